"""Draw the picture of docs/inference.md: `python -m analysis.inference_picture [--out docs/images/inference.png]`.

Where the tokens of a conversation lie, and what ranks do in its last turn, from the cache manager and the plans;
times are simulated for one layer of 32 query and 8 key/value heads of 128 on H200s whose figures are the data sheets'.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.patches import Patch

from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager, ScheduledChunk
from megatron_longctx.schedules import Workload
from megatron_longctx.schedules.cache_modes import CACHE_MODES
from megatron_longctx.schedules.simulate import Simulation, simulate
from megatron_longctx.topology import load_cluster

matplotlib.use("Agg")
from matplotlib import pyplot

RANKS, PAGE = 4, 64
TURNS = (65536, 24576, 16384)  # new tokens of each
SHORT = 512  # ... of another third turn
PAGES = sum(TURNS) // RANKS // PAGE + 8  # of a rank
COLOURS = ("#22667a", "#4497ab", "#c0703a")
COMPUTE, MERGE, TRANSFER = "#3b8d8c", "#e4a33d", "#7d8fa8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/inference.png"))
    out: Path = parser.parse_args().out
    figure = pyplot.figure(figsize=(13, 8.2))
    grid = figure.add_gridspec(3, 3, hspace=0.7, wspace=0.13, left=0.05, right=0.98, top=0.95, bottom=0.12)
    homes(figure.add_subplot(grid[0, :]))
    for row, new in ((1, TURNS[-1]), (2, SHORT)):
        found = {mode: simulated(mode, *last_turn(new)) for mode in CACHE_MODES}
        longest = max(simulation.seconds for simulation in found.values())
        for column, (mode, simulation) in enumerate(found.items()):
            axes = figure.add_subplot(grid[row, column])
            lanes(axes, simulation, longest)
            cached = sum(TURNS[:-1])
            axes.set_title(
                f"{mode}: {new:,} new over {cached:,} cached, {simulation.seconds * 1e3:.2f} ms", fontsize=10
            )
    colours = {f"turn {i}": colour for i, colour in enumerate(COLOURS, 1)}
    colours |= {"kernel calls": COMPUTE, "packing, merging": MERGE, "messages": TRANSFER}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, ncols=6, frameon=False, loc="lower center", fontsize=10)
    figure.savefig(out, dpi=100)
    print(out)


def last_turn(new: int) -> tuple[ScheduledChunk, int]:
    """A turn of `new` tokens after the first two, and the slots of a rank."""
    manager = CacheManager(RANKS, PAGES, PAGE)
    session = manager.open()
    for before in TURNS[:-1]:
        manager.append({session: before})
    (turn,) = manager.append({session: new})
    return turn, manager.slots_per_rank


def homes(axes: Any) -> None:
    """Positions of the conversation by the rank that holds them, coloured by turn."""
    manager = CacheManager(RANKS, PAGES, PAGE)
    session = manager.open()
    start = 0
    for colour, new in zip(COLOURS, TURNS, strict=True):
        (turn,) = manager.append({session: new})
        for rank in range(RANKS):
            for span in turn.new_spans[rank]:
                axes.barh(rank, len(span), left=start + span.start, height=0.7, color=colour, edgecolor="white")
        start += new
    for rank in range(RANKS):
        axes.text(start * 1.005, rank, f"{manager.num_tokens(session, rank):,} tokens", va="center", fontsize=9)
    axes.set_title("Which rank holds which tokens of a conversation of three turns", fontsize=11)
    axes.set_xlabel("position")
    frame(axes, start * 1.08)


def lanes(axes: Any, simulation: Simulation, longest: float) -> None:
    """What every rank computes, and below it when its messages are under way."""
    for span in simulation.spans:
        shift, height, colour = (-0.1, 0.55, MERGE if span.home < 0 else COMPUTE)
        if span.lane == "transfer":
            shift, height, colour = 0.33, 0.2, TRANSFER
        left, width = span.start * 1e3, (span.stop - span.start) * 1e3
        axes.barh(span.rank + shift, width, left=left, height=height, color=colour, edgecolor="white", linewidth=0.3)
    axes.set_xlabel("milliseconds of a layer's attention, simulated")
    frame(axes, longest * 1.02e3)


def simulated(mode: str, turn: ScheduledChunk, slots: int) -> Simulation:
    cluster = load_cluster("h200_x8").resized(RANKS)
    return simulate(Batch(RANKS, slots, (turn,)).plan(mode), cluster, Workload(32, 8, 128), timeline=True)


def frame(axes: Any, right: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(RANKS - 0.4, -0.6)
    axes.set_yticks(range(RANKS))
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("rank")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
