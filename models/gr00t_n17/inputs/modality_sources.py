"""Modalities put together from what there is: a dataset's columns and modality.json, a recipe, a checkpoint's file."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from models.gr00t_n17.inputs.modality import TASK_KEY, ActionGroup, Group, Modalities
from models.gr00t_n17.inputs.normalize import Statistics

logger = logging.getLogger(__name__)

DEFAULT_COLUMNS = {"state": "observation.state", "action": "action"}


def resolve(
    *,
    cameras: Sequence[str],
    state: Mapping[str, int],
    action: Mapping[str, int],
    horizon: int | None,
    modality: Mapping[str, Any] | None = None,
    groups: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> Modalities:
    """The modalities of one embodiment on one dataset.

    Args:
        cameras: cameras of a batch, in order.
        state, action: columns that are read, with their widths.
        horizon: action steps of a chunk; None takes the checkpoint's.
        modality: content of the dataset's modality.json. Its groups that lie in the columns are used in its order; a
            column without any is a group of its own, as all are without the file.
        groups: what the recipe says over it: `state` [names], `action` {name: {rep, type, format, state_key}},
            `mean_std` [names], `sin_cos` [names], each optional. Given, it replaces the checkpoint's.
        checkpoint: modality_configs[tag] of a processor_config.json, whose groups and order are used.

    Raises:
        ValueError: a group or camera is asked for that the dataset does not have; names those it has.
    """
    states = _dataset_groups("state", state, modality)
    actions = _dataset_groups("action", action, modality)
    names = _video_names(cameras, modality)
    language = _language(modality)
    if checkpoint is None or groups is not None:
        said = dict(groups or {})
        own_state = _picked(states, said.get("state"), "model.modality.state", "state")
        chosen = said.get("action")
        own_action = _picked(actions, None if chosen is None else list(chosen), "model.modality.action", "action")
        mean_std, sin_cos = list(said.get("mean_std") or ()), tuple(said.get("sin_cos") or ())
        known = {g.name for g in (*own_state, *own_action)}
        if unknown := sorted(set(mean_std) - known):
            raise ValueError(f"model.modality.mean_std names {unknown}; the groups are {sorted(known)}")
        if horizon is None:
            raise ValueError("the checkpoint has no modality config for this embodiment: give data.horizon")
        return Modalities(
            video=names,
            state=own_state,
            action=tuple(_action(group, dict((chosen or {}).get(group.name) or {})) for group in own_action),
            action_deltas=tuple(range(horizon)),
            sin_cos=sin_cos,
            mean_std_state=tuple(g.name for g in own_state if g.name in mean_std),
            mean_std_action=tuple(g.name for g in own_action if g.name in mean_std),
            language=language or TASK_KEY,
        )
    config = Config(checkpoint)
    deltas = config.deltas("action")
    _only_steps_that_are_read(deltas, config.deltas("state"))
    if horizon is not None and horizon != len(deltas):
        logger.info("data.horizon=%d replaces the %d action steps of the checkpoint", horizon, len(deltas))
        deltas = tuple(range(horizon))
    where = "the checkpoint's modality config"
    own_action = _picked(actions, config.keys("action"), where, "action")
    return config.joined(
        video=_checkpoint_video(config.keys("video"), names),
        state=_picked(states, config.keys("state"), where, "state"),
        action=own_action,
        action_deltas=deltas,
    )


def from_checkpoint(config: Mapping[str, Any], statistics: Statistics) -> Modalities:
    """The modalities of a checkpoint alone, its inputs coming by group and camera name.

    Args:
        config: modality_configs[tag].
        statistics: of the same tag; they tell the groups' widths.
    """
    read = Config(config)
    whole = {}
    for section, numbers in (("state", statistics.state), ("action", statistics.action)):
        if absent := [name for name in read.keys(section) if name not in numbers]:
            raise ValueError(f"statistics.json has no {section} statistics for the groups {absent}")
        whole[section] = tuple(
            Group(name=name, column=name, start=0, stop=len(numbers[name]["min"])) for name in read.keys(section)
        )
    return read.joined(
        video=tuple((name, name) for name in read.keys("video")),
        state=whole["state"],
        action=whole["action"],
        action_deltas=read.deltas("action"),
    )


class Config:
    """One tag of a checkpoint's modality_configs."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        for section in ("video", "state", "action", "language"):
            keys = values.get(section, {}).get("modality_keys")
            if not isinstance(keys, list) or not (keys or section == "state"):  # a policy may go by its cameras alone
                raise ValueError(f"processor_config.json: {section}.modality_keys is {keys!r}; a list was expected")

    def keys(self, section: str) -> list[str]:
        """Names of a section, in order."""
        return list(self.values[section]["modality_keys"])

    def deltas(self, section: str) -> tuple[int, ...]:
        """Steps around the anchor that a section reads."""
        return tuple(self.values[section]["delta_indices"])

    def joined(
        self,
        *,
        video: tuple[tuple[str, str], ...],
        state: tuple[Group, ...],
        action: tuple[Group, ...],
        action_deltas: tuple[int, ...],
    ) -> Modalities:
        """With the groups and cameras that the names stand for."""
        configs = self.values["action"].get("action_configs") or [{}] * len(action)
        if len(configs) != len(action):
            raise ValueError(
                f"processor_config.json: {len(configs)} action_configs for the {len(action)} groups "
                f"{[group.name for group in action]}; one for each was expected"
            )
        return Modalities(
            video=video,
            state=state,
            action=tuple(_action(group, dict(said)) for group, said in zip(action, configs, strict=True)),
            action_deltas=action_deltas,
            state_deltas=self.deltas("state"),
            video_deltas=self.deltas("video"),
            sin_cos=tuple(self.values["state"].get("sin_cos_embedding_keys") or ()),
            mean_std_state=tuple(self.values["state"].get("mean_std_embedding_keys") or ()),
            mean_std_action=tuple(self.values["action"].get("mean_std_embedding_keys") or ()),
            language=self.keys("language")[0],
        )


