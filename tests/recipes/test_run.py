"""How a run ends that is stopped before it could save."""

import signal
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "is neither a run folder (no recipe.json) nor a checkpoint folder (no config.json)"),
        (("config.json",), "--uri: "),
        (("config.json", "--step", "3", "--uri", "/data"), "--step: a checkpoint folder has one step only"),
        (("recipe.json", "--embodiment", "libero_sim"), "--embodiment: a run knows its robot"),
    ],
)
def test_eval_names_options_that_do_not_go_with_what_is_there(
    options: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options:
        (tmp_path / options[0]).write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        launch.main(["eval", str(tmp_path), *options[1:]])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


def test_check_prints_the_memory_of_a_recipe_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["data.uri=/later", f"run.dir={tmp_path}", "data.generate={world: tabletop}"]
    for mode, least, most in (("stock", 32.0, 32.1), ("lean", 23.9, 24.0)):
        with pytest.raises(SystemExit) as stopped:
            launch.main(["check", "gr00t_n17/finetune", *data, f"model.precision={mode}", "--memory"])
        assert stopped.value.code == 0
        static = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("static"))
        assert least <= float(static.split()[-1]) <= most
