"""Groups of a dataset, of a recipe and of a checkpoint put together; embodiment tags; what does not fit is told."""

from typing import Any

import pytest

from models.gr00t_n17.inputs.embodiments import merge, slot_of, tag_of
from models.gr00t_n17.inputs.modality import Modalities
from models.gr00t_n17.inputs.modality_sources import resolve

MODALITY = {
    "state": {
        "arm": {"start": 0, "end": 5},
        "grip": {"start": 5, "end": 6},
        "base": {"start": 0, "end": 2, "original_key": "observation.base"},
    },
    "action": {"arm": {"start": 0, "end": 5}, "grip": {"start": 5, "end": 6}},
    "video": {"front": {"original_key": "observation.images.cam_1"}},
    "annotation": {"human.task": {}},
}
CONFIG: dict[str, Any] = {
    "video": {"delta_indices": [-15, 0], "modality_keys": ["front"]},
    "state": {"delta_indices": [0], "modality_keys": ["grip", "arm"], "mean_std_embedding_keys": ["arm"]},
    "action": {
        "delta_indices": [0, 1, 2, 3],
        "modality_keys": ["grip", "arm"],
        "action_configs": [
            {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None},
            {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": "arm"},
        ],
    },
    "language": {"delta_indices": [0], "modality_keys": ["annotation.human.task"]},
}


def made(**changes: Any) -> Modalities:
    arguments: dict[str, Any] = {
        "cameras": ["observation.images.cam_1"],
        "state": {"observation.state": 6},
        "action": {"action": 6},
        "horizon": 8,
    }
    return resolve(**{**arguments, **changes})


def names(groups: Any) -> list[tuple[str, str, int, int]]:
    return [(group.name, group.column, group.start, group.stop) for group in groups]


def test_without_names_every_column_is_a_group() -> None:
    found = made(state={"observation.state": 6, "observation.base": 2})
    assert names(found.state) == [("state", "observation.state", 0, 6), ("base", "observation.base", 0, 2)]
    assert names(found.action) == [("action", "action", 0, 6)]
    assert found.video == (("cam_1", "observation.images.cam_1"),)
    assert found.action_deltas == tuple(range(8))


def test_modality_json_names_the_parts_of_the_columns_that_are_read() -> None:
    found = made(modality=MODALITY)
    assert names(found.state) == [("arm", "observation.state", 0, 5), ("grip", "observation.state", 5, 6)]
    assert found.video == (("front", "observation.images.cam_1"),)
    assert found.language == "annotation.human.task"
    both = made(modality=MODALITY, state={"observation.state": 6, "observation.base": 2, "observation.extra": 3})
    assert [group.name for group in both.state] == ["arm", "grip", "base", "extra"]


def test_a_recipe_chooses_groups_their_order_and_what_they_mean() -> None:
    groups = {
        "state": ["grip", "arm"],
        "action": {"arm": {"rep": "RELATIVE"}, "grip": {}},
        "mean_std": ["grip"],
        "sin_cos": ["arm"],
    }
    found = made(modality=MODALITY, groups=groups)
    assert [group.name for group in found.state] == ["grip", "arm"]
    assert [(group.name, group.rep) for group in found.action] == [("arm", "RELATIVE"), ("grip", "ABSOLUTE")]
    assert found.mean_std_state == found.mean_std_action == ("grip",)
    assert found.sin_cos == ("arm",)
    assert [group.name for group in found.relative] == ["arm"]


def test_a_checkpoint_decides_order_steps_and_meaning_unless_the_recipe_says_groups() -> None:
    found = made(modality=MODALITY, checkpoint=CONFIG, horizon=None)
    assert names(found.action) == [("grip", "action", 5, 6), ("arm", "action", 0, 5)]
    assert found.relative[0].reference == "arm"
    assert (found.video_deltas, found.action_deltas) == ((-15, 0), (0, 1, 2, 3))
    assert (found.mean_std_state, found.mean_std_action) == (("arm",), ())
    assert made(modality=MODALITY, checkpoint=CONFIG, horizon=6).horizon == 6
    own = made(modality=MODALITY, checkpoint=CONFIG, groups={"state": None})
    assert [group.name for group in own.action] == ["arm", "grip"]
    assert own.relative == ()


def test_cameras_of_a_checkpoint_are_found_by_name_or_by_place() -> None:
    config = {**CONFIG, "video": {"delta_indices": [0], "modality_keys": ["wrist", "front"]}}
    cameras = ["observation.images.front", "observation.images.wrist"]
    by_name = made(modality={**MODALITY, "video": {}}, checkpoint=config, cameras=[*cameras, "observation.images.x"])
    assert by_name.cameras == ("observation.images.wrist", "observation.images.front")
    by_place = made(modality={**MODALITY, "video": {}}, checkpoint=config, cameras=["a", "b"])
    assert by_place.video == (("wrist", "a"), ("front", "b"))
    with pytest.raises(ValueError, match=r"has the cameras \['wrist', 'front'\].*name 2 in data.cameras"):
        made(modality=MODALITY, checkpoint=config)
    # a place must not give a camera another one's name: here the wrist's would be called front
    with pytest.raises(ValueError, match=r"name 2 in data\.cameras"):
        made(modality={**MODALITY, "video": {}}, checkpoint=config, cameras=["side", "observation.images.wrist"])
    beside = made(modality={**MODALITY, "video": {}}, checkpoint=config, cameras=["observation.images.wrist", "side"])
    assert beside.video == (("wrist", "observation.images.wrist"), ("front", "side"))


@pytest.mark.parametrize("given", [{}, {"groups": {"mean_std": ["arm"], "action": {"arm": {"rep": "RELATIVE"}}}}])
def test_they_survive_json_and_the_checkpoints_form(given: dict[str, Any]) -> None:
    found = made(modality=MODALITY, **given)
    assert Modalities.from_dict(found.to_dict()) == found
    again = made(modality=MODALITY, checkpoint=found.to_config(), horizon=None)
    assert again == found
    deployed = found.by_group()
    assert names(deployed.action)[0] == ("arm", "arm", 0, 5)
    assert deployed.cameras == ("front",)
    assert deployed.to_config() == found.to_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": {"state": ["hand"]}}, r"model.modality.state has the state groups \['hand'\].*\['arm', 'grip'\]"),
        ({"groups": {"mean_std": ["hand"]}}, r"mean_std names \['hand'\]"),
        ({"groups": {"sin_cos": ["hand"]}}, r"name \['hand'\], which are no state groups"),
        ({"groups": {"action": {"arm": {"rep": "relative"}}}}, "rep='relative' is none of ABSOLUTE, RELATIVE, DELTA"),
        (
            {"groups": {"action": {"arm": {"rep": "RELATIVE", "state_key": "grip"}}}},
            "arm .* has 5 elements, its state group grip has 1",
        ),
        (
            {"groups": {"action": {"arm": {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D"}}}},
            "arm .* has 5 elements, XYZ_ROT6D has 9",
        ),
        ({"groups": {"action": {"arm": {"rep": "RELATIVE", "type": "EEF"}}}}, "a pose is XYZ_ROT6D or XYZ_ROTVEC"),
        ({"groups": {"state": ["grip"], "action": {"arm": {"rep": "RELATIVE"}}}}, "'arm' is no state group"),
        ({"horizon": None}, "give data.horizon"),
        ({"state": {"observation.state": 4}}, r"state.arm is 0..5 of observation.state, which has 4"),
        (
            {"checkpoint": {**CONFIG, "state": {"delta_indices": [0], "modality_keys": ["leg"]}}},
            r"the checkpoint's modality config has the state groups \['leg'\]",
        ),
        # Steps that a loader would not read, so that others would stand in their places unnoticed.
        (
            {"checkpoint": {**CONFIG, "action": {**CONFIG["action"], "delta_indices": [0, 2, 4, 6]}}},
            r"has the action steps \[0, 2, 4, 6\], of a dataset \[0, 1, 2, 3\] are read",
        ),
        (
            {"checkpoint": {**CONFIG, "state": {**CONFIG["state"], "delta_indices": [-1]}}},
            r"has the state steps \[-1\], of a dataset \[0\] are read",
        ),
        (
            {"checkpoint": {**CONFIG, "action": {**CONFIG["action"], "action_configs": [{}]}}},
            r"1 action_configs for the 2 groups \['grip', 'arm'\]",
        ),
        (
            {"checkpoint": {**CONFIG, "action": {**CONFIG["action"], "action_configs": [{"scale": 2}, {}]}}},
            r"action group grip: \['scale'\] are none of rep, type, format, state_key",
        ),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**{"modality": MODALITY, **changes})


def test_tags_and_slots() -> None:
    assert slot_of("simpler_env_widowx") == 1
    assert merge({"robot": 5, "libero_sim": 7}) | {"libero_sim": 7} == merge({"robot": 5, "libero_sim": 7})
    assert slot_of("robot", merge({"robot": 5})) == 5
    assert (tag_of(10), tag_of(2), tag_of(5)) == ("new_embodiment", "libero_sim", "embodiment_5")
    with pytest.raises(ValueError, match="'simpler_env_widowix' is not known; the nearest is 'simpler_env_widowx'"):
        slot_of("simpler_env_widowix")