def _only_steps_that_are_read(action: tuple[int, ...], state: tuple[int, ...]) -> None:
    """A dataset is read at the anchor and at every row from it on; other steps would be given these rows unnoticed."""
    for section, deltas, read in (("action", action, tuple(range(len(action)))), ("state", state, (0,))):
        if deltas != read:
            raise ValueError(
                f"the checkpoint's modality config has the {section} steps {list(deltas)}, of a dataset {list(read)} "
                "are read; set model.modality, which replaces the config"
            )


def _action(group: Group, said: dict[str, Any]) -> ActionGroup:
    if unknown := sorted(set(said) - {"rep", "type", "format", "state_key"}):
        raise ValueError(f"action group {group.name}: {unknown} are none of rep, type, format, state_key")
    return ActionGroup(name=group.name, column=group.column, start=group.start, stop=group.stop, **said)


def _dataset_groups(section: str, columns: Mapping[str, int], modality: Mapping[str, Any] | None) -> dict[str, Group]:
    """Groups by name: those of modality.json that lie in the columns, then whole columns that have none."""
    found: dict[str, Group] = {}
    for name, part in ((modality or {}).get(section) or {}).items():
        column = (part or {}).get("original_key") or DEFAULT_COLUMNS[section]
        if column in columns:
            start, stop = (part or {}).get("start", 0), (part or {}).get("end", columns[column])
            if not 0 <= start < stop <= columns[column]:
                raise ValueError(
                    f"modality.json: {section}.{name} is {start}..{stop} of {column}, which has {columns[column]} "
                    "elements"
                )
            found[name] = Group(name=name, column=column, start=start, stop=stop)
    for column, width in columns.items():
        if all(group.column != column for group in found.values()):
            name = column.removeprefix("observation.")
            found[name] = Group(name=name, column=column, start=0, stop=width)
    return found


def _picked(groups: Mapping[str, Group], names: Sequence[str] | None, where: str, section: str) -> tuple[Group, ...]:
    if names is None:
        return tuple(groups.values())
    if absent := [name for name in names if name not in groups]:
        raise ValueError(
            f"{where} has the {section} groups {absent}, which the dataset's data.{section} columns do not; it has "
            f"{list(groups)}. Name them in meta/modality.json or data.modality, or choose groups in model.modality"
        )
    return tuple(groups[name] for name in names)


def _video_names(cameras: Sequence[str], modality: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """(name, camera): modality.json's name, or the camera's own without the common prefix."""
    named = {
        ((part or {}).get("original_key") or name): name for name, part in ((modality or {}).get("video") or {}).items()
    }
    return tuple((named.get(camera, camera.removeprefix("observation.images.")), camera) for camera in cameras)


def _checkpoint_video(keys: Sequence[str], names: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The checkpoint's cameras in its order, by name; by place where the numbers agree and no name says otherwise."""
    cameras = dict(names)
    if all(key in cameras for key in keys):
        return tuple((key, cameras[key]) for key in keys)
    by_place = zip(keys, names, strict=False)
    if len(keys) == len(names) and all(key == name or key not in cameras for key, (name, _) in by_place):
        video = tuple((key, camera) for key, (_, camera) in zip(keys, names, strict=True))
        logger.info("cameras of the checkpoint by place: %s", ", ".join(f"{key} = {camera}" for key, camera in video))
        return video
    raise ValueError(
        f"the checkpoint's embodiment has the cameras {list(keys)}, the dataset {[camera for _, camera in names]}: "
        f"name {len(keys)} in data.cameras in the checkpoint's order, or set model.modality to use all of the dataset"
    )


def _language(modality: Mapping[str, Any] | None) -> str | None:
    """Key of the instruction by modality.json's first annotation."""
    for name in (modality or {}).get("annotation") or {}:
        return f"annotation.{name.removeprefix('annotation.')}"
    return None
