"""Activation checkpointing of transformer blocks, in place: a block that recomputes keeps its input and nothing else.

A block becomes an instance of a subclass of its own class, so that no name in the state dict changes and copies of a
model work. The recomputation stops at the last value that the backward needs: a product after it does not run twice.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.common.block_memory import BlockUse, measure, peak, plan_kept
from models.common.block_options import CheckpointingConfig

__all__ = ["DEFAULT_SAVE", "CheckpointingConfig", "CheckpointingReport", "Plan", "apply", "plans_of", "resolve"]

_log = logging.getLogger(__name__)
# Matrix products and attention. The plain implementation of attention is two batched products.
DEFAULT_SAVE = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_dot_product_*")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
)


@dataclass(kw_only=True)
class CheckpointingReport:
    """Which blocks recompute, by part and index, and what that means for one micro-batch of the measured size.

    Bytes and FLOPs are None until they are measured: mode `auto` does so in the first training step, every mode when
    `apply` is given an example. `saved_bytes` are kept from forward to backward, `peak_bytes` are the most that is kept
    at any time, recomputation included; `extra_flops` are the recomputation's. All three are about the blocks of the
    chosen parts alone.
    """

    mode: str
    blocks: dict[str, int]
    recomputed: dict[str, tuple[int, ...]]
    saved_ops: tuple[str, ...] = ()
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    extra_flops: int | None = None
    pending: bool = False

    def summary(self) -> str:
        """One line for people."""
        if self.mode == "none":
            return "checkpointing: off"
        chosen = [f"{part} {_ranges(self.recomputed.get(part, ()))} of {n}" for part, n in self.blocks.items()]
        line = f"checkpointing {self.mode}: recomputes {', '.join(chosen)}"
        if self.saved_ops:
            line += f", except {', '.join(self.saved_ops)}"
        if self.pending:
            return f"{line}; the first training step measures what can be kept"
        if self.saved_bytes is not None and self.peak_bytes is not None and self.extra_flops is not None:
            line += (
                f"; {self.saved_bytes / 1e9:.3g} GB kept, {self.peak_bytes / 1e9:.3g} GB at the most, "
                f"{self.extra_flops / 1e12:.3g} TFLOP more for a micro-batch"
            )
        return line


@dataclass(eq=False, kw_only=True)
class Plan:
    """What all blocks of one call of `apply` share. While `pending`, a pass is watched that decides or checks it."""

    config: CheckpointingConfig
    report: CheckpointingReport
    states: dict[tuple[str, int], BlockState]
    patterns: dict[str, frozenset[Any]] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)
    uses: dict[tuple[str, int], BlockUse] = field(default_factory=dict)
    measures: bool = False
    pending: bool = False

    def finish(self) -> None:
        """The watched pass is over: choose the kept blocks (auto), check the patterns (selective), fill the report."""
        if not self.pending:
            return
        self.pending = self.report.pending = False
        if self.patterns:
            self._check_patterns()
        if not self.measures:
            return
        uses = {key: self.uses[key] for key in self.states if key in self.uses}
        if self.config.mode == "auto":
            self._choose(uses)
        recomputed = [key for key, state in self.states.items() if state.recompute]
        self.report.recomputed = _by_part(recomputed)
        self.report.saved_bytes, self.report.peak_bytes = peak(uses, frozenset(recomputed))
        self.report.extra_flops = sum(uses[key].recompute_flops for key in recomputed if key in uses)
        self.uses.clear()
        _log.info("%s", self.report.summary())

    def _choose(self, uses: dict[tuple[str, int], BlockUse]) -> None:
        budget = (self.config.memory_gb or 0.0) * 1e9
        kept = plan_kept(uses, budget)
        for key, state in self.states.items():
            state.recompute = key not in kept
        _, least = peak(uses, frozenset(uses))
        if least > budget:
            _log.warning(
                "checkpointing.memory_gb=%g: all blocks recompute and still need %.3g GB; a smaller batch needs less",
                self.config.memory_gb,
                least / 1e9,
            )

    def _check_patterns(self) -> None:
        """Patterns of a recipe must match something that ran; the default's are alternatives."""
        unused = [pattern for pattern, ops in self.patterns.items() if not ops & self.seen]
        if self.config.save is not None and unused:
            ran = sorted({_name(op).removesuffix(".default") for op in self.seen})
            raise ValueError(
                f"checkpointing.save: {', '.join(unused)} matched no operation of the blocks; they ran {', '.join(ran)}"
            )


