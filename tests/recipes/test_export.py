"""`python -m recipes export`: what a run has trained, as a checkpoint folder, from single files and from shards."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.common.trained import DIGEST_KEY, FrozenWeights
from models.gr00t_n17.checkpoint.folder import CheckpointFolder, weight_files
from recipes.build import build_network, build_processor
from recipes.export import export_run
from recipes.launch import main
from recipes.load import load, to_dict
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.sources import open_all
from recipes.trained import find_checkpoint, load_run, read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TRAINED = "action_head.model.proj_out_2.weight"

# Two processes shard a network's blocks and leaves with FSDP2 and write what Lightning's strategy for it writes.
_SHARDED = """
import sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import blocks
import json
dist.init_process_group("gloo")
network = GR00TN17(GR00TN17Config.from_dict(json.loads(Path(sys.argv[2]).read_text())))
network.load_state_dict(torch.load(sys.argv[1], weights_only=True))
mesh = init_device_mesh("cpu", (2,))
for part in blocks(network).values():
    for block in part:
        fully_shard(block, mesh=mesh)
fully_shard(network, mesh=mesh)
state = get_model_state_dict(network, options=StateDictOptions(full_state_dict=False, cpu_offload=True))
trained = {name for name, p in network.named_parameters() if p.requires_grad}
dcp.save({"state_dict": {f"network.{n}": v for n, v in state.items() if n in trained}}, checkpoint_id=sys.argv[3])
if dist.get_rank() == 0:
    torch.save({"global_step": 7}, Path(sys.argv[3]) / "meta.pt")
