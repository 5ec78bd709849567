"""GR00T N1.7 for gpu.py: what a training step costs by precision mode, compiled or not.

A step is forward, backward, clipping at 1 and AdamW, under bfloat16 autocast as a recipe with `bf16-mixed` runs it, on
a batch that lies on the device: per sample three 480x640 cameras by recipe A (88 tokens each) and a prompt of 290
tokens, one embodiment. Modes: `stock` trains all 32 slots in float32, `lean` and `bf16` the one in use
(`models/gr00t_n17/precision.py`). The head is trained, the backbone frozen. `static` is what
`models/gr00t_n17/memory.py` predicts. Losses of the first step show that modes compute the same.
"""

import argparse
import zlib
from typing import Any

import torch
from gpu_steps import Case, lines, peak_bytes, timed
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


def run_case(arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    """Measure one mode in this process; `case` is MODE:off or MODE:on."""
    mode, compiled = case.split(":")[0], case.endswith(":on")
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


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each mode, under a line of heads."""
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
    cells = []
    for row in rows:
        line = [row["mode"], "on" if row["compiled"] else "off"]
        if "left_out" in row:
            cells.append([*line, row["left_out"]])
            continue
        line += [f"{row['step_s'] * 1e3:.1f}", f"{row['samples_per_s']:.1f}"]
        line += [f"{row['step_tflops'] / row['step_s']:.1f}"]
        line += ["-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}"]
        line += [f"{row[name] / 1e9:.2f}" for name in ("peak_bytes", "static_bytes")]
        cells.append([*line, f"{row['first_step_s']:.1f}", f"{row['loss_first']:.4f}"])
    return lines(heads, cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), default="released")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["stock", "lean"])
    parser.add_argument("--compile", type=lambda text: text.split(","), default=["off", "on"])


def problem(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    unknown = [value for value in arguments.modes if value not in precision.MODES]
    unknown += [value for value in arguments.compile if value not in ("off", "on")]
    return f"{unknown}: --modes takes {','.join(precision.MODES)}, --compile off,on" if unknown else None


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Every mode, uncompiled and compiled."""
    return [
        Case(
            name=f"{mode}:{compiled}",
            row={"mode": mode, "compiled": compiled == "on"},
            options={"size": arguments.size, "batch": arguments.batch},
        )
        for compiled in arguments.compile
        for mode in arguments.modes
    ]


def title(arguments: argparse.Namespace) -> str:
    return f"GR00T N1.7 {arguments.size}, batch {arguments.batch}"
