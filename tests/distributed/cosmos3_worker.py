"""Runs of a tiny Cosmos-3 policy on the ranks of one start of torchrun, for test_cosmos3.py.

Start it as `torchrun --nproc-per-node {2,4} cosmos3_worker.py FOLDER`; it writes FOLDER/ranks{2,4}.pt.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import avg_pool3d

sys.path.insert(0, str(Path(__file__).parent))
import parallel_runs
from parallel_runs import SAMPLES, STEPS, Recorded, counted, frozen_facts

from models.common.block_options import CompileConfig
from models.common.mesh import MeshStrategy, bf16_policy
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.module import Cosmos3PolicyModule
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.parallelize import checkpoint_blocks, compile_network

# so that `auto` lets one of the two layers keep its activations, which are those of a rank's share
CHECKPOINTING = parallel_runs.checkpointing(memory_gb=0.0018 / int(os.environ.get("WORLD_SIZE", "1")))
HORIZON, CANVAS, CONTENT, WIDE = 8, (64, 80), (56, 80), 4


class Module(Recorded, Cosmos3PolicyModule):
    """The policy's, recorded."""


class Encoder:
    """In the place of the VAE: means of colours, 16 x 16 x 4 at a time as its strides are; the first frame alone."""

    def to(self, device: torch.device) -> "Encoder":
        return self

    def encode(self, video: Tensor) -> Tensor:
        pixels = video.float() / 127.5 - 1.0
        first = avg_pool3d(pixels[:, :, :1], (1, 16, 16))
        rest = avg_pool3d(pixels[:, :, 1:], (4, 16, 16))
        latents = torch.cat([first, rest], dim=2) * 10.0
        return torch.cat([latents, latents.mean(dim=1, keepdim=True)], dim=1)

    def flops(self, *size: int, upstream: bool = False) -> int:
        return 0


def make_module(checkpointing: str = "none", compiled: bool = False, **options: Any) -> Module:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    network.init_weights(0)
    checkpoint_blocks(network, CHECKPOINTING[checkpointing])
    if compiled:  # what differs under sharding is the tracing; kernels are compared where they are tested
        compile_network(network, CompileConfig(scope="blocks", on_failure="raise"), backend="aot_eager")
    return Module(
        network,
        Encoder(),
        seed=0,
        optimizer={
            "lr": 1e-3,
            "eps": 1e-3,  # so large that the gradient decides the step, not its rounding
            "betas": (0.9, 0.99),
            "weight_decay": 0.05,
            "weight_decay_on": "all",
            "lr_multipliers": {"action_heads": 5.0},
        },
        schedule={"max_steps": STEPS, "kind": "linear", "cycle_steps": 10 * STEPS},
        ema={"kind": "power", "rate": 0.1},
        **options,
    )


def part(step: int, first: int, size: int) -> dict[str, Any]:
    """A micro-batch as `Cosmos3Processor.to_network` gives it; captions are of different lengths."""
    generator = torch.Generator().manual_seed(step)
    lengths = [3 + 5 * sample % 7 for sample in range(SAMPLES)]
    ids = [torch.randint(256, (length,), generator=generator) for length in lengths]
    video = torch.randint(256, (SAMPLES, 3, HORIZON + 1, *CANVAS), dtype=torch.uint8, generator=generator)
    action = torch.rand(SAMPLES, HORIZON + 1, 8, generator=generator)
    action[..., WIDE:] = 0.0
    mine = slice(first, first + size)
    return {
        "video": video[mine],
        "content_size": CONTENT,
        "text_ids": torch.cat(ids[mine]),
        "text_lengths": tuple(lengths[mine]),
        "action": action[mine],
        "action_dim": WIDE,
        "domain": 2,
        "fps": 15.0,
        "position": torch.arange(step * SAMPLES, (step + 1) * SAMPLES)[mine],
    }


def train(module: Module, strategy: Any = "auto", **options: Any) -> dict[str, Any]:
    """`parallel_runs.train` on the samples of this model."""
    return parallel_runs.train(module, part, strategy, **options)


def combinations(kind: str) -> Any:
    """Every option under FSDP, some under the others; all with ALL_COMBINATIONS=1 in the environment."""
    every = kind == "fsdp" or os.environ.get("ALL_COMBINATIONS")
    modes = tuple(CHECKPOINTING) if every else ("none", "layers")
    return parallel_runs.combinations(kind, modes, ("selective",) if kind == "fsdp" else ())


def on_two(folder: Path, results: dict[str, Any]) -> None:
    for name, mode, compiled in combinations("ddp"):
        strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
        results[name] = train(make_module(mode, compiled), strategy)
    for name, mode, compiled in combinations("fsdp"):
        results[name] = train(make_module(mode, compiled), MeshStrategy(1, 2))
    results["ddp accumulated"] = train(make_module(), DDPStrategy(gradient_as_bucket_view=True), micro_batches=2)
    results["fsdp ahead"] = train(make_module(lookahead="stream"), MeshStrategy(1, 2))
    results["fsdp accumulated"] = train(make_module(), MeshStrategy(1, 2), micro_batches=2)
    module = make_module()
    with counted(module) as seen:
        results["bf16"] = train(module, MeshStrategy(1, 2, bf16_policy()), precision="bf16-mixed")
    results["bf16"]["collectives"] = seen
    results["ddp bf16"] = train(make_module(), DDPStrategy(), precision="bf16-mixed")
    for name, strategy in (("fsdp", MeshStrategy(1, 2)), ("ddp", DDPStrategy())):
        results[f"resumed {name}"] = train(make_module(), strategy, resume=folder / "hsdp.ckpt")


def on_four(folder: Path, results: dict[str, Any]) -> None:
    for name, mode, compiled in combinations("hsdp"):
        results[name] = train(make_module(mode, compiled), MeshStrategy(2, 2))
    module = make_module()
    with counted(module) as seen:
        results["saved"] = train(module, MeshStrategy(2, 2), save=folder / "hsdp.ckpt")
    results["saved"] |= {"collectives": seen, **frozen_facts(module, results["saved"]["trained"])}
    module = make_module()
    with counted(module) as seen:
        results["accumulated"] = train(module, MeshStrategy(2, 2), micro_batches=2)
    results["accumulated"]["collectives"] = seen
    results["resumed from a file"] = train(make_module(), MeshStrategy(2, 2), resume=folder / "plain.ckpt")


def main(folder: Path) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    try:
        (on_two if ranks == 2 else on_four)(folder, results)
    finally:
        if os.environ["RANK"] == "0":
            torch.save(results, folder / f"ranks{ranks}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
