"""Peak memory of the process and of its device."""

import resource
import sys

import torch

from callbacks.window import Window

GIB = 2**30


def peak_rss_bytes() -> int:
    """Largest resident set of this process since it began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Memory:
    """Meter of peaks on this rank; rank 0's are the ones logged."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(self, window: Window) -> dict[str, float]:
        metrics = {"mem/peak_rss_gib": peak_rss_bytes() / GIB}
        if self.device.type == "cuda":
            metrics["mem/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
        return metrics

    def summary(self) -> dict[str, float]:
        """Figures of the whole run for `summary.json`; GB are 1e9 bytes."""
        figures = {"peak_rss_gb": peak_rss_bytes() / 1e9}
        if self.device.type == "cuda":
            figures["peak_device_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return figures
