"""AdamW in groups of one weight decay and learning rate, and its learning rate over the steps."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from models.common.split_adamw import SplitAdamW

# Weight decay is decided by module class and by name, as the training loop of the released model does it: every
# LayerNorm module, and every name matching one of these. What does not match decays: the per-embodiment `.b` tensors
# and the `norm1.linear.weight` of the adaptive norms among them.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)

DecayOn = Literal["matrices", "all"]
ScheduleKind = Literal["cosine", "linear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; defaults are the stock fine-tuning values."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5
    weight_decay_on: DecayOn = "matrices"
    """`matrices` spares norms and biases, see `decay_groups`; `all` spares nothing."""
    lr_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Learning rate of a part of the model as a multiple of `lr`; the model says which parts it has."""
    fused: bool = True
    """One kernel for the whole update; rounds differently from the stock loop over tensors."""
    fold_clip: bool = False
    """The fused update scales the gradients as it reads them, see `fold_scale`; otherwise a pass before it does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "lr_multipliers", dict(self.lr_multipliers))
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"optimizer.lr={self.lr}, eps={self.eps}, weight_decay={self.weight_decay}: "
                "lr and eps must be above 0, weight_decay at least 0"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas}: two numbers in [0, 1) are needed")
        if self.fold_clip and not self.fused:
            raise ValueError("optimizer.fold_clip: only the fused update scales gradients; set optimizer.fused to true")
        if self.weight_decay_on not in get_args(DecayOn):
            raise ValueError(
                f"optimizer.weight_decay_on={self.weight_decay_on!r}: one of {', '.join(get_args(DecayOn))}"
            )
        if not all(multiplier > 0 for multiplier in self.lr_multipliers.values()):
            raise ValueError(f"optimizer.lr_multipliers={self.lr_multipliers}: multiples above 0 are needed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the steps, as a share of its peak.

    `cosine`: warm-up by steps or by a ratio of max_steps (0.05 when neither is given), then half a cosine to 0 at
    max_steps. `linear`: from 1 at the first step on a straight line that reaches 0 at cycle_steps; no warm-up.
    """

    max_steps: int
    kind: ScheduleKind = "cosine"
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    cycle_steps: int | None = None
    """Of `linear`; None means max_steps. Beyond them the run ends before its learning rate is 0."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"schedule.max_steps={self.max_steps}: at least 1 step is needed")
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"schedule.kind={self.kind!r}: one of {', '.join(get_args(ScheduleKind))}")
        if self.kind == "linear" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError("schedule.kind=linear has no warm-up: leave warmup_steps and warmup_ratio out")
        if self.kind != "linear" and self.cycle_steps is not None:
            raise ValueError(
                f"schedule.cycle_steps is read with kind=linear only, and kind={self.kind}: set it to null"
            )
        if self.cycle_steps is not None and self.cycle_steps < self.max_steps:
            raise ValueError(
                f"schedule.cycle_steps={self.cycle_steps}: the learning rate would be 0 before "
                f"max_steps={self.max_steps}"
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("schedule.warmup_steps and schedule.warmup_ratio are both set; keep one of them")
        if not 0 <= self.warmup <= self.max_steps:
            raise ValueError(f"schedule: {self.warmup} warm-up steps do not fit into max_steps={self.max_steps}")

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""
        if self.kind == "linear":
            return 0
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((0.05 if self.warmup_ratio is None else self.warmup_ratio) * self.max_steps)

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at optimiser step `step`, counted from 0 (where it is 0 with any warm-up)."""
        if self.kind == "linear":
            return max(0.0, 1.0 - step / (self.cycle_steps or self.max_steps))
        if step < self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / max(1, self.max_steps - self.warmup)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def from_options(kind: type, options: Mapping[str, Any] | Any, name: str) -> Any:
    """An instance of the dataclass `kind` from a mapping (or as given); unknown keys are named."""
    if isinstance(options, kind):
        return options
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{name}: unknown keys {unknown}; allowed are {known}")
    return kind(**options)


