"""Where a conversation's tokens are, and what ranks do in its last turn: `inference` of `analysis.pictures`."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.plans import Workload
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.planner.simulate import Simulation, simulate

WORKLOAD = Workload(32, 8, 128)
RANKS, PAGE = 4, 64
TURNS = (65536, 24576, 16384)  # new tokens of every turn
SHORT = 512  # ... of another third turn
PAGES = sum(TURNS) // RANKS // PAGE + 8  # per rank
TURN_COLOURS = ("#22667a", "#4497ab", "#c0703a")
COMPUTE, MERGE, TRANSFER = "#3b8d8c", "#e4a33d", "#7d8fa8"


def inference(out: Path) -> None:
    """Draw where the tokens of a conversation are, and the last turn, long or short, in every mode."""
    figure = pyplot.figure(figsize=(13, 8.2))
    grid = figure.add_gridspec(3, 3, hspace=0.7, wspace=0.13, left=0.05, right=0.98, top=0.95, bottom=0.12)
    _draw_placement(figure.add_subplot(grid[0, :]))
    cluster, cached = load_cluster("h200_x8").resized(RANKS), sum(TURNS[:-1])
    for row, new in ((1, TURNS[-1]), (2, SHORT)):
        manager = CacheManager(RANKS, PAGES, PAGE)
        session = manager.open()
        *_, chunks = (manager.append({session: tokens}) for tokens in (*TURNS[:-1], new))
        batch = Batch(RANKS, manager.slots[0], chunks)
        simulations = {mode: simulate(batch.plan(mode), cluster, WORKLOAD, timeline=True) for mode in CACHE_MODES}
        longest = max(simulation.seconds for simulation in simulations.values())
        for column, (mode, simulation) in enumerate(simulations.items()):
            axes = figure.add_subplot(grid[row, column])
            _draw_lanes(axes, simulation, longest)
            title = f"{mode}: {new:,} new over {cached:,} cached, {simulation.seconds * 1e3:.2f} ms"
            axes.set_title(title, fontsize=10)
    colours = {f"turn {i}": colour for i, colour in enumerate(TURN_COLOURS, 1)}
    colours |= {"kernel calls": COMPUTE, "packing, merging": MERGE, "messages": TRANSFER}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, ncols=6, frameon=False, loc="lower center", fontsize=10)
    figure.savefig(out, dpi=100)


def _draw_placement(axes: Any) -> None:
    """Draw the positions of the conversation by the rank that holds them, coloured by turn."""
    manager = CacheManager(RANKS, PAGES, PAGE)
    session = manager.open()
    start = 0
    for colour, new in zip(TURN_COLOURS, TURNS, strict=True):
        (chunk,) = manager.append({session: new})
        for rank in range(RANKS):
            for span in chunk.new_spans[rank]:
                axes.barh(rank, len(span), left=start + span.start, height=0.7, color=colour, edgecolor="white")
        start += new
    for rank in range(RANKS):
        axes.text(start * 1.005, rank, f"{manager.shards(session)[rank].tokens:,} tokens", va="center", fontsize=9)
    axes.set_title("Which rank holds which tokens of a conversation of three turns", fontsize=11)
    axes.set_xlabel("position")
    _format_ranks(axes, start * 1.08)


def _draw_lanes(axes: Any, simulation: Simulation, longest: float) -> None:
    """Draw what every rank computes, and below it when its messages are in flight."""
    for span in simulation.spans:
        shift, height, colour = (-0.1, 0.55, MERGE if span.home < 0 else COMPUTE)
        if span.lane == "transfer":
            shift, height, colour = 0.33, 0.2, TRANSFER
        left, width = span.start * 1e3, (span.stop - span.start) * 1e3
        axes.barh(span.rank + shift, width, left=left, height=height, color=colour, edgecolor="white", linewidth=0.3)
    axes.set_xlabel("milliseconds of a layer's attention, simulated")
    _format_ranks(axes, longest * 1.02e3)


def _format_ranks(axes: Any, right: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(RANKS - 0.4, -0.6)
    axes.set_yticks(range(RANKS))
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("rank")
    axes.spines[["top", "right"]].set_visible(False)
