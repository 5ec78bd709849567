"""Rows of a window around an anchor step, clamped to its episode."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def window_frames(
    frames: NDArray[np.int64], lengths: NDArray[np.int64], offsets: Sequence[int] | range
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Frames of a window for a batch of anchors, repeating the edge frame beyond the ends of the episode.

    Args:
        frames: [B] anchor frame inside its episode.
        lengths: [B] rows of the anchor's episode.
        offsets: T steps relative to the anchor, negative = past.

    Returns:
        frames [B, T] inside the episode, and is_pad [B, T], True where the wanted step lies outside the episode.
    """
    wanted = frames[:, None] + np.asarray(offsets, np.int64)[None, :]
    last = (lengths - 1)[:, None]
    is_pad = (wanted < 0) | (wanted > last)
    return np.minimum(np.maximum(wanted, 0), last), is_pad
