"""The start-up of stock loaders, to measure beside ours: every row of every table as a Python object.

What `data.startup: rows` does. A run computes the same with and without it.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Rows of all data files and of the episode list of a LeRobot dataset, all columns; the caller holds them."""
    import pyarrow.parquet as pq

    began, root = time.perf_counter(), Path(str(folder).removeprefix("file://"))
    rows: list[dict[str, Any]] = []
    for part in ("data", "meta/episodes"):
        for file in sorted((root / part).rglob("*.parquet")):
            rows += pq.read_table(file).to_pylist()
    for name in ("episodes.jsonl", "episodes_stats.jsonl"):
        if (file := root / "meta" / name).is_file():
            rows += [json.loads(line) for line in file.read_text().splitlines()]
    logger.info("data.startup=rows: %d rows of %s as objects in %.1f s", len(rows), root, time.perf_counter() - began)
    return rows
