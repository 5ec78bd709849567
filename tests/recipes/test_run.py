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


def test_a_recipe_for_many_ranks_is_checked_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many ranks as it names, or as many as asked for; overrides may also stand behind the options."""
    data = ["data.uri=/later", f"run.dir={tmp_path}", "data.generate={world: tabletop}"]
    static = {}
    for asked, ranks, shard in ((["parallel.shard=8"], 8, 8), (["--ranks", "32", "parallel.shard=4"], 32, 4)):
        with pytest.raises(SystemExit) as stopped:
            launch.main(["check", "gr00t_n17/finetune", *data, "--memory", "data.global_batch_size=64", *asked])
        out = capsys.readouterr().out
        assert stopped.value.code == 0
        assert f"no problems on {ranks} ranks" in out
        static[shard] = float(next(line for line in out.splitlines() if line.startswith("static")).split()[-1])
    # what is trained, 16 bytes each of 1.62 G values, is split
    assert static[4] - static[8] == pytest.approx(16 * 1.6205 / 8, abs=0.05)
    for wrong in (["--ranks", "12", "parallel.shard=8"], ["--ranks=3", "data.global_batch_size=64"]):
        with pytest.raises(SystemExit) as stopped:
            launch.main(["check", "gr00t_n17/finetune", *data, *wrong])
        assert stopped.value.code == 2
    assert "not divisible by the 3 ranks" in capsys.readouterr().err


def test_check_prints_the_memory_of_a_recipe_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["data.uri=/later", f"run.dir={tmp_path}", "data.generate={world: tabletop}"]
    for mode, least, most in (("stock", 32.0, 32.1), ("lean", 23.9, 24.0)):
        with pytest.raises(SystemExit) as stopped:
            launch.main(["check", "gr00t_n17/finetune", *data, f"model.precision={mode}", "--memory"])
        assert stopped.value.code == 0
        static = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("static"))
        assert least <= float(static.split()[-1]) <= most
