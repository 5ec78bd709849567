"""What the documentation tells a user to type exists and is accepted."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from knonik.cli import make_parser
from recipes.launch import _TABLE, _parser
from recipes.load import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


def commands(page: str) -> list[str]:
    """Lines of the fenced blocks that name no other language than the shell's."""
    found: list[str] = []
    language: str | None = None
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language in ("", "bash", "sh") and line.strip():
            found.append(line.split(" # ")[0].strip())
    return found


def test_pages_have_commands() -> None:
    assert any(line.startswith("make train") for line in commands("README.md"))
    assert any("torchrun" in line for line in commands("README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_recipe_commands_are_accepted(page: str) -> None:
    for line in commands(page):
        if "-m recipes" not in line:
            continue
        words = shlex.split(line)
        arguments = _parser().parse_args(words[words.index("recipes") + 1 :])
        if hasattr(arguments, "recipe"):
            load(arguments.recipe, arguments.overrides)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_data_layer_are_accepted(page: str) -> None:
    for line in commands(page):
        if line.startswith(("knonik ", "python -m knonik ")):
            words = shlex.split(line)
            make_parser().parse_args(words[words.index("knonik") + 1 :])


@pytest.mark.parametrize("page", PAGES)
def test_benchmarks_take_the_options_they_are_given(page: str) -> None:
    for line in commands(page):
        if line.startswith("python benchmarks/"):
            words = shlex.split(line)
            source = (ROOT / words[1]).read_text()
            assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == [], line


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    for line in commands(page):
        if line.startswith("make "):
            target = shlex.split(line)[1]
            done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, line


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|benchmarks|docs|models|callbacks|knonik|recipes)/[\w./]+\.\w+)`", text)
    linked = [target for target in re.findall(r"\]\(([\w./-]+)\)", text) if "://" not in target]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not ((ROOT / page).parent / name).exists()]
    assert missing == []


def test_the_closing_table_has_a_label_for_each_figure_once() -> None:
    keys = [key for key, _, _ in _TABLE]
    assert len(set(keys)) == len(keys)
