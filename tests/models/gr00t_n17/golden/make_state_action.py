"""Make state_action.json and state_action.npz: vectors, masks and decoded actions of the released processor's own code.

Every case is one embodiment with its own groups and settings on generated episodes. The reference classes turn windows
of them into vectors and random predictions back into robot units; the text and image part is left out, and so is the
random state dropout. Statistics of relative actions are the reference's own over the same episodes.

Run in an environment of its own, with a checkout of the repository NVIDIA/Isaac-GR00T (N1.7, June 2026):
    python -m venv golden
    golden/bin/pip install "albumentations==1.4.18" "transformers==5.5.4" scipy pandas torch torchvision tqdm
    golden/bin/python tests/models/gr00t_n17/golden/make_state_action.py CHECKOUT
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.spatial.transform import Rotation

OUT = Path(__file__).with_name("state_action.json")
SAMPLES, ROWS, WIDTH = 12, 16, 28  # per case; of the padded action
LENGTHS = (20, 9, 26)  # of the episodes of a case
PLAIN = {"use_percentiles": False, "clip_outliers": True, "use_relative_action": True}
ARM = {"arm": 5, "gripper": 1}


def action(
    dim: int, rep: str = "ABSOLUTE", kind: str = "NON_EEF", form: str = "DEFAULT", state: str | None = None
) -> dict:
    return {"dim": dim, "rep": rep, "type": kind, "format": form, "state_key": state}


def case(tag: str, state: dict[str, int], actions: dict[str, dict], horizon: int = 8, **said: Any) -> dict[str, Any]:
    names = ("sin_cos", "mean_std_state", "mean_std_action")
    groups = {name: said.pop(name, []) for name in names}
    return {"tag": tag, "state": state, "action": actions, "horizon": horizon, **groups, "settings": {**PLAIN, **said}}


ARM_ACTION = {"arm": action(5), "gripper": action(1)}
WIDOWX = ("x", "y", "z", "roll", "pitch", "yaw", "pad", "gripper")
POSE9, POSE6 = ("XYZ_ROT6D", 9), ("XYZ_ROTVEC", 6)
CASES = {
    "range": case("new_embodiment", ARM, ARM_ACTION),
    "range_unclipped": case("new_embodiment", ARM, ARM_ACTION, clip_outliers=False),
    "percentiles": case("new_embodiment", ARM, ARM_ACTION, use_percentiles=True),
    "percentiles_unclipped": case("libero_sim", ARM, ARM_ACTION, use_percentiles=True, clip_outliers=False),
    "widowx": case(
        "simpler_env_widowx",
        dict.fromkeys(WIDOWX, 1),
        {name: action(1) for name in WIDOWX if name != "pad"},
        use_percentiles=True,
    ),
    "mean_std": case("new_embodiment", ARM, ARM_ACTION, mean_std_state=["arm"], mean_std_action=["arm", "gripper"]),
    "mean_std_unclipped": case(
        "new_embodiment",
        ARM,
        ARM_ACTION,
        mean_std_state=["gripper"],
        mean_std_action=["gripper"],
        use_percentiles=True,
        clip_outliers=False,
    ),
    "sin_cos": case(
        "robocasa_gr1_tabletop",
        ARM,
        ARM_ACTION,
        sin_cos=["arm"],
        mean_std_state=["arm"],
        apply_sincos_state_encoding=True,
    ),
    "sin_cos_off": case("robocasa_gr1_tabletop", ARM, ARM_ACTION, sin_cos=["arm"], use_percentiles=True),
    "no_state": case("new_embodiment", ARM, ARM_ACTION, exclude_state=True),
    "relative": case("new_embodiment", ARM, {"arm": action(5, "RELATIVE"), "gripper": action(1)}, use_percentiles=True),
    "relative_to_another": case(
        "libero_sim",
        {"joints": 5, "gripper": 1},
        {"gripper": action(1), "arm": action(5, "RELATIVE", state="joints")},
        horizon=1,
        clip_outliers=False,
    ),
    "relative_mean_std": case(
        "new_embodiment", ARM, {"arm": action(5, "RELATIVE"), "gripper": action(1)}, mean_std_action=["arm"], horizon=5
    ),
    "relative_off": case(
        "new_embodiment", ARM, {"arm": action(5, "RELATIVE"), "gripper": action(1)}, use_relative_action=False
    ),
    "delta": case("new_embodiment", ARM, {"arm": action(5, "DELTA"), "gripper": action(1, "DELTA")}),
    "pose_rot6d": case("new_embodiment", {"eef": 9}, {"eef": action(9, "RELATIVE", "EEF", "XYZ_ROT6D")}),
    "pose_rotvec": case("new_embodiment", {"eef": 6}, {"eef": action(6, "RELATIVE", "EEF", "XYZ_ROTVEC")}),
    "pose_rotvec_unclipped": case(
        "libero_sim",
        {"gripper": 1, "hand": 6},
        {"eef": action(6, "RELATIVE", "EEF", "XYZ_ROTVEC", "hand"), "gripper": action(1)},
        clip_outliers=False,
        use_percentiles=True,
    ),
    "pose_absolute": case("new_embodiment", {"eef": 9}, {"eef": action(9, "ABSOLUTE", "EEF", "XYZ_ROT6D")}),
    "droid": case(
        "oxe_droid_relative_eef_relative_joint",
        {"eef_9d": 9, "gripper_position": 1, "joint_position": 7},
        {
            "eef_9d": action(9, "RELATIVE", "EEF", "XYZ_ROT6D", "eef_9d"),
            "gripper_position": action(1, state="gripper_position"),
            "joint_position": action(7, "RELATIVE", state="joint_position"),
        },
        horizon=7,
        use_percentiles=True,
    ),
    "widest": case(
        "xdof_relative_eef_relative_joint",
        {"left": 9, "right": 6, "rest": 13},
        {
            "right": action(6, "RELATIVE", "EEF", "XYZ_ROTVEC"),
            "left": action(9, "RELATIVE", "EEF", "XYZ_ROT6D"),
            "rest": action(13),
        },
        horizon=9,
    ),
}


def poses(form: str, walk: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Poses along a random walk [R, 6], written in a format."""
    start = Rotation.random(random_state=int(rng.integers(1 << 30)))
    rotation = start * Rotation.from_rotvec(walk[:, 3:] * 0.4)
    matrix = rotation.as_matrix()
    numbers = matrix[:, :2].reshape(-1, 6) if form == "XYZ_ROT6D" else rotation.as_rotvec()
    return np.concatenate([walk[:, :3], numbers], axis=1).astype(np.float32)


