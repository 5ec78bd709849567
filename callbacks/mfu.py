"""FLOPs utilisation: the share of the devices' peak that went into the model's own arithmetic, and into all of it.

MFU counts forward and backward of what is trained and the forward of what is frozen, never recomputation; HFU counts
the recomputation too (PaLM, arXiv 2204.02311, appendix B). Where the peak is unknown there is neither, and the reason
is stated. Warm-up steps are left out; the FLOPs are those of the batches that were trained, whatever their sizes.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from callbacks.peak_flops import peak_tflops
from callbacks.window import Window

logger = logging.getLogger(__name__)


class Mfu:
    """Meter of achieved TFLOP/s per device and, with a known peak, of MFU and HFU.

    Args:
        device: the device this rank trains on.
        precision: the recipe's or Lightning's name of the precision; the table holds bf16 peaks.
        peak_override: dense peak in TFLOP/s from the recipe; wins over the table.
    """

    def __init__(self, device: torch.device, precision: str, peak_override: float | None = None) -> None:
        self.peak_tflops: float | None = None
        self.source: str | None = None
        self.reason: str | None = None
        self._flops = 0
        self._recompute = 0
        self._device_s = 0.0
        self._said = False
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        if peak_override is not None:
            self.peak_tflops, self.source = peak_override, "metrics.peak_tflops of the recipe"
        elif found := peak_tflops(name, precision):
            self.peak_tflops, self.source = found
        else:
            self.reason = f"no peak known for device {name!r} at precision {precision!r}; set metrics.peak_tflops"

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Take in the recorded steps of an earlier start of the same run."""
        for row in rows:
            if not row["warm_up"]:
                self._flops += int(row["flops"])
                self._recompute += int(row["recompute_flops"])
                self._device_s += row["step_s"] * row["ranks"]

    def measure(self, window: Window) -> dict[str, float]:
        places = window.timed()
        flops = sum(window.flops[place] for place in places)
        if flops == 0:
            return {}
        self._say_once()
        recompute = sum(window.recompute_flops[place] for place in places)
        device_s = max(sum(window.step_s[place] for place in places), 1e-9) * window.world_size
        self._flops += flops
        self._recompute += recompute
        self._device_s += device_s
        metrics = {"perf/tflops_per_gpu": flops / device_s / 1e12}
        if self.peak_tflops is not None:
            metrics["perf/mfu"] = metrics["perf/tflops_per_gpu"] / self.peak_tflops
            metrics["perf/hfu"] = (flops + recompute) / device_s / 1e12 / self.peak_tflops
        return metrics

    def summary(self) -> dict[str, float | str | None]:
        """Figures of the whole run for `summary.json`."""
        tflops, all_tflops = (
            flops / self._device_s / 1e12 if self._device_s else 0.0
            for flops in (self._flops, self._flops + self._recompute)
        )
        peak = self.peak_tflops if self._device_s else None
        return {
            "tflops_per_device": tflops,
            "mfu": None if peak is None else tflops / peak,
            "hfu": None if peak is None else all_tflops / peak,
            "mfu_reason": self.reason,
            "peak_tflops": self.peak_tflops,
            "peak_source": self.source,
        }

    def _say_once(self) -> None:
        if self._said:
            return
        self._said = True
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_rank() > 0:
            return
        if self.reason is not None:
            logger.info("no MFU: %s", self.reason)
        else:
            logger.info("MFU is relative to %g dense TFLOP/s a device (%s)", self.peak_tflops, self.source)
