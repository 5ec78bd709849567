"""Dense peak of a device by its name, for MFU; unknown devices have none.

Figures are dense bf16 with fp32 accumulation, in TFLOP/s. Vendors headline twice these, with 2:4 sparsity.
"""

# Searched in this order, the specific before the general: "L40S" contains "L4".
# (parts the name must contain, peak TFLOP/s, source)
PEAKS: tuple[tuple[tuple[str, ...], float, str], ...] = (
    (("GB300",), 2500.0, "NVIDIA GB300 product page, half of the sparse figure"),
    (("GB200",), 2500.0, "NVIDIA GB200 product page, half of the sparse figure"),
    (("B300",), 2250.0, "NVIDIA Blackwell datasheet"),
    (("B200",), 2250.0, "NVIDIA Blackwell datasheet"),
    (("GH200",), 989.0, "NVIDIA H200 datasheet (same die)"),
    (("H20",), 148.0, "NVIDIA H20 specification as resellers list it, 296 int8"),
    (("H800", "PCIE"), 756.0, "NVIDIA H100 datasheet (same die and clocks)"),
    (("H800",), 989.0, "NVIDIA H100 datasheet (same die and clocks)"),
    (("H200", "NVL"), 836.0, "NVIDIA H200 datasheet, 1671 sparse"),
    (("H200",), 989.0, "NVIDIA H200 datasheet, 1979 sparse"),
    (("H100", "NVL"), 835.0, "NVIDIA H100 datasheet"),
    (("H100", "PCIE"), 756.0, "NVIDIA H100 datasheet"),
    (("H100", "HBM2E"), 756.0, "NVIDIA H100 datasheet: the PCIe card has this memory"),
    (("H100",), 989.0, "NVIDIA H100 datasheet"),
    (("A100",), 312.0, "NVIDIA A100 datasheet"),
    (("A800",), 312.0, "NVIDIA A100 datasheet (same die)"),
    (("A40",), 149.7, "NVIDIA A40 datasheet"),
    (("A30",), 165.0, "NVIDIA A30 datasheet"),
    (("A10",), 125.0, "NVIDIA A10 datasheet"),
    (("L40S",), 362.0, "NVIDIA L40S datasheet, 733 sparse"),
    (("L40",), 181.0, "NVIDIA L40 datasheet"),
    (("L4",), 121.0, "NVIDIA L4 datasheet"),
    (("RTX PRO 6000", "MAX-Q"), 440.4, "four times its 110.1 TFLOP/s of fp32, the ratio of this die"),
    (("RTX PRO 6000", "BLACKWELL WORKSTATION"), 503.8, "third-party specification table, 1010 sparse"),
    (("RTX 5090",), 209.5, "NVIDIA Blackwell GeForce whitepaper"),
    (("RTX 4090",), 165.2, "NVIDIA Ada GeForce whitepaper"),
    (("RTX 3090",), 71.0, "NVIDIA Ampere GeForce whitepaper"),
    (("RTX 6000 ADA",), 364.0, "NVIDIA RTX 6000 Ada datasheet, a quarter of the sparse fp8 figure"),
    (("RTX A6000",), 154.8, "NVIDIA RTX A6000 datasheet, half of the sparse figure"),
)

# Variants that share a name with a faster part but not its figure; better no MFU than a wrong one. Of the RTX PRO 6000
# Server Edition no source states a clock.
_UNLISTED = ("LAPTOP", "SERVER EDITION", " D ", "TI", "SUPER", "MIG", "VGPU", "GRID")


def peak_tflops(device_name: str, precision: str) -> tuple[float, str] | None:
    """Peak of one device at a precision, with its source.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it.
        precision: the recipe's or Lightning's name; only those that multiply in bf16 are in the table.

    Returns:
        (TFLOP/s, source), or None where the table knows nothing certain.
    """
    if "bf16" not in precision.split("-"):
        return None
    name = f"{device_name.upper()} "
    words = name.split()
    if any(word in words or (" " in word and word in name) for word in _UNLISTED):
        return None
    for parts, peak, source in PEAKS:
        # the first part is the model: a whole word, or the start of one such as "A100-SXM4-80GB"
        head, *rest = parts
        if _has_model(name, head) and all(part in name for part in rest):
            return peak, source
    return None


def _has_model(name: str, model: str) -> bool:
    at = name.find(model)
    while at >= 0:
        before, after = name[at - 1] if at else " ", name[at + len(model)]
        if not before.isalnum() and not after.isalnum():
            return True
        at = name.find(model, at + 1)
    return False
