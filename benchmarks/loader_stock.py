"""The stock GR00T N1.7 loading algorithm, written for comparison from its description.

What it does, and what it costs: anchors are dealt to shards as slices, one in ten steps of an episode to a slice
(`episode_sampling_rate` 0.1). A worker process loads a shard in a background thread while it hands out the one before.
For every (episode, slice) of the shard it reads the episode's parquet and **decodes every frame of every camera of the
whole episode**; for each step of the slice it cuts state and action and runs the image path: shorter side to 256, a
random 95 % crop, to 256 again, colour jitter, one draw for all cameras. So a frame is decoded about ten times an epoch.

Left out, so the real one costs more: the statistics pass, the language model's tokenizer and its image processor.
Cheaper here than stock: PyAV with one codec thread in place of torchcodec with one a core, pyarrow in place of pandas,
Pillow in place of albumentations.
"""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EDGE, _CROP, _JITTER = 256, 0.95, (0.3, 0.4, 0.5, 0.08)
Slice = tuple[int, NDArray[np.int64]]  # episode, its anchor steps


def imports(spec: dict[str, Any]) -> None:
    import av  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    from PIL import Image, ImageEnhance  # noqa: F401

    torch.set_num_threads(1)


class StockGr00t:
    """DataLoader with one forked worker over the sharded dataset."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader

        self._batch = int(spec["batch"])
        options = {"shard_size": 1024, "episode_sampling_rate": 0.1, **spec.get("options", {})}
        dataset = _iterable(Path(spec["data"]), int(spec["horizon"]), **options)
        loader: Any = DataLoader(dataset, self._batch, num_workers=1, multiprocessing_context="fork")
        self._batches = iter(loader)

    def take(self) -> int:
        next(self._batches)
        return self._batch

    def settled(self) -> bool:
        return True

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._batches


def open_source(spec: dict[str, Any]) -> StockGr00t:
    return StockGr00t(spec)


def deal(lengths: list[int], horizon: int, shard_size: int, rate: float, seed: int = 42) -> list[list[Slice]]:
    """Shards of (episode, steps): every step that can be an anchor in exactly one shard."""
    rng = np.random.default_rng(seed)
    usable = [max(0, length - horizon + 1) for length in lengths]
    shards: list[list[Slice]] = [[] for _ in range(-(-sum(usable) // shard_size))]
    filled, slices = np.zeros(len(shards), np.int64), int(1 / rate)
    for episode in rng.permutation(len(lengths)).tolist():
        steps = np.arange(usable[episode])
        rng.shuffle(steps)
        for first in range(slices):
            part = steps[first::slices]
            target = int(filled.argmin())
            shards[target].append((episode, part))
            filled[target] += len(part)
    return shards


def _iterable(folder: Path, horizon: int, shard_size: int, episode_sampling_rate: float) -> Any:
    from torch.utils.data import IterableDataset

    class Shards(IterableDataset[dict[str, Any]]):
        def __init__(self) -> None:
            self.set = StockFolder(folder, horizon)
            self.shards = deal(self.set.lengths, horizon, shard_size, episode_sampling_rate)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            rng = np.random.default_rng(42)
            order = _endless(len(self.shards), rng)
            coming = _Background(self.set, self.shards[next(order)])
            while True:
                samples = coming.result()
                coming = _Background(self.set, self.shards[next(order)])
                for place in rng.permutation(len(samples)).tolist():
                    yield samples[place]

    return Shards()


def _endless(count: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(count).tolist()


class _Background:
    """A shard being loaded by a thread."""

    def __init__(self, dataset: "StockFolder", shard: list[Slice]) -> None:
        self._samples: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, args=(dataset, shard), daemon=True)
        self._thread.start()

    def _load(self, dataset: "StockFolder", shard: list[Slice]) -> None:
        try:
            for episode, steps in shard:
                self._samples += dataset.samples(episode, steps)
        except Exception as error:
            self._error = error

    def result(self) -> list[dict[str, Any]]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._samples


class StockFolder:
    """A LeRobot v2.1 folder, read as the stock code reads it: whole episodes at a time."""

    def __init__(self, folder: Path, horizon: int) -> None:
        self._folder, self._horizon = folder, horizon
        self._info = json.loads((folder / "meta" / "info.json").read_text())
        rows = [json.loads(line) for line in (folder / "meta" / "episodes.jsonl").read_text().splitlines()]
        self.lengths = [int(row["length"]) for row in rows]
        tasks = [json.loads(line) for line in (folder / "meta" / "tasks.jsonl").read_text().splitlines()]
        self._tasks = {row["task_index"]: row["task"] for row in tasks}
        self._cameras = [key for key, feature in self._info["features"].items() if feature["dtype"] == "video"]

    def samples(self, episode: int, steps: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The anchor steps of one slice, ready for the collator."""
        rows = self._rows(episode)
        films = [self._film(episode, camera) for camera in self._cameras]
        return [self._sample(rows, films, step) for step in steps.tolist()]

    def _path(self, template: str, episode: int, **names: str) -> Path:
        chunk = episode // self._info["chunks_size"]
        return self._folder / template.format(episode_chunk=chunk, episode_index=episode, **names)

    def _rows(self, episode: int) -> dict[str, NDArray[Any]]:
        import pyarrow.parquet as pq

        table = pq.read_table(self._path(self._info["data_path"], episode))
        vectors = {key: np.stack(table[key].to_numpy()) for key in ("observation.state", "action")}
        return {**vectors, "task_index": table["task_index"].to_numpy()}

    def _film(self, episode: int, camera: str) -> list[NDArray[np.uint8]]:
        import av

        with av.open(str(self._path(self._info["video_path"], episode, video_key=camera))) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]

    def _sample(self, rows: dict[str, NDArray[Any]], films: list[list[NDArray[np.uint8]]], step: int) -> dict[str, Any]:
        chunk = slice(step, step + self._horizon)
        return {
            "images": np.stack(augment([film[step] for film in films])),
            "state": rows["observation.state"][step : step + 1].astype(np.float32),
            "action": rows["action"][chunk].astype(np.float32),
            "text": self._tasks[int(rows["task_index"][step])],
        }


def augment(frames: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """The released checkpoint's training path on one sample's frames of equal size; one draw for all of them."""
    from PIL import Image, ImageEnhance

    offsets = random.random(), random.random()
    brightness, contrast, saturation = (random.uniform(max(0.0, 1 - x), 1 + x) for x in _JITTER[:3])
    hue = random.uniform(-_JITTER[3], _JITTER[3])
    order = random.sample(range(4), 4)

    def shifted(picture: Image.Image) -> Image.Image:
        channels = np.array(picture.convert("HSV"))
        channels[..., 0] += np.uint8(round(hue * 255) % 256)
        return Image.fromarray(channels, "HSV").convert("RGB")

    steps = (
        lambda picture: ImageEnhance.Brightness(picture).enhance(brightness),
        lambda picture: ImageEnhance.Contrast(picture).enhance(contrast),
        lambda picture: ImageEnhance.Color(picture).enhance(saturation),
        shifted,
    )
    done = []
    for frame in frames:
        picture = _to_edge(Image.fromarray(frame))
        width, height = int(picture.width * _CROP), int(picture.height * _CROP)
        left = int(offsets[0] * (picture.width - width + 1))
        top = int(offsets[1] * (picture.height - height + 1))
        picture = _to_edge(picture.crop((left, top, left + width, top + height)))
        for number in order:
            picture = steps[number](picture)
        done.append(np.asarray(picture))
    return done


def _to_edge(picture: Any) -> Any:
    from PIL import Image

    scale = _EDGE / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BOX)