def columns(said: dict[str, Any], rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows of every state and action group over all episodes; an action lies near the state it refers to."""
    rows = sum(LENGTHS)
    walks = {name: np.cumsum(rng.normal(0, 0.2, (rows, max(dim, 6))), axis=0) for name, dim in said["state"].items()}
    forms = {
        (group["state_key"] or name): group["format"]
        for name, group in said["action"].items()
        if group["type"] == "EEF"
    }
    state = {
        name: poses(forms[name], walks[name][:, :6], np.random.default_rng(dim))
        if name in forms
        else walks[name][:, :dim].astype(np.float32)
        for name, dim in said["state"].items()
    }
    actions = {}
    for name, group in said["action"].items():
        near = walks[group["state_key"] or name] + rng.normal(0, 0.1, (rows, 1))
        if group["type"] == "EEF":
            dim = said["state"][group["state_key"] or name]
            actions[name] = poses(group["format"], near[:, :6], np.random.default_rng(dim))
            if group["format"] == "XYZ_ROT6D":  # as a network would give them: no rotation to the last bit
                actions[name][:, 3:] *= rng.uniform(0.9, 1.1, (rows, 1)).astype(np.float32)
        else:
            actions[name] = near[:, : group["dim"]].astype(np.float32)
    if "pad" in state:
        state["pad"][:] = 0.25  # a column of one value
    return state, actions


def numbers(values: np.ndarray, rng: np.random.Generator) -> dict[str, list[float]]:
    """Statistics over half of the rows, so that others fall outside; some elements with next to no extent."""
    part = values[: len(values) // 2]
    out = {
        "min": part.min(axis=0),
        "max": part.max(axis=0),
        "mean": part.mean(axis=0),
        "std": part.std(axis=0),
        "q01": np.quantile(part, 0.01, axis=0),
        "q99": np.quantile(part, 0.99, axis=0),
    }
    out = {name: np.asarray(value, np.float64) for name, value in out.items()}
    if values.shape[1] >= 5:
        middle = out["min"][1]
        for low, high in (("min", "max"), ("q01", "q99")):
            out[low][1], out[high][1] = middle, middle  # none
            out[high][2] = out[low][2] + 1e-8  # little enough to count as none
            out[high][3] = out[low][3] + 1e-3  # little, but not none
        out["std"][1], out["std"][2] = 0.0, 1e-9
    return {name: value.tolist() for name, value in out.items()}


def main(checkout: Path) -> None:
    # The packages' own initialisation wants the whole training environment; the modules needed here do not.
    for name in ("gr00t", "gr00t.model", "gr00t.model.gr00t_n1d7"):
        module = types.ModuleType(name)
        module.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = module
    from gr00t.data import stats
    from gr00t.data.embodiment_tags import EmbodimentTag
    from gr00t.data.types import ModalityConfig, VLAStepData
    from gr00t.model.gr00t_n1d7 import processing_gr00t_n1d7 as reference

    stub = types.SimpleNamespace(tokenizer=types.SimpleNamespace(padding_side="right"))
    reference.build_processor = lambda *_, **__: stub
    described, arrays = {}, {}
    for seed, (name, said) in enumerate(CASES.items()):
        rng = np.random.default_rng(seed)
        state, actions = columns(said, rng)
        config = {
            "video": {"delta_indices": [0], "modality_keys": ["front"]},
            "state": {
                "delta_indices": [0],
                "modality_keys": list(state),
                "sin_cos_embedding_keys": said["sin_cos"] or None,
                "mean_std_embedding_keys": said["mean_std_state"] or None,
            },
            "action": {
                "delta_indices": list(range(said["horizon"])),
                "modality_keys": list(actions),
                "mean_std_embedding_keys": said["mean_std_action"] or None,
                "action_configs": [{k: v for k, v in g.items() if k != "dim"} for g in said["action"].values()],
            },
            "language": {"delta_indices": [0], "modality_keys": ["task"]},
        }
        tag = EmbodimentTag(said["tag"])
        parsed = {key: ModalityConfig(**value) for key, value in config.items()}
        numbers_of = {
            "state": {key: numbers(value, rng) for key, value in state.items()},
            "action": {key: numbers(value, rng) for key, value in actions.items()},
        }
        relative = {}
        for key, group in said["action"].items():
            if group["rep"] == "RELATIVE":
                relative[key] = relative_numbers(stats, parsed, key, state, actions)
        if relative:
            numbers_of["relative_action"] = relative
        processor = reference.Gr00tN1d7Processor(
            {said["tag"]: config},
            statistics={said["tag"]: numbers_of},
            max_state_dim=WIDTH,
            max_action_dim=WIDTH,
            max_action_horizon=ROWS,
            use_albumentations=True,
            **said["settings"],
        )
        processor._get_vlm_inputs = lambda **_: {}
        found: dict[str, list[np.ndarray]] = {"state": [], "action": [], "mask": [], "predicted": []}
        decoded: dict[str, list[np.ndarray]] = {key: [] for key in actions}
        starts = np.cumsum((0, *LENGTHS))
        windows = [s + i for s, n in zip(starts, LENGTHS, strict=False) for i in range(n - said["horizon"] + 1)]
        anchors = rng.permutation(windows)[:SAMPLES]
        for row in anchors:
            states = {key: value[row : row + 1] for key, value in state.items()}
            step = VLAStepData(
                images={},
                states=states,
                actions={key: value[row : row + said["horizon"]] for key, value in actions.items()},
                text="pick it up",
                embodiment=tag,
            )
            out = processor([{"content": step}])
            predicted = rng.uniform(-1.2, 1.2, (1, ROWS, WIDTH)).astype(np.float32)
            batched = {key: value[None] for key, value in states.items()}
            for key, value in processor.decode_action(predicted, tag, batched).items():
                decoded[key].append(value[0].astype(np.float32))
            found["state"].append(out["state"].numpy())
            found["action"].append(out["action"].numpy())
            found["mask"].append(out["action_mask"].numpy().astype(np.uint8))
            found["predicted"].append(predicted[0])
        arrays |= {f"{name}/{key}": np.stack(value) for key, value in found.items()}
        arrays |= {f"{name}/decoded/{key}": np.stack(value) for key, value in decoded.items()}
        arrays[f"{name}/observation.state"] = np.concatenate(list(state.values()), axis=1)
        arrays[f"{name}/action_column"] = np.concatenate(list(actions.values()), axis=1)
        arrays[f"{name}/anchors"] = np.asarray(anchors)
        slot = out["embodiment_id"]
        described[name] = {**said, "statistics": numbers_of, "modality_config": config, "slot": slot}
    OUT.write_text(json.dumps({"lengths": LENGTHS, "cases": described}, indent=None) + "\n")
    np.savez_compressed(OUT.with_suffix(".npz"), **arrays)


def relative_numbers(
    stats: Any, parsed: dict[str, Any], key: str, state: dict[str, np.ndarray], actions: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The reference's statistics of one relative group over the generated episodes."""
    loader = object.__new__(stats.RelativeActionLoader)
    loader.action_key, loader.modality_configs = key, parsed
    loader.action_config = parsed["action"].action_configs[parsed["action"].modality_keys.index(key)]
    frames, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        table = {f"state.{name}": list(value[rows]) for name, value in state.items()}
        table |= {f"action.{name}": list(value[rows]) for name, value in actions.items()}
        frames.append(pd.DataFrame(table))
        start += length
    loader.loader = frames
    stats.RelativeActionLoader = lambda *_, **__: loader
    try:
        found = stats.calculate_stats_for_key(Path(), None, key)
    finally:
        stats.RelativeActionLoader = type(loader)
    return {name: np.asarray(value, np.float64).tolist() for name, value in found.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
