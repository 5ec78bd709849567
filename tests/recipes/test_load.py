"""Recipe files: bases, overrides, conditions, and what is said when something does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.load import RecipeError, available, diff, from_dict, load, to_dict

ROOT = Path(__file__).resolve().parents[2]


def needed(name: str) -> list[str]:
    """The values that a recipe leaves to its user."""
    return ["data.mixture=[{uri: /a}, {uri: /b}]"] if name.endswith("mixture") else ["data.uri=/data"]


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(name, list(overrides))
    return caught.value.problems


@pytest.mark.parametrize("name", available())
def test_every_recipe_loads_and_survives_its_own_dump(name: str) -> None:
    recipe = load(name, needed(name))
    assert from_dict(to_dict(recipe)) == recipe


def test_bridge_is_the_published_experiment() -> None:
    recipe = load("gr00t_n17/bridge", ["data.uri=/data"])
    assert recipe.data.cameras is not None
    assert (len(recipe.data.cameras), recipe.data.horizon, recipe.data.batch_size) == (3, 8, 64)
    assert (recipe.trainer.max_steps, recipe.optimizer.lr, recipe.schedule.warmup_ratio) == (3000, 1e-4, 0.05)
    assert recipe.model.size == "released"
    assert recipe.model.processor["color_jitter"] == [0.3, 0.4, 0.5, 0.08]


def test_overrides_win_over_conditions_and_conditions_over_the_file() -> None:
    recipe = load("gr00t_n17/finetune", ["data.uri=/d", "model.size=tiny"])
    assert (recipe.model.weights, recipe.optimizer.lr, recipe.precision) == (None, 1e-3, "fp32")
    recipe = load("gr00t_n17/finetune", ["data.uri=/d", "model.size=tiny", "optimizer.lr=1e-2"])
    assert recipe.optimizer.lr == 1e-2
    assert load("gr00t_n17/finetune", ["data.uri=/d"]).model.weights == "nvidia/GR00T-N1.7-3B"


def test_all_problems_are_told_at_once_with_the_nearest_name() -> None:
    lines = problems("quickstart", "trainer.max_stesp=3", "optimizer.lr=fast", "data.edge=wrap", "seed=true")
    text = "\n".join(lines)
    assert "trainer.max_stesp: unknown key (did you mean 'max_steps'?)" in text
    assert "optimizer.lr: expected float, got str 'fast'" in text
    assert "data.edge: 'wrap' is not one of 'repeat', 'inside'" in text
    assert "seed: expected int" in text
    assert len(lines) == 4


def test_a_required_value_is_named() -> None:
    assert problems("gr00t_n17/bridge") == ["data.uri: required, give it as data.uri=..."]
    assert problems("gr00t_n17/mixture") == ["data.mixture: required, give it as data.mixture=..."]


def test_unknown_recipe_and_malformed_override() -> None:
    assert "did you mean 'quickstart'" in problems("quikstart")[0]
    assert "key=value" in problems("quickstart", "seed")[0]


def test_values_that_are_no_yaml_are_all_named() -> None:
    lines = problems("quickstart", "trainer.max_steps=[1,", "data.uri={", "seed=1")
    assert [line.split(":")[0] for line in lines] == ["trainer.max_steps", "data.uri"]
    assert all("is not readable as YAML" in line for line in lines)


def test_a_list_in_place_of_a_section_is_told_with_all_else() -> None:
    lines = problems("quickstart", "model.processor=[1]", "data.cameras={a: b}", "seed=x")
    assert [line.split(":")[0] for line in lines] == ["model.processor", "data.cameras.a", "seed"]
    assert "a section of keys cannot become a list" in lines[0]


def test_overrides_of_which_no_use_can_be_made_hide_no_other_problem() -> None:
    given = ("+ladder=9", "+foo=1", "data.horizon=[1,", ".seed=3", "data..uri=4", "optimizer.lr=fast")
    lines = problems("cosmos3_policy/smoke", *given)
    assert [line.split(":")[0] for line in lines] == [
        "+ladder",
        "+foo",
        "data.horizon",
        "override '.seed=3' is not of the form key=value, or its key has an empty part",
        "override 'data..uri=4' is not of the form key=value, or its key has an empty part",
        "optimizer.lr",
    ]
    assert problems("cosmos3_policy/droid", "data.uri=[1,") == [
        "data.uri: '[1,' is not readable as YAML: while parsing a flow node did not find expected node content"
    ]
    assert load("cosmos3_policy/smoke", ["seed=1", "seed=2", "seed=1"]).seed == 1


@pytest.mark.parametrize("section", ["checkpointing", "optimizer", "trainer", "run", "data", "wandb", "data.cache"])
def test_a_value_in_place_of_a_section_is_one_problem(section: str) -> None:
    lines = problems("cosmos3_policy/smoke", f"{section}=full")
    assert len(lines) == 1
    assert lines[0].startswith(f"{section}: 'full' is not a section of keys; those are ")


def test_an_unknown_model_is_one_problem() -> None:
    (line,) = problems("cosmos3_policy/smoke", "model.name=cosmos3")
    assert line == "model.name: 'cosmos3' is not one of 'gr00t_n17', 'cosmos3_policy'"


def test_a_choice_of_another_model_says_whose_it_is() -> None:
    (line,) = problems("gr00t_n17/finetune", "data.uri=/d", "+ladder=1")
    assert line == (
        "+ladder=1: is for model.name=cosmos3_policy, and model.name of this recipe is gr00t_n17; leave it out"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "is a list; a recipe is a mapping"),
        ("base: [quickstart]\nwhen: 5\n", "when: 5 in mine.yaml is no mapping"),
        ("base: [quickstart]\nwhen:\n  model.szie=tiny: {seed: 5}\n", "'model.szie' is no key of a recipe"),
        ("base: quikstart\n", "base: 'quikstart', named by mine.yaml"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert expected in problems(str(file))[0]


def test_conditions_may_name_any_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: quickstart\nwhen:\n  model.processor.tokenizer=words: {seed: 5}\n")
    assert load(str(file)).seed == 5
    file.write_text("base: quickstart\nwhen:\n  evaluation.layouts=120: {seed: 6}\n")
    assert load(str(file)).seed == 6


def test_a_base_outside_the_package_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: [../../../etc/passwd]\n")
    assert "not a recipe file of the package" in problems(str(file))[0]


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: [gr00t_n17/finetune]\nrun: {name: mine}\ndata: {uri: /data, horizon: 4}\n")
    recipe = load(str(file))
    assert (recipe.run.dir, recipe.data.horizon, recipe.optimizer.lr) == ("runs/mine", 4, 1e-4)


def test_diff_names_what_changed() -> None:
    old, new = load("quickstart"), load("quickstart", ["optimizer.lr=1e-3", "data.cameras=null"])
    assert diff(to_dict(old), to_dict(new)) == {
        "data.cameras": (["observation.images.top", "observation.images.wrist"], None),
        "optimizer.lr": (1.5e-3, 1e-3),
    }


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["show", "quickstart"], ["show", "quickstart", "sead=1"], ["check", "gr00t_n17/finetune", "sead=1"]],
)
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    """`--help`, `show`, `check` and errors answer at once: seconds of imports would show up here as modules."""
    names = {"torch", "lightning", "transformers", "av", "wandb"} | ({"numpy"} if arguments[0] != "check" else set())
    code = (
        "import sys\n"
        "from recipes.launch import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        f"    heavy = {names} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
        "    sys.exit(end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == (2 if "sead=1" in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr
