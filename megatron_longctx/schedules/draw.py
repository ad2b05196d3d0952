"""Plans as pictures: which step computes which query-key pairs, how even the load is, and where documents are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .describe import document_shards
from .plan import Block, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELLS = 480  # resolution of the pair map: enough to see every span, whatever the length
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}  # behind numbers on hatching


def load_pyplot() -> Any:
    """Import matplotlib's pyplot for files, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG with the pair map and the load of every rank.

    Raises:
        OSError: `path` cannot be written.
    """
    pyplot = load_pyplot()
    height = min(max(4.8, 0.36 * plan.n + 2.4), 12.0)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(height * 2.35, height), width_ratios=(1, 1.25))
    _pair_map(left, plan)
    draw_on(right, plan)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_on(axes: Axes, plan: Plan) -> None:
    """Draw the load of every rank over time on `axes`: one bar per kernel call, labelled with the keys' home rank.

    A step lasts as long as its busiest rank; grey is waiting. Colour is the step, as in the pair map.
    """
    colours = _colours(len(plan.steps))
    start = 0.0
    scale = 1.0 / max(plan.mask.pairs / plan.n, 1)
    for t, step in enumerate(plan.steps):
        loads = [sum(a.work for a in attends) for attends in step.attends]
        width = max(loads) * scale
        for rank, attends in enumerate(step.attends):
            left = start
            for attend in attends:
                share = attend.work * scale
                axes.barh(rank, share, left=left, height=0.78, color=colours[t], edgecolor="white", linewidth=0.6)
                if share > 0.045 and plan.n <= 16:
                    homes = sorted({key.home for key in attend.keys})
                    label = str(homes[0]) if len(homes) == 1 else f"{homes[0]}…{homes[-1]}"
                    axes.text(left + share / 2, rank, label, ha="center", va="center", fontsize=7.5)
                left += share
            if left < start + width - 1e-9:
                waiting: dict[str, Any] = {"color": "#e9e9e9", "hatch": "////", "edgecolor": "#c4c4c4", "linewidth": 0}
                axes.barh(rank, start + width - left, left=left, height=0.78, **waiting)
        start += width
        if width:
            axes.axvline(start, color="#888888", linewidth=0.5, linestyle=":")
    axes.set_title(f"{plan.name}, {plan.n} ranks: load per rank ({plan.idle_fraction():.1%} idle)", fontsize=10)
    axes.set_xlabel("time (1 = perfectly shared work); numbers: home rank of the keys; grey: waiting", fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    axes.set_yticks(range(plan.n) if plan.n <= 16 else range(0, plan.n, max(1, plan.n // 8)))
    axes.set_ylim(plan.n - 0.5, -0.5)
    axes.set_xlim(0, max(start, 1.0) * 1.01)
    axes.tick_params(labelsize=8)


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    # Start light enough that the labels stay readable on every bar.
    return [colormaps["viridis"](0.35 + 0.6 * t / max(count - 1, 1)) for t in range(count)]


def _pair_map(axes: Axes, plan: Plan) -> None:
    """Draw query tokens down and key tokens across; colour is the step that computes the pair."""
    import numpy
    from matplotlib.colors import ListedColormap

    cells = min(_CELLS, plan.mask.length)
    sample = [(2 * i + 1) * plan.mask.length // (2 * cells) for i in range(cells)]
    slots = [  # (cell, slot) of the sampled tokens, indexed by rank
        [(i, at + span.index(token)) for at, span in spans for i, token in enumerate(sample) if token in span]
        for spans in map(plan.queries.slot_spans, range(plan.n))
    ]
    grid = numpy.full((cells, cells), numpy.nan)
    for t, step in enumerate(plan.steps):
        for attend in (attend for attends in step.attends for attend in attends):
            rows, query_rows = _gathered(attend.queries, slots)
            columns, key_rows = _gathered(attend.keys, slots)
            for each in attend.slices if rows and columns else ():
                i, j = numpy.array(query_rows)[:, None], numpy.array(key_rows)
                seen = (each.q_start <= i) & (i < each.q_stop) & (each.k_start <= j) & (j < each.k_stop)
                seen &= (each.lo <= j - i) & (j - i <= each.hi)
                block = grid[numpy.ix_(rows, columns)]
                grid[numpy.ix_(rows, columns)] = numpy.where(seen, t, block)
    end = max(plan.mask.length, 1)
    colours = ListedColormap(_colours(len(plan.steps)))
    axes.imshow(
        grid, cmap=colours, vmin=-0.5, vmax=len(plan.steps) - 0.5, extent=(0, end, end, 0), interpolation="nearest"
    )
    for span in (span for spans in plan.queries.spans for span in spans if span.step == 1):
        axes.axhline(span.start, color="white", linewidth=0.5)
        axes.axvline(span.start, color="white", linewidth=0.5)
    handles = [axes.plot([], [], "s", color=colours(t))[0] for t in range(len(plan.steps))]
    if len(handles) <= 16:
        axes.legend(handles, [f"step {t}" for t in range(len(handles))], fontsize=8, loc="upper right", frameon=False)
    axes.set_title(f"{plan.queries.name} layout: step that computes each query-key pair", fontsize=10)
    axes.set_xlabel("key token", fontsize=9)
    axes.set_ylabel("query token", fontsize=9)
    axes.tick_params(labelsize=8)


def _gathered(blocks: tuple[Block, ...], slots: list[list[tuple[int, int]]]) -> tuple[list[int], list[int]]:
    """Return the cells of the sampled tokens in some blocks, and their numbers among the gathered rows."""
    cells, rows, at = [], [], 0
    for block in blocks:
        for cell, slot in slots[block.home]:
            if block.start <= slot < block.stop:
                cells.append(cell)
                rows.append(at + slot - block.start)
        at += block.tokens
    return cells, rows


def draw_placement(plan: Plan, path: Path) -> None:
    """Write a PNG with one bar of tokens per rank, coloured by document and hatched where a document is cut.

    Raises:
        OSError: `path` cannot be written.
    """
    pyplot = load_pyplot()
    from matplotlib import colormaps

    figure, axes = pyplot.subplots(figsize=(11, min(max(3.2, 0.42 * plan.n + 1.6), 12.0)))
    left = [0] * plan.n
    for rank, number, tokens, is_whole in document_shards(plan):
        style: dict[str, Any] = {"color": colormaps["tab20"](number % 20), "hatch": None if is_whole else "///"}
        axes.barh(rank, tokens, left=left[rank], height=0.8, edgecolor="white", linewidth=0.6, **style)
        if tokens * 28 > plan.mask.length / plan.n and plan.n <= 32:
            place = left[rank] + tokens / 2, rank
            axes.text(*place, str(number), ha="center", va="center", fontsize=8, bbox=_LABEL_BOX)
        left[rank] += tokens
    for rank in range(plan.n) if plan.n <= 32 else ():
        share = plan.pairs(rank) * plan.n / max(plan.mask.pairs, 1)
        axes.text(left[rank], rank, f"  {share:.1%} of an equal share of the pairs", va="center", fontsize=8)
    axes.set_title(f"{plan.queries.name} layout: {len(plan.mask.documents)} documents over {plan.n} ranks", fontsize=10)
    axes.set_xlabel("tokens; numbers: documents, hatched where other ranks hold a part", fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    axes.set_ylim(plan.n - 0.5, -0.5)
    axes.set_xlim(0, max(left, default=1) * 1.22 + 1)
    axes.set_yticks(range(0, plan.n, max(1, plan.n // 16)))
    axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
