"""Named groups of the state and action vectors, and cameras by name: what one embodiment's modality config says."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from numpy.typing import NDArray

REPS, TYPES, FORMATS = ("ABSOLUTE", "RELATIVE", "DELTA"), ("EEF", "NON_EEF"), ("DEFAULT", "XYZ_ROT6D", "XYZ_ROTVEC")
POSE_WIDTHS = {"XYZ_ROT6D": 9, "XYZ_ROTVEC": 6}
TASK_KEY = "annotation.human.action.task_description"
"""Language key written where a dataset's modality.json names none."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A named part of a column: its elements start..stop."""

    name: str
    column: str
    start: int
    stop: int

    @property
    def dim(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """The group's part of columns [..., D]."""
        if self.column not in columns:
            raise ValueError(
                f"{self.column!r} is not in the batch, which has {sorted(columns)}; see data.state and data.action"
            )
        return columns[self.column][..., self.start : self.stop]


@dataclass(frozen=True, kw_only=True)
class ActionGroup(Group):
    """A part of the action and what its numbers mean.

    rep: ABSOLUTE; RELATIVE: given as absolute values in the data, learnt as differences to the state at the anchor;
    DELTA: differences already in the data, passed on as they are. type: EEF poses differ by a rigid motion, NON_EEF
    values by subtraction. format: how a pose is written. state_key: the state group that RELATIVE refers to, None for
    the one of the same name.
    """

    rep: str = "ABSOLUTE"
    type: str = "NON_EEF"
    format: str = "DEFAULT"
    state_key: str | None = None

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("rep", self.rep, REPS),
            ("type", self.type, TYPES),
            ("format", self.format, FORMATS),
        ):
            if value not in allowed:
                raise ValueError(f"action group {self.name}: {key}={value!r} is none of {', '.join(allowed)}")

    @property
    def reference(self) -> str:
        """Name of the state group that a relative action refers to."""
        return self.state_key or self.name


@dataclass(frozen=True, kw_only=True)
class Modalities:
    """What one embodiment's samples consist of; order of a tuple is order in the network's vectors.

    video: (name, key of the batch's camera). *_deltas: steps around the anchor that are read. sin_cos: state groups
    read as angles. mean_std_*: groups normalised by mean and deviation. language: key of the instruction.
    """

    video: tuple[tuple[str, str], ...]
    state: tuple[Group, ...]
    action: tuple[ActionGroup, ...]
    action_deltas: tuple[int, ...]
    state_deltas: tuple[int, ...] = (0,)
    video_deltas: tuple[int, ...] = (0,)
    sin_cos: tuple[str, ...] = ()
    mean_std_state: tuple[str, ...] = ()
    mean_std_action: tuple[str, ...] = ()
    language: str = TASK_KEY

    def __post_init__(self) -> None:
        problems = []
        states = {group.name: group for group in self.state}
        for section, names, groups in (
            ("state", [g.name for g in self.state], (*self.sin_cos, *self.mean_std_state)),
            ("action", [g.name for g in self.action], self.mean_std_action),
            ("video", [name for name, _ in self.video], ()),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                problems.append(f"{section} groups {twice} are named twice")
            if unknown := sorted(set(groups) - set(names)):
                problems.append(
                    f"sin_cos and mean_std name {unknown}, which are no {section} groups; there are {names}"
                )
        for group in self.action:
            if group.rep == "RELATIVE":
                problems += _relative_problems(group, states.get(group.reference), list(states))
        if problems:
            raise ValueError("modalities: " + "; ".join(problems))

    @property
    def cameras(self) -> tuple[str, ...]:
        """The batch's cameras in the network's order."""
        return tuple(camera for _, camera in self.video)

    @property
    def horizon(self) -> int:
        """Action steps of a chunk."""
        return len(self.action_deltas)

    @property
    def relative(self) -> tuple[ActionGroup, ...]:
        """Action groups learnt as differences to the state."""
        return tuple(group for group in self.action if group.rep == "RELATIVE")

    def state_group(self, name: str) -> Group:
        """A state group by its name."""
        return next(group for group in self.state if group.name == name)

    def by_group(self) -> Self:
        """The same for inputs that come by group and camera name, not by column: a deployed policy's observations."""
        return dataclasses.replace(
            self,
            state=tuple(dataclasses.replace(g, column=g.name, start=0, stop=g.dim) for g in self.state),
            action=tuple(dataclasses.replace(g, column=g.name, start=0, stop=g.dim) for g in self.action),
            video=tuple((name, name) for name, _ in self.video),
        )

    def to_config(self) -> dict[str, dict[str, Any]]:
        """One tag of a checkpoint's modality_configs."""

        def section(deltas: Sequence[int], keys: Sequence[str], sin_cos: Sequence[str], mean_std: Sequence[str]) -> Any:
            return {
                "delta_indices": list(deltas),
                "modality_keys": list(keys),
                "sin_cos_embedding_keys": list(sin_cos) or None,
                "mean_std_embedding_keys": list(mean_std) or None,
                "action_configs": None,
            }

        action = section(self.action_deltas, [g.name for g in self.action], (), self.mean_std_action)
        action["action_configs"] = [
            {"rep": g.rep, "type": g.type, "format": g.format, "state_key": g.state_key} for g in self.action
        ]
        state_names = [g.name for g in self.state]
        return {
            "video": section(self.video_deltas, [name for name, _ in self.video], (), ()),
            "state": section(self.state_deltas, state_names, self.sin_cos, self.mean_std_state),
            "action": action,
            "language": section((0,), [self.language], (), ()),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes an equal object."""
        values = dataclasses.asdict(self)
        return {
            key: [list(item) if isinstance(item, tuple) else item for item in value]
            if isinstance(value, tuple)
            else value
            for key, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` described."""
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        plain["video"] = tuple((name, camera) for name, camera in values["video"])
        plain["state"] = tuple(Group(**group) for group in values["state"])
        plain["action"] = tuple(ActionGroup(**group) for group in values["action"])
        return cls(**plain)


def _relative_problems(group: ActionGroup, reference: Group | None, states: list[str]) -> list[str]:
    where = f"action group {group.name} (RELATIVE {group.type} {group.format})"
    if reference is None:
        return [f"{where}: its state_key {group.reference!r} is no state group; there are {states}"]
    problems = []
    if reference.dim != group.dim:
        problems.append(f"{where} has {group.dim} elements, its state group {reference.name} has {reference.dim}")
    if group.type == "NON_EEF" and group.format != "DEFAULT":
        problems.append(f"{where}: values that are no poses have the format DEFAULT")
    if group.type == "EEF" and group.dim != POSE_WIDTHS.get(group.format, group.dim):
        problems.append(f"{where} has {group.dim} elements, {group.format} has {POSE_WIDTHS[group.format]}")
    if group.type == "EEF" and group.format not in POSE_WIDTHS:
        problems.append(f"{where}: a pose is XYZ_ROT6D or XYZ_ROTVEC")
    return problems
