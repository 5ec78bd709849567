"""GR00T's meta/modality.json: names for parts of the state and action vectors, for cameras and for language columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knonik.metadata.files import MetadataError, json_object

MODALITY_FILE = "meta/modality.json"
_DEFAULT_COLUMNS = {"state": "observation.state", "action": "action"}
_ANNOTATION = "annotation."


@dataclass(frozen=True, kw_only=True)
class Modality:
    """The names a dataset gives to its parts.

    state, action: name -> half open slice of the vector in a column. columns: "state.<name>" or "action.<name>" -> that
    column, `observation.state` and `action` where the file names no other. video: name -> camera key.
    annotation: name -> column with values of task_index. details: the file as it is, for what has no field here
    (rotation_type, absolute, dtype, range).
    """

    state: dict[str, slice]
    action: dict[str, slice]
    video: dict[str, str]
    annotation: dict[str, str]
    columns: dict[str, str]
    details: dict[str, Any]


def parse_modality(body: bytes, features: Mapping[str, Mapping[str, Any]]) -> Modality:
    """Read the file's bytes against the features that meta/info.json declares.

    Raises:
        MetadataError: it is no JSON object, or a part is not described by whole numbers inside its vector.
    """
    content = json_object(body, MODALITY_FILE)
    slices: dict[str, dict[str, slice]] = {}
    columns: dict[str, str] = {}
    for group, default in _DEFAULT_COLUMNS.items():
        slices[group] = {}
        for name, part in _group(content, group).items():
            column = _text(part, "original_key", f"{group}.{name}") or default
            slices[group][name] = _slice(part, f"{group}.{name}", column, features)
            columns[f"{group}.{name}"] = column
    video = {
        name: _text(part, "original_key", f"video.{name}") or name for name, part in _group(content, "video").items()
    }
    annotation = {
        name: _text(part, "original_key", f"annotation.{name}") or f"{_ANNOTATION}{name}"
        for name, part in _group(content, "annotation").items()
    }
    return Modality(
        state=slices["state"],
        action=slices["action"],
        video=video,
        annotation=annotation,
        columns=columns,
        details=content,
    )


def text_column(given: str | None, modality: Modality | None, features: Mapping[str, Mapping[str, Any]]) -> str:
    """The column whose values select the text of a row, given by its own name or by that of an annotation.

    Raises:
        KeyError: there is no such column; the message lists those that could be meant.
    """
    named = modality.annotation if modality else {}
    column = "task_index" if given is None else named.get(given, given)
    # task_index is one of LeRobot's standard columns, which not every info.json declares.
    if column == "task_index" or column in features:
        return column
    choices = [name for name in features if name.startswith(_ANNOTATION)]
    raise KeyError(
        f"text_column={given!r} is no column of the dataset; give task_index"
        + "".join(f", {name}" for name in dict.fromkeys([*choices, *named]))
    )


def _group(content: Mapping[str, Any], group: str) -> dict[str, dict[str, Any]]:
    parts = content.get(group) or {}
    if not isinstance(parts, dict):
        raise MetadataError(f"{MODALITY_FILE}: {group} is {parts!r}; an object of name -> description was expected")
    for name, part in parts.items():
        if not isinstance(part, dict | None):
            raise MetadataError(f"{MODALITY_FILE}: {group}.{name} is {part!r}; an object was expected")
    return {name: part or {} for name, part in parts.items()}


def _text(part: Mapping[str, Any], key: str, where: str) -> str | None:
    value = part.get(key)
    if not isinstance(value, str | None):
        raise MetadataError(f"{MODALITY_FILE}: {where}.{key} is {value!r}; the name of a column was expected")
    return value


def _slice(part: Mapping[str, Any], where: str, column: str, features: Mapping[str, Mapping[str, Any]]) -> slice:
    start, end = part.get("start", 0), part.get("end")
    width = _width(features.get(column, {}).get("shape"))
    if end is None and start == 0 and width:
        end = width  # a column of its own, named without its obvious extent
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end:
        raise MetadataError(
            f"{MODALITY_FILE}: {where} goes from start={start!r} to end={end!r}; "
            "whole numbers with 0 <= start < end were expected"
        )
    if width and end > width:
        raise MetadataError(f"{MODALITY_FILE}: {where} ends at {end}, but column {column} has {width} elements")
    return slice(start, end)


def _width(shape: Any) -> int | None:
    """Elements of a row by its declared shape, None where the declaration says nothing usable."""
    if not isinstance(shape, list) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        return None
    width = 1
    for n in shape:
        width *= n
    return width
