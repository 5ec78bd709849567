"""Named groups of the state and action vectors: do the dataset's modality.json, the recipe and the columns agree?"""

import json
from typing import Any

from recipes.parse import nearest
from recipes.parts import key
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.sources import modality


def group_problems(recipe: Recipe, number: int, part: PartConfig, dataset: Any) -> list[str]:
    """Problems of `modality` and the groups that a part names."""
    where = key(recipe, number, "modality")
    try:
        content = modality(part, dataset)
        known = _named(content, dataset)
    except ValueError as error:
        return [f"{where}: {error}"] if part.modality is not None else [f"{key(recipe, number, 'uri')}: {error}"]
    groups = part.groups
    if groups is None:
        return []
    here = key(recipe, number, "groups")
    if content is None:
        return [f"{here}: the dataset has no meta/modality.json to name its groups; give {where} as well"]
    problems = []
    action = groups.action or {}
    for name in groups.state or ():
        if name not in known["state"]:
            problems.append(f"{here}.state: {name!r} is no state group of modality.json{nearest(name, known['state'])}")
    for name, settings in action.items():
        if name not in known["action"]:
            problems.append(
                f"{here}.action: {name!r} is no action group of modality.json{nearest(name, known['action'])}"
            )
        relative_to = settings.state_key or name
        if settings.rep == "RELATIVE" and relative_to not in known["state"]:
            problems.append(
                f"{here}.action.{name}.state_key: {relative_to!r} is no state group"
                f"{nearest(relative_to, known['state'])}"
            )
        if settings.rep != "RELATIVE" and settings.state_key is not None:
            problems.append(f"{here}.action.{name}.state_key: has no effect with rep={settings.rep}; give rep=RELATIVE")
    problems += [
        f"{here}.mean_std: {name!r} is no group{nearest(name, [*known['state'], *known['action']])}"
        for name in groups.mean_std
        if name not in known["state"] and name not in known["action"]
    ]
    problems += [
        f"{here}.sin_cos: {name!r} is no state group{nearest(name, known['state'])}"
        for name in groups.sin_cos
        if name not in known["state"]
    ]
    for section, names in (("state", groups.state or ()), ("action", tuple(action))):
        for name in names:
            column = known[section].get(name)
            if column is not None and column not in getattr(part, section):
                problems.append(
                    f"{here}.{section}: {name!r} lies in column {column!r}, which {key(recipe, number, section)} "
                    "does not name"
                )
    return problems


def _named(content: Any, dataset: Any) -> dict[str, dict[str, str]]:
    """{"state" | "action": {group: column}} of a modality.json; raises ValueError where it does not fit the dataset."""
    from knonik.metadata.modality import parse_modality

    found: dict[str, dict[str, str]] = {"state": {}, "action": {}}
    if content is None:
        return found
    parsed = parse_modality(json.dumps(content).encode(), dataset.features)
    for section, names in (("state", parsed.state), ("action", parsed.action)):
        found[section] = {name: parsed.columns[f"{section}.{name}"] for name in names}
    return found
