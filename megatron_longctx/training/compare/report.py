"""The `compare` verb: tables, pictures and a dashboard of runs, from their `metrics.jsonl` and `resolved.yaml`.

Differences are the loss minus the loss of the first run at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import ParallelismConfig, mode_options
from ...core.plans import Plan, build_plan
from .runs import COLOURS, METRICS, Metric, Run, common_steps, differences, largest_difference, load_runs
from .views import write_dashboard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
_PLAN_KEYS = (
    "context_parallel_size",
    "schedule",
    "max_buffer_tokens",
    "inner_size",
    "rounds",
    "outer_schedule",
    "cluster",
)


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
    """Return each run's metrics, without those that no run recorded, and its largest difference."""
    first, steps, metrics = runs[0], common_steps(runs), _recorded(runs)
    header = ["run", "mode", "steps", *(metric.title for metric in metrics), "max |difference|"]
    rows = []
    for run in runs:
        largest = "first" if run is first else f"{largest_difference(run, first, steps):.2e}"
        values = [metric.text(run) for metric in metrics]
        rows.append([run.name, run.facts()["mode"], str(len(run.records)), *values, largest])
    return _table(header, rows) + "\n(medians over all recorded steps)"


def _recorded(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics that at least one run recorded."""
    return [metric for metric in METRICS if any(metric.of(run) is not None for run in runs)]


def distinct_plans(runs: Sequence[Run]) -> list[Plan]:
    """Return the distinct context-parallel plans of the runs with several ranks, in order."""
    plans: dict[tuple[ParallelismConfig, int], Plan] = {}
    for run in runs:
        settings = run.config.get("parallelism", {})
        if settings.get("context_parallel_size", 1) > 1:
            par = ParallelismConfig(**{key: settings[key] for key in _PLAN_KEYS if key in settings})
            length = run.config["data"]["seq_length"]
            if (par, length) not in plans:
                plan = build_plan(par.schedule, par.context_parallel_size, length, mode_options(par))
                plans[par, length] = plan
    return list(plans.values())


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


def draw(runs: Sequence[Run], plans: Sequence[Plan]) -> Figure:
    """Draw loss curves, their differences below them, and one panel per plan on the right."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: it would keep the figure, and look for a display
    from matplotlib.ticker import MaxNLocator

    from ...planner.draw import draw_on

    with rc_context(_STYLE | {"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        columns = math.ceil(len(plans) / 2)  # two plans above each other; a single one has the full height
        figure = Figure(figsize=(8 + 7 * columns, 6.2 if len(plans) < 2 else 8), layout="constrained")
        grid = figure.add_gridspec(6, 1 + columns, width_ratios=[8] + [7] * columns)
        compared = len(runs) > 1
        upper = lowest = figure.add_subplot(grid[: 4 if compared else 6, 0])
        _draw_losses(upper, runs)
        if compared:
            lowest = figure.add_subplot(grid[4:, 0], sharex=upper)
            _draw_differences(lowest, runs)
            upper.tick_params(labelbottom=False)
        lowest.set_xlabel("step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels([upper, lowest])
        for i, plan in enumerate(plans):
            rows = slice(None) if len(plans) == 1 else slice(3 * (i % 2), 3 * (i % 2) + 3)
            axes = figure.add_subplot(grid[rows, 1 + i // 2])
            axes.grid(False)
            draw_on(axes, plan)
    return figure


def draw_metrics(runs: Sequence[Run]) -> Figure:
    """Draw a panel for every recorded metric, with a bar per run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metrics = _recorded(runs)
    columns = min(3, len(metrics))
    lines = math.ceil(len(metrics) / max(columns, 1))
    with rc_context(_STYLE | {"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(5.2 * max(columns, 1), lines * (1.0 + 0.3 * len(runs))), layout="constrained")
        for number, metric in enumerate(metrics):
            axes = figure.add_subplot(lines, columns, number + 1)
            colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
            bars = axes.barh(range(len(runs)), [metric.of(run) or 0.0 for run in runs], color=colours)
            axes.bar_label(bars, [metric.text(run) for run in runs], padding=3)
            axes.set_yticks(range(len(runs)), [] if number % columns else [run.name for run in runs])
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set_xlim(left=0)
            axes.set_title(f"{metric.title}  ({metric.better} is better)", loc="left", fontweight="bold")
            axes.set_xlabel(metric.unit)
    return figure


def _chosen_plans(runs: Sequence[Run], choice: str) -> list[Plan]:
    if choice in ("all", "none"):
        return distinct_plans(runs if choice == "all" else ())
    chosen = [run for run in runs if run.name in (choice, Path(choice).name)]
    if not chosen:
        known = ", ".join(run.name for run in runs)
        raise ValueError(f"--plan {choice}: expected all, none or one of the runs ({known}). Name one of these.")
    plans = distinct_plans(chosen)
    if not plans:
        raise ValueError(f"--plan {choice}: this run has one context-parallel rank, so no plan. Use --plan none.")
    return plans


def compare(
    folders: Sequence[Path | str],
    out: Path | str | None = None,
    plan: str = "all",
    rows: int = 50,
    html: Path | str | None = None,
) -> Path:
    """Print tables of the runs in `folders`, write the pictures, and the dashboard if `html` is given.

    Args:
        folders: run folders; differences are taken from the first.
        out: the picture of losses (its suffix selects the format). Its name with `_figures` is the picture of speeds,
            waiting and memory. None for `compare.png` beside the first run.
        plan: `all` draws every distinct plan of several ranks, `none` no plan, a run's name only that run's.
        rows: the most steps to print.
        html: path of the dashboard.

    Returns:
        the path of the picture of losses.

    Raises:
        ValueError: a run that cannot be read, no common steps, or an unknown `plan`.
    """
    if rows < 2:
        raise ValueError(f"--rows {rows}: expected at least 2. The first and the last step are always shown.")
    runs = load_runs(folders)
    plans = _chosen_plans(runs, plan)
    print(loss_table(runs, rows), summary_table(runs), sep="\n\n")
    path = Path(out) if out is not None else Path(folders[0]).resolve().parent / "compare.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, plans).savefig(path, dpi=150)
    figures = path.with_stem(f"{path.stem}_figures")
    draw_metrics(runs).savefig(figures, dpi=120)
    print(f"\npictures: {path} (losses), {figures} (speed, waiting, memory)")
    if html is not None:
        Path(html).parent.mkdir(parents=True, exist_ok=True)
        write_dashboard(runs, Path(html))
        print(f"dashboard: {html} (open it in a browser)")
    return path
