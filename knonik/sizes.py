"""Sizes in bytes, as people write them."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as 0, "512MB", "4GB" (1e9), "4GiB" (2^30) or "1.5 TB".

    Raises:
        ValueError: not a size, or a negative one.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)(b?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: float) -> str:
    """The same the other way, three digits: 4096000000 -> "4.1 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
