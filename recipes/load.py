"""Recipe files: find, merge the bases, apply the overrides, resolve once into frozen dataclasses.

A file names what it builds on (`base: [...]`) and may change further keys when one has a certain value
(`when: {"model.size=tiny": {...}}`); what the user gives as `key=value` wins over both, and over the keys that
`+group=value` sets together.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.parse import known, nearest, optional, parse
from recipes.schema import Recipe

RECIPES = Path(__file__).parent


class RecipeError(ValueError):
    """Everything wrong with a recipe, one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the recipe:\n{lines}")


def available() -> list[str]:
    """Names of the recipes that come with the package, fragments in `base/` left out."""
    names = (p.relative_to(RECIPES).with_suffix("").as_posix() for p in RECIPES.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("base/"))


def find(name: str) -> Path:
    """File of a recipe, given by its name (`gr00t_n17/bridge`) or by a path to a YAML file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.is_file():
            return path
        raise RecipeError([f"recipe file {name!r} does not exist"])
    if name not in available():
        raise RecipeError([f"no recipe named {name!r}{nearest(name, available())}; or give a path ending in .yaml"])
    return RECIPES / f"{name}.yaml"


def load(name: str, overrides: list[str] | None = None) -> Recipe:
    """Resolve a recipe.

    Args:
        name: recipe name or path of a YAML file.
        overrides: `key=value` strings; keys are dotted, values are YAML. `+group=value` sets the keys of
            `base/GROUP/VALUE.yaml`.

    Raises:
        RecipeError: with all problems of the file and the overrides.
    """
    recipe, problems = examine(name, overrides or [])
    if problems:
        raise RecipeError(problems)
    return recipe


def examine(name: str, overrides: list[str]) -> tuple[Recipe, list[str]]:
    """Like `load`, but gives the problems beside a recipe that is sound in all other places, to check those too."""
    problems: list[str] = []
    recipe = parse(Recipe, merged(name, overrides, problems), problems)
    if recipe is None:
        raise RecipeError(problems)
    return recipe, problems


def from_dict(values: dict[str, Any]) -> Recipe:
    """Recipe from plain values, as `to_dict` gives them."""
    problems: list[str] = []
    recipe = parse(Recipe, values, problems)
    if recipe is None or problems:
        raise RecipeError(problems)
    return recipe


def merged(name: str, overrides: list[str], problems: list[str]) -> dict[str, Any]:
    """Plain nested dictionary of a recipe after bases, overrides and interpolation, not yet checked for types.

    What of the overrides cannot be used is put into `problems` and left out. So are values marked `???` that nobody
    gave; they stand as null or an empty string.
    """
    tree: Any = OmegaConf.create()
    files = [(find(name), ""), *_choices([item for item in overrides if item.startswith("+")], problems)]
    items = _given([item for item in overrides if not item.startswith("+")], problems)
    try:
        for file, choice in files:
            fragment: Any = _with_bases(file, ())
            whens, only = fragment.pop("when", {}), fragment.pop("only", "") if choice else ""
            if only and (other := _other(only, OmegaConf.merge(tree, *items))):
                problems.append(f"{choice}: is for {only}, and {other}; leave it out")
                continue
            tree = OmegaConf.merge(tree, fragment)
            items = _fitting(tree, items, problems)
            tree = _under(tree, whens, OmegaConf.merge(OmegaConf.create(), *items), problems)
        tree = OmegaConf.merge(tree, *items)
        told = {line.split(":", 1)[0] for line in problems}
        for key in sorted(OmegaConf.missing_keys(tree)):
            problems += [] if key in told else [f"{key}: required, give it as {key}=..."]
            OmegaConf.update(tree, key, None if optional(Recipe, key) else "")
        values = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a list where a section stands, or the reverse
        raise RecipeError([f"cannot merge the recipe: {_merge_error(error)}"]) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _under(tree: Any, whens: Any, given: Any, problems: list[str]) -> Any:
    """The tree with what it says for the values that it, or the user, gives to certain keys."""
    for condition, fragment in whens.items():
        key, _, value = str(condition).partition("=")
        if not known(Recipe, key):
            problems.append(f"when: {condition}: {key!r} is no key of a recipe, so this would never apply")
        elif str(OmegaConf.select(OmegaConf.merge(tree, given), key)) == value:
            tree = OmegaConf.merge(tree, fragment)
    return tree


def _other(only: str, tree: Any) -> str:
    """Empty where the tree has the `key=value` that a fragment is for; else what it has."""
    key, _, value = only.partition("=")
    found = str(OmegaConf.select(tree, key))
    return "" if found == value else f"{key} of this recipe is {found}"


def _choices(chosen: list[str], problems: list[str]) -> list[tuple[Path, str]]:
    """Files of `+GROUP=VALUE`, keys that are set together, over the recipe's and under the user's own."""
    groups = sorted(folder.name for folder in (RECIPES / "base").iterdir() if folder.is_dir())
    files = []
    for choice in chosen:
        group, _, value = choice[1:].partition("=")
        values = sorted(file.stem for file in (RECIPES / "base" / group).glob("*.yaml")) if group in groups else []
        if group not in groups:
            problems.append(f"+{group}: no group of choices{nearest(group, groups)}")
        elif value not in values:
            problems.append(f"+{group}: {value!r} is not one of {', '.join(values)}")
        else:
            files.append((RECIPES / "base" / group / f"{value}.yaml", choice))
    return files


def _given(overrides: list[str], problems: list[str]) -> list[Any]:
    """Each readable `key=value` string as a tree of its own."""
    given = []
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(f"override {item!r} is not of the form key=value, or its key has an empty part")
            continue
        try:
            given.append(OmegaConf.from_dotlist([item]))
        except Exception as error:  # the YAML library raises several unrelated types
            reason = " ".join(str(error).split("\n  in ")[0].split())
            problems.append(f"{key}: {value!r} is not readable as YAML: {reason}")
    return given


def _fitting(tree: Any, items: list[Any], problems: list[str]) -> list[Any]:
    """The overrides that can stand over a tree and over those before them; of the others it is told why."""
    fitting = []
    for given in items:
        try:
            tree = OmegaConf.merge(tree, given)
            fitting.append(given)
        except (OmegaConfBaseException, TypeError):  # TypeError: a list where a section stands, or the reverse
            plain: Any = OmegaConf.to_container(given)
            ((key, value),) = flatten(plain).items()
            problems.append(
                f"{key}: {value!r} cannot stand here: a section of keys cannot become a list, nor a list one"
            )
    return fitting


def _merge_error(error: Exception) -> str:
    """What the merging library says, with the key where it names one on a line of its own."""
    text = str(error)
    key = re.search(r"full_key: (\S+)", text)
    return text.splitlines()[0] + (f" (at {key[1]})" if key else "")


def _with_bases(path: Path, seen: tuple[Path, ...]) -> Any:
    """A recipe file over its `base:` list, later bases over earlier ones; names are relative to the package."""
    if path in seen:
        raise RecipeError([f"base: {path.name} includes itself through {' -> '.join(p.name for p in seen)}"])
    try:
        tree: Any = OmegaConf.load(path)
    except Exception as error:  # the YAML library raises several unrelated types
        raise RecipeError([f"{path} is not readable YAML: {error}"]) from error
    if not OmegaConf.is_dict(tree) and tree:
        raise RecipeError([f"{path} is a list; a recipe is a mapping of sections, as in docs/recipes.md"])
    bases = tree.pop("base", []) if tree else []
    if not isinstance(bases, list) and not OmegaConf.is_list(bases):
        bases = [bases]
    if tree and "when" in tree and not OmegaConf.is_dict(tree["when"]):
        raise RecipeError([f"when: {tree['when']!r} in {path.name} is no mapping of `key=value` to sections"])
    parts = []
    for base in bases:
        file = RECIPES / f"{base}.yaml"
        if not file.is_file() or not file.resolve().is_relative_to(RECIPES):
            raise RecipeError([f"base: {base!r}, named by {path.name}, is not a recipe file of the package"])
        parts.append(_with_bases(file, (*seen, path)))
    return OmegaConf.merge(*parts, tree)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain nested dictionary of a recipe, tuples as lists: what is stored with a run and what `from_dict` reads."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return plain


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(recipe)))


def flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted key -> value, for comparing two recipes."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{path}.{key}" if path else key
        flat.update(flatten(value, dotted) if isinstance(value, dict) and value else {dotted: value})
    return flat


def diff(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) for every value that differs; an absent one reads as None."""
    before, after = flatten(old), flatten(new)
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