@dataclass(eq=False, kw_only=True)
class BlockState:
    """What one block has to know."""

    key: tuple[str, int]
    plan: Plan
    recompute: bool
    draws: bool
    contexts: Callable | None = None


def apply(
    blocks: Mapping[str, Sequence[nn.Module]],
    config: CheckpointingConfig,
    *,
    example: Callable[[], Any] | None = None,
    default_save: tuple[str, ...] = DEFAULT_SAVE,
) -> CheckpointingReport:
    """Make the chosen blocks recompute, in place; before they are compiled and sharded.

    Args:
        blocks: by part, in the order they run; only those that run with gradients.
        default_save: what mode `selective` keeps unless the configuration says it.
        example: runs one forward pass of the model on a typical micro-batch; it is called once, to measure. Without it
            mode `auto` measures in the first training step, in which every block recomputes and runs once more.

    Raises:
        ValueError: parts or layers that the model does not have, `save` patterns that match nothing.
    """
    chosen = _chosen_parts(blocks, config)
    indices = {part: _recomputed(part, len(list_), config) for part, list_ in chosen.items()}
    report = CheckpointingReport(
        mode=config.mode, blocks={part: len(list_) for part, list_ in chosen.items()}, recomputed={}
    )
    if config.mode == "none":
        return report
    plan = Plan(config=config, report=report, states={})
    contexts = None
    if config.mode == "selective":
        patterns = default_save if config.save is None else config.save
        plan.patterns = resolve(patterns)
        report.saved_ops = patterns
        contexts = _contexts(frozenset().union(*plan.patterns.values()), plan.seen)
    plan.measures = config.mode == "auto" or example is not None
    plan.pending = report.pending = plan.measures or config.save is not None
    for part, list_ in chosen.items():
        for i, block in enumerate(list_):
            if i in indices[part] or plan.measures:
                _install(block, plan, (part, i), recompute=i in indices[part], contexts=contexts)
    report.recomputed = {part: tuple(sorted(found)) for part, found in indices.items() if found}
    if example is not None:
        with torch.enable_grad():
            example()
        plan.finish()
    else:
        _log.info("%s", report.summary())
    return report


def plans_of(module: nn.Module) -> tuple[Plan, ...]:
    """Plans of the blocks in a module; one that is `pending` has to run uncompiled."""
    states = (getattr(part, "_recomputation", None) for part in module.modules())
    return tuple(dict.fromkeys(state.plan for state in states if state is not None))


def kept_kinds(report: CheckpointingReport) -> frozenset[str]:
    """Which products a selective recomputation does not run again: of "mm", "addmm" (with a bias) and "attention"."""
    kinds = {"aten.mm": "mm", "aten.addmm": "addmm", **dict.fromkeys(_ATTENTION, "attention")}
    return frozenset(
        kind for name, kind in kinds.items() if any(fnmatch.fnmatch(name, pattern) for pattern in report.saved_ops)
    )


def _install(block: nn.Module, plan: Plan, key: tuple[str, int], *, recompute: bool, contexts: Any) -> None:
    if hasattr(block, "_recomputation"):
        raise ValueError(f"checkpointing: block {key[0]}.{key[1]} recomputes already; apply once")
    # Where nothing is drawn the generator's state need not be carried from the forward to the recomputation.
    draws = any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in block.modules())
    state = BlockState(key=key, plan=plan, recompute=recompute, draws=draws, contexts=contexts)
    plan.states[key] = state
    block._recomputation = state
    block.__class__ = _recomputing(type(block))


@functools.cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a block's class whose forward recomputes in the backward pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._recomputation
        run = super(subclass, self).forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if state.plan.pending:
            return _watched(self, run, args, kwargs)
        if not state.recompute:
            return run(*args, **kwargs)
        if state.contexts is None:
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=state.draws, **kwargs)
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=state.draws, context_fn=state.contexts, **kwargs
        )

    subclass = type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    return subclass


