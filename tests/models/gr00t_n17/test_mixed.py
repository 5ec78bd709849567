"""A batch of two embodiments gives every sample what its own processor gives it alone."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.mixed import MixedProcessor, load_processor
from models.gr00t_n17.inputs.normalize import Statistics, merged
from models.gr00t_n17.inputs.processor import DatasetParts, Processor
from models.gr00t_n17.inputs.text import WordTokenizer

CONFIG = GR00TN17Config.tiny(max_num_embodiments=32)
TEXTS = ["pick up the red block", "open"]
TOKENIZER = WordTokenizer.from_texts(TEXTS, backbone=CONFIG.backbone)
SETTINGS = {"shortest_image_edge": None, "crop_fraction": None, "min_pixels": 1024, "tokenizer": "words"}
DATASET = torch.tensor([0, 1, 1, 0, 1])


def statistics(dim: int, seed: int) -> dict[str, np.ndarray]:
    base = np.random.default_rng(seed).uniform(0.5, 1.5, dim)
    return {"min": -2 * base, "max": 3 * base, "mean": 0.1 * base, "std": base, "q01": -base, "q99": 2 * base}


def part(tag: str, cameras: list[str], width: int, horizon: int, *, seed: int = 0, **settings: Any) -> Processor:
    """A part with relative arms: its statistics hold for its own chunk."""
    groups = {"state": ["observation.state"], "action": {"move": {"rep": "RELATIVE", "state_key": "observation.state"}}}
    relative = {"move": {name: np.tile(v, (horizon, 1)) for name, v in statistics(width, seed + 9).items()}}
    return Processor.for_dataset(
        CONFIG,
        {**SETTINGS, "state_dropout_prob": 0.3, **settings},
        DatasetParts(
            cameras=cameras,
            state=["observation.state"],
            action=["action"],
            statistics={"observation.state": statistics(width, seed), "action": statistics(width, seed + 1)},
            modality={
                "state": {"observation.state": {"start": 0, "end": width}},
                "action": {"move": {"start": 0, "end": width}},
            },
            groups=groups,
            relative=lambda _: relative,
        ),
        horizon=horizon,
        embodiment=tag,
        tokenizer=TOKENIZER,
    )


def with_video(part: Processor, deltas: tuple[int, ...] = (-2, 0)) -> Processor:
    """The same part reading frames of the past, as a checkpoint's modality config may say."""
    described = part.to_dict()
    described["modalities"]["video_deltas"] = list(deltas)
    return Processor.from_dict(described)


@pytest.fixture
def parts() -> list[Processor]:
    return [
        with_video(part("libero_sim", ["top", "wrist"], 3, 8)),
        with_video(part("new_embodiment", ["side", "top"], 5, 6, seed=3)),
    ]


