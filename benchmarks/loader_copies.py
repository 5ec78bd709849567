"""JPEG copies of the benchmark's data in the formats of other loaders, each made once by that library's own writer.

    python benchmarks/loader_copies.py [FOLDER] [--only mosaicml ...] [--python PATH]

A copy holds the samples that a loader of the video would make, one record each: the three frames as JPEG of quality 90
with 4:2:0 chroma, state, the window of actions, and the instruction. **They are lossy and about four times the bytes of
the video**; that is the price at which these loaders avoid decoding video. Records are written in a random order, as
users of WebDataset do; all copies in the same one.

The writers may be installed in another environment than this project: the interpreter given runs this file once for
each copy, which then needs nothing but the library and NumPy, and is sent the samples as plain values.
"""

import argparse
import io
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

QUALITY = 90
SOURCE = "av1g2/v30"
PACKAGES = {
    "mosaicml": ("mosaicml-streaming", "streaming"),
    "litdata": ("litdata",) * 2,
    "webdataset": ("webdataset",) * 2,
}
_CAMERAS = 3
_CHUNK_BYTES = 64 << 20
Sample = dict[str, Any]  # image_<n>: JPEG bytes, state and action: (float32 bytes, shape), text: str


def installed(name: str, python: str) -> bool:
    """Whether the environment of an interpreter has the library of a copy."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({PACKAGES[name][1]!r}) is None)"
    return subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL).returncode == 0


def place(name: str, folder: Path) -> Path:
    """Where a copy lies."""
    return folder / f"jpeg{QUALITY}" / name


def ensure(names: list[str], folder: Path, *, python: str, horizon: int) -> None:
    """Make the copies that are not there, all in one pass over the video."""
    targets = {name: place(name, folder) for name in names if not place(name, folder).exists()}
    if not targets:
        return
    import loader_data

    source = loader_data.ensure(SOURCE, folder)
    begin = time.perf_counter()
    writers = {}
    for name, target in targets.items():
        shutil.rmtree(_part(target), ignore_errors=True)
        _part(target).mkdir(parents=True)
        command = [python, str(Path(__file__).resolve()), "--write", name, str(_part(target))]
        writers[target] = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        for sample in samples(source, horizon):
            for writer in writers.values():
                pickle.dump(sample, writer.stdin, protocol=4)  # type: ignore[arg-type]
    finally:
        for writer in writers.values():
            writer.communicate()  # closes its input and waits
    for target, writer in writers.items():
        if writer.returncode:
            raise RuntimeError(f"the writer of {target} ended with {writer.returncode}; its message stands above")
        _part(target).rename(target)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        print(f"{target}: {size / 1e6:.0f} MB, {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def samples(source: Path, horizon: int) -> Iterator[Sample]:
    """One epoch of the dataset in a random order."""
    import tempfile

    import knonik

    with tempfile.TemporaryDirectory() as cache, knonik.open(source, cache_dir=Path(cache)) as dataset:
        loader = knonik.Loader(dataset, batch_size=16, windows={"action": range(horizon)}, edge="inside")
        with loader:
            left = loader.num_anchors
            for batch in loader:
                for row in range(min(left, len(batch))):
                    yield _sample(batch, row)
                left -= len(batch)
                if left <= 0:
                    return


def _sample(batch: Any, row: int) -> Sample:
    images = {
        f"image_{n}": _jpeg(pictures[row, 0].numpy()) for n, (_, pictures) in enumerate(sorted(batch.images.items()))
    }
    vectors = {"state": batch.state["observation.state"][row, 0].numpy(), "action": batch.action["action"][row].numpy()}
    return {
        **images,
        **{key: (value.tobytes(), value.shape) for key, value in vectors.items()},
        "text": batch.text[row],
    }


def _jpeg(picture: Any) -> bytes:
    from PIL import Image

    body = io.BytesIO()
    Image.fromarray(picture).save(body, "JPEG", quality=QUALITY)
    return body.getvalue()


def _received() -> Iterator[Sample]:
    """Samples from standard input, vectors as arrays."""
    while True:
        try:
            sample = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for key in ("state", "action"):
            body, shape = sample[key]
            sample[key] = np.frombuffer(body, np.float32).reshape(shape)
        yield sample


def _write_mosaicml(target: Path) -> None:
    from streaming import MDSWriter

    columns = {f"image_{n}": "bytes" for n in range(_CAMERAS)}
    columns |= {"state": "ndarray", "action": "ndarray", "text": "str"}
    with MDSWriter(out=str(target), columns=columns, size_limit=_CHUNK_BYTES) as writer:
        for sample in _received():
            writer.write(sample)


def _write_litdata(target: Path) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(target), chunk_bytes=_CHUNK_BYTES)
    for number, sample in enumerate(_received()):
        cache[number] = sample
    cache.done()
    cache.merge()


def _write_webdataset(target: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(target / "%04d.tar"), maxsize=_CHUNK_BYTES, verbose=0) as writer:
        for number, sample in enumerate(_received()):
            images = {f"{n}.jpg": sample[f"image_{n}"] for n in range(_CAMERAS)}
            vectors = {f"{key}.npy": sample[key] for key in ("state", "action")}
            writer.write({"__key__": f"{number:07d}", **images, **vectors, "txt": sample["text"]})


_WRITERS = {"mosaicml": _write_mosaicml, "litdata": _write_litdata, "webdataset": _write_webdataset}


def main() -> None:
    if sys.argv[1:2] == ["--write"]:  # a copy's name and folder; the samples come from standard input
        _WRITERS[sys.argv[2]](Path(sys.argv[3]))
        return
    import loader_data

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=loader_data.default_folder(), help="of the data")
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES), metavar="COPY")
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with the libraries")
    parser.add_argument("--horizon", type=int, default=8, help="action steps of a sample")
    args = parser.parse_args()
    there = [name for name in args.only if installed(name, args.python)]
    if lacking := [PACKAGES[name][0] for name in args.only if name not in there]:
        print(f"not installed for {args.python}: {', '.join(lacking)}", file=sys.stderr)
    ensure(there, args.folder, python=args.python, horizon=args.horizon)


if __name__ == "__main__":
    main()
