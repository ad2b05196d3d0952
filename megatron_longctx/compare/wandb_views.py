"""The views of `compare` in W&B: a workspace and a report, of the same figures, by mode."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from .. import names
from ..errors import refuse
from .runs import METRICS

_BY = ("run.group", "run.jobType")
_CURVES = (names.LOSS, names.VALIDATION_LOSS, *(metric.key for metric in METRICS))
_ABOUT = "Runs of one group side by side, by mode (job type): bars are of the last step, curves of every step."


def views(kind: str, place: str, group: str | None = None) -> Any:
    """An object of `wandb_workspaces` with a `save()`, for the project `ENTITY/PROJECT`.

    Args:
        kind: `workspace` or `report`.
        group: of the runs shown; None: all, in a line or a bar for every group and mode.

    Raises:
        ValueError: `place` is none, or the package is missing.
    """
    entity, _, project = place.partition("/")
    if not entity or not project or "/" in project:
        raise refuse("wandb", place, "ENTITY/PROJECT", "For example my-team/megatron-longctx.")
    try:
        reports: Any = import_module("wandb_workspaces.reports.v2")
        workspaces: Any = import_module("wandb_workspaces.workspaces")
    except ImportError as error:
        missing = f"wandb-workspaces: expected to be installed ({error}). pip install 'megatron-longctx[wandb]'"
        raise ValueError(missing) from None
    bars: list[Any] = [
        reports.BarPlot(title=f"{metric.key}, last step ({metric.better} is better)", metrics=[metric.key])
        for metric in METRICS
    ]
    curves: list[Any] = [reports.LinePlot(title=key, x=names.STEP, y=[key]) for key in _CURVES]
    shown = [workspaces.Metric("Group") == group] if group else []
    if kind == "report":
        runs = reports.Runset(groupby=list(_BY), filters=shown)
        grids = [reports.PanelGrid(runsets=[runs], panels=_placed(reports, panels)) for panels in (bars, curves)]
        blocks = [reports.P(_ABOUT), reports.H2("Figures"), grids[0], reports.H2("Curves"), grids[1]]
        title = f"Context-parallel modes{f': {group}' if group else ''}"[:128]
        return reports.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"modes{f' of {group}' if group else ''}",
        sections=[
            workspaces.Section(name=name, panels=panels, is_open=True)
            for name, panels in (("Figures", bars), ("Curves", curves))
        ],
        settings=workspaces.WorkspaceSettings(x_axis=names.STEP),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group"), workspaces.Metric("JobType")],
            filters=shown,
            pinned_columns=[f"summary:{key}" for key in (names.LOSS, *(metric.key for metric in METRICS))],
        ),
    )


def _placed(reports: Any, panels: list[Any]) -> list[Any]:
    """Three in a row of a report's 24 columns."""
    for i, panel in enumerate(panels):
        panel.layout = reports.Layout(x=8 * (i % 3), y=6 * (i // 3), w=8, h=6)
    return panels


def specification(view: Any) -> str:
    """What W&B would store, as JSON."""
    stored = json.loads(view._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(stored, indent=2)