def batch(members: slice | torch.Tensor = slice(None), cut: int = 8) -> SimpleNamespace:
    """Five samples of both parts as the data layer gives them: the widest vectors, the longest chunk, all cameras."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"top": (32, 64), "wrist": (32, 32), "side": (64, 64)}
    images = {
        camera: torch.randint(0, 256, (5, 2, *size, 3), dtype=torch.uint8, generator=generator)
        for camera, size in sizes.items()
    }
    state, action = torch.randn(5, 1, 5, generator=generator), torch.randn(5, 8, 5, generator=generator)
    text = [TEXTS[i % 2] for i in range(5)]
    chosen = torch.arange(5)[members]
    return SimpleNamespace(
        images={camera: frames[chosen] for camera, frames in images.items()},
        state={"observation.state": state[chosen]},
        action={"action": action[chosen, :cut]},
        action_is_pad=torch.zeros(len(chosen), cut, dtype=torch.bool),
        text=[text[i] for i in chosen.tolist()],
        position=100 + chosen,
        dataset=DATASET[chosen],
        inputs={},
    )


def network_inputs(processor: Processor | MixedProcessor, of: SimpleNamespace) -> dict[str, Any]:
    of.inputs = {key: value.to("cpu") for key, value in processor.prepare(of).items()}
    return processor.to_network(of, augment=True)


def test_every_sample_gets_what_its_own_processor_gives(parts: list[Processor]) -> None:
    mixed = MixedProcessor(parts)
    out = network_inputs(mixed, batch())
    assert out["embodiment_id"].tolist() == [2, 10, 10, 2, 10]
    assert out["image_grid_thw"].device.type == "cpu"
    assert not {"image_rows", "image_grids"} & set(out)
    patches = out["image_grid_thw"].prod(dim=1)
    images = torch.arange(5).repeat_interleave(4)  # two times, two cameras
    sample_of_patch = images.repeat_interleave(patches)
    for number, alone in enumerate(parts):
        chosen = torch.nonzero(number == DATASET).flatten()
        expected = network_inputs(alone, batch(chosen, alone.horizon))
        for name in ("state", "action", "action_mask", "position"):
            assert torch.equal(out[name][chosen], expected[name]), name
        own = torch.isin(sample_of_patch, chosen)
        assert torch.equal(out["pixel_values"][own], expected["pixel_values"])
        assert torch.equal(out["image_grid_thw"][torch.isin(images, chosen)], expected["image_grid_thw"])
        for row, ids, mask in zip(chosen, expected["input_ids"], expected["attention_mask"], strict=True):
            assert out["input_ids"][row][out["attention_mask"][row] == 1].tolist() == ids[mask == 1].tolist()


def test_one_slot_for_all_parts_is_one_integer(parts: list[Processor]) -> None:
    mixed = MixedProcessor([parts[1], with_video(part("robocasa_panda_omron", ["side", "top"], 3, 8))])
    assert mixed.active_slots == (10,)
    assert network_inputs(mixed, batch())["embodiment_id"] == 10
    assert "image_rows" not in mixed.prepare(batch())


def test_parts_of_one_embodiment_share_merged_statistics() -> None:
    parts = [part("libero_sim", ["top"], 3, 8, seed=seed, use_relative_action=False) for seed in (0, 7)]
    mixed = MixedProcessor(parts, weights=[3, 1])
    first, second = (p.statistics.state["observation.state"] for p in parts)
    for used in mixed.parts:
        found = used.statistics.state["observation.state"]
        np.testing.assert_array_equal(found["min"], np.minimum(first["min"], second["min"]))
        np.testing.assert_array_equal(found["q99"], np.maximum(first["q99"], second["q99"]))
        np.testing.assert_allclose(found["mean"], 0.75 * first["mean"] + 0.25 * second["mean"])
    assert list(mixed.statistics_file()) == ["libero_sim"]
    with pytest.raises(ValueError, match=r"data.mixture\[0\], data.mixture\[1\] are the same embodiment libero_sim"):
        MixedProcessor([parts[0], part("libero_sim", ["top"], 3, 6, seed=7, use_relative_action=False)])


def test_merged_deviations_are_those_of_the_joined_values() -> None:
    rng = np.random.default_rng(0)
    sets = [rng.normal(0, 1, (30, 2)), rng.normal(4, 2, (90, 2))]

    def one(values: np.ndarray) -> Statistics:
        fields = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        return Statistics(state={"arm": {**fields, "q01": values.min(0), "q99": values.max(0)}})

    found, joined = merged([one(v) for v in sets], [30, 90]).state["arm"], np.concatenate(sets)
    np.testing.assert_allclose(found["mean"], joined.mean(0))
    np.testing.assert_allclose(found["std"], joined.std(0))


def test_a_mixture_survives_json_and_writes_both_embodiments(parts: list[Processor]) -> None:
    mixed = MixedProcessor(parts)
    again = load_processor(json.loads(json.dumps(mixed.to_dict())))
    assert isinstance(again, MixedProcessor)
    assert again.to_dict() == mixed.to_dict()
    file = mixed.to_file({"processor_kwargs": {"modality_configs": {"xdof": {}}, "kept": 1}})
    assert set(file["processor_kwargs"]["modality_configs"]) == {"xdof", "libero_sim", "new_embodiment"}
    assert file["processor_kwargs"]["kept"] == 1
    assert set(mixed.statistics_file()) == {"libero_sim", "new_embodiment"}
    assert mixed.embodiment_file()["libero_sim"] == 2
    assert isinstance(load_processor(parts[0].to_dict()), Processor)


def test_predictions_are_decoded_by_the_part(parts: list[Processor]) -> None:
    mixed, given = MixedProcessor(parts), batch(torch.tensor([1, 2]))
    actions = torch.rand(2, CONFIG.action_horizon, CONFIG.max_action_dim)
    found = mixed.decode_actions(actions, given.state, part=1)
    assert found["move"].shape == (2, 6, 5)
    np.testing.assert_array_equal(found["move"], parts[1].decode_actions(actions, given.state)["move"])
    with pytest.raises(ValueError, match=r"\['move'\] are relative to the state: give decode_actions the raw state"):
        mixed.decode_actions(actions, part=1)


def test_parts_that_do_not_go_together_are_refused(parts: list[Processor]) -> None:
    other = part("libero_sim", ["top"], 3, 8, state_dropout_prob=0.0)
    with pytest.raises(ValueError, match=r"data.mixture\[1\] has another set of processor settings"):
        MixedProcessor([parts[1], other])
    with pytest.raises(ValueError, match=r"data.mixture\[1\] has another set of video steps.*\(-3, 0\), \(-2, 0\)"):
        MixedProcessor([parts[1], with_video(parts[0], (-3, 0))])
    alone = part("libero_sim", ["top"], 3, 8)
    with pytest.raises(
        ValueError, match=r"top has 2 frames per sample, the modality config reads 1, at the steps \[0\]"
    ):
        alone.prepare(batch())
    bad = batch()
    bad.dataset = bad.dataset + 1
    with pytest.raises(ValueError, match=r"names the parts \[2\]; there are 2"):
        MixedProcessor(parts).prepare(bad)
