"""What the clock hears of Lightning's loop, with a profiler of the user behind it and with none."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from callbacks.device_time import DeviceTime
from callbacks.listener import EXCLUDED, FETCH, Listener
from callbacks.step_clock import StepClock
from callbacks.step_hooks import STEP_HOOKS, StepCallback


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Ones:
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(4, 2)


class Kept(Profiler):
    """Counts the beginnings and ends it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def start(self, action_name: str) -> None:
        self.begun[action_name] += 1

    def stop(self, action_name: str) -> None:
        self.ended[action_name] += 1


@pytest.mark.parametrize("inner", [PassThroughProfiler, Kept])
def test_what_a_step_must_not_count_is_heard(inner: type[Profiler]) -> None:
    listener = Listener(inner(), DeviceTime(torch.device("cpu")))
    with listener.profile(f"{EXCLUDED}{{...}}.on_train_batch_end"):
        assert listener._excluded_depth == 1
    with listener.profile("[Strategy]SingleDeviceStrategy.training_step") as name:
        assert listener._excluded_depth == 0
        assert isinstance(name, str)
    with pytest.raises(ArithmeticError), listener.profile(EXCLUDED):
        raise ArithmeticError
    assert listener._excluded_depth == 0
    assert listener.excluded["pause"] > 0
    with listener.profile(FETCH):
        pass
    assert len(listener.fetch_s) == 1


def test_a_callback_is_not_called_for_what_it_does_not_do() -> None:
    class Ends(StepCallback):
        def on_train_batch_end(self, *args: object) -> None:
            pass

    called = {hook for hook in STEP_HOOKS if callable(getattr(Ends(), hook))}
    assert called == {"on_train_batch_end"}
    assert callable(Ends().on_save_checkpoint), "called without asking"

    class More(Ends):
        def on_before_backward(self, *args: object) -> None:
            pass

    assert {hook for hook in STEP_HOOKS if callable(getattr(More(), hook))} == {*called, "on_before_backward"}


def test_a_profiler_of_the_user_hears_every_action(tmp_path: Path) -> None:
    """The same actions, with the clock in front of it as without."""
    heard = []
    choices: list[list[Callback]] = [[], [StepClock(0.0)]]
    for callbacks in choices:
        kept = Kept()
        trainer = Trainer(
            accelerator="cpu", max_steps=3, callbacks=callbacks, profiler=kept, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Line(), train_dataloaders=Ones())
        assert kept.begun == kept.ended
        heard.append(Counter({name: count for name, count in kept.begun.items() if "Callback" not in name}))
    assert heard[0] == heard[1]
    assert heard[0][FETCH] >= 3