dist.destroy_process_group()
"""


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


@pytest.fixture
def run(checkpoint: Path, arm_dataset: Path, tmp_path: Path) -> Path:
    """A run folder as training leaves it, with checkpoints of steps 3 and 7; only one tensor was trained."""
    return make_run(
        tmp_path / "run", checkpoint, arm_dataset, tmp_path / "cache", ["model.precision=lean"], steps=(3, 7)
    )


def make_run(folder: Path, weights: Path, data: Path, cache: Path, more: list[str], steps: tuple[int, ...]) -> Path:
    recipe = load(
        "gr00t_n17/finetune",
        [
            f"data.uri={data}", f"data.cache.dir={cache}", f"model.weights={weights}", f"run.dir={folder}",
            "data.global_batch_size=2", "data.batch_size=null", "data.horizon=8", "trainer.max_steps=7",
            "model.processor.tokenizer=words", *more,
        ],
    )  # fmt: skip
    RunFolder(folder).create(recipe)
    processor, network = starting(recipe)
    (folder / "processor.json").write_text(json.dumps(processor.to_dict()))
    (folder / "environment.json").write_text(json.dumps({"fingerprint": "of-the-data"}))
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    state = network.state_dict()
    for step in steps:
        state[TRAINED] = state[TRAINED] + step / 3
        stored = {
            "state_dict": {f"network.{name}": value for name, value in state.items() if name in trained},
            "global_step": step,
            DIGEST_KEY: FrozenWeights(network).digest,
        }
        torch.save(stored, RunFolder(folder).checkpoint_path(step))
    return folder


def starting(recipe: Recipe):
    datasets = open_all(recipe)
    try:
        return build_processor(recipe, datasets), build_network(recipe)
    finally:
        for dataset in datasets:
            dataset.close()


def test_the_newest_checkpoint_is_exported_over_its_base(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    written = export_run(run, tmp_path / "out")
    assert written["step"] == 7
    assert written["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    before, after = tensors(checkpoint), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {TRAINED}
    assert torch.equal(after[TRAINED], (before[TRAINED].float() + 3 / 3 + 7 / 3).bfloat16())
    out = CheckpointFolder(tmp_path / "out")
    assert out.config_values["rtc_ramp_rate"] == 6.0
    assert out.processor is not None
    assert out.processor["key_of_a_later_version"] == {"kept": True}
    assert set(out.statistics or {}) >= {"new_embodiment", "libero_sim"}
    assert out.statistics["new_embodiment"] != (CheckpointFolder(checkpoint).statistics or {})["new_embodiment"]
    assert json.loads((tmp_path / "out/experiment_cfg/recipe.json").read_text()) == RunFolder(run).recipe
    card = (tmp_path / "out/README.md").read_text()
    assert "| optimizer steps | 7 |" in card
    assert "| data fingerprint | of-the-data |" in card
    assert '| `model.precision` | `"lean"` |' in card
    assert "run.dir" not in card
    export_run(run, tmp_path / "early", step=3, dtype="float32")
    early = tensors(tmp_path / "early")[TRAINED]
    assert torch.equal(early, before[TRAINED].float() + 3 / 3)


def test_an_exported_folder_starts_the_next_run(run: Path, arm_dataset: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out")
    recipe = load(
        "gr00t_n17/finetune",
        [f"data.uri={arm_dataset}", f"data.cache.dir={tmp_path / 'cache'}", f"model.weights={tmp_path / 'out'}",
         "data.horizon=8", "model.processor.tokenizer=words"],
    )  # fmt: skip
    processor, network = starting(recipe)
    trained = load_run(run)
    assert torch.equal(network.get_parameter(TRAINED), trained.network.get_parameter(TRAINED).bfloat16().float())
    assert processor.statistics.to_dict() == trained.processor.statistics.to_dict()


@pytest.mark.distributed
def test_shards_of_two_ranks_are_joined_in_one_process(checkpoint: Path, arm_dataset: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint, arm_dataset, tmp_path / "cache", [], steps=(3,))
    reference = load_run(run).network
    torch.save(reference.state_dict(), tmp_path / "state.pt")
    sharded = RunFolder(run).checkpoint_path(7)
    (tmp_path / "write.py").write_text(_SHARDED)
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict()))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "write.py",
         tmp_path / "state.pt", tmp_path / "config.json", sharded],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(sharded.glob("*.distcp"))) == 2
    assert find_checkpoint(run) == sharded
    whole = export_run(run, tmp_path / "whole", step=3, dtype="float32")
    joined = export_run(run, tmp_path / "joined", dtype="float32")
    assert (whole["step"], joined["step"]) == (3, 7)
    a, b = tensors(tmp_path / "whole"), tensors(tmp_path / "joined")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    (sharded / ".metadata").unlink()
    assert find_checkpoint(run) != sharded, "an index that is written last says that all shards are there"
    with pytest.raises(ValueError, match="no whole checkpoint"):
        read_checkpoint(sharded)


def test_what_cannot_be_exported_is_told_before_anything_is_written(
    run: Path, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint of step 5; there are \[3, 7\]"):
        export_run(run, tmp_path / "out", step=5)
    with pytest.raises(ValueError, match="is no run folder"):
        export_run(tmp_path, tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        export_run(run, run)
    # the base was replaced by another one of the same shapes
    stored = RunFolder(run).recipe
    assert stored is not None
    stored["model"]["weights"] = str(write_checkpoint(tmp_path / "other", seed=1))
    (run / "recipe.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="frozen weights are not those"):
        export_run(run, tmp_path / "out")
    (run / "checkpoints/step-00000007.ckpt").write_bytes(b"half")
    assert find_checkpoint(run).stem == "step-00000003"
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str | Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, arguments)])
        return int(ended.value.code or 0)

    assert command(run, tmp_path / "out", "--step", "3") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert command(run, tmp_path / "out") == 2
    assert "not empty" in capsys.readouterr().err


def test_changes_leave_defaults_and_places_out() -> None:
    from recipes.export import changes

    recipe = load("gr00t_n17/finetune", ["data.uri=/somewhere", "optimizer.lr=2e-4", "data.cache.dir=/cache"])
    changed = changes(to_dict(dataclasses.replace(recipe, seed=3)))
    assert changed["optimizer.lr"] == 2e-4
    assert changed["seed"] == 3
    assert not any("/somewhere" in str(value) or "/cache" in str(value) for value in changed.values())
    assert "optimizer.eps" not in changed
