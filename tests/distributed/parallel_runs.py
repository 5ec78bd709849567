"""What the workers of both models share: ten steps on some ranks with losses, first gradients and collectives kept."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.common.block_options import CheckpointingConfig
from models.common.mesh import MeshStrategy, whole_tensors

SAMPLES, STEPS, SAVED = 8, 10, 5
Inputs = dict[str, Any]


class Recorded(LightningModule):
    """Before a model's module: keeps the loss of every step, the gradients of the first and what phase it is in."""

    network: Any

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


class Parts:
    """Micro-batches of a rank, step after step; `start` continues after a resume.

    inputs: (step, first sample, number of samples) -> a micro-batch.
    """

    def __init__(
        self, inputs: Callable[[int, int, int], Inputs], micro_batches: int, rank: int, ranks: int, start: int = 0
    ) -> None:
        self.inputs, self.micro_batches, self.rank, self.ranks, self.start = inputs, micro_batches, rank, ranks, start

    def __iter__(self) -> Iterator[Inputs]:
        size = SAMPLES // (self.micro_batches * self.ranks)
        for step in range(self.start, STEPS):
            for index in range(self.micro_batches):
                yield self.inputs(step, (self.rank * self.micro_batches + index) * size, size)


class SaveAt(Callback):
    """Saves once, half way, and keeps the trained weights of that moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == SAVED and not self.weights:
            trainer.save_checkpoint(self.path)
            whole = whole_tensors(trained_parameters(pl_module))
            self.weights = {name: value.detach().clone() for name, value in whole.items()}


def start(worker: Path, folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a worker under torchrun, with what it printed kept."""
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            str(worker), str(folder),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def trained_parameters(module: Any) -> dict[str, Any]:
    return {name: p for name, p in module.network.named_parameters() if p.requires_grad}


def train(
    module: Recorded,
    inputs: Callable[[int, int, int], Inputs],
    strategy: Any = "auto",
    *,
    micro_batches: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
    precision: Any = "32-true",
) -> dict[str, Any]:
    """Losses and first gradients of ten steps, or of those after a checkpoint."""
    from recipes.checkpoint_io import AtomicCheckpointIO

    torch._dynamo.reset()  # a process makes one network; the compiler gives up on a block that it has seen in many
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    saving = [] if save is None else [SaveAt(save)]
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision=precision, max_steps=STEPS,
        accumulate_grad_batches=micro_batches, gradient_clip_val=0.5, callbacks=saving, plugins=[AtomicCheckpointIO()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, log_every_n_steps=1,
    )  # fmt: skip
    data = Parts(inputs, micro_batches, rank, ranks, SAVED if resume is not None else 0)
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
def counted(module: Recorded) -> Iterator[list[tuple[str, str, int, torch.dtype]]]:
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


@contextmanager
def kept_for_backward(*parts: nn.Module) -> Iterator[list[dict[str, int]]]:
    """How often each part is called inside, and how many tensors its calls keep for a backward pass."""
    counts = [{"calls": 0, "tensors": 0} for _ in parts]
    handles = []

    def listen(number: int, part: nn.Module) -> None:
        open_hooks: list[Any] = []

        def begin(*_: Any) -> None:
            def keep(tensor: Tensor) -> Tensor:
                counts[number]["tensors"] += 1
                return tensor

            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            hooks.__enter__()
            open_hooks.append(hooks)
            counts[number]["calls"] += 1

        def end(*_: Any) -> None:
            open_hooks.pop().__exit__(None, None, None)

        handles.extend((part.register_forward_pre_hook(begin), part.register_forward_hook(end)))

    for number, part in enumerate(parts):
        listen(number, part)
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def frozen_facts(module: Recorded, trained: int) -> dict[str, Any]:
    """What must not exist of a frozen parameter; after training."""
    frozen = [p for p in module.network.parameters() if not p.requires_grad]
    tuned = trained_parameters(module)
    return {
        "frozen": len(frozen),
        "frozen_gradients": sum(p.grad is not None for p in frozen),
        "frozen_shards": sum(isinstance(p, DTensor) for p in frozen),
        "states_too_many": trained - len(tuned),
        "unsharded": sum(not isinstance(p, DTensor) for p in tuned.values()),
        "padded": {name: padded(p, 2) for name, p in tuned.items()},
    }


def padded(parameter: Tensor, shards: int) -> int:
    """Elements that are gathered of a parameter: its first axis is filled up to a multiple of the shards."""
    rows, *rest = parameter.shape or (1,)
    return -(-rows // shards) * shards * int(torch.Size(rest).numel())


def combinations(kind: str, modes: Sequence[str], compiled: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """(name, checkpointing, compiled). Compiling takes seconds for each, so the suite has some of these; all with
    ALL_COMBINATIONS=1 in the environment."""
    for mode in modes:
        yield f"{kind} {mode}", mode, False
    for mode in modes if os.environ.get("ALL_COMBINATIONS") else compiled:
        yield f"{kind} {mode} compiled", mode, True


def checkpointing(memory_gb: float) -> dict[str, CheckpointingConfig]:
    """Every mode by its name; `auto` with a budget that lets some blocks of a tiny model keep their activations."""
    return {
        "none": CheckpointingConfig(),
        "full": CheckpointingConfig(mode="full"),
        "selective": CheckpointingConfig(mode="selective"),
        "layers": CheckpointingConfig(mode="layers", last_k=1),
        "auto": CheckpointingConfig(mode="auto", memory_gb=memory_gb),
    }
