"""The `compare` verb: tables, a picture and a dashboard of runs, from their `metrics.jsonl` and `resolved.yaml`.

Differences are the loss minus the loss of the first run at the same step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import environment, files, names
from ..config.extras import install
from ..core.errors import refuse
from .metrics import METRICS, MIN_STEPS, Summary, Value, decode, warm_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join((lines[0], "-+-".join("-" * width for width in widths), *lines[1:]))


def loss_table(runs: Sequence[Run], max_rows: int) -> str:
    """Return losses and differences by step: all, or `max_rows` evenly spaced steps with the first and the last."""
    steps = common_steps(runs)
    shown = steps
    if len(steps) > max_rows:
        last = len(steps) - 1
        shown = [steps[round(i * last / (max_rows - 1))] for i in range(max_rows)]
    first, others = runs[0], runs[1:]
    header = ["step", *(f"loss {run.name}" for run in runs)]
    header += ["difference"] if len(others) == 1 else [f"{run.name} - {first.name}" for run in others]
    rows = []
    for step in shown:
        apart = [f"{differences(run, first, [step])[0]:+.2e}" for run in others]
        rows.append([str(step), *(f"{run.loss(step):.6f}" for run in runs), *apart])
    note = f"\n({len(shown)} of {len(steps)} common steps)" if len(shown) < len(steps) else ""
    return _table(header, rows) + note


def summary_table(runs: Sequence[Run]) -> str:
    """Return each run's largest difference, the metrics that a run has recorded, and what is doubtful."""
    first, steps = runs[0], common_steps(runs)
    metrics = [metric for metric in METRICS if any(metric.of(run.records) for run in runs)]
    header = ["run", "mode", "max |difference|", "steps", *(metric.heading for metric in metrics)]
    rows = []
    for run in runs:
        largest = "first" if run is first else f"{largest_difference(run, first, steps):.2e}"
        values = [metric.text(run.records) for metric in metrics]
        rows.append([run.name, run.facts()["mode"], largest, str(len(run.records)), *values])
    doubts = Counter(doubt for run in runs for doubt in run.doubts())
    notes = [f"{count} of {len(runs)} runs: {doubt}." for doubt, count in doubts.items()]
    about = "Medians after the warm-up ± half the distance of the quartiles; memory: the most."
    return "\n".join([_table(header, rows), about, *notes])


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        steps = sorted(run.records)
        # Curves hide the first one where the losses agree: it is wide and pale, so that both stay visible.
        pale = i == 0 and len(runs) > 1
        axes.plot(
            steps,
            [run.loss(step) for step in steps],
            linestyle="-" if i == 0 else _LINES[i % len(_LINES)],
            linewidth=5.0 if pale else 1.8,
            alpha=0.35 if pale else 1.0,
            color=COLOURS[i % len(COLOURS)],
            label=run.name,
        )
    axes.set_ylabel("training loss")
    axes.set_title("Loss", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="upper right")


def _draw_differences(axes: Axes, runs: Sequence[Run]) -> None:
    first, steps = runs[0], common_steps(runs)
    sizes = []
    for i, run in enumerate(runs[1:], start=1):
        apart = [abs(d) for d in differences(run, first, steps)]
        sizes += [d for d in apart if d > 0 and math.isfinite(d)]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(steps, apart, "o-", markersize=3.5, linewidth=1.0, color=colour)
    # Differences that grow by orders of magnitude are unreadable on a linear axis; exact zeros need its linear part.
    if sizes and max(sizes) > 20 * min(sizes):
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(sizes))))
        axes.set_ylim(bottom=0)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.set_ylim(bottom=0, top=None if sizes else 1e-6)
    axes.set_ylabel("|difference|")
    axes.set_title(f"Difference from {first.name}", loc="left", fontweight="bold")


def draw(runs: Sequence[Run]) -> Figure:
    """Draw loss curves, and their differences below them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: it would keep the figure, and look for a display
    from matplotlib.ticker import MaxNLocator

    with rc_context(_STYLE | {"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(10, 6.2), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1)) if len(runs) > 1 else [figure.subplots()]
        _draw_losses(panels[0], runs)
        if len(runs) > 1:
            _draw_differences(panels[1], runs)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels(panels)
    return figure


def compare(
    folders: Sequence[Path | str], out: Path | str | None = None, rows: int = 50, html: Path | str | None = None
) -> Path:
    """Print tables of the runs in `folders`, write the picture, and the dashboard if `html` is given.

    Args:
        folders: run folders; differences are taken from the first.
        out: the picture of losses, which is returned. None for `compare.png` beside the first run.
        rows: the most steps to print.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if rows < 2:
        raise refuse("--rows", rows, "at least 2", "The first and the last step are always shown.")
    path = Path(out) if out is not None else Path(folders[0]).resolve().parent / "compare.png"
    if path.suffix[1:].lower() not in (known := FigureCanvasBase.filetypes):
        raise refuse("--out", path, f"a file that ends in one of {', '.join(known)}", "Give another name.")
    if html is not None and Path(html).is_dir():
        raise refuse("--html", html, "a file; this is a folder", "Give a file name in it.")
    runs = load_runs(folders)
    for file in (path, Path(html or path)):
        file.parent.mkdir(parents=True, exist_ok=True)
    print(loss_table(runs, rows), agreement(runs), summary_table(runs), sep="\n\n")
    draw(runs).savefig(path, dpi=150)
    print(f"\npicture: {path}")
    if html is not None:
        write_dashboard(runs, Path(html))
        print(f"dashboard: {html} (open it in a browser)")
    return path


