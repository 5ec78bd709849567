"""Statistics that travel with a written dataset: exact ones of columns, histogram ones of images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
IMAGE_SAMPLES = 8  # frames of an episode that enter the image statistics, evenly spaced
IMAGE_SIDE = 160  # they are thinned to at most this many rows and columns


def column_stats(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """min, max, mean, std and quantiles over the rows of [N, D] or [N], each of shape [D]; count of shape [1]."""
    rows = values.reshape(len(values), -1)
    wide = rows.astype(np.float64)
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    return {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": wide.mean(axis=0),
        "std": wide.std(axis=0),
        "count": np.array([len(rows)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


@dataclass(frozen=True)
class ImageHistogram:
    """How often each of the 256 levels occurs per channel, in a sample of frames; adds up over episodes."""

    counts: NDArray[np.int64]  # [3, 256]
    frames: int
    size: tuple[int, int]  # height, width of the full frames

    @classmethod
    def of(cls, frames: NDArray[np.uint8]) -> "ImageHistogram":
        """Sample an episode's frames [N, H, W, 3]."""
        number, height, width = frames.shape[:3]
        chosen = np.unique(np.linspace(0, number - 1, min(number, IMAGE_SAMPLES)).round().astype(np.int64))
        step = -(-max(height, width) // IMAGE_SIDE)
        sample = frames[chosen, ::step, ::step]
        counts = np.stack([np.bincount(sample[..., c].reshape(-1), minlength=256) for c in range(3)])
        return cls(counts, len(chosen), (height, width))

    def __add__(self, other: "ImageHistogram") -> "ImageHistogram":
        return ImageHistogram(self.counts + other.counts, self.frames + other.frames, self.size)

    def stats(self) -> dict[str, NDArray[Any]]:
        """Per channel, levels scaled to [0, 1], shape [3, 1, 1]; count is the number of frames sampled."""
        levels = np.arange(256) / 255.0
        share = self.counts / self.counts.sum(axis=1, keepdims=True)
        mean = share @ levels
        variance = share @ levels**2 - mean**2
        below = share.cumsum(axis=1)
        found = {
            "min": levels[(self.counts > 0).argmax(axis=1)],
            "max": levels[255 - (self.counts[:, ::-1] > 0).argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(variance, 0.0)),
            **{name: levels[(below < q).sum(axis=1).clip(max=255)] for name, q in QUANTILES.items()},
        }
        return {**{name: value.reshape(3, 1, 1) for name, value in found.items()}, "count": np.array([self.frames])}


def stats_json(stats: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, dict[str, Any]]:
    """The same as nested lists."""
    return {key: {name: np.asarray(value).tolist() for name, value in group.items()} for key, group in stats.items()}
