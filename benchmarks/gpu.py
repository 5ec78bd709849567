"""What a training step of GR00T N1.7 costs on a GPU: seconds, samples/s, MFU and memory by precision mode.

    python benchmarks/gpu.py gr00t [--size released|tiny] [--device cuda|cpu] [--batch 64] [--steps 10]
        [--modes stock,lean] [--compile off,on] [--limit-s 540] [--json FILE]

Weights are random: nothing is downloaded. A step is forward, backward, clipping at 1 and AdamW, under bfloat16 autocast
as a recipe with `bf16-mixed` runs it, on a batch that lies on the device: per sample three 480x640 cameras by recipe A
(88 tokens each) and a prompt of 290 tokens, one embodiment. Modes: `stock` trains all 32 slots in float32, `lean` and
`bf16` the one in use (`models/gr00t_n17/precision.py`). The head is trained, the backbone frozen.

Every case is a process of its own, so that its memory is its own. The step time is that of `--steps` steps between two
waits for the device, behind warm-up; `first step` holds compilation and the kernels' first use. Peak memory is the
allocator's on a GPU and the process's on a CPU; `static` is what `models/gr00t_n17/memory.py` predicts. MFU counts
model FLOPs (frozen parts forward only) over the peak of the device's name, and is absent where that is unknown. A case
that `--limit-s` leaves no time for is a row that says so. Losses of the first step show that modes compute the same.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from callbacks.peak_flops import peak_tflops
from models.common.optim import OptimizerConfig, build_optimizer
from models.gr00t_n17 import memory, precision
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.flops import step_flops
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import compile_network
from models.gr00t_n17.slots import is_slot_tensor

WARMUP = 3
# config, patch grid of an image, cameras, prompt length, slot in use
SIZES: dict[str, tuple[dict[str, Any], tuple[int, int], int, int, int]] = {
    "released": ({}, (16, 22), 3, 290, 10),
    # the tiny model as a fine-tune: frozen backbone and dropout, so that every mode means what it means when released
    "tiny": ({"tune_llm": False, "tune_visual": False, "state_dropout_prob": 0.2}, (4, 6), 2, 32, 2),
}


def network_config(size: str) -> GR00TN17Config:
    changes = SIZES[size][0]
    return GR00TN17Config(**changes) if size == "released" else GR00TN17Config.tiny(**changes)


def build(size: str, mode: str, device: torch.device) -> GR00TN17:
    """The network in a precision mode, with random weights drawn on the device."""
    slot = SIZES[size][4]
    with torch.device("meta"):
        network = GR00TN17(network_config(size), slots=None if mode == "stock" else (slot,))
    precision.apply(network, mode)
    network.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim < 2 or name.endswith(".b"):
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            # By name, one row for all slots and rounded as stored: every mode starts from the same weights.
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            row = parameter[:1] if is_slot_tensor(name) else parameter
            width = row.shape[1] if name.endswith(".W") else row[0].numel()
            values = torch.randn(row.shape, generator=generator, device=device) * width**-0.5
            parameter.copy_(values.bfloat16())
    torch.manual_seed(0)
    return network.train()


def make_batch(size: str, samples: int, device: torch.device) -> dict[str, Any]:
    """Inputs on the device but for the patch grids, as a processor hands them over."""
    _, grid, cameras, length, slot = SIZES[size]
    config = network_config(size)
    ids = config.backbone
    tokens = grid[0] * grid[1] // ids.vision.spatial_merge_size**2
    image = [ids.vision_start_token_id, *[ids.image_token_id] * tokens, ids.vision_end_token_id]
    row = [
        ids.im_start_token_id,
        *image * cameras,
        *range(20, 20 + length - 2 - cameras * len(image)),
        ids.im_end_token_id,
    ]
    assert len(row) == length, "the size's prompt length must hold its images"
    horizon, width = config.action_horizon, config.max_action_dim
    mask = torch.zeros(samples, horizon, width)
    mask[:, :8, :7] = 1
    pixels = ids.vision.in_channels * ids.vision.temporal_patch_size * ids.vision.patch_size**2
    host: dict[str, Tensor] = {
        "input_ids": torch.tensor([row] * samples),
        "attention_mask": torch.ones(samples, length, dtype=torch.int64),
        "state": torch.randn(samples, 1, config.max_state_dim),
        "action": torch.randn(samples, horizon, width) * mask,
        "action_mask": mask,
        "noise": torch.randn(samples, horizon, width),
        "time": torch.rand(samples) * 0.999,
    }
    batch: dict[str, Any] = {name: tensor.to(device) for name, tensor in host.items()}
    batch["pixel_values"] = torch.randn(samples * cameras * grid[0] * grid[1], pixels, device=device)
    return {**batch, "image_grid_thw": torch.tensor([[1, *grid]] * (samples * cameras)), "embodiment_id": slot}


def run_case(arguments: argparse.Namespace, mode: str, compiled: bool) -> dict[str, Any]:
    """Measure one mode in this process."""
    device = torch.device(arguments.device)
    network = build(arguments.size, mode, device)
    static = memory.measure(network)
    optimizer = build_optimizer(network, OptimizerConfig())
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    batch = make_batch(arguments.size, arguments.batch, device)
    noise, flow_time = batch.pop("noise"), batch.pop("time")
    if compiled:
        compile_network(network)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(batch, noise, flow_time)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.detach()

    first_s, losses = timed(step, 1, device)
    timed(step, WARMUP - 1, device)
    seconds, last = timed(step, arguments.steps, device)
    grids = [tuple(grid[1:]) for grid in batch["image_grid_thw"].tolist()]
    length = batch["input_ids"].shape[1]
    flops = step_flops(network, image_grids=grids, sequence_length=length, batch_size=arguments.batch)
    step_s = seconds / arguments.steps
    found = peak_tflops(torch.cuda.get_device_name(device), "bf16-mixed") if device.type == "cuda" else None
    return {
        "mode": mode,
        "compiled": compiled,
        "step_s": step_s,
        "first_step_s": first_s,
        "samples_per_s": arguments.batch / step_s,
        "step_tflops": flops / 1e12,
        "mfu": flops / step_s / (found[0] * 1e12) if found else None,
        "peak_bytes": peak_bytes(device),
        "static_bytes": static.static_total,
        "parameters": static.parameters,
        "trained": static.trained,
        "loss_first": float(losses[0]),
        "loss_last": float(last[-1]),
    }


def timed(step: Any, count: int, device: torch.device) -> tuple[float, list[Tensor]]:
    """Seconds of `count` steps between two waits for the device, and their losses."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    losses = [step() for _ in range(count)]
    wait()
    return time.perf_counter() - begin, losses


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(rows: list[dict[str, Any]]) -> str:
    heads = (
        "mode",
        "compiled",
        "step ms",
        "samples/s",
        "TFLOP/s",
        "MFU %",
        "peak GB",
        "static GB",
        "first step s",
        "loss",
    )
    lines = [" ".join(f"{head:>12}" for head in heads)]
    for row in rows:
        cells = [row["mode"], "on" if row["compiled"] else "off"]
        if "left_out" in row:
            lines.append(" ".join(f"{cell:>12}" for cell in cells) + f"  {row['left_out']}")
            continue
        cells += [f"{row['step_s'] * 1e3:.1f}", f"{row['samples_per_s']:.1f}"]
        cells += [f"{row['step_tflops'] / row['step_s']:.1f}"]
        cells += ["-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}"]
        cells += [f"{row[name] / 1e9:.2f}" for name in ("peak_bytes", "static_bytes")]
        cells += [f"{row['first_step_s']:.1f}", f"{row['loss_first']:.4f}"]
        lines.append(" ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def gr00t(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, each in a process of its own, as long as the time lasts."""
    began, rows = time.monotonic(), []
    for compiled in arguments.compile:
        for mode in arguments.modes:
            row: dict[str, Any] = {"mode": mode, "compiled": compiled == "on"}
            left = arguments.limit_s - (time.monotonic() - began)
            command = [sys.executable, __file__, "gr00t", "--case", mode, compiled]
            for name in ("size", "device", "batch", "steps"):
                command += [f"--{name}", str(getattr(arguments, name))]
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(left, 0.01), check=True)
                row = json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired:
                row["left_out"] = f"left out: more than the {arguments.limit_s} s of --limit-s"
            except subprocess.CalledProcessError as error:
                row["left_out"] = f"failed with exit code {error.returncode}; its message stands above"
            rows.append(row)
            print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_subparsers(dest="model", required=True).add_parser("gr00t")
    cuda = torch.cuda.is_available()
    model.add_argument("--size", choices=list(SIZES), default="released")
    model.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    model.add_argument("--batch", type=int, default=64)
    model.add_argument("--steps", type=int, default=10)
    model.add_argument("--modes", type=lambda text: text.split(","), default=["stock", "lean"])
    model.add_argument("--compile", type=lambda text: text.split(","), default=["off", "on"])
    model.add_argument("--limit-s", type=float, default=540)
    model.add_argument("--json", type=Path)
    model.add_argument("--case", nargs=2, metavar=("MODE", "COMPILE"), help="one case in this process; prints JSON")
    arguments = parser.parse_args(argv)
    unknown = [value for value in arguments.modes if value not in precision.MODES]
    unknown += [value for value in arguments.compile if value not in ("off", "on")]
    if unknown:
        parser.error(f"{unknown}: --modes takes {','.join(precision.MODES)}, --compile off,on")
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: there is no GPU here; --device cpu --size tiny runs everywhere")
    if arguments.case:
        print(json.dumps(run_case(arguments, arguments.case[0], arguments.case[1] == "on")))
        return
    rows = gr00t(arguments)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"GR00T N1.7 {arguments.size}, batch {arguments.batch}, {name}, PyTorch {torch.__version__}")
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