def _watched(block: Any, run: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block's pass while the plan is pending. Every block recomputes, so that whatever is chosen, this pass fits."""
    state: BlockState = block._recomputation
    plan = state.plan
    if plan.measures:
        use = measure(block, run, args, kwargs)
        plan.uses[state.key] = plan.uses[state.key] + use if state.key in plan.uses else use
    options = {} if state.contexts is None else {"context_fn": state.contexts}
    result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=state.draws, **options, **kwargs)
    # The first gradient that arrives at any block says that the pass is over.
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: plan.finish())
    return result


def _chosen_parts(
    blocks: Mapping[str, Sequence[nn.Module]], config: CheckpointingConfig
) -> dict[str, Sequence[nn.Module]]:
    present = {part: list_ for part, list_ in blocks.items() if list_}
    wanted = tuple(present) if config.parts is None else config.parts
    absent = [part for part in wanted if part not in present]
    if absent and config.mode != "none":
        raise ValueError(
            f"checkpointing.parts: {', '.join(absent)} {'has' if len(absent) == 1 else 'have'} no blocks that run with "
            f"gradients; those that do: {', '.join(present) or 'none'}"
        )
    chosen = {part: list_ for part, list_ in present.items() if part in wanted}
    if not chosen and config.mode != "none":
        raise ValueError(f"checkpointing.mode={config.mode}: no block runs with gradients, so nothing is kept")
    longest = max(map(len, chosen.values()), default=0)
    if config.mode == "layers" and max(config.last_k or 0, config.every_k or 0) > longest:
        raise ValueError(
            f"checkpointing: {'last_k' if config.last_k else 'every_k'}={config.last_k or config.every_k} is more than "
            f"the blocks there are: {', '.join(f'{part} {len(list_)}' for part, list_ in chosen.items())}"
        )
    return chosen


def _recomputed(part: str, count: int, config: CheckpointingConfig) -> frozenset[int]:
    """Indices of the blocks of a part that recompute; all of them where that is found out later."""
    if config.mode == "none":
        return frozenset()
    if config.mode != "layers":
        return frozenset(range(count))
    if config.last_k is not None:
        return frozenset(range(max(0, count - config.last_k), count))
    if config.every_k is not None:
        return frozenset(range(0, count, config.every_k))
    layers = config.layers or ()
    beyond = [i for i in layers if not -count <= i < count]
    if beyond:
        raise ValueError(
            f"checkpointing.layers: {part} has blocks 0 to {count - 1} and no {', '.join(map(str, beyond))}; "
            "checkpointing.parts limits the parts that are meant"
        )
    return frozenset(i % count for i in layers)


def resolve(patterns: Sequence[str]) -> dict[str, frozenset[Any]]:
    """Operations by pattern; a name stands for all of its overloads.

    Raises:
        ValueError: patterns that match nothing.
    """
    names = {name.replace("::", ".", 1): name for name in torch._C._dispatch_get_all_op_names()}
    resolved: dict[str, frozenset[Any]] = {}
    for pattern in patterns:
        found = [n for name, n in names.items() if fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}.")]
        resolved[pattern] = frozenset(_overload(name) for name in found)
    unknown = [pattern for pattern, ops in resolved.items() if not ops]
    if unknown:
        raise ValueError(
            f"checkpointing.save: {', '.join(unknown)} matches no operation of PyTorch; names look like aten.mm or "
            "aten._scaled_dot_product_*"
        )
    return resolved


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _contexts(ops: frozenset[Any], seen: set[Any]) -> Callable:
    """Makes the two contexts of a selective checkpoint; `seen` collects the operations that run."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return contexts


def _name(op: Any) -> str:
    return str(op)


def _by_part(keys: Sequence[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    parts = dict.fromkeys(part for part, _ in keys)
    return {part: tuple(i for other, i in keys if other == part) for part in parts}


def _ranges(indices: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""

    def runs() -> Iterator[list[int]]:
        for i in sorted(indices):
            if current and i == current[-1] + 1:
                current.append(i)
                continue
            if current:
                yield list(current)
            current[:] = [i]
        if current:
            yield list(current)

    current: list[int] = []
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs()) or "none"
