"""The peak table against names as the driver reports them."""

import pytest

from callbacks.peak_flops import peak_tflops

KNOWN = {
    "NVIDIA GB300": 2500,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 836,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 154.8,
}
UNKNOWN = [
    "cpu",
    "NVIDIA H20",
    "NVIDIA A10",
    "NVIDIA A10G",
    "Tesla T4",
    "Tesla V100-SXM2-16GB",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "AMD Instinct MI300X",
]


@pytest.mark.parametrize(("name", "peak"), KNOWN.items())
def test_known_devices(name: str, peak: float) -> None:
    found = peak_tflops(name, "bf16-mixed")
    assert found is not None
    assert found[0] == peak
    assert found[1], "a figure without a source"


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_figure_is_guessed(name: str) -> None:
    assert peak_tflops(name, "bf16-mixed") is None


def test_no_peak_for_other_precisions() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "32-true") is None
