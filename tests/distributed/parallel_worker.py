"""Runs of a tiny model on the ranks of one start of torchrun, for test_parallel.py: losses, gradients, collectives.

Start it as `torchrun --nproc-per-node {2,4} parallel_worker.py FOLDER`; it writes FOLDER/ranks{2,4}.pt.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.mesh import MeshStrategy, bf16_policy, gathered, whole_tensors
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import checkpoint_blocks, compile_network, tuned_parameters

SAMPLES, STEPS, SAVED = 8, 10, 5
CHECKPOINTING = {
    "none": CheckpointingConfig(),
    "full": CheckpointingConfig(mode="full"),
    "selective": CheckpointingConfig(mode="selective"),
    "layers": CheckpointingConfig(mode="layers", last_k=1),
    "auto": CheckpointingConfig(mode="auto", memory_gb=0.003),
}


class Module(GR00TN17Module):
    """Keeps the loss of every step, the gradients of the first and the collectives of the last."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}
        self.phase = "forward"

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if name == "train/loss":
            self.losses.append(float(value))

    def on_before_backward(self, loss: Tensor) -> None:
        self.phase = "backward"

    def on_after_backward(self) -> None:
        self.phase = "forward"

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **options)
        if not self.first:
            grads = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
            self.first = {name: value.clone() for name, value in whole_tensors(grads).items()}


def make_module(checkpointing: str = "none", compiled: bool = False, **config: Any) -> Module:
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
        optimizer={"lr": 1e-3, "eps": 1e-3},  # so large that the gradient decides the step, not its rounding
        schedule={"max_steps": STEPS, "warmup_steps": 0},
    )


class Parts:
    """Micro-batches of a rank, step after step, with masks of different sizes; `position` continues after a resume."""

    def __init__(self, config: GR00TN17Config, micro_batches: int, rank: int, ranks: int, start: int = 0) -> None:
        self.config, self.micro_batches, self.rank, self.ranks, self.start = config, micro_batches, rank, ranks, start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        size = SAMPLES // (self.micro_batches * self.ranks)
        for step in range(self.start, STEPS):
            inputs = samples(self.config, step)
            for index in range(self.micro_batches):
                first = (self.rank * self.micro_batches + index) * size
                images = {"pixel_values": 4}
                yield {
                    name: value[first * images.get(name, 1) : (first + size) * images.get(name, 1)]
                    for name, value in inputs.items()
                }


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


class SaveAt(Callback):
    """Saves once, half way, and keeps the trained weights of that moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == SAVED and not self.weights:
            trainer.save_checkpoint(self.path)
            whole = whole_tensors(tuned_parameters(pl_module.network))
            self.weights = {name: value.detach().clone() for name, value in whole.items()}


def train(
    module: Module,
    strategy: Any = "auto",
    *,
    micro_batches: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
    precision: Any = "32-true",
) -> dict[str, Any]:
    """Losses and first gradients of ten steps, or of those after a checkpoint."""
    from recipes.checkpoint_io import AtomicCheckpointIO

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    saving = [] if save is None else [SaveAt(save)]
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision=precision, max_steps=STEPS,
        accumulate_grad_batches=micro_batches, gradient_clip_val=0.5, callbacks=saving, plugins=[AtomicCheckpointIO()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, log_every_n_steps=1,
    )  # fmt: skip
    start = SAVED if resume is not None else 0
    data = Parts(module.network.config, micro_batches, rank, ranks, start)
    trainer.fit(module, train_dataloaders=data, ckpt_path=resume, weights_only=True)
    if isinstance(trainer.strategy, MeshStrategy):
        trainer.strategy.finish_saving()
    compiled = getattr(module.network, "compiled", None)
    result = {
        "losses": module.losses,
        "gradients": module.first,
        "trained": len(trainer.optimizers[0].state),
        "graphs": 0 if compiled is None else compiled.graphs,
    }
    return result | ({"weights": saving[0].weights} if saving else {})


@contextmanager
def counted(module: Module) -> Iterator[list[tuple[str, str, int, torch.dtype]]]:
    """(collective, phase, elements, dtype) of everything that FSDP exchanges inside."""
    seen: list[tuple[str, str, int, torch.dtype]] = []
    # the longest tensor is the whole: output of a gather, input of a reduce-scatter
    names = (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_reduce",
    )
    kept = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def listen(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            whole = max((t for t in (*args, *options.values()) if isinstance(t, Tensor)), key=Tensor.numel)
            kind = next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if name.startswith(kind))
            seen.append((kind, module.phase, whole.numel(), whole.dtype))
            return kept[name](*args, **options)

        return call

    for name in kept:
        setattr(dist, name, listen(name))
    try:
        yield seen
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def frozen_facts(module: Module, trained: int) -> dict[str, Any]:
    """What must not exist of a frozen parameter; after training."""
    frozen = [p for p in module.network.parameters() if not p.requires_grad]
    return {
        "frozen": len(frozen),
        "frozen_gradients": sum(p.grad is not None for p in frozen),
        "frozen_shards": sum(isinstance(p, DTensor) for p in frozen),
        "states_too_many": trained - len(tuned_parameters(module.network)),
        "unsharded": sum(not isinstance(p, DTensor) for p in tuned_parameters(module.network).values()),
        "padded": {name: padded(p, 2) for name, p in tuned_parameters(module.network).items()},
    }


def padded(parameter: Tensor, shards: int) -> int:
    """Elements that are gathered of a parameter: its first axis is filled up to a multiple of the shards."""
    rows, *rest = parameter.shape or (1,)
    return -(-rows // shards) * shards * int(torch.Size(rest).numel())


def combinations(kind: str) -> Iterator[tuple[str, str, bool]]:
    """(name, checkpointing, compiled). Compiling takes seconds for each, so the suite has some of these; all with
    ALL_COMBINATIONS=1 in the environment."""
    chosen = tuple(CHECKPOINTING) if os.environ.get("ALL_COMBINATIONS") else ("selective",)
    for mode in CHECKPOINTING:
        yield f"{kind} {mode}", mode, False
    for mode in chosen:
        yield f"{kind} {mode} compiled", mode, True


def on_two(folder: Path, results: dict[str, Any]) -> None:
    for name, mode, compiled in combinations("ddp"):
        strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
        results[name] = train(make_module(mode, compiled), strategy)
    for name, mode, compiled in combinations("fsdp"):
        results[name] = train(make_module(mode, compiled), MeshStrategy(1, 2))
    results["ddp accumulated"] = train(make_module(), DDPStrategy(gradient_as_bucket_view=True), micro_batches=2)
    results["fsdp accumulated"] = train(make_module(), MeshStrategy(1, 2), micro_batches=2)
    for name, config in (("top layer", {"tune_top_llm_layers": 1}), ("no dit", {"tune_diffusion_model": False})):
        module = make_module(**config)
        with counted(module) as seen:
            results[name] = train(module, MeshStrategy(1, 2))
        results[name] |= {"collectives": seen, **frozen_facts(module, results[name]["trained"])}
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
