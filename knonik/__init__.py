"""Stream LeRobot datasets in place: exact frames, an order that is a function, and a resumable loader."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knonik.batches.batch import Batch
    from knonik.datamodule import DataModule
    from knonik.dataset import Dataset, open
    from knonik.loader import Loader
    from knonik.order.mixture import Mixture, Part

__all__ = ["Batch", "DataModule", "Dataset", "Loader", "Mixture", "Part", "open"]

_HOME = {
    "Batch": "knonik.batches.batch",
    "DataModule": "knonik.datamodule",
    "Dataset": "knonik.dataset",
    "Loader": "knonik.loader",
    "Mixture": "knonik.order.mixture",
    "Part": "knonik.order.mixture",
    "open": "knonik.dataset",
}


def __getattr__(name: str) -> Any:
    """Import on first use: reading an index needs neither torch nor a video library."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
