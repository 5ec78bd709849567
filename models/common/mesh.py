"""Sharded training by a mesh of ranks: FSDP2 on one axis, HSDP on two, as a strategy of Lightning.

Trained parameters are split over the axis `shard` and repeated over the axis `replicate`. Frozen ones stay whole on
every rank: they have no gradient and no optimizer state to share, so splitting them would buy little memory for a
gather in every step.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from models.common import sharded_state

REPLICATE, SHARD = "replicate", "shard"


def bf16_policy() -> MixedPrecisionPolicy:
    """Weights are gathered in bfloat16 and gradients are summed over the ranks in float32.

    Inputs are left as they are: flow variables must stay float32, and autocast rounds what enters a product.
    """
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_modules(
    root: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    *,
    entries: Sequence[str] = (),
    unrounded: Sequence[nn.Module] | None = None,
) -> None:
    """Shard the trained parameters below `root` in place: one gather for each unit, one for what is in no unit.

    Args:
        root: runs as a whole; its own parameters stay gathered from its forward pass to its backward pass.
        units: modules inside in the order they run. Each is gathered before it runs, again before its backward pass,
            and freed after either; the last is not freed between the two.
        policy: dtypes of what is gathered and reduced; None means those of the parameters.
        entries: methods beside `forward` by which the root is entered.
        unrounded: modules whose weights a policy does not round, each gathered by itself; None means the norms.
    """
    frozen = {parameter for parameter in root.parameters() if not parameter.requires_grad}
    trained = [unit for unit in units if any(parameter.requires_grad for parameter in unit.parameters())]
    if not any(parameter.requires_grad for parameter in root.parameters()):
        return
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": frozen, "mp_policy": policy or MixedPrecisionPolicy()}
    if policy is not None:
        if unrounded is None:  # norms read a float32 stream
            unrounded = [m for m in root.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
        for module in unrounded:
            if any(parameter.requires_grad for parameter in module.parameters()):
                fully_shard(module, mesh=mesh, ignored_params=frozen, reshard_after_forward=True)
                module.freed_after_forward = True  # type: ignore[assignment]
    for unit in trained:
        freed: Any = unit is not trained[-1]
        fully_shard(unit, reshard_after_forward=freed, **options)
        unit.freed_after_forward = freed
    fully_shard(root, reshard_after_forward=False, **options)
    for name in entries:
        register_fsdp_forward_method(root, name)


def sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """Modules whose parameters are gathered as one, outer ones first; empty for a network that is not sharded."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """All trained parameters whole on every rank, so that ranks may run the network at different times or not at all.

    A collective at its beginning; for evaluation without gradients. Does nothing to a network that is not sharded.
    """
    modules = sharded_modules(network)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(getattr(module, "freed_after_forward", False), recurse=False)
            module.reshard()


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Tensors by name, sharded ones put together on the CPU, others as they are; every rank must call it.

    Args:
        keep: False on ranks that only take part, and get an empty dict.
    """
    result = {}
    for name, tensor in tensors.items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
            whole = whole.cpu() if keep else whole
        if keep:
            result[name] = whole
    return result


class MeshStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with the two axes of HSDP and checkpoints that are written behind the training.

    The module shards its network in `configure_model`, by `self.device_mesh` and `trainer.strategy.policy`.

    Args:
        replicate, shard: ranks along each axis; their product is the number of ranks. With replicate 1 the mesh has
            the one axis `shard`.
        policy: for the module's `configure_model`.
    """

    def __init__(self, replicate: int, shard: int, policy: MixedPrecisionPolicy | None = None) -> None:
        super().__init__(data_parallel_size=replicate * shard, tensor_parallel_size=1)
        self.replicate, self.shard, self.policy = replicate, shard, policy
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._behind: list[Future[None]] = []
        self._cpu_group: dist.ProcessGroup | None = None

    def setup_environment(self) -> None:
        """The process group, then the mesh: the base class would make one of data and tensor parallelism."""
        self._setup_distributed()
        if self.replicate * self.shard != self.world_size:
            raise ValueError(
                f"replicate {self.replicate} x shard {self.shard} are not the {self.world_size} ranks of this run"
            )
        shape, names = (self.replicate, self.shard), (REPLICATE, SHARD)
        if self.replicate == 1:
            shape, names = shape[1:], names[1:]
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._cpu_group = dist.new_group(backend="gloo")
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Of an accumulated step, micro-batches before the last are summed inside the shard axis only.

        That sum is what keeps the gradients as small as the shards; the one over replicas waits for the last.
        """
        modules = [] if self.replicate == 1 else sharded_modules(self._network)
        for module in modules:
            module.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_all_reduce(True, recurse=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(self._network.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Its state dict with names for positions: other numbers of ranks find their shards by them."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return sharded_state.by_name(optimizer.state_dict(), self._names(optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        Strategy.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy this rank's shards to the CPU and write them behind the training; the next save waits for this one.

        `finish_saving` waits too, and raises what went wrong.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported; checkpoints go to a folder of the file system")
        path = Path(self.broadcast(filepath))
        self.finish_saving()
        tensors, rest = sharded_state.separate(checkpoint)
        if self.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            sharded_state.clear(path.parent)
        dist.barrier(self._cpu_group)
        self._behind.append(self._writer.submit(sharded_state.write, path, tensors, rest, self._cpu_group))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once the one being written is whole."""
        if self.is_global_zero:
            after = list(self._behind)
            self._behind.append(self._writer.submit(_discard_after, after, Path(filepath)))

    def finish_saving(self) -> None:
        """Wait until every rank's part of the last save is on disk and its folder has its name; a collective.

        Raises:
            OSError: it could not be written; checkpoints before it are whole.
        """
        behind, self._behind = self._behind, []
        try:
            for work in behind:
                work.result()
        except Exception as error:
            raise OSError(
                "the last checkpoint could not be written; earlier ones are whole, and the same command continues from "
                f"them: {str(error).strip()}"
            ) from error
        dist.barrier(self._cpu_group)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = True) -> Any:
        """A folder written by any number of ranks, or the file of a run that was not sharded."""
        path = Path(self.broadcast(checkpoint_path))
        parameters = dict(self._network.named_parameters())
        if path.is_dir():
            return sharded_state.read_shards(path, parameters, self._cpu_group)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        states = checkpoint.get(sharded_state.OPTIMIZERS, [])
        named = [
            sharded_state.by_name(state, self._names(optimizer))
            for state, optimizer in zip(states, self.optimizers, strict=False)
        ]
        cut = sharded_state.shard({**checkpoint, sharded_state.OPTIMIZERS: named}, parameters)
        return sharded_state.by_position(cut)

    @property
    def _network(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        names = {id(parameter): name for name, parameter in self._network.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _discard_after(saves: Sequence[Future[None]], path: Path) -> None:
    for save in saves:
        save.result()  # one that failed leaves the older checkpoint where it is
    sharded_state.discard(path)
