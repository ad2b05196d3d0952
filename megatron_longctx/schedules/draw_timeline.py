"""Simulated plans as Gantt charts: one plan with all ranks, or all modes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refuse
from .cost import GIB
from .draw import load_pyplot
from .select import Candidate
from .simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT, _MERGE, _TRANSFER = "#ececec", "#e4a33d", "#7d8fa8"


def draw_timeline(simulation: Simulation, path: Path) -> None:
    """Write a PNG with what every rank computes and transfers over time.

    Args:
        simulation: a simulation with `timeline=True`.

    Raises:
        ValueError: a simulation without a timeline.
        OSError: `path` cannot be written.
    """
    pyplot = load_pyplot()
    plan = simulation.plan
    if not simulation.spans:
        raise refuse("simulation", plan.name, "one with a time line", "Call simulate(timeline=True).")
    figure, axes = pyplot.subplots(figsize=(12, min(2.2 + 0.5 * plan.n, 14)))
    _gantt(axes, simulation, simulation.seconds)
    axes.set_title(
        f"{plan.name} {_direction(simulation)}, {plan.n} ranks, {plan.mask.length:,} tokens: "
        f"{simulation.seconds * 1e3:.3f} ms, at most {max(simulation.exposed_s) * 1e3:.3f} ms waiting for messages, "
        f"{simulation.idle_share:.1%} not computing, {simulation.peak_bytes / GIB:.2f} GiB",
        fontsize=11,
    )
    below = 0.5, -0.12 if plan.n > 6 else -0.22
    handles = _handles("number, shade: home of its keys")
    axes.legend(handles=handles, ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=below)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def draw_modes(entries: Sequence[Candidate], path: Path, title: str) -> None:
    """Write a PNG with forward and backward of every mode on one time scale, the fastest first, and their totals.

    Args:
        entries: simulations with `timeline=True`; modes that cannot run are listed with their reasons.
    """
    pyplot = load_pyplot()
    ran = sorted((entry for entry in entries if entry.forward), key=lambda entry: entry.seconds)
    refused = [entry for entry in entries if not entry.forward]
    rows = max(len(ran), 1)
    figure, grid = pyplot.subplots(
        rows, 3, figsize=(17, 1.9 * rows + 1.2), squeeze=False, width_ratios=(1, 2.2, 0.55), layout="constrained"
    )
    ends = [max((getattr(entry, way).seconds for entry in ran), default=1.0) for way in ("forward", "backward")]
    for row, entry in enumerate(ran):
        for axes, simulation, end in zip(grid[row], (entry.forward, entry.backward), ends, strict=False):
            assert simulation is not None
            _gantt(axes, simulation, end, small=True)
            figures = f"{simulation.seconds * 1e3:.2f} ms, {simulation.idle_share:.0%} not computing"
            heading = f"{entry.name} {_direction(simulation)}: {figures}"
            axes.set_title(heading, fontsize=9 if len(heading) < 60 else 7, loc="left")
        _totals(grid[row][2], entry, ran)
        grid[row][0].set_ylabel("ranks, 0 first", fontsize=8)
    for axes in grid[-1][:2]:
        axes.set_xlabel("milliseconds", fontsize=9)
    grid[0][2].set_title("forward and backward; memory", fontsize=9, loc="left")
    handles, place = _handles("shade: home of its keys"), "outside upper center"
    figure.legend(handles=handles, loc=place, ncols=4, fontsize=9, frameon=False, title=title, title_fontsize=13)
    if refused:
        reasons = "\n".join(f"{entry.name}: {entry.reason}" for entry in refused)
        figure.supxlabel(reasons, fontsize=9, ha="left", x=0.01)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _direction(simulation: Simulation) -> str:
    return "backward" if simulation.plan.backward else "forward"


def _gantt(axes: Axes, simulation: Simulation, end: float, small: bool = False) -> None:
    from matplotlib import colormaps

    n = simulation.plan.n
    scale = 1e3  # milliseconds
    colours = colormaps["viridis"]
    waiting: dict[str, Any] = {"color": _WAIT, "hatch": "////", "edgecolor": "#d0d0d0", "linewidth": 0}
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.0 if small else 0.5}
    for rank in range(n):
        axes.barh(rank - 0.1, simulation.seconds * scale, height=0.56, **waiting)
    for span in simulation.spans:
        left, width = span.start * scale, (span.stop - span.start) * scale
        if span.lane == "transfer":
            axes.barh(span.rank + 0.33, width, left=left, height=0.22, color=_TRANSFER, **edge)
            continue
        colour = _MERGE if span.home < 0 else colours(0.3 + 0.65 * span.home / max(n - 1, 1))
        axes.barh(span.rank - 0.1, width, left=left, height=0.56, color=colour, **edge)
        if not small and n <= 16 and span.home >= 0 and span.stop - span.start > 0.03 * end:
            axes.text(left + width / 2, span.rank - 0.1, span.label, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, end * scale * 1.005)
    axes.set_ylim(n - 0.4, -0.5)
    axes.tick_params(labelsize=8)
    if small:
        axes.set_yticks([])
        return
    axes.set_xlabel("milliseconds", fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    axes.set_yticks(range(n) if n <= 16 else range(0, n, max(1, n // 8)))


def _totals(axes: Axes, entry: Candidate, ran: Sequence[Candidate]) -> None:
    """Draw time and memory of a mode as shares of the slowest and the largest."""
    slowest = max(other.seconds for other in ran)
    largest = max(other.peak_bytes for other in ran)
    axes.barh([0, 1], [entry.seconds / slowest, entry.peak_bytes / largest], color=["#4c7f8c", "#b98ab0"], height=0.6)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(1.6, -0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.02, 0, f"{entry.seconds * 1e3:.2f} ms", va="center", fontsize=9, color="white")
    axes.text(0.02, 1, f"{entry.peak_bytes / GIB:.2f} GiB", va="center", fontsize=9, color="white")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _handles(marks: str) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(facecolor="#3b8d8c", label=f"kernel call ({marks})"),
        Patch(facecolor=_MERGE, label="packing and merging"),
        Patch(facecolor=_TRANSFER, label="messages of a step"),
        Patch(facecolor=_WAIT, hatch="////", edgecolor="#d0d0d0", label="waiting"),
    ]
