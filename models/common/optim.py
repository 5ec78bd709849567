"""The stock optimiser: AdamW with the usual two weight-decay groups, linear warm-up from 0, half-cosine to 0."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.common.split_adamw import SplitAdamW

# Weight decay is decided by module class and by name, as the training loop of the released model does it: every
# LayerNorm module, and every name matching one of these. What does not match decays: the per-embodiment `.b` tensors
# and the `norm1.linear.weight` of the adaptive norms among them.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; defaults are the stock fine-tuning values."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5
    fused: bool = True
    """One kernel for the whole update; rounds differently from the stock loop over tensors."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"optimizer.lr={self.lr}, eps={self.eps}, weight_decay={self.weight_decay}: "
                "lr and eps must be above 0, weight_decay at least 0"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas}: two numbers in [0, 1) are needed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up by steps or by a ratio of max_steps (0.05 when neither is given), then half-cosine to 0 at max_steps."""

    max_steps: int
    warmup_steps: int | None = None
    warmup_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"schedule.max_steps={self.max_steps}: at least 1 step is needed")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("schedule.warmup_steps and schedule.warmup_ratio are both set; keep one of them")
        if not 0 <= self.warmup <= self.max_steps:
            raise ValueError(f"schedule: {self.warmup} warm-up steps do not fit into max_steps={self.max_steps}")

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((0.05 if self.warmup_ratio is None else self.warmup_ratio) * self.max_steps)

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at optimiser step `step`, counted from 0 (where it is 0 with any warm-up)."""
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


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW | SplitAdamW:
    """AdamW over the trainable parameters of `module` in two groups; in its split form where some are bfloat16."""
    decay, no_decay = decay_groups(module)
    if not decay and not no_decay:
        raise ValueError("nothing to train: every parameter is frozen; set one of the tune_* switches of the model")
    groups: list[dict[str, Any]] = [
        {"params": list(decay.values()), "weight_decay": config.weight_decay},
        {"params": list(no_decay.values()), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": config.fused}
    if any(parameter.dtype == torch.bfloat16 for parameter in (*decay.values(), *no_decay.values())):
        return SplitAdamW(groups, **options)
    return adamw(groups, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """AdamW whose gradients may be clipped, fused or not.

    The fused one can undo a gradient scaler's scaling, and Lightning refuses to clip what may still be scaled. Only
    float16 needs a scaler; 32-true and bf16-mixed have none.
    """
    optimizer = torch.optim.AdamW(parameters, **options)
    optimizer._step_supports_amp_scaling = False
    return optimizer


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
