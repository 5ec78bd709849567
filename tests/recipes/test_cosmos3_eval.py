"""Open loop of the Cosmos-3 policy: figures against the dataset's own table, and a folder that acts as its run does."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import knonik
from models.cosmos3_policy.policy import Policy
from models.cosmos3_policy.sampler import Sampling
from recipes import evaluate as entrance
from recipes.evaluate import evaluate_folder
from recipes.families.cosmos3_policy import evaluate
from recipes.families.cosmos3_policy.evaluate import compare, evaluate_run
from recipes.family import family
from recipes.launch import main
from recipes.load import load, to_dict
from recipes.parts import parts
from recipes.sources import open_part
from recipes.stages import make_dataset
from recipes.trained import TrainedRun


class Encoder:
    """In the place of the VAE: means of 16 x 16 pixels, the mean of the colours as the fourth channel."""

    def to(self, device: str) -> "Encoder":
        return self

    def encode(self, video: Tensor) -> Tensor:
        means = torch.nn.functional.avg_pool3d(video.float() / 127.5 - 1.0, (1, 16, 16))
        return torch.cat([means, means.mean(dim=1, keepdim=True)], dim=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """The smoke recipe's network as it begins, as if a run had just saved it."""
    where = tmp_path_factory.mktemp("cosmos3")
    values = [f"data.uri={where / 'data'}", f"data.cache.dir={where / 'cache'}", f"run.dir={where / 'run'}"]
    recipe = load("cosmos3_policy/smoke", [*values, "data.generate.layouts=2", "data.validation=0.4", "seed=3"])
    make_dataset(recipe)
    room = family(recipe)
    (part,) = parts(recipe)
    with open_part(recipe, part) as dataset:
        processor = room.build_processor(recipe, [dataset])
    network = room.build_network(recipe)
    return TrainedRun(recipe=recipe, network=network, processor=processor, checkpoint=where / "none.ckpt", step=0)


@pytest.fixture(autouse=True)
def no_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "build_vae", lambda recipe: Encoder())


class Constant:
    """Answers 0.25 whatever it sees."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.asked = 0

    def act(self, images: Any, state: Any, text: Any, *, keys: Tensor) -> dict[str, np.ndarray]:
        assert {camera: tuple(value.shape) for camera, value in images.items()} == {
            camera: (len(text), 64, 64, 3) for camera in self.processor.cameras
        }
        assert state["observation.state"].shape == (len(text), 7)
        self.asked += len(text)
        return {"action": np.full((len(text), self.processor.horizon, 7), 0.25, np.float32)}


@pytest.mark.parametrize("stride", [None, 3])
def test_errors_are_those_of_the_table(trained: TrainedRun, stride: int | None) -> None:
    uri = trained.recipe.data.uri
    assert uri is not None
    policy = Constant(trained.processor)
    with knonik.open(uri) as dataset:
        found = compare(policy, dataset, stride, None)  # type: ignore[arg-type]
        lengths = dataset.episodes.length.tolist()
    steps = stride or 8
    (file,) = Path(uri).glob("data/*/*.parquet")
    table = pq.read_table(file)
    actions = np.array(table["action"].to_pylist())
    # every step of an episode is compared once, whatever the stride; chunks end with the episode
    assert found["action_mse"] == pytest.approx(np.square(actions - 0.25).mean(), rel=1e-6)
    assert found["action_mae"] == pytest.approx(np.abs(actions - 0.25).mean(), rel=1e-6)
    assert found["predictions"] == policy.asked == sum(-(-length // steps) for length in lengths)
    assert found["episodes_compared"] == len(lengths)


def test_a_run_is_compared_with_what_it_held_out(trained: TrainedRun) -> None:
    found = evaluate_run(trained, uri=None, stride=None, limit=None)
    assert evaluate_run(trained, uri=None, stride=None, limit=None) == found
    assert 0 < found["episodes_compared"] < 4
    whole = evaluate_run(trained, uri=trained.recipe.data.uri, stride=None, limit=None)
    assert whole["episodes_compared"] == 4
    assert whole["action_mse"] != found["action_mse"]


def test_an_exported_folder_acts_as_the_run(trained: TrainedRun, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    stored = to_dict(trained.recipe)
    options: dict[str, Any] = {"run": tmp_path, "dtype": "float32", "layout": "released", "stored": stored}
    family(trained.recipe).export(trained, folder, **options)
    sampling = Sampling(steps=2)
    loaded = Policy.from_pretrained(folder, encoder=Encoder(), dtype=torch.float32, sampling=sampling)
    own = Policy(trained.network, Encoder(), trained.processor, sampling=sampling)
    images = {camera: torch.full((1, 64, 64, 3), 90, dtype=torch.uint8) for camera in trained.processor.cameras}
    state = {"observation.state": torch.linspace(0, 1, 7)[None]}
    expected = own.act(images, state, ["lift the red block"])["action"]
    np.testing.assert_array_equal(loaded.act(images, state, ["lift the red block"])["action"], expected)
    found = evaluate_folder(folder, str(trained.recipe.data.uri), limit=1)
    assert found["episodes_compared"] == 1
    assert np.isfinite(found["action_mse"])
    assert found == evaluate_run(trained, uri=str(trained.recipe.data.uri), stride=None, limit=1), "to the last bit"


def test_steps_of_a_chunk_keep_their_length_on_a_faster_dataset(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dataset's rows may be closer in time than the steps that the policy was trained on."""
    uri = str(trained.recipe.data.uri)
    with knonik.open(uri) as dataset:
        lengths, rate = dataset.episodes.length.tolist(), dataset.fps
    settings = dataclasses.replace(trained.processor.settings, fps=rate / 2)
    monkeypatch.setattr(trained.processor, "settings", settings)
    found = evaluate_run(trained, uri=uri, stride=None, limit=None)
    assert found["predictions"] == sum(-(-length // 16) for length in lengths)  # 8 steps are 16 rows


def test_numbers_that_no_evaluation_has_are_told_before_anything_is_read(tmp_path: Path) -> None:
    told = r"--stride 0: give 1 or more\n--episodes -1: give 1 or more"
    with pytest.raises(ValueError, match=told):
        entrance.evaluate_run(tmp_path, stride=0, limit=-1)
    with pytest.raises(ValueError, match=told):
        entrance.evaluate_folder(tmp_path, "/nowhere", stride=0, limit=-1)


@pytest.mark.parametrize("kind", ["without a package", "distributed", "distributed iteration"])
def test_what_cannot_be_evaluated_is_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ImportError("the video encoder needs Diffusers")

    monkeypatch.setattr(entrance, "evaluate_folder", lacking)
    file = {"distributed": "latest_checkpoint.txt", "distributed iteration": "model/.metadata"}.get(kind, "config.json")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path), "--uri", "/data"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("needs Diffusers" if kind == "without a package" else "is a distributed checkpoint: a training st") in line


def test_what_cannot_be_compared_is_told(trained: TrainedRun, arm_dataset: Path) -> None:
    with pytest.raises(ValueError, match="--stride 9 is not in 1 to 8"):
        evaluate_run(trained, uri=trained.recipe.data.uri, stride=9, limit=None)
    with pytest.raises(ValueError, match=r"observation\.images\.top.*this dataset has not"):
        evaluate_run(trained, uri=str(arm_dataset), stride=None, limit=None)
