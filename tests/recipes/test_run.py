"""How a run ends that is stopped before it could save."""

import signal
import sys

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes import launch
from recipes.run import exits_name_their_signal


def test_a_stopped_run_does_not_look_like_a_finished_one() -> None:
    with pytest.raises(SystemExit) as stopped, exits_name_their_signal():
        raise SIGTERMException
    assert stopped.value.code == 128 + signal.SIGTERM
    with pytest.raises(SystemExit) as stopped, exits_name_their_signal():
        sys.exit(1)  # what Lightning makes of a KeyboardInterrupt
    assert stopped.value.code == 128 + signal.SIGINT


def test_an_interrupted_start_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(launch._COMMANDS, "show", interrupted)
    with pytest.raises(SystemExit) as stopped:
        launch.main(["show", "quickstart"])
    assert stopped.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"
