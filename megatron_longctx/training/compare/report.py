"""The `compare` verb: tables, a picture and a dashboard of runs, from their `metrics.jsonl` and `resolved.yaml`.

Differences are the loss minus the loss of the first run at the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import refuse
from ..metrics.summary import METRICS
from .runs import COLOURS, Run, agreement, common_steps, differences, largest_difference, load_runs
from .views import write_dashboard

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
