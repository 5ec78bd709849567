"""How much a loader slows the training step it feeds: decode threads in the training process, or one side process.

    python benchmarks/loader_disturbance.py [--dataset FOLDER] [--rounds 6] [--steps 20]

A fixed CPU step of a small transformer (one torch thread, so much of it is Python) runs with no loader, with
`knonik.Loader` as shipped, and with the same loader in a spawned process that hands tensors over in shared memory. The
three take turns in every round, so that a machine that is busy for a while hits all of them. Printed: the bare step's
median time, its median and lower-quartile ratio to the step without a loader (the quartile is less moved by other
programs), the median wait for a batch before it, and the ratio with that wait, which is what training sees.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

import knonik
from knonik.write.lerobot import EpisodeData, write_lerobot

RING = 3


def demo_episodes(count: int, length: int = 21, cameras: int = 2, side: int = 64) -> Iterator[EpisodeData]:
    """Smooth moving pictures, about as hard to decode as a tabletop scene."""
    y, x = np.mgrid[:side, :side] / side
    for episode in range(count):
        frames = {}
        for camera in range(cameras):
            waves = [np.sin(9 * x + 0.2 * i + episode) * np.cos(7 * y - 0.1 * i + camera) for i in range(length)]
            gray = (128 + 90 * np.stack(waves)).astype(np.uint8)
            frames[f"observation.images.cam{camera}"] = np.stack([gray, gray[:, ::-1], gray[:, :, ::-1]], axis=-1)
        rows = np.random.default_rng(episode).normal(size=(length, 8)).astype(np.float32)
        yield EpisodeData(columns={"observation.state": rows, "action": rows}, frames=frames, task="lift the block")


def make_loader(folder: str, batch_size: int, threads: int) -> knonik.Loader:
    dataset = knonik.open(folder, cache_dir=Path(folder).parent / "cache")
    return knonik.Loader(
        dataset, batch_size=batch_size, windows={"action": range(8)}, decode_threads=threads, ring_batches=RING
    )


class Step:
    """Forward and backward of a small transformer over the patches of the batch's images."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self._patch = torch.nn.Conv2d(3, width, 8, 8)
        self._body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        parameters = [*self._patch.parameters(), *self._body.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def __call__(self, images: dict[str, torch.Tensor]) -> None:
        pictures = torch.cat([images[key].flatten(0, 1) for key in sorted(images)])
        patches = self._patch(pictures.permute(0, 3, 1, 2).float() / 255).flatten(2).transpose(1, 2)
        self._body(patches).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def side_process(folder: str, batch_size: int, threads: int, ready: Any, stop: Any) -> None:
    """Run the loader and hand its tensors over; torch's queue moves them into shared memory."""
    torch.set_num_threads(1)
    with make_loader(folder, batch_size, threads) as loader:
        for batch in loader:
            ready.put(batch)
            if stop.is_set():
                break


def measure(step: Step, take: Callable[[], dict[str, torch.Tensor]], steps: int) -> tuple[float, float, float]:
    """Seconds: median and lower quartile of the bare step, median of the wait before it."""
    busy, wait = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        images = take()
        taken = time.perf_counter()
        step(images)
        wait.append(taken - begin)
        busy.append(time.perf_counter() - taken)
    return statistics.median(busy), statistics.quantiles(busy, n=4)[0], statistics.median(wait)


def with_threads(folder: str, args: argparse.Namespace, step: Step) -> tuple[float, float, float]:
    with make_loader(folder, args.batch_size, args.threads) as loader:
        for _ in range(2 * RING):
            step(next(loader).images)
        return measure(step, lambda: next(loader).images, args.steps)


def with_process(folder: str, args: argparse.Namespace, step: Step) -> tuple[float, float, float]:
    context = mp.get_context("spawn")
    ready, stop = context.Queue(maxsize=RING), context.Event()
    worker = context.Process(
        target=side_process, args=(folder, args.batch_size, args.threads, ready, stop), daemon=True
    )
    worker.start()
    for _ in range(2 * RING):
        step(ready.get().images)
    result = measure(step, lambda: ready.get().images, args.steps)
    stop.set()
    while worker.is_alive():  # a full queue would keep the worker waiting
        try:
            ready.get(timeout=0.1)
        except Exception:
            worker.join(timeout=0.1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", help="LeRobot folder; default: 100 generated episodes of two 64x64 cameras")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="decode threads")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dataset or str(
            write_lerobot(Path(temporary, "set"), demo_episodes(100), fps=10, robot_type="none", codec="h264")
        )
        step = Step(args.width, args.layers)
        with make_loader(folder, args.batch_size, args.threads) as loader:
            held = [batch.images for batch in itertools.islice(loader, RING)]
        fixed = itertools.cycle(held)
        measure(step, lambda: next(fixed), args.steps)
        results: dict[str, list[tuple[float, float, float]]] = {"none": [], "threads": [], "process": []}
        for _ in range(args.rounds):
            results["none"].append(measure(step, lambda: next(fixed), args.steps))
            results["threads"].append(with_threads(folder, args, step))
            results["process"].append(with_process(folder, args, step))
    print(
        f"{'loader':10} {'step ms':>9} {'ratio':>7} {'ratios of the rounds':>22} {'quartile ratio':>15} {'wait ms':>9}"
    )
    for name, found in results.items():
        pairs = list(zip(found, results["none"], strict=True))
        ratios = [ours[0] / bare[0] for ours, bare in pairs]
        quartile = statistics.median(ours[1] / bare[1] for ours, bare in pairs)
        busy, _, wait = (statistics.median(values) * 1e3 for values in zip(*found, strict=True))
        whole = statistics.median((ours[0] + ours[2]) / (bare[0] + bare[2]) for ours, bare in pairs)
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        step_part = f"{name:10} {busy:9.1f} {statistics.median(ratios):7.3f} {spread:>22} {quartile:15.3f}"
        print(f"{step_part} {wait:9.2f} {whole:10.3f}")


if __name__ == "__main__":
    main()
