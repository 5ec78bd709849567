"""The dashboard draws what is documented, all of it, and nothing else."""

import json
import re
from pathlib import Path

import pytest

from recipes import launch
from recipes.dashboard import create, panels, workspace

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROWS = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
NAMES = {name for row in ROWS for name in re.findall(r"`(\w+/\w+)`", row.split(" | ")[0])}


def drawn() -> list[str]:
    return [name for section in panels()["sections"] for panel in section["panels"] for name in panel["metrics"]]


def test_every_metric_has_one_panel_and_every_panel_documented_metrics() -> None:
    assert len(drawn()) == len(set(drawn()))
    assert set(drawn()) <= NAMES
    gauges = {
        name for name in NAMES if name.startswith("loader/")
    }  # too many to draw all; the view adds any on request
    assert NAMES - gauges <= set(drawn())


def test_the_panels_are_printed_for_those_without_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        launch.main(["dashboard"])
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out) == panels()


@pytest.mark.parametrize("target", ["project", "a/b/c", "/b", "a/"])
def test_a_place_that_is_none_is_named(target: str) -> None:
    with pytest.raises(ValueError, match="ENTITY/PROJECT"):
        create(target)


def test_the_view_has_the_panels() -> None:
    pytest.importorskip("wandb_workspaces")
    view = json.loads(workspace("entity", "project")._to_model().model_dump_json(by_alias=True, exclude_none=True))
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section["name"] for section in panels()["sections"]]
    found = [name for section in sections for panel in section["panels"] for name in panel["config"]["metrics"]]
    assert found == drawn()
