"""Runs of a tiny model on the ranks of one start of torchrun, for test_parallel.py: losses, gradients, collectives.

Start it as `torchrun --nproc-per-node {2,4} parallel_worker.py FOLDER`; it writes FOLDER/ranks{2,4}.pt.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import parallel_runs
from parallel_runs import SAMPLES, STEPS, Recorded, counted, frozen_facts, kept_for_backward

from models.common.block_options import CompileConfig
from models.common.mesh import MeshStrategy, bf16_policy, gathered
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import checkpoint_blocks, compile_network

CHECKPOINTING = parallel_runs.checkpointing(memory_gb=0.003)


class Module(Recorded, GR00TN17Module):
    """GR00T's, recorded."""


def make_module(checkpointing: str = "none", compiled: bool = False, fold_clip: bool = False, **config: Any) -> Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "diffusion_model_cfg": {"num_layers": 2},
        "tune_llm": False,
        "tune_visual": False,
        **config,
    }
    network = GR00TN17(GR00TN17Config.tiny(**sizes))
    checkpoint_blocks(network, CHECKPOINTING[checkpointing])
    if compiled:  # what differs under sharding is the tracing; kernels are compared where they are tested
        compile_network(network, CompileConfig(scope="blocks", on_failure="raise"), backend="aot_eager")
    return Module(
        network,
        seed=0,
        # eps is so large that the gradient decides the step, not its rounding
        optimizer={"lr": 1e-3, "eps": 1e-3, "fold_clip": fold_clip},
        schedule={"max_steps": STEPS, "warmup_steps": 0},
    )


def samples(config: GR00TN17Config, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    b = config.backbone
    row = [b.im_start_token_id, b.vision_start_token_id, b.image_token_id, b.vision_end_token_id, 10, 11]
    mask = torch.zeros(SAMPLES, config.action_horizon, config.max_action_dim)
    for sample, steps in enumerate((8, 8, 1, 3, 8, 7, 2, 2)):
        mask[sample, :steps, :7] = 1
    return {
        "input_ids": torch.tensor([row] * SAMPLES),
        "attention_mask": torch.ones(SAMPLES, len(row), dtype=torch.int64),
        "pixel_values": torch.rand(SAMPLES * 4, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * SAMPLES),
        "state": torch.rand(SAMPLES, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(SAMPLES, config.action_horizon, config.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": torch.ones(SAMPLES, dtype=torch.int64),
        "position": torch.arange(step * SAMPLES, (step + 1) * SAMPLES),
    }


def part(step: int, first: int, size: int) -> dict[str, Tensor]:
    """Samples of a step, with masks of different sizes."""
    images = {"pixel_values": 4}
    return {
        name: value[first * images.get(name, 1) : (first + size) * images.get(name, 1)]
        for name, value in samples(GR00TN17Config.tiny(), step).items()
    }


def train(module: Module, strategy: Any = "auto", **options: Any) -> dict[str, Any]:
    """`parallel_runs.train` on the samples of this model."""
    return parallel_runs.train(module, part, strategy, **options)


def combinations(kind: str) -> Any:
    return parallel_runs.combinations(kind, tuple(CHECKPOINTING), ("selective",))


def on_two(folder: Path, results: dict[str, Any]) -> None:
    for name, mode, compiled in combinations("ddp"):
        strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
        results[name] = train(make_module(mode, compiled), strategy)
    for name, mode, compiled in combinations("fsdp"):
        results[name] = train(make_module(mode, compiled), MeshStrategy(1, 2))
    results["ddp accumulated"] = train(make_module(), DDPStrategy(gradient_as_bucket_view=True), micro_batches=2)
    results["fsdp accumulated"] = train(make_module(), MeshStrategy(1, 2), micro_batches=2)
    results["folded"] = train(make_module(fold_clip=True), MeshStrategy(1, 2))
    for name, config in (("top layer", {"tune_top_llm_layers": 1}), ("no dit", {"tune_diffusion_model": False})):
        module = make_module(**config)
        backbone = module.network.backbone
        frozen = backbone if name == "no dit" else backbone.model.model.language_model.layers[0]
        with counted(module) as seen, kept_for_backward(frozen, module.network.action_head.vlln) as kept:
            results[name] = train(module, MeshStrategy(1, 2))
        results[name] |= {"collectives": seen, "kept": kept, **frozen_facts(module, results[name]["trained"])}
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
    results["folded"] = train(make_module(fold_clip=True), MeshStrategy(2, 2))
    results["saved"] = train(make_module(), MeshStrategy(2, 2), save=folder / "hsdp.ckpt")
    module = make_module()
    with counted(module) as seen:
        results["accumulated"] = train(module, MeshStrategy(2, 2), micro_batches=2)
    results["accumulated"]["collectives"] = seen
    with gathered(module.network):  # ranks may then run alone
        if dist.get_rank() == 3:
            inputs = samples(module.network.config, 0)
            noise, time = module.flow_variables(inputs["position"])
            with torch.no_grad():
                module.network(inputs, noise=noise, time=time)
    results["resumed hsdp"] = train(make_module(), MeshStrategy(2, 2), resume=folder / "hsdp.ckpt")
    results["resumed fsdp"] = train(make_module(), MeshStrategy(1, 4), resume=folder / "hsdp.ckpt")
    results["resumed from a file"] = train(make_module(), MeshStrategy(2, 2), resume=folder / "plain.ckpt")


def die_while_saving(folder: Path) -> None:
    """One checkpoint, then another during which a rank is killed half way through its shards."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    train(make_module(), MeshStrategy(1, 2), save=folder / "killed" / "checkpoints" / "step-00000005.ckpt")
    whole = FileSystemWriter.write_data

    def half(self: Any, plan: Any, planner: Any) -> Any:
        result = whole(self, plan, planner)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    FileSystemWriter.write_data = half  # type: ignore[method-assign]
    train(make_module(), MeshStrategy(1, 2), save=folder / "killed" / "checkpoints" / "step-00000006.ckpt")


def main(folder: Path) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    try:
        (on_two if ranks == 2 else on_four)(folder, results)
    finally:
        if os.environ["RANK"] == "0":
            torch.save(results, folder / f"ranks{ranks}.pt")
    if ranks == 2:
        dist.barrier()
        die_while_saving(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
