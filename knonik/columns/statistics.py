"""Statistics of a column over the rows of some episodes, as normalisation needs them."""

import hashlib
import json
import logging
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from knonik.cache import one_builder, replacing
from knonik.columns.arrays import Column, columns_folder
from knonik.metadata.episodes import EpisodeTable

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 20  # of values looked at together; quantiles and deviations take several times as much

FIELDS = ("min", "max", "mean", "std", "q01", "q99")
Statistics = dict[str, NDArray[np.float64]]


def column_statistics(column: Column, episodes: EpisodeTable) -> Statistics:
    """Min, max, mean, std (ddof 0) and the 1 % and 99 % quantiles (linear interpolation), each float64 [D].

    Args:
        column: [rows of the dataset, D].
        episodes: the episodes in use; other rows are left out.
    """
    rows = [slice(begin, begin + n) for begin, n in zip(episodes.first_row, episodes.length, strict=True)]
    dims = max(1, _BLOCK_BYTES // (4 * max(1, episodes.num_rows)))
    blocks = []
    for first in range(0, column.shape[1], dims):
        values = np.concatenate([column[part, first : first + dims] for part in rows]).astype(np.float32, copy=False)
        blocks.append(_block_statistics(values))
    return {name: np.concatenate([block[name] for block in blocks]) for name in FIELDS}


def _block_statistics(values: NDArray[np.float32]) -> Statistics:
    if not np.all(np.isfinite(values)):
        raise ValueError("the column holds values that are not finite; statistics would not be either")
    low, high = np.quantile(values, (0.01, 0.99), axis=0)
    return {
        "min": values.min(axis=0).astype(np.float64),
        "max": values.max(axis=0).astype(np.float64),
        # Summed in double precision: float32 sums over millions of rows lose digits.
        "mean": values.mean(axis=0, dtype=np.float64),
        "std": values.std(axis=0, dtype=np.float64),
        "q01": low.astype(np.float64),
        "q99": high.astype(np.float64),
    }


def cached_statistics(key: str, column: Column, episodes: EpisodeTable, folder: Path) -> Statistics:
    """`column_statistics`, kept as JSON beside the column under `folder`, by the episode ids and the column's name."""
    subset = hashlib.sha256(episodes.ids.astype("<i8").tobytes()).hexdigest()[:16]
    place = columns_folder(folder, episodes)
    path = place / f"statistics-{quote(key, safe='')}-{subset}.json"
    found = _stored(path, key, column.shape[1])
    if found is None:
        with one_builder(place, "statistics"):  # the other ranks of the node find the result
            found = _stored(path, key, column.shape[1])
            if found is None:
                try:
                    found = column_statistics(column, episodes)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from error
                with replacing(path) as temporary:
                    temporary.write_text(json.dumps({name: values.tolist() for name, values in found.items()}))
    return found


def _stored(path: Path, key: str, width: int) -> Statistics | None:
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes())
        found = {name: np.array(stored[name], np.float64) for name in FIELDS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("statistics cache %s is damaged (%s); it is computed again", path, error)
        return None
    if any(values.shape != (width,) for values in found.values()):
        logger.warning("statistics cache %s has another width than %s; it is computed again", path, key)
        return None
    return found
