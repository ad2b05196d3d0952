"""Interactive views of runs: a dashboard in one HTML file, and a workspace and a report in W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...config import files, names
from ...config.extras import install
from ...core.errors import refuse
from ..metrics.summary import METRICS, Summary, warm_up
from .runs import COLOURS, Run, agreement, common_steps, largest_difference

_TEMPLATE = Path(__file__).with_name("dashboard.html")
_MARK = "/*RUNS*/"
_MAX_POINTS = 2000  # of a curve: more than a screen has columns
_LOSSES = ((names.LOSS, "training loss", 1.0), (names.VALIDATION_LOSS, "validation loss", 1.0))
_CURVES = (*_LOSSES, *((metric.key, metric.heading, metric.scale) for metric in METRICS))
_TITLE = "{0.heading}, {1} ({0.better} is better)"
_ABOUT = "Runs of one group side by side, by mode (job type): bars are medians after the warm-up. "


def write_dashboard(runs: Sequence[Run], path: Path) -> None:
    """Write a page that opens without a network or a server. Losses are compared with the first run's."""
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
        "agreement": agreement(runs),
        "colours": COLOURS,
        "metrics": [apart, *metrics],
        "curves": [{"key": key, "title": title} for key, title, _ in _CURVES],
        "runs": [_run(run, first, steps) for run in runs],
    }


def _run(run: Run, first: Run, steps: Sequence[int]) -> dict[str, Any]:
    difference = None if run is first else _finite(largest_difference(run, first, steps))
    apart = None if difference is None else Summary(difference, difference, difference, len(steps))
    shown = sorted(run.records)
    shown = shown[:: -(-len(shown) // _MAX_POINTS)]
    return {
        "name": run.name,
        **run.facts(),
        "doubts": run.doubts(),
        "measured": len(run.records) - warm_up(len(run.records)),
        "values": {m.key: _values(m.of(run.records)) for m in METRICS} | {"difference": _values(apart)},
        "steps": shown,
        "curves": {key: [_finite(run.records[step].get(key), scale) for step in shown] for key, _, scale in _CURVES},
    }


def _values(summary: Summary | None) -> dict[str, float] | None:
    """Return a summary in types of JSON; null if a value is not finite."""
    return summary._asdict() if summary and math.isfinite(summary.low + summary.high) else None


def _finite(value: Any, scale: float = 1.0) -> float | None:
    return value * scale if isinstance(value, (int, float)) and math.isfinite(value) else None


def wandb_views(place: str, group: str | None = None) -> tuple[Any, Callable[[str], Any]]:
    """Return a workspace of `wandb_workspaces` for a project, and what makes a report that links to its URL.

    Both have a method `save()`, and then a `url`. Bars are of the run's summary, which has medians after the warm-up.

    Args:
        place: `ENTITY/PROJECT`.
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
    figures = [(_TITLE.format(m, "most" if m.most else "median"), m.summary_key) for m in METRICS]
    panels = {
        "Do the losses agree?": [reports.LinePlot(title=t, x=names.STEP, y=[key]) for key, t, _ in _LOSSES],
        "Speed, waiting and memory": [reports.BarPlot(title=title, metrics=[key]) for title, key in figures],
        "By step": [reports.LinePlot(title=m.title, x=names.STEP, y=[m.key]) for m in METRICS],
    }
    shown = [workspaces.Metric("Group") == group] if group else []
    title = f"Context-parallel modes{f': {group}' if group else ''}"[:128]
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=[workspaces.Section(name=name, panels=plots, is_open=True) for name, plots in panels.items()],
        settings=workspaces.WorkspaceSettings(x_axis=names.STEP),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group"), workspaces.Metric("JobType")],
            filters=shown,
            pinned_columns=[f"summary:{key}" for key in (names.LOSS, *(metric.summary_key for metric in METRICS))],
        ),
    )

    def report(url: str) -> Any:
        runs = reports.Runset(groupby=["run.group", "run.jobType"], filters=shown)
        blocks: list[Any] = [reports.P([_ABOUT, reports.Link("The workspace", url), " has the same panels."])]
        for heading, plots in panels.items():
            for i, plot in enumerate(plots):  # three in a row of a report's 24 columns
                plot.layout = reports.Layout(x=8 * (i % 3), y=6 * (i // 3), w=8, h=6)
            blocks += [reports.H2(heading), reports.PanelGrid(runsets=[runs], panels=plots)]
        return reports.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")

    return workspace, report


def specification(view: Any) -> Any:
    """Return what W&B would store, in types of JSON."""
    return json.loads(view._to_model().model_dump_json(by_alias=True, exclude_none=True))
