"""Named groups of the state and action vectors: do dataset, modality.json, recipe and checkpoint agree?"""

import math
from typing import TYPE_CHECKING, Any

from recipes.families.gr00t_n17.build import model_config
from recipes.families.gr00t_n17.processor import group_settings
from recipes.families.gr00t_n17.slots import DEFAULT_EMBODIMENT, checkpoint_folder
from recipes.parse import nearest
from recipes.parts import key
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.schema_model import ActionGroupConfig
from recipes.sources import modality

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models.gr00t_n17.inputs.modality import Group, Modalities


def group_problems(recipe: Recipe, number: int, part: PartConfig, dataset: Any) -> list[str]:
    """Problems of the groups of a part, whose columns are known to be right.

    What the recipe says is looked at word by word; then everything is put together as training would do it.
    """
    from models.gr00t_n17.inputs.processor_sources import Stored

    where = key(recipe, number, "modality" if part.modality is not None else "uri")
    try:
        own = _resolved(part, dataset, groups=None, checkpoint=None)
    except ValueError as error:
        return [f"{where}: {error}"]
    if problems := _groups(key(recipe, number, "groups"), part, own) or _switched_off(recipe, number, part):
        return problems
    try:
        stored = Stored.read(checkpoint_folder(recipe), part.embodiment or DEFAULT_EMBODIMENT)
    except (ValueError, OSError) as error:
        return [f"model.weights: {error}"]
    try:
        used = _resolved(part, dataset, groups=group_settings(part.groups), checkpoint=stored.modality_config)
    except ValueError as error:
        return [f"{key(recipe, number, 'groups')}: {error}"]
    return _width(recipe, number, "state", used.state) + _width(recipe, number, "action", used.action)


def _width(recipe: Recipe, number: int, section: str, groups: "Sequence[Group]") -> list[str]:
    """Groups that are together wider than the network; what else the columns hold is not read."""
    limit = f"max_{section}_dim"
    try:
        allowed = getattr(model_config(recipe), limit)
    except (TypeError, ValueError, OSError):
        return []  # reported with the model
    width = sum(group.dim for group in groups)
    if not isinstance(allowed, int) or width <= allowed:
        return []
    return [
        f"{key(recipe, number, section)}: {width} values a step are more than the model's {limit} = {allowed}; name "
        f"fewer columns or, in model.modality, groups, or set model.config.{limit}, which released weights do not allow"
    ]


def _switched_off(recipe: Recipe, number: int, part: PartConfig) -> list[str]:
    """Groups with a meaning that the recipe's own `model.processor` forbids."""
    groups, settings = part.groups, recipe.model.processor
    if groups is None:
        return []
    relative = [name for name, said in (groups.action or {}).items() if said.rep == "RELATIVE"]
    return [
        f"{key(recipe, number, 'groups')}.{where}: has no effect with model.processor.{name}=false; leave one out"
        for where, name, asked in (
            ("action", "use_relative_action", bool(relative)),
            ("sin_cos", "apply_sincos_state_encoding", bool(groups.sin_cos)),
        )
        if asked and settings.get(name) is False
    ]


def _resolved(part: PartConfig, dataset: Any, *, groups: Any, checkpoint: Any) -> "Modalities":
    from models.gr00t_n17.inputs.modality_sources import resolve

    def widths(columns: tuple[str, ...]) -> dict[str, int]:
        return {column: math.prod(dataset.features[column]["shape"]) for column in columns}

    return resolve(
        cameras=tuple(dataset.cameras if part.cameras is None else part.cameras),
        state=widths(part.state),
        action=widths(part.action),
        horizon=part.horizon,
        modality=modality(part, dataset),
        groups=groups,
        checkpoint=checkpoint,
    )


def _groups(here: str, part: PartConfig, own: "Modalities") -> list[str]:
    """Names that are no groups, and settings that would do nothing; `own` has all groups of the dataset."""
    groups = part.groups
    if groups is None:
        return []
    states, actions = ([group.name for group in of] for of in (own.state, own.action))
    said = (
        ("state", groups.state or (), states),
        ("action", tuple(groups.action or {}), actions),
        ("mean_std", groups.mean_std, [*states, *actions]),
        ("sin_cos", groups.sin_cos, states),
    )
    problems = [
        f"{here}.{section}: {name!r} is no group of the dataset's{nearest(name, known)}"
        for section, names, known in said
        for name in names
        if name not in known
    ]
    if groups.action == {}:
        problems.append(f"{here}.action: the section is empty; name at least one group; null means all")
    for name, settings in (groups.action or {}).items():
        problems += _relative(f"{here}.action.{name}.state_key", name, settings, states)
    return problems


def _relative(where: str, name: str, settings: ActionGroupConfig, states: list[str]) -> list[str]:
    reference = settings.state_key or name
    if settings.rep == "RELATIVE" and reference not in states:
        return [f"{where}: {reference!r} is no state group{nearest(reference, states)}"]
    if settings.rep != "RELATIVE" and settings.state_key is not None:
        return [f"{where}: has no effect with rep={settings.rep}; give rep=RELATIVE"]
    return []
