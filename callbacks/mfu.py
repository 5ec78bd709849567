"""Model FLOPs utilisation: the share of the devices' peak that went into the model's own arithmetic.

Counted are forward and backward of what is trained and the forward of what is frozen, never recomputation (PaLM,
arXiv 2204.02311, appendix B). Where the peak is unknown there is no MFU, and the reason is stated.
"""

from collections.abc import Iterable

import torch

from callbacks.peak_flops import peak_tflops
from callbacks.window import Window


class Mfu:
    """Meter of achieved TFLOP/s per device and, with a known peak, of MFU.

    Args:
        device: the device this rank trains on.
        precision: Lightning's name of the precision; the table holds bf16 peaks.
        peak_override: dense peak in TFLOP/s from the recipe; wins over the table.
    """

    def __init__(self, device: torch.device, precision: str, peak_override: float | None = None) -> None:
        self.peak_tflops: float | None = None
        self.source: str | None = None
        self.reason: str | None = None
        self._flops = 0
        self._device_s = 0.0
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        if peak_override is not None:
            self.peak_tflops, self.source = peak_override, "metrics.peak_tflops of the recipe"
        elif found := peak_tflops(name, precision):
            self.peak_tflops, self.source = found
        else:
            self.reason = f"no peak known for device {name!r} at precision {precision!r}; set metrics.peak_tflops"

    def restore(self, flops: Iterable[int], device_s: Iterable[float]) -> None:
        """Take in the steps of an earlier start of the same run; `device_s` is step time by ranks."""
        self._flops += sum(flops)
        self._device_s += sum(device_s)

    def measure(self, window: Window) -> dict[str, float]:
        flops = sum(window.flops)
        if flops == 0:
            return {}
        device_s = max(sum(window.step_s), 1e-9) * window.world_size
        self._flops += flops
        self._device_s += device_s
        metrics = {"perf/tflops_per_gpu": flops / device_s / 1e12}
        if self.peak_tflops is not None:
            metrics["perf/mfu"] = metrics["perf/tflops_per_gpu"] / self.peak_tflops
        return metrics

    def summary(self) -> dict[str, float | str | None]:
        """Figures of the whole run for `summary.json`."""
        tflops = self._flops / self._device_s / 1e12 if self._device_s else 0.0
        return {
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops is not None else None,
            "mfu_reason": self.reason,
            "peak_tflops": self.peak_tflops,
            "peak_source": self.source,
        }
