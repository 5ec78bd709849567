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
    """Meter of peaks on this rank; rank 0's are the ones logged.

    Attributes:
        free_frac: share of the device's memory that PyTorch has never taken; None before the first window, or on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free_frac: float | None = None

    def measure(self, window: Window) -> dict[str, float]:
        metrics = {"mem/peak_rss_gib": peak_rss_bytes() / GIB}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self.free_frac = 1 - reserved / total
            metrics |= {
                "mem/peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "mem/gpu_allocated_gib": torch.cuda.memory_allocated(self.device) / GIB,
                "mem/gpu_peak_reserved_gib": reserved / GIB,
                "mem/gpu_used_frac": 1 - free / total,
            }
        return metrics

    def summary(self) -> dict[str, float]:
        """Figures of the whole run for `summary.json`; GB are 1e9 bytes."""
        figures = {"peak_rss_gb": peak_rss_bytes() / 1e9}
        if self.device.type == "cuda":
            figures["peak_device_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            figures["peak_device_reserved_gb"] = torch.cuda.max_memory_reserved(self.device) / 1e9
        return figures
