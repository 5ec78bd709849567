"""What the random part of the Cosmos-3 picture path costs on a CPU: the device path beside per-frame operations.

    python benchmarks/jitter.py --json rows.json
    python benchmarks/jitter.py --sizes 320x180 --frames 33 --rounds 5

One thread, seconds of the process's own CPU time, so that a busy machine does not show; the ways take turns, and the
median over the rounds is given for one sample of three views. "jitter" is the four colour operations alone, "picture"
is crop, resize, jitter, halving and truncation up to the composed picture. The per-frame way is
`models/cosmos3_policy/vision/reference.py`; where torchvision is installed, its own v2 transforms are a third way.
`--clips 200` also counts how far the pictures of that many clips of one frame differ.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.augment import Augmentation, Augmentations, ClipAugmenter, draw_augmentations
from models.cosmos3_policy.vision.compose import compose_videos, plan_canvas
from models.cosmos3_policy.vision.jitter import Jitter, jitter_
from models.cosmos3_policy.vision.reference import compose_clip, jitter_frame

CONFIG = AugmentConfig()
CPU = torch.device("cpu")
HEADER = f"{'size':10s}{'what':10s}{'ours s':>9s}{'frames s':>10s}{'ratio':>8s}"
HEADER += f"{'torchvision s':>15s}{'ratio':>8s}{'ns/pixel':>10s}"


def clip(seed: int, frames: int, height: int, width: int) -> Tensor:
    """uint8 [F, H, W, 3]: slopes of colour with noise on one half."""
    draw = torch.Generator().manual_seed(seed)
    smooth = interpolate(torch.rand(frames, 3, 6, 8, generator=draw), size=(height, width), mode="bilinear")
    smooth[..., width // 2 :] += 0.2 * torch.rand(frames, 3, height, width - width // 2, generator=draw)
    return (smooth.clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def torchvision_jitter() -> Callable[[Tensor, Jitter], Tensor] | None:
    """torchvision's four operations in the order drawn, or None where it is not installed."""
    try:
        from torchvision.transforms.v2 import functional
    except ImportError:
        return None

    names = ("brightness", "contrast", "saturation", "hue")

    def jitter(picture: Tensor, drawn: Jitter) -> Tensor:
        for operation in drawn.order:
            name = names[operation]
            picture = getattr(functional, f"adjust_{name}")(picture, getattr(drawn, name))
        return picture

    return jitter


def ways(height: int, width: int, frames: int, drawn: Augmentation) -> dict[str, dict[str, Callable[[], Any]]]:
    """{"jitter" or "picture": {way: one sample's work}}."""
    views = [clip(view, frames, height, width) for view in range(3)]
    canvas = plan_canvas("fit", [(height, width)] * 3)
    levels = torch.cat(views).permute(3, 0, 1, 2).flatten(2).to(torch.float32).contiguous()
    pictures = list((levels / 255).view(3, -1, height, width).unbind(1))
    pictures = [picture.contiguous() for picture in pictures]
    augmenter = ClipAugmenter(CONFIG, (height, width), CPU)
    chunks = levels.split(augmenter.chunk_frames, dim=1)
    scratch = torch.empty(chunks[0].shape)

    def ours() -> None:
        for chunk in chunks:
            jitter_(scratch[:, : chunk.shape[1]].copy_(chunk), drawn.jitter, augmenter.work)

    jitters: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "frames": lambda: [jitter_frame(picture, drawn.jitter) for picture in pictures],
    }
    torchvision = torchvision_jitter()
    if torchvision is not None:
        jitters["torchvision"] = lambda: [torchvision(picture, drawn.jitter) for picture in pictures]
    batch = [view[None] for view in views]
    return {
        "jitter": jitters,
        "picture": {
            "ours": lambda: compose_videos(batch, canvas, Augmentations([drawn]), CONFIG),
            "frames": lambda: compose_clip(views, drawn, CONFIG),
        },
    }


def measure(height: int, width: int, frames: int, rounds: int) -> list[dict[str, Any]]:
    """A row for "jitter" and one for "picture": CPU seconds of a sample, median over rounds with draws of their own."""
    times: dict[str, dict[str, list[float]]] = {}
    for number, drawn in enumerate(draw_augmentations(CONFIG, 0, range(rounds + 1))):
        for what, each in ways(height, width, frames, drawn).items():
            for way, work in each.items():
                begin = time.process_time()
                work()
                if number:  # the first round warms up
                    times.setdefault(what, {}).setdefault(way, []).append(time.process_time() - begin)
    rows = []
    for what, each in times.items():
        seconds = {way: statistics.median(values) for way, values in each.items()}
        pixels = 3 * frames * height * width
        rows.append({"size": f"{width}x{height}", "frames": frames, "what": what, "pixels": pixels, "seconds": seconds})
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = row["seconds"]
    text = f"{row['size']:10s}{row['what']:10s}{seconds['ours']:9.3f}{seconds['frames']:10.3f}"
    text += f"{seconds['frames'] / seconds['ours']:8.1f}"
    if "torchvision" in seconds:
        text += f"{seconds['torchvision']:15.3f}{seconds['torchvision'] / seconds['ours']:8.1f}"
    else:
        text += f"{'-':>15s}{'-':>8s}"
    return text + f"{seconds['ours'] / row['pixels'] * 1e9:10.1f}"


def difference(height: int, width: int, clips: int) -> dict[str, Any]:
    """How far `clips` pictures of three views differ: the largest difference in levels, the share that differs."""
    canvas = plan_canvas("fit", [(height, width)] * 3)
    largest, differing, count = 0, 0, 0
    for n, drawn in enumerate(draw_augmentations(CONFIG, 1, range(clips))):
        views = [clip(3 * n + view, 1, height, width) for view in range(3)]
        ours = compose_videos([view[None] for view in views], canvas, Augmentations([drawn]), CONFIG)[0]
        content = ours[..., : canvas.content[0], : canvas.content[1]].to(torch.int16)
        gap = (content - compose_clip(views, drawn, CONFIG).to(torch.int16)).abs()
        largest = max(largest, int(gap.max()))
        differing, count = differing + int((gap > 0).sum()), count + gap.numel()
    return {"size": f"{width}x{height}", "clips": clips, "largest": largest, "share": differing / count}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["160x90", "320x180", "640x360"], help="width x height of a view")
    parser.add_argument("--frames", type=int, default=33, help="frames of a clip")
    parser.add_argument("--rounds", type=int, default=5, help="samples timed after the first one")
    parser.add_argument("--clips", type=int, default=0, help="clips to compare, of one frame each")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(HEADER)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        width, height = (int(side) for side in size.split("x"))
        for row in measure(height, width, options.frames, options.rounds):
            rows.append(row)
            print(line(row), flush=True)
    if options.clips:
        for size in options.sizes:
            width, height = (int(side) for side in size.split("x"))
            row = difference(height, width, options.clips)
            rows.append(row)
            print(
                f"{size}: {row['clips']} clips differ by at most {row['largest']} level, {row['share']:.2e} of values"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