@dataclass(frozen=True)
class Run:
    """One run: its records keyed by step, its resolved configuration, and what it ran on."""

    name: str
    records: dict[int, dict[str, Value]]
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)

    def loss(self, step: int) -> float:
        """Return the loss at `step`; NaN if none was recorded."""
        value = self.records[step].get(names.LOSS)
        return float(value) if isinstance(value, (int, float)) else math.nan

    def facts(self) -> dict[str, Any]:
        """Return the facts by which runs are distinguished, grouped and filtered."""
        return environment.facts(self.config, self.environment)

    def doubts(self) -> list[str]:
        """Return why its speeds cannot be ranked, in words that follow the names of runs; empty if they can."""
        measured = len(self.records) - warm_up(len(self.records))
        on_cpu = ["on CPUs, so the times say nothing about GPUs"] if self.facts()["hardware"] == "cpu" else []
        few = f"with fewer than {MIN_STEPS} steps after the warm-up, which do not tell modes apart"
        return on_cpu + ([few] if measured < MIN_STEPS else [])


# For runs in order: blue, vermilion, green, … which colour-blind readers can distinguish as well.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#7F5FC1", "#8A6D3B", "#C0392B", "#607D8B"),
)


def load_run(folder: Path | str) -> Run:
    """Read one run folder. Refuse one without settings or steps."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"run {folder}: expected a run folder. Check the path; runs are in runs/<run.name>.")
    metrics, resolved = folder / "metrics.jsonl", folder / "resolved.yaml"
    for path in (metrics, resolved):
        if not path.is_file():
            raise ValueError(f"{path}: no such file. Give a folder that `megatron-longctx train` wrote.")
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    records: dict[int, dict[str, Value]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = decode(line)
        except ValueError as error:
            if number == len(lines):
                continue  # the run is writing it, or was killed while writing it
            raise ValueError(f"{metrics}:{number}: not a JSON object ({error}). Remove the line.") from error
        step = record.get(names.STEP)
        if isinstance(step, int):
            records[step] = record
    if not records:
        raise ValueError(f"{metrics}: no training steps in it. Let the run finish at least one step.")
    try:
        config = dict(files.read_yaml(resolved))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{resolved}: expected settings ({error}). Give a folder that training wrote.") from None
    settings = {str(key): value for key, value in config.items()}
    return Run(folder.resolve().name, records, settings, environment.read(folder))


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders, as `load_run`. If two have the same name, paths are the names of all."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    return runs


def common_steps(runs: Sequence[Run]) -> list[int]:
    """Return the steps that every run has, ascending. Refuse runs that have none."""
    steps = sorted(set.intersection(*(set(run.records) for run in runs)))
    if not steps:
        spans = ", ".join(f"{run.name}: {min(run.records)} to {max(run.records)}" for run in runs)
        raise ValueError(f"the runs have no common steps ({spans}). Compare runs that trained the same steps.")
    return steps


def differences(run: Run, first: Run, steps: Sequence[int]) -> list[float]:
    """Return the loss of `run` minus the loss of `first` at every step."""
    return [run.loss(step) - first.loss(step) for step in steps]


def largest_difference(run: Run, first: Run, steps: Sequence[int]) -> float:
    """Return the largest absolute difference of the losses; NaN if one of them is."""
    sizes = [abs(each) for each in differences(run, first, steps)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)  # max() may skip a NaN


def agreement(runs: Sequence[Run]) -> str:
    """Return one sentence on how far the losses of all runs differ from the first run's."""
    first, steps = runs[0], common_steps(runs)
    apart = {run.name: largest_difference(run, first, steps) for run in runs[1:]}
    if not apart:
        return f"{first.name} is the only run: there is no loss to compare with its own."
    name = max(apart, key=lambda each: math.inf if math.isnan(apart[each]) else apart[each])
    return f"Largest difference from the loss of {first.name} at {len(steps)} common steps: {apart[name]:.1e} ({name})."


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
    Refuse a `place` other than `ENTITY/PROJECT`, and a missing package. Only runs of `group` are shown; None for all,
    with one line or bar per group and mode.
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
