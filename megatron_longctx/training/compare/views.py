"""Interactive views of runs: a dashboard in one HTML file, and a workspace and a report in W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...config import files, names
from ...config.extras import install
from ...core.errors import refuse
from .runs import COLOURS, METRICS, Run, common_steps, largest_difference

_TEMPLATE = Path(__file__).with_name("dashboard.html")
_MARK = "/*RUNS*/"
_MAX_POINTS = 2000  # of a curve: more than a screen has columns
_CURVES = ((names.LOSS, "loss"), *((metric.key, metric.title) for metric in METRICS))
_ABOUT = "Runs of one group side by side, by mode (job type): bars are of the last step, curves of every step."


def write_dashboard(runs: Sequence[Run], path: Path) -> None:
    """Write a page that opens without a network or a server. Losses are compared with the first run's.

    Raises:
        ValueError: the runs have no common steps.
    """
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_MARK)
    # No text of a run may end the script: JSON allows "</", but here it must not occur.
    data = json.dumps(content(runs), allow_nan=False).replace("</", "<\\/")
    files.write_text(path, before + data + after)


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the page's data in types of JSON. A value that is unknown or not finite is null."""
    first, steps = runs[0], common_steps(runs)
    metrics = [{"key": m.key, "title": m.title, "unit": m.unit, "better": m.better} for m in METRICS]
    apart = {"key": "difference", "title": "largest loss difference", "unit": f"to {first.name}", "better": "low"}
    return {
        "first": first.name,
        "colours": COLOURS,
        "metrics": [*metrics, apart],
        "curves": [{"key": key, "title": title} for key, title in _CURVES],
        "runs": [_run(run, first, steps) for run in runs],
    }


def _run(run: Run, first: Run, steps: Sequence[int]) -> dict[str, Any]:
    difference = None if run is first else largest_difference(run, first, steps)
    shown = sorted(run.records)
    shown = shown[:: -(-len(shown) // _MAX_POINTS)]
    return {
        "name": run.name,
        **run.facts(),
        "values": {**{m.key: _finite(m.of(run)) for m in METRICS}, "difference": _finite(difference)},
        "steps": shown,
        "curves": {key: [_finite(run.records[step].get(key)) for step in shown] for key, _ in _CURVES},
    }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def wandb_view(kind: str, place: str, group: str | None = None) -> Any:
    """Return an object of `wandb_workspaces` with a `save()` method, for the project `ENTITY/PROJECT`.

    Args:
        kind: `workspace` or `report`.
        group: show only runs of this group; None for all, with one line or bar per group and mode.

    Raises:
        ValueError: `place` has another form, or the package is missing.
    """
    entity, _, project = place.partition("/")
    if not entity or not project or "/" in project:
        raise refuse("wandb", place, "ENTITY/PROJECT", "For example my-team/megatron-longctx.")
    try:
        reports: Any = import_module("wandb_workspaces.reports.v2")
        workspaces: Any = import_module("wandb_workspaces.workspaces")
    except ImportError as error:
        missing = f"wandb-workspaces: expected to be installed ({error}). Run {install('wandb')}."
        raise ValueError(missing) from None
    bars: list[Any] = [
        reports.BarPlot(title=f"{metric.key}, last step ({metric.better} is better)", metrics=[metric.key])
        for metric in METRICS
    ]
    keys = (names.LOSS, names.VALIDATION_LOSS, *(metric.key for metric in METRICS))
    panels = {"Figures": bars, "Curves": [reports.LinePlot(title=key, x=names.STEP, y=[key]) for key in keys]}
    shown = [workspaces.Metric("Group") == group] if group else []
    if kind == "report":
        runs = reports.Runset(groupby=["run.group", "run.jobType"], filters=shown)
        blocks: list[Any] = [reports.P(_ABOUT)]
        for title, plots in panels.items():
            for i, plot in enumerate(plots):  # three in a row of a report's 24 columns
                plot.layout = reports.Layout(x=8 * (i % 3), y=6 * (i // 3), w=8, h=6)
            blocks += [reports.H2(title), reports.PanelGrid(runsets=[runs], panels=plots)]
        title = f"Context-parallel modes{f': {group}' if group else ''}"[:128]
        return reports.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"modes{f' of {group}' if group else ''}",
        sections=[workspaces.Section(name=name, panels=plots, is_open=True) for name, plots in panels.items()],
        settings=workspaces.WorkspaceSettings(x_axis=names.STEP),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group"), workspaces.Metric("JobType")],
            filters=shown,
            pinned_columns=[f"summary:{key}" for key in (names.LOSS, *(metric.key for metric in METRICS))],
        ),
    )


def specification(view: Any) -> str:
    """Return, as JSON, what W&B would store."""
    stored = json.loads(view._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(stored, indent=2)
