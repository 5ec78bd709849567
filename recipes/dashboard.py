"""The dashboard of a run in Weights & Biases: panels as JSON, and a saved view made of them.

    python -m recipes dashboard                    # the panels, as JSON
    python -m recipes dashboard ENTITY/PROJECT     # a saved view in that project

The panels are data, in `dashboard.json`: whoever has another viewer, or not the library that makes the view (the extra
`dashboard`), reads them from there.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
STEP = "trainer/global_step"  # what Lightning counts optimizer steps in


def panels() -> dict[str, Any]:
    """Name and sections of the dashboard; a section has panels, a panel has a title and the metrics it draws."""
    values: dict[str, Any] = json.loads(FILE.read_text())
    return values


def workspace(entity: str, project: str) -> Any:
    """The saved view, not yet stored.

    Raises:
        ValueError: the library that makes views is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        extra = "install the extra: pip install -e '.[dashboard]'"
        raise ValueError(f"a saved view is made by wandb-workspaces, which is not installed: {extra}") from error
    values = panels()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=values["name"],
        auto_generate_panels=False,
        sections=[
            workspaces.Section(
                name=section["name"],
                is_open=section.get("open", True),
                panels=[
                    reports.LinePlot(
                        title=panel["title"], x=STEP, y=panel["metrics"], log_y=panel.get("log_y"), title_x="step"
                    )
                    for panel in section["panels"]
                ],
            )
            for section in values["sections"]
        ],
    )


def create(target: str) -> str:
    """Store the view in a project and give its address.

    Args:
        target: `ENTITY/PROJECT`.

    Raises:
        ValueError: `target` is something else, or W&B refuses.
    """
    entity, _, project = target.partition("/")
    if not entity or not project or "/" in project:
        raise ValueError(f"{target!r} is not of the form ENTITY/PROJECT")
    view = workspace(entity, project)
    try:
        return str(view.save().url)
    except Exception as error:  # W&B's own classes; its library is not imported here
        raise ValueError(f"W&B did not store the view in {target}: {error}") from error