def decay_groups(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Trainable parameters by name as (with weight decay, without)."""
    layer_norms = tuple(name + "." for name, part in module.named_modules() if isinstance(part, nn.LayerNorm))
    decay: dict[str, nn.Parameter] = {}
    no_decay: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        in_norm = any(name.startswith(prefix) for prefix in layer_norms)
        (no_decay if in_norm or _NO_DECAY_NAME.search(name) else decay)[name] = parameter
    return decay, no_decay


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, parts: Mapping[str, Sequence[str]] | None = None
) -> torch.optim.AdamW | SplitAdamW:
    """AdamW over the trainable parameters of `module`; in its split form where some are bfloat16.

    Two groups, with and without weight decay, and as many again for each part with a learning rate of its own; such
    groups carry the name of the part as `part`.

    Args:
        parts: what `config.lr_multipliers` may name: beginnings of the names of that part's parameters.

    Raises:
        ValueError: nothing is trained, or a multiplier is for a part that the model has not or does not train.
    """
    decay, no_decay = decay_groups(module)
    if not decay and not no_decay:
        raise ValueError("nothing to train: every parameter is frozen; set one of the tune_* switches of the model")
    if config.weight_decay_on == "all":
        decay, no_decay = {n: p for n, p in module.named_parameters() if p.requires_grad}, {}
    groups: list[dict[str, Any]] = []
    multipliers = _multipliers(config, parts or {}, [*decay, *no_decay])
    for part, multiplier in [(None, 1.0), *multipliers.items()]:
        for members, weight_decay in ((decay, config.weight_decay), (no_decay, 0.0)):
            params = [p for name, p in members.items() if _part_of(name, config, parts or {}) == part]
            own = {} if part is None else {"part": part, "lr": config.lr * multiplier}
            if params:
                groups.append({"params": params, "weight_decay": weight_decay, **own})
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": config.fused}
    if any(parameter.dtype == torch.bfloat16 for parameter in (*decay.values(), *no_decay.values())):
        return SplitAdamW(groups, **options)
    return adamw(groups, **options)


def _multipliers(
    config: OptimizerConfig, parts: Mapping[str, Sequence[str]], trained: Sequence[str]
) -> Mapping[str, float]:
    """The config's multipliers, each of which must be for something that is trained."""
    for part in config.lr_multipliers:
        if part not in parts:
            raise ValueError(f"optimizer.lr_multipliers.{part}: this model names {sorted(parts) or 'no parts'}")
        if not any(name.startswith(tuple(parts[part])) for name in trained):
            raise ValueError(f"optimizer.lr_multipliers.{part}: nothing of that part is trained")
    return config.lr_multipliers


def _part_of(name: str, config: OptimizerConfig, parts: Mapping[str, Sequence[str]]) -> str | None:
    """The part with a learning rate of its own that a parameter belongs to."""
    return next((part for part in config.lr_multipliers if name.startswith(tuple(parts[part]))), None)


def rates_by_part(optimizer: torch.optim.Optimizer) -> dict[str | None, float]:
    """Present learning rate of every part that has its own, and under None that of all others."""
    return {group.get("part"): group["lr"] for group in optimizer.param_groups}


def check_parts(checkpoint: Mapping[str, Any], config: OptimizerConfig) -> None:
    """Refuse to continue with other parts of the network in groups of their own than a checkpoint's optimizer has.

    Raises:
        ValueError: names both; the multipliers themselves may change.
    """
    own = set(config.lr_multipliers)
    for state in checkpoint.get("optimizer_states") or ():
        stored = {group["part"] for group in state["param_groups"] if group.get("part") is not None}
        if stored != own:
            raise ValueError(
                f"optimizer.lr_multipliers: the checkpoint's optimizer has groups for {sorted(stored) or 'no parts'}, "
                f"this run for {sorted(own) or 'no parts'}; values may change when a run continues, the names may not: "
                "give a multiplier of 1 where there shall be none"
            )


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """AdamW whose gradients may be clipped, fused or not.

    The fused one can undo a gradient scaler's scaling, and Lightning refuses to clip what may still be scaled. Only
    float16 needs a scaler; 32-true and bf16-mixed have none.
    """
    optimizer = torch.optim.AdamW(parameters, **options)
    optimizer._step_supports_amp_scaling = False
    return optimizer


def fold_scale(optimizer: torch.optim.Optimizer, factor: torch.Tensor | None) -> None:
    """Let the next fused update multiply the gradients by `factor` while it reads them; None leaves them as they are.

    It saves one pass over all gradients. The kernel divides by the reciprocal, made for scalers of float16 losses: for
    powers of two that is the same number, for others the last bit may differ.
    """
    inner: Any = getattr(optimizer, "optimizer", optimizer)  # of Lightning's wrapper the optimizer itself
    inner.grad_scale = None if factor is None else factor.reciprocal()


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each parameter group was built with: everything but the parameters and the step's own learning rate."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def apply_settings(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, settings: list[dict[str, Any]]
) -> None:
    """Give a restored optimizer and schedule the settings of `settings_of` back, at the step where they stand.

    Both are restored with the settings they were saved with, which would silently win over a changed configuration.
    """
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    scheduler.base_lrs = [own["initial_lr"] for own in settings]
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
