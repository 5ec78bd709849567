"""What a run leaves on disk: whole checkpoints, the newest only, and a W&B run that the environment can redirect."""

import gc
import os
from pathlib import Path

import pytest
import torch

from recipes.checkpoint_io import AtomicCheckpointIO
from recipes.load import RecipeError, load, to_dict
from recipes.run_folder import RunFolder
from recipes.wandb_run import started, wandb_logger


class Unwritable:
    def __reduce__(self) -> str:
        raise OSError("disk full")


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder, io = RunFolder(tmp_path), AtomicCheckpointIO()
    io.save_checkpoint({"weights": torch.ones(3)}, folder.checkpoint_path(8))
    assert torch.load(folder.checkpoint_path(8), weights_only=True)["weights"].tolist() == [1, 1, 1]
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({"weights": torch.ones(3), "more": Unwritable()}, folder.checkpoint_path(16))
    assert folder.latest_checkpoint() == (folder.checkpoint_path(8), 8)
    assert [file.name for file in folder.checkpoints.iterdir()] == ["step-00000008.ckpt"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(checkpoint: object, file: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"step-00000008.ckpt could not be written, [\d,]+ MB are free there"):
        AtomicCheckpointIO().save_checkpoint({}, RunFolder(tmp_path).checkpoint_path(8))


def test_half_a_checkpoint_of_a_killed_run_is_not_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    AtomicCheckpointIO().save_checkpoint({}, folder.checkpoint_path(8))
    (folder.checkpoints / ".writing.ckpt").write_bytes(b"half")
    assert folder.latest_checkpoint() == (folder.checkpoint_path(8), 8)
    AtomicCheckpointIO().save_checkpoint({}, folder.checkpoint_path(16))
    assert len(list(folder.checkpoints.iterdir())) == 2


@pytest.mark.parametrize(("keep", "left"), [(2, [7, 10]), (1, [10]), (9, [3, 7, 10]), (-1, [3, 7, 10])])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for step in (10, 3, 7):
        folder.checkpoint_path(step).touch()
    folder.prune(keep)
    assert sorted(file.name for file in folder.checkpoints.iterdir()) == [f"step-{step:08d}.ckpt" for step in left]


def test_wandb_variables_win_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_TAGS", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    recipe = load("quickstart", ["wandb.project=mine", "wandb.tags=[a]"])
    plain = wandb_logger(recipe, RunFolder(tmp_path), to_dict(recipe))._wandb_init
    assert (plain["project"], plain["name"], plain["dir"]) == ("mine", recipe.run.name, str(tmp_path))
    assert plain["tags"] == ["a"]
    again = wandb_logger(recipe, RunFolder(tmp_path), to_dict(recipe))._wandb_init
    assert again["id"] == plain["id"]  # a run that continues is the same run
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    monkeypatch.setenv("WANDB_TAGS", "b")
    changed = wandb_logger(recipe, RunFolder(tmp_path), to_dict(recipe))._wandb_init
    assert (changed["project"], changed["id"], changed["tags"]) == ("theirs", "abc", None)


def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, io = RunFolder(tmp_path), AtomicCheckpointIO()
    for step in (8, 16, 24):
        io.save_checkpoint({"weights": torch.ones(3)}, folder.checkpoint_path(step))
    with folder.checkpoint_path(24).open("r+b") as file:
        file.truncate(folder.checkpoint_path(24).stat().st_size // 2)
    folder.checkpoint_path(16).write_bytes(b"")
    assert folder.latest_checkpoint() == (folder.checkpoint_path(8), 8)
    folder.set_damaged_aside()
    names = sorted(file.name for file in folder.checkpoints.iterdir())
    assert names == ["step-00000008.ckpt", "step-00000016.ckpt.damaged", "step-00000024.ckpt.damaged"]
    assert "step-00000024.ckpt is not whole" in caplog.text
    folder.prune(1)  # the damaged ones do not count
    assert folder.latest_checkpoint() == (folder.checkpoint_path(8), 8)


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    folder.checkpoint_path(8).write_bytes(b"half")
    with pytest.raises(RecipeError, match=r"no checkpoint in .* is whole"):
        folder.set_damaged_aside()
    assert folder.checkpoint_path(8).read_bytes() == b"half"


def test_one_process_at_a_time_holds_a_run(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.claim()
    with pytest.raises(RecipeError, match=rf"run.dir: .* is in use by process {os.getpid()} on "):
        second.claim()
    del first
    gc.collect()
    second.claim()


def test_a_missing_wandb_login_is_a_problem_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.errors import UsageError

    def init(**options: object) -> object:
        raise UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("RANK", raising=False)
    recipe = load("quickstart")
    with pytest.raises(RecipeError, match=r"logger: W&B cannot begin .*No API key configured.*WANDB_MODE=offline"):
        started(wandb_logger(recipe, RunFolder(tmp_path), to_dict(recipe)))
