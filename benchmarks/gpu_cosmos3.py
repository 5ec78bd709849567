"""The Cosmos-3 policy for gpu.py: what a training step costs with and without compiling and recomputing.

A step is forward (captions too), loss, backward, clipping at 1 and AdamW on the generation tower, under bfloat16
autocast with the frozen caption tower in bfloat16, on a pack that lies on the device: per sample a prompt of 150
tokens, 9 latent frames of 33x40 and 33 action rows, 3,243 tokens. The VAE does not run.

The released widths with as many layers as the device holds: `--layers` or, by default, the number that the hungriest
case fits, the same for all cases. `--cases` is a list of CHECKPOINTING:COMPILE. CHECKPOINTING is none, full, selective,
every-K or last-K (the layers that recompute); COMPILE is off, on, or mix for Inductor's mix-order reduction, which is
off otherwise. `--attention` is the implementation; auto is FlashAttention of variable lengths on a GPU. MFU leaves
recomputation out, and the backward pass of what is frozen; HFU adds what ran twice; `upstream` is the count of NVIDIA's
framework, which takes a backward pass of the frozen tower and one more forward pass for
granted. Losses of the first step show that the cases compute the same.
"""

import argparse
import dataclasses
import zlib
from typing import Any, get_args

import torch
from gpu_steps import Case, lines, peak_bytes, timed
from torch import Tensor, nn

from callbacks.peak_flops import peak_tflops
from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.optim import OptimizerConfig, build_optimizer
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.flops import PackShape, recompute_flops, step_flops, upstream_flops
from models.cosmos3_policy.layers.attention_plan import Backend
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.objective import Flow, losses, noised
from models.cosmos3_policy.parallelize import checkpoint_blocks, compile_network, is_trained

WARM_UP = 3
# text tokens, latent [T, H, W], action rows, rows' raw width
SIZES: dict[str, tuple[int, tuple[int, int, int], int, int]] = {
    "released": (150, (9, 33, 40), 33, 8),
    "tiny": (7, (3, 5, 6), 5, 4),
}
TOKENS = 3243
"""Of a released sample."""
LADDER = "none:off,full:off,none:on,none:mix,full:on,selective:on,every-2:on,last-4:on"
FP32, BF16 = 4, 2
KEPT_PER_TOKEN = 32
"""Bytes of activations that a layer keeps for each token and unit of width, nothing recomputed; with a margin."""
SPARE = 6e9
"""Bytes for kernels' workspace, the context and what lies between the blocks."""


def network_config(size: str, layers: int | None) -> Cosmos3PolicyConfig:
    changes = {} if layers is None else {"num_hidden_layers": layers}
    return Cosmos3PolicyConfig(**changes) if size == "released" else Cosmos3PolicyConfig.tiny(**changes)


def build(config: Cosmos3PolicyConfig, device: torch.device) -> Cosmos3Policy:
    """The network with random weights drawn on the device: frozen ones in bfloat16, trained ones in float32."""
    with torch.device("meta"):
        network = Cosmos3Policy(config)
    for name, parameter in network.named_parameters():
        if not is_trained(name):
            parameter.data = parameter.data.bfloat16()
    network.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim < 2 or "bias" in name:
                parameter.fill_(1.0 if "norm" in name else 0.0)
                continue
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(std=config.hidden_size**-0.5, generator=generator)
    return network.train()


def make_flow(size: str, config: Cosmos3PolicyConfig, samples: int, device: torch.device) -> Flow:
    """A noised pack on the device, with what its network shall say."""
    text, shape, rows, wide = SIZES[size]
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(samples, config.latent_channel, *shape, generator=generator, device=device)
    action = torch.randn(samples, rows, config.action_dim, generator=generator, device=device)
    action[..., wide:] = 0.0
    return noised(
        latents,
        action,
        seed=0,
        position=torch.arange(samples, device=device),
        shift=5.0,
        action_dim=wide,
        text_ids=torch.arange(text, device=device).repeat(samples) % config.vocab_size,
        text_lengths=(text,) * samples,
        domain=min(8, config.num_embodiment_domains - 1),
        fps=15.0,
    )


def options(case: str) -> tuple[CheckpointingConfig, CompileConfig]:
    """What CHECKPOINTING:COMPILE means.

    Raises:
        ValueError: it means nothing.
    """
    mode, _, compiled = case.partition(":")
    if compiled not in ("off", "on", "mix"):
        raise ValueError(f"{case!r}: behind the colon stands off, on or mix")
    kind, _, number = mode.partition("-")
    if number:
        if kind not in ("every", "last") or not number.isdigit():
            raise ValueError(f"{case!r}: none, full, selective, every-K or last-K before the colon")
        checkpointing = CheckpointingConfig(
            mode="layers", **{{"every": "every_k", "last": "last_k"}[kind]: int(number)}
        )
    elif mode in ("none", "full", "selective"):
        checkpointing = CheckpointingConfig(mode=mode)
    else:
        raise ValueError(f"{case!r}: none, full, selective, every-K or last-K before the colon")
    mix = {"triton.mix_order_reduction": True} if compiled == "mix" else {}
    return checkpointing, CompileConfig(
        scope="none" if compiled == "off" else "blocks", inductor=mix, on_failure="raise"
    )


