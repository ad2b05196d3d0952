"""The `compare` verb: runs in tables, a picture and a dashboard.

Reads each run's `metrics.jsonl` and `resolved.yaml`. Differences are loss minus the first run's loss, at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import ParallelismConfig, mode_options
from ..schedules import build_plan
from .dashboard import write_dashboard
from .runs import COLOURS, METRICS, Metric, Run, common_steps, differences, load_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
_OPTIONS = ("schedule", "max_buffer_tokens", "inner_size", "outer_schedule", "cluster")


class PlanKey(NamedTuple):
    """What tells context-parallel plans apart. length: tokens of a sequence."""

    parallelism: ParallelismConfig
    length: int


def _layout(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join((lines[0], "-+-".join("-" * width for width in widths), *lines[1:]))


def loss_table(runs: Sequence[Run], max_rows: int) -> str:
    """Losses and differences by step; of more than `max_rows` steps evenly spaced ones, first and last included."""
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
    return _layout(header, rows) + note


def summary_table(runs: Sequence[Run]) -> str:
    """Medians of speed and waiting, peak memory and the largest difference of each run; columns that none has are left
    out."""
    steps = common_steps(runs)
    known = _recorded(runs)
    header = ["run", "mode", "steps", *(metric.title for metric in known), "max |difference|"]
    rows = []
    for run in runs:
        figures = [metric.text(run) for metric in known]
        rows.append([run.name, run.facts()["mode"], str(len(run.records)), *figures, _largest(run, runs[0], steps)])
    return _layout(header, rows) + "\n(medians over all recorded steps)"


def _recorded(runs: Sequence[Run]) -> list[Metric]:
    """Figures that some run has."""
    return [metric for metric in METRICS if any(metric.of(run) is not None for run in runs)]


def _largest(run: Run, first: Run, steps: Sequence[int]) -> str:
    if run is first:
        return "first"
    apart = [abs(d) for d in differences(run, first, steps)]
    # max() would pass over a NaN, depending on where it stands.
    return "nan" if any(math.isnan(d) for d in apart) else f"{max(apart):.2e}"


def plan_keys(runs: Sequence[Run]) -> list[PlanKey]:
    """The distinct context-parallel plans of more than one rank among `runs`, in order."""
    keys: dict[PlanKey, None] = {}
    for run in runs:
        parallelism = run.config.get("parallelism", {})
        world = parallelism.get("context_parallel_size", 1)
        if world > 1:
            told = {key: parallelism[key] for key in _OPTIONS if key in parallelism}
            plan = ParallelismConfig(context_parallel_size=world, **told)
            keys[PlanKey(plan, run.config["data"]["seq_length"])] = None
    return list(keys)


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        steps = sorted(run.records)
        # Later runs lie on the first one where the losses agree: it is drawn wide and pale, so that both stay visible.
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


def draw(runs: Sequence[Run], plans: Sequence[PlanKey]) -> Figure:
    """The picture: loss curves, their differences below them, and one panel for each of `plans` on the right."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: it would keep the figure, and look for a display
    from matplotlib.ticker import MaxNLocator

    from ..schedules.draw import draw_on

    with rc_context(_STYLE | {"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        columns = math.ceil(len(plans) / 2)  # two plans above each other, one alone in full height
        figure = Figure(figsize=(8 + 7 * columns, 6.2 if len(plans) < 2 else 8), layout="constrained")
        grid = figure.add_gridspec(6, 1 + columns, width_ratios=[8] + [7] * columns)
        compared = len(runs) > 1
        upper = figure.add_subplot(grid[: 4 if compared else 6, 0])
        _draw_losses(upper, runs)
        lowest = upper
        if compared:
            lowest = figure.add_subplot(grid[4:, 0], sharex=upper)
            _draw_differences(lowest, runs)
            upper.tick_params(labelbottom=False)
        lowest.set_xlabel("step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels([upper, lowest])
        for i, key in enumerate(plans):
            rows = slice(None) if len(plans) == 1 else slice(3 * (i % 2), 3 * (i % 2) + 3)
            axes = figure.add_subplot(grid[rows, 1 + i // 2])
            axes.grid(False)
            par = key.parallelism
            draw_on(axes, build_plan(par.schedule, par.context_parallel_size, key.length, mode_options(par)))
    return figure


def draw_figures(runs: Sequence[Run]) -> Figure:
    """The other picture: a panel of bars for every figure that a run has, a bar a run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    known = _recorded(runs)
    columns = min(3, len(known))
    lines = math.ceil(len(known) / max(columns, 1))
    with rc_context(_STYLE | {"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(5.2 * max(columns, 1), lines * (1.0 + 0.3 * len(runs))), layout="constrained")
        for number, metric in enumerate(known, start=1):
            axes = figure.add_subplot(lines, columns, number)
            values = [metric.of(run) for run in runs]
            colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
            bars = axes.barh(range(len(runs)), [value or 0.0 for value in values], color=colours)
            axes.bar_label(bars, [metric.text(run) for run in runs], padding=3)
            axes.set_yticks(
                range(len(runs)), [run.name for run in runs] if number % columns == 1 or columns == 1 else []
            )
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set_xlim(left=0)
            axes.set_title(f"{metric.title}  ({metric.better} is better)", loc="left", fontweight="bold")
            axes.set_xlabel(metric.unit)
    return figure


def _chosen_plans(runs: Sequence[Run], choice: str) -> list[PlanKey]:
    if choice == "none":
        return []
    if choice == "all":
        return plan_keys(runs)
    chosen = [run for run in runs if run.name in (choice, Path(choice).name)]
    if not chosen:
        known = ", ".join(run.name for run in runs)
        raise ValueError(f"--plan {choice}: expected all, none or one of the runs ({known}). Name one of these.")
    keys = plan_keys(chosen)
    if not keys:
        raise ValueError(f"--plan {choice}: this run has one context-parallel rank, so no plan. Use --plan none.")
    return keys


def compare(
    folders: Sequence[Path | str],
    out: Path | str | None = None,
    plan: str = "all",
    rows: int = 50,
    html: Path | str | None = None,
) -> Path:
    """Print the tables for the runs in `folders`, write the pictures and, if asked for, the dashboard.

    Args:
        folders: run folders; differences are taken from the first.
        out: the picture of losses (its suffix says the format), with `_figures` that of speeds, waiting and memory;
            None: `compare.png` beside the first run.
        plan: `all` draws every distinct plan of more than one rank, `none` none, a run's name only that run's.
        rows: most steps to print.
        html: where the dashboard goes.

    Returns:
        where the picture of losses is.

    Raises:
        ValueError: a run that cannot be read, no common steps, or an unknown `plan`.
    """
    if rows < 2:
        raise ValueError(f"--rows {rows}: expected at least 2. The first and the last step are always shown.")
    runs = load_runs(folders)
    chosen = _chosen_plans(runs, plan)
    print(loss_table(runs, rows), summary_table(runs), sep="\n\n")
    path = Path(out) if out is not None else Path(folders[0]).resolve().parent / "compare.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, chosen).savefig(path, dpi=150)
    figures = path.with_stem(f"{path.stem}_figures")
    draw_figures(runs).savefig(figures, dpi=120)
    print(f"\npictures: {path} (losses), {figures} (speed, waiting, memory)")
    if html is not None:
        Path(html).parent.mkdir(parents=True, exist_ok=True)
        write_dashboard(runs, Path(html))
        print(f"dashboard: {html} (open it in a browser)")
    return path
