"""MosaicML streaming, LitData and WebDataset on JPEG copies of the data, under torch's DataLoader, one worker.

The specification's option `library` chooses; each reads the copy that `loader_copies.py` made in its own format, and
decodes with Pillow, as their own decoders do.
"""

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CAMERAS = 3
_SHUFFLE = 500  # samples of WebDataset's buffer


def imports(spec: dict[str, Any]) -> None:
    import torch
    import torch.utils.data
    from PIL import Image

    library = spec["options"]["library"]
    if library == "mosaicml":
        import streaming  # noqa: F401
    elif library == "litdata":
        import litdata  # noqa: F401
    else:
        import webdataset  # noqa: F401
    Image.init()
    torch.set_num_threads(1)


class Jpeg:
    """One of the libraries with its shuffling on."""

    def __init__(self, spec: dict[str, Any]) -> None:
        # A decoded picture is read only until the batch is put together, which torch warns about.
        warnings.filterwarnings("ignore", message=".*not writable")
        self._batch = int(spec["batch"])
        common = {"batch_size": self._batch, "num_workers": 1, "drop_last": True, "persistent_workers": True}
        self._loader = _LOADERS[spec["options"]["library"]](Path(spec["data"]), common)
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def take(self) -> int:
        next(self._batches)
        return self._batch

    def settled(self) -> bool:
        return True

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]  # a generator
        del self._loader


def open_source(spec: dict[str, Any]) -> Jpeg:
    return Jpeg(spec)


def _pictures(record: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    pictures = {}
    for key in (f"image_{n}" for n in range(_CAMERAS)):
        pictures[key] = np.asarray(Image.open(io.BytesIO(record[key])).convert("RGB"))
    return {**record, **pictures}


def _mosaicml(folder: Path, common: dict[str, Any]) -> Any:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Samples(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return _pictures(super().__getitem__(at))

    clean_stale_shared_memory()  # what a run that was killed has left makes the next one fail
    return DataLoader(Samples(local=str(folder), shuffle=True, batch_size=common["batch_size"]), **common)


def _litdata(folder: Path, common: dict[str, Any]) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    class Samples(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return _pictures(super().__getitem__(at))

    return StreamingDataLoader(Samples(str(folder), shuffle=True), **common)


def _webdataset(folder: Path, common: dict[str, Any]) -> Any:
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted(map(str, folder.glob("*.tar")))
    stream = webdataset.WebDataset(shards, shardshuffle=len(shards), nodesplitter=webdataset.split_by_node)
    return DataLoader(stream.shuffle(_SHUFFLE).map(_webdataset_sample), **common)


def _webdataset_sample(record: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    sample = {f"image_{n}": record[f"{n}.jpg"] for n in range(_CAMERAS)}
    vectors = {key: np.load(io.BytesIO(record[f"{key}.npy"])) for key in ("state", "action")}
    return _pictures({**sample, **vectors, "text": record["txt"].decode()})


_LOADERS = {"mosaicml": _mosaicml, "litdata": _litdata, "webdataset": _webdataset}
