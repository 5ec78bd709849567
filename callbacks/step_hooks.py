"""Callbacks that are not called for what they do not do.

Lightning calls six hooks of every callback in every step, also those that a callback leaves as they are: each costs a
name for the profiler, its bracket and an empty call. It passes over a hook that cannot be called.
"""

from typing import Any

from lightning.pytorch import Callback

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class StepCallback(Callback):
    """A callback whose step hooks are None where a subclass does not define them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for hook in STEP_HOOKS:
            if getattr(cls, hook) is getattr(Callback, hook):
                setattr(cls, hook, None)
