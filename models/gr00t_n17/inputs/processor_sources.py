"""What a processor is made from: a checkpoint folder's side files, and a dataset's columns, names and statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models.gr00t_n17.inputs import embodiments, modality_sources, processor_file
from models.gr00t_n17.inputs.modality import Modalities
from models.gr00t_n17.inputs.normalize import Numbers, Statistics

if TYPE_CHECKING:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder


@dataclass(frozen=True, kw_only=True)
class DatasetParts:
    """A dataset as a processor sees it.

    cameras: cameras of a batch, in order. state, action: columns that are read. statistics: {column: {min, max, mean,
    std, q01, q99}}, each [D]. modality: content of modality.json. groups: what the recipe says over it, as
    `modality_sources.resolve` takes it. relative: {group: numbers [horizon, D]} for modalities with relative groups,
    called only for them.
    """

    cameras: Sequence[str]
    state: Sequence[str]
    action: Sequence[str]
    statistics: Mapping[str, Mapping[str, Any]]
    modality: Mapping[str, Any] | None = None
    groups: Mapping[str, Any] | None = None
    relative: Callable[[Modalities], Mapping[str, Numbers]] | None = None

    def modalities(self, horizon: int | None, checkpoint: Mapping[str, Any] | None = None) -> Modalities:
        """Groups and cameras, by the recipe, the checkpoint's modality config for the embodiment, or the dataset."""
        return modality_sources.resolve(
            cameras=self.cameras,
            state=widths(self.statistics, self.state),
            action=widths(self.statistics, self.action),
            horizon=horizon,
            modality=self.modality,
            groups=self.groups,
            checkpoint=checkpoint,
        )

    @property
    def implied(self) -> dict[str, Any]:
        """Settings without which the recipe's groups would do nothing."""
        groups = self.groups or {}
        implied = {}
        if any((said or {}).get("rep") == "RELATIVE" for said in (groups.get("action") or {}).values()):
            implied["use_relative_action"] = True
        if groups.get("sin_cos"):
            implied["apply_sincos_state_encoding"] = True
        return implied


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a checkpoint folder says of an embodiment; empty where it says nothing.

    settings: fields of ProcessorConfig. modality_config: modality_configs[tag]. ids: the merged table of slots.
    tokenizer: description of the tokenizer a training run used.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    modality_config: Mapping[str, Any] | None = None
    statistics: Statistics | None = None
    ids: Mapping[str, int] = field(default_factory=lambda: embodiments.merge({}))
    tokenizer: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: "CheckpointFolder | str | Path | None", tag: str) -> "Stored":
        """From a folder's JSON files.

        Raises:
            ValueError: a file is not what it should be; names it and the key.
        """
        if folder is None:
            return cls()
        opened = opened_folder(folder)
        file, kwargs = opened.processor_file, opened.processor
        if file is None or kwargs is None:
            return cls(ids=opened.embodiment_ids)
        ours = file.get(processor_file.OURS) or {}
        statistics = (opened.statistics or {}).get(tag)
        return cls(
            settings={**ours.get("processor", {}), **processor_file.settings_of(kwargs, ours.get("processor"))},
            modality_config=kwargs.get("modality_configs", {}).get(tag),
            statistics=None if statistics is None else Statistics.from_dict(statistics),
            ids=opened.embodiment_ids,
            tokenizer=ours.get("tokenizer"),
        )


def known_embodiment(folder: "CheckpointFolder | str | Path", tag: str) -> Stored:
    """What the folder says of an embodiment it must know.

    Raises:
        ValueError: there is no processor_config.json, or no modality config or statistics for the tag.
    """
    opened = opened_folder(folder)
    if opened.processor is None:
        raise ValueError(f"{opened.path} has no processor_config.json, from which a processor could be made")
    stored = Stored.read(opened, tag)
    configs = sorted(opened.processor.get("modality_configs", {}))
    if stored.modality_config is None:
        embodiments.slot_of(tag, stored.ids)  # a misspelt tag is told with its neighbour
        raise ValueError(
            f"{opened.path}/processor_config.json has no modality config for embodiment {tag!r}; it has "
            f"{', '.join(configs)}: this checkpoint was not trained for that robot"
        )
    if stored.statistics is None:
        raise ValueError(f"{opened.path}/statistics.json has no statistics for embodiment {tag!r}")
    return stored


def ignored(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Settings of a recipe that would change nothing beside those of the checkpoint's processor file, each told why."""
    both = {"shortest_image_edge": 256, "crop_fraction": 0.95, **stored, **settings}
    problems = []
    for key, rivals in (
        ("image_target_size", ("shortest_image_edge", "crop_fraction")),
        ("image_crop_size", ("crop_fraction",)),
    ):
        if settings.get(key) is not None and all(both[rival] is not None for rival in rivals):
            told = " and ".join(f"{rival}={both[rival]}" for rival in rivals)
            problems.append(f"{key}={settings[key]} would be ignored beside {told}; set one of these to null")
    return problems


def opened_folder(folder: "CheckpointFolder | str | Path") -> "CheckpointFolder":
    """The folder as an object."""
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder

    return CheckpointFolder(folder) if isinstance(folder, str | Path) else folder


def widths(statistics: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> dict[str, int]:
    """Widths of columns by their statistics.

    Raises:
        ValueError: a column has none; names it.
    """
    if missing := [column for column in columns if column not in statistics]:
        raise ValueError(f"no statistics for {missing}; given are {sorted(statistics)}")
    if twice := sorted({column for column in columns if list(columns).count(column) > 1}):
        raise ValueError(f"columns {twice} are named twice")
    return {column: np.asarray(statistics[column]["min"]).size for column in columns}