def fitting_layers(available: float, config: Cosmos3PolicyConfig, tokens: int) -> int:
    """Layers whose weights, gradients, AdamW states and kept activations lie in so many bytes, nothing recomputed."""
    base = static_bytes(dataclasses.replace(config, num_hidden_layers=1))
    each = static_bytes(dataclasses.replace(config, num_hidden_layers=2)) - base
    each += KEPT_PER_TOKEN * tokens * config.hidden_size
    return max(1, min(config.num_hidden_layers, int((available - SPARE - base) // each) + 1))


def static_bytes(config: Cosmos3PolicyConfig) -> int:
    """Trained: weight, gradient and two states in float32, and autocast's copy. Frozen: the bfloat16 weight."""
    with torch.device("meta"):
        network = Cosmos3Policy(config)
    parameters = network.named_parameters()
    return sum(p.numel() * (4 * FP32 + BF16 if is_trained(name) else BF16) for name, p in parameters)


def run_case(arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    """Measure one case in this process."""
    device = torch.device(arguments.device)
    config = network_config(arguments.size, arguments.layers)
    network = build(config, device)
    network.attention = None if arguments.attention == "auto" else arguments.attention
    checkpointing, compiling = options(case)
    checkpoint_blocks(network, checkpointing)
    compile_network(network, compiling)
    optimizer = build_optimizer(network, OptimizerConfig(lr=8e-5, betas=(0.9, 0.99), weight_decay=0.05))
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    flow = make_flow(arguments.size, config, arguments.samples, device)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            velocity = network.generate(flow.packed, network.understand(flow.packed))
            loss = sum(10.0 * part.mean() for part in losses(velocity, flow))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.detach()

    first_s, first = timed(step, 1, device)
    timed(step, WARM_UP - 1, device)
    seconds, last = timed(step, arguments.steps, device)
    shape = PackShape.of(flow.packed, config)
    model, upstream = step_flops(network, shape), upstream_flops(config, shape)
    ran = model + recompute_flops(network, shape)
    counted = upstream.training if checkpointing.mode == "none" else upstream.checkpointed
    step_s = seconds / arguments.steps
    found = peak_tflops(torch.cuda.get_device_name(device), "bf16-mixed") if device.type == "cuda" else None

    def share(flops: float) -> float | None:
        return flops / step_s / (found[0] * 1e12) if found else None

    return {
        "case": case,
        "layers": config.num_hidden_layers,
        "step_s": step_s,
        "first_step_s": first_s,
        "samples_per_s": arguments.samples / step_s,
        "tokens_per_s": sum(shape.text + shape.generated) / step_s,
        "step_tflops": model / 1e12,
        "ran_tflops": ran / 1e12,
        "upstream_tflops": counted / 1e12,
        "mfu": share(model),
        "hfu": share(ran),
        "upstream": share(counted),
        "peak_bytes": peak_bytes(device),
        "static_bytes": static_bytes(config),
        "loss_first": float(first[0]),
        "loss_last": float(last[-1]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each case, under a line of heads."""
    heads = (
        "case",
        "step ms",
        "samples/s",
        "tokens/s",
        "TFLOP/s",
        "MFU %",
        "HFU %",
        "upstream %",
        "peak GB",
        "first step s",
        "loss",
    )
    cells = []
    for row in rows:
        if "left_out" in row:
            cells.append([row["case"], row["left_out"]])
            continue
        line = [row["case"], f"{row['step_s'] * 1e3:.1f}", f"{row['samples_per_s']:.2f}", f"{row['tokens_per_s']:.0f}"]
        line += [f"{row['step_tflops'] / row['step_s']:.1f}"]
        line += ["-" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("mfu", "hfu", "upstream")]
        cells.append(
            [*line, f"{row['peak_bytes'] / 1e9:.2f}", f"{row['first_step_s']:.1f}", f"{row['loss_first']:.4f}"]
        )
    return lines(heads, cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), default="released")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--attention", choices=["auto", *get_args(Backend)], default="auto")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=LADDER.split(","))


def problem(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments; fills in the number of layers."""
    for case in [*arguments.cases, *filter(None, [arguments.case])]:
        try:
            options(case)
        except ValueError as error:
            return f"--cases: {error}"
    if arguments.samples < 1 or (arguments.layers is not None and arguments.layers < 1):
        return f"--samples {arguments.samples}, --layers {arguments.layers}: at least 1"
    if arguments.layers is None:
        whole = network_config(arguments.size, None)
        arguments.layers = whole.num_hidden_layers
        if arguments.size == "released" and arguments.device == "cuda" and torch.cuda.is_available():
            available = torch.cuda.get_device_properties(0).total_memory
            arguments.layers = fitting_layers(available, whole, arguments.samples * TOKENS)
    return None


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Every case, with the same layers."""
    shared = {name: getattr(arguments, name) for name in ("size", "samples", "layers", "attention")}
    return [Case(name=case, row={"case": case}, options=shared) for case in arguments.cases]


def title(arguments: argparse.Namespace) -> str:
    """Says how much of the model the figures are of."""
    whole = network_config(arguments.size, None).num_hidden_layers
    what = f"{arguments.layers} of {whole} layers, {arguments.samples} samples a pack, attention {arguments.attention}"
    return f"Cosmos-3 policy {arguments.size}, {what}"
