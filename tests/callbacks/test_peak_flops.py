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
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 440.4,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GH200 144G HBM3e": 989,
    "NVIDIA H100 80GB HBM2e": 756,
    "NVIDIA H800": 989,
    "NVIDIA H800 PCIe": 756,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800 80GB PCIe": 312,
    "NVIDIA A800 40GB Active": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
}
UNKNOWN = [
    "cpu",
    "NVIDIA A10G",
    "Tesla T4",
    "Tesla V100-SXM2-16GB",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA RTX PRO 5000 Blackwell",
    "NVIDIA RTX 4000 Ada Generation",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 4080 SUPER",
    "GRID A100-10C",
    "NVIDIA A2",
    "NVIDIA A16",
    "NVIDIA L20",
    "NVIDIA DGX Display",
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


def test_a_name_in_a_longer_one_is_no_match() -> None:
    """An L4 inside "L40S" or an A10 inside "A100" would give a figure of another device."""
    figures = {name: peak_tflops(f"NVIDIA {name}", "bf16-mixed") for name in ("L40S", "L40", "L4", "A100", "A10", "A1")}
    assert [found and found[0] for found in figures.values()] == [362, 181, 121, 312, 125, None]


def test_sharded_bf16_has_the_same_peak() -> None:
    assert peak_tflops("NVIDIA H200", "fsdp-bf16") == peak_tflops("NVIDIA H200", "bf16-mixed")
    assert peak_tflops("NVIDIA H200", "fp32") is None


def test_no_peak_for_other_precisions() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "32-true") is None
