"""Compare training runs: one table, one summary, one picture.

    python analysis/compare.py runs/demo-cp1 runs/demo-cp4 --out runs/demo.png

Reads each run's `metrics.jsonl` and `resolved.yaml`. Differences are loss minus the first run's loss, at the same step.
Installed from a wheel the same is `python -m megatron_longctx.analysis.compare`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from megatron_longctx import names
from megatron_longctx.metrics.sinks import decode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron_longctx.metrics.sinks import Value

# Blue, vermilion, green, … told apart by colour-blind readers as well; lines also differ in style.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_SUMMARY = (
    ("tokens/s", names.TOKENS_PER_S, ",.0f"),
    ("tokens/s/GPU", names.TOKENS_PER_S_PER_GPU, ",.0f"),
    ("TFLOP/s/GPU", names.TFLOPS_PER_GPU, ".3g"),
    ("MFU causal %", names.MFU_CAUSAL_PCT, ".1f"),
    ("MFU dense %", names.MFU_DENSE_PCT, ".1f"),
)


@dataclass(frozen=True)
class Run:
    """One run as read from its folder: `records` by step, `config` the resolved tree."""

    name: str
    records: dict[int, dict[str, Value]]
    config: dict[str, Any]

    def loss(self, step: int) -> float:
        """Loss at `step`; NaN where none was recorded."""
        return _number(self.records[step].get(names.LOSS))

    def column(self, key: str) -> list[float]:
        """Every recorded value of one metric."""
        return [float(v) for r in self.records.values() if isinstance(v := r.get(key), (int, float))]


_OPTIONS = ("max_buffer_tokens", "inner_size", "outer_schedule", "cluster")


@dataclass(frozen=True)
class PlanKey:
    """What tells context-parallel plans apart. `length`: tokens of a sequence; `world`: context-parallel ranks."""

    schedule: str
    world: int
    length: int
    max_buffer_tokens: int | None = None
    inner_size: int | None = None
    outer_schedule: str = "zigzag"
    cluster: str | None = None


def _number(value: Value) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def load_run(folder: Path | str) -> Run:
    """Read one run folder.

    Raises:
        ValueError: the folder or one of its files is missing, or there are no steps in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"run {folder}: expected a run folder. Check the path; runs are in runs/<run.name>.")
    metrics, resolved = folder / "metrics.jsonl", folder / "resolved.yaml"
    for path in (metrics, resolved):
        if not path.is_file():
            raise ValueError(f"{path}: no such file. Give a folder that `megatron-longctx train` wrote.")
    lines = metrics.read_text(encoding="utf-8").splitlines()
    records: dict[int, dict[str, Value]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = decode(line)
        except ValueError as error:
            if number == len(lines):
                continue  # a run that is still writing, or was killed while writing
            raise ValueError(f"{metrics}:{number}: not a JSON object ({error}). Remove the line.") from error
        step = record.get(names.STEP)
        if isinstance(step, int):
            records[step] = record
    if not records:
        raise ValueError(f"{metrics}: no training steps in it. Let the run finish at least one step.")
    config = OmegaConf.to_container(OmegaConf.load(resolved))
    if not isinstance(config, dict):
        raise ValueError(f"{resolved}: expected a mapping of settings. Give a folder that training wrote.")
    return Run(folder.resolve().name, records, {str(key): value for key, value in config.items()})


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders; runs whose folders are named alike are told apart by their paths.

    Raises:
        ValueError: as `load_run`.
    """
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    return runs


def common_steps(runs: Sequence[Run]) -> list[int]:
    """Steps that every run has, ascending.

    Raises:
        ValueError: there are none.
    """
    steps = sorted(set.intersection(*(set(run.records) for run in runs)))
    if not steps:
        spans = ", ".join(f"{run.name}: {min(run.records)} to {max(run.records)}" for run in runs)
        raise ValueError(f"the runs have no common steps ({spans}). Compare runs that trained the same steps.")
    return steps


def differences(run: Run, first: Run, steps: Sequence[int]) -> list[float]:
    """Loss of `run` minus loss of `first`, by step."""
    return [run.loss(step) - first.loss(step) for step in steps]


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
    """Medians of speed, peak memory and the largest difference of each run."""

    def cell(values: Sequence[float], pick: Any, spec: str) -> str:
        return format(pick(values), spec) if values else "—"

    steps = common_steps(runs)
    header = ["run", "steps", *(title for title, _, _ in _SUMMARY), "peak mem GiB", "max |difference|"]
    rows = []
    for run in runs:
        medians = [cell(run.column(key), median, spec) for _, key, spec in _SUMMARY]
        memory = cell(run.column(names.PEAK_ACTIVE_GIB), max, ".2f")
        rows.append([run.name, str(len(run.records)), *medians, memory, _largest(run, runs[0], steps)])
    return _layout(header, rows) + "\n(medians over all recorded steps)"


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
            length = run.config["data"]["seq_length"]
            told = {key: parallelism[key] for key in _OPTIONS if key in parallelism}
            keys[PlanKey(parallelism["schedule"], world, length, **told)] = None
    return list(keys)


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        steps = sorted(run.records)
        # Later runs lie on the first one where the losses agree: it is drawn wide and pale, so that both stay visible.
        pale = i == 0 and len(runs) > 1
        axes.plot(
            steps,
            [run.loss(step) for step in steps],
            linestyle="-" if i == 0 else _STYLES[i % len(_STYLES)],
            linewidth=5.0 if pale else 1.8,
            alpha=0.35 if pale else 1.0,
            color=_COLOURS[i % len(_COLOURS)],
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
        colour = _COLOURS[i % len(_COLOURS)]
        axes.plot(steps, apart, "o-", markersize=3.5, linewidth=1.0, color=colour, label=f"{run.name} - {first.name}")
    # Differences that grow by orders of magnitude are unreadable on a linear axis; exact zeros need its linear part.
    if sizes and max(sizes) > 20 * min(sizes):
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(sizes))))
        axes.set_ylim(bottom=0)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.set_ylim(bottom=0, top=None if sizes else 1e-6)
    axes.set_ylabel("|difference|")
    if len(runs) > 2:
        axes.legend(frameon=False, loc="best")


def _draw_plan(axes: Axes, key: PlanKey) -> None:
    from megatron_longctx.config import ParallelismConfig, mode_options  # here: without plans it needs no room
    from megatron_longctx.schedules import build_plan
    from megatron_longctx.schedules.draw import draw_on

    told = {name: getattr(key, name) for name in _OPTIONS}
    options = mode_options(ParallelismConfig(context_parallel_size=key.world, **told))
    draw_on(axes, build_plan(key.schedule, key.world, key.length, options))


def draw(runs: Sequence[Run], plans: Sequence[PlanKey]) -> Figure:
    """The picture: loss curves, their differences below them, and one panel for each of `plans` on the right."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}
    with rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        columns = math.ceil(len(plans) / 2)  # two plans above each other, one alone in full height
        figure = Figure(figsize=(8 + 7 * columns, 6.2 if len(plans) < 2 else 8), layout="constrained")
        FigureCanvasAgg(figure)  # no pyplot: it would keep the figure, and look for a display
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
            _draw_plan(axes, key)
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


def compare(folders: Sequence[Path | str], out: Path | str | None = None, plan: str = "all", rows: int = 50) -> Path:
    """Print the tables for the runs in `folders` and write the picture.

    Args:
        folders: run folders; differences are taken from the first.
        out: the picture (its suffix says the format); None: `compare.png` beside the first run.
        plan: `all` draws every distinct plan of more than one rank, `none` none, a run's name only that run's.
        rows: most steps to print.

    Returns:
        where the picture is.

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
    print(f"\npicture: {path}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="compare", description="Compare training runs: table, summary, picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is what others are compared to")
    parser.add_argument("--out", metavar="FILE", help="picture to write (default: compare.png beside the first run)")
    parser.add_argument("--plan", default="all", metavar="RUN", help="draw this run's plan; `all` (default) or `none`")
    parser.add_argument("--rows", type=int, default=50, help="most steps to print (default: 50)")
    arguments = parser.parse_args(argv)
    try:
        compare(arguments.runs, arguments.out, arguments.plan, arguments.rows)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
