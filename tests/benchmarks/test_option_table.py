"""The comparison of training options: every line is a recipe that can run, every row has the loss beside the time."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import options
import options_worker

from models.gr00t_n17.config import GR00TN17Config
from recipes.check_options import option_problems


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.name)
def test_each_line_is_a_recipe_that_fits(option: options.Option, tmp_path: Path) -> None:
    sizes = GR00TN17Config.tiny(**options.FROZEN).to_dict()
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    recipe = options_worker.recipe_of(tmp_path, [*option.overrides, "trainer.max_steps=4"])
    assert option_problems(recipe, option.ranks) == []


def test_a_row_shows_the_loss_beside_the_time() -> None:
    row = {"name": "compile blocks", "plain_s": 0.5, "option_s": 0.25, "ratio": 0.5, "first_step_s": 40.0}
    row |= {"plain_peak_bytes": 2e9, "option_peak_bytes": 1e9, "loss_difference": 2e-7, "label": "tolerance"}
    cells = options.line(row).split()
    assert cells == ["compile", "blocks", "0.500", "0.250", "0.50", "40.0", "-1000", "MB", "2.0e-07", "tolerance"]
    assert options.HEADER.index("ratio") < options.HEADER.index("loss differs by")
