"""From plain dictionaries to frozen dataclasses, with every problem collected instead of the first one raised."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the allowed name closest to `name`, or the list of all when none is close."""
    names = list(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f" (allowed: {', '.join(names) or 'none'})"


def parse(cls: type[T], values: Any, problems: list[str], path: str = "") -> T | None:
    """Build dataclass `cls` from a mapping.

    Args:
        cls: a frozen keyword-only dataclass whose field types are scalars, tuples, dicts, Literals or dataclasses.
        values: the mapping, with plain Python values.
        problems: receives one line per problem, each with the full dotted key.
        path: dotted key of `values` itself.

    Returns:
        The instance, with the default (or an empty value) in the place of everything that did not fit, so that the
        rest can still be checked; None when `values` is no mapping at all. It is sound only if no problem was added.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    if not isinstance(values, dict):
        problems.append(f"{path or 'recipe'}: {values!r} is not a section of keys; those are {', '.join(fields)}")
        return None
    for key in values:
        if key not in fields:
            problems.append(f"{_join(path, str(key))}: unknown key{nearest(str(key), fields)}")
    arguments = {}
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        found = len(problems)
        if name in values:
            arguments[name] = _convert(hints[name], values[name], problems, _join(path, name))
        elif required:
            problems.append(f"{_join(path, name)}: required, but the recipe gives no value")
        if len(problems) > found and not _is_section(hints[name]):
            arguments.pop(name, None)
            if required:
                arguments[name] = _EMPTY.get(hints[name])
        elif len(problems) > found and arguments.get(name) is None:
            arguments.pop(name, None)
            if required:
                arguments[name] = _convert(hints[name], {}, [], "")
    try:
        return cls(**arguments)
    except ValueError as error:  # a class that looks at its own values, and says what is wrong with all of them
        own, text = path.rpartition(".")[2], str(error)
        problems += [f"{path}: {line}" for line in text.removeprefix(f"{own}: ").split("; ")]
        return cls()


def misfits(cls: type, values: Mapping[str, Any], path: str) -> list[str]:
    """Unknown keys and wrong types among values that are to replace some fields of `cls`; nothing of `cls` is built."""
    hints = typing.get_type_hints(cls)
    problems: list[str] = []
    for key, value in values.items():
        if key in hints:
            _convert(hints[key], value, problems, f"{path}.{key}")
        else:
            problems.append(f"{path}.{key}: unknown key{nearest(str(key), hints)}")
    return problems


def known(cls: type, dotted: str) -> bool:
    """Whether a dotted key leads to a field of a dataclass, or into one that takes any mapping."""
    name, _, rest = dotted.partition(".")
    fields = _fields(cls, name)
    if not rest or not fields:
        return bool(fields)
    return any(get_origin(kind) in (dict, Mapping) or known(kind, rest) for kind in fields)


# Stand-ins for required values that were wrong: never used to run anything, only to look at the other keys.
_EMPTY: dict[Any, Any] = {str: "", int: 1, float: 1.0, bool: False}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def optional(cls: type, dotted: str) -> bool:
    """Whether the field that a dotted key of sections leads to may be null."""
    name, _, rest = dotted.partition(".")
    fields = _fields(cls, name)
    return any(optional(kind, rest) for kind in fields) if rest else any(type(None) in get_args(f) for f in fields)


def _is_section(kind: Any) -> bool:
    """Whether a field holds a section of keys, or one of several by its `name`, and never null."""
    return all(dataclasses.is_dataclass(option) for option in get_args(kind) or (kind,))


def _fields(kind: Any, name: str) -> list[Any]:
    """Types of field `name` in a section, or in those sections of a union that have it."""
    sections = [option for option in (kind, *get_args(kind)) if dataclasses.is_dataclass(option)]
    hints = [typing.get_type_hints(section) for section in sections]
    return [own[name] for own in hints if name in own]


def _convert(kind: Any, value: Any, problems: list[str], path: str) -> Any:
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        if value is None and type(None) in get_args(kind):
            return None
        if len(options) > 1 and all(dataclasses.is_dataclass(option) for option in options):
            return _alternative(options, value, problems, path)
        # `int | str`: the one the value already is, else the last one reports it
        fitting = (option for option in options[:-1] if isinstance(option, type) and type(value) is option)
        return _convert(next(fitting, options[-1]), value, problems, path)
    if dataclasses.is_dataclass(kind):
        return parse(typing.cast(Any, kind), value, problems, path)
    if origin is Literal:
        choices = get_args(kind)
        if value not in choices:
            problems.append(f"{path}: {value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin is tuple:
        return _convert_tuple(get_args(kind), value, problems, path)
    if origin is Sequence:
        return _convert_tuple((*get_args(kind), ...), value, problems, path)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            problems.append(f"{path}: expected a section of keys, got {value!r}")
            return value
        held = get_args(kind)[-1]
        return {name: _convert(held, item, problems, _join(path, str(name))) for name, item in value.items()}
    return _convert_scalar(kind, value, problems, path)


def _alternative(options: list[Any], value: Any, problems: list[str], path: str) -> Any:
    """One of several sections: that of the `name` the values give, the first where they give none."""
    by_name = {get_args(typing.get_type_hints(option)["name"])[0]: option for option in options}
    chosen = options[0]
    if isinstance(value, dict) and "name" in value:
        if value["name"] not in by_name:
            problems.append(f"{path}.name: {value['name']!r} is not one of {', '.join(map(repr, by_name))}")
        chosen = by_name.get(value["name"], chosen)
        own, others = {field.name for field in dataclasses.fields(chosen)}, dict[str, str]()
        for name, option in by_name.items():
            others |= {field.name: name for field in dataclasses.fields(option) if field.name not in own}
        if value["name"] not in by_name:  # whose keys these are is not known
            value = {key: held for key, held in value.items() if key != "name" and key not in others}
            return parse(chosen, value, problems, path)
        problems += [
            f"{path}.{key}: is a key of {others[key]}, and {path}.name is {value['name']}; leave it out"
            for key in value
            if key in others
        ]
        value = {key: held for key, held in value.items() if key not in others}
    return parse(chosen, value, problems, path)


def _convert_tuple(items: tuple[Any, ...], value: Any, problems: list[str], path: str) -> Any:
    if not isinstance(value, list | tuple):
        problems.append(f"{path}: expected a list, got {value!r}")
        return value
    if items[-1] is not Ellipsis and len(value) != len(items):
        problems.append(f"{path}: expected {len(items)} values, got {len(value)}")
        return value
    kinds = [items[0]] * len(value) if items[-1] is Ellipsis else items
    return tuple(_convert(k, v, problems, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _convert_scalar(kind: Any, value: Any, problems: list[str], path: str) -> Any:
    # bool is a subclass of int: `max_steps: true` must not pass as 1
    fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits:
        problems.append(f"{path}: expected {kind.__name__}, got {type(value).__name__} {value!r}")
    return value
