"""Plans as pictures: the step that computes each query-key pair, the load of ranks, the placement of documents, and
Gantt charts of simulations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import refuse
from ..core.plans.plan import Block, Plan
from .choose_mode import Candidate
from .cost import GIB
from .describe import document_shards, idle_fraction, rank_pairs, weighted_pairs
from .simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS = 480  # resolution of the pair map: enough to see every span of any length
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}  # behind numbers on hatching
_WAIT, _MERGE, _TRANSFER = "#ececec", "#e4a33d", "#7d8fa8"
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG with the pair map and the load of every rank. Raises OSError: `path` cannot be written."""
    height = min(max(4.8, 0.36 * plan.n + 2.4), 12.0)
    figure = _figure(height * 2.35, height)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _pair_map(left, plan)
    draw_on(right, plan)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def draw_placement(plan: Plan, path: Path) -> None:
    """Write a PNG with one bar of tokens per rank, coloured by document and hatched where a document is cut.

    Raises OSError: `path` cannot be written.
    """
    from matplotlib import colormaps

    figure = _figure(11, min(max(3.2, 0.42 * plan.n + 1.6), 12.0))
    axes = figure.subplots()
    left = [0] * plan.n
    for rank, number, tokens, is_whole in document_shards(plan):
        style: dict[str, Any] = {"color": colormaps["tab20"](number % 20), "hatch": None if is_whole else "///"}
        axes.barh(rank, tokens, left=left[rank], height=0.8, edgecolor="white", linewidth=0.6, **style)
        if tokens * 28 > plan.mask.length / plan.n and plan.n <= 32:
            place = left[rank] + tokens / 2, rank
            axes.text(*place, str(number), ha="center", va="center", fontsize=8, bbox=_LABEL_BOX)
        left[rank] += tokens
    for rank, pairs in enumerate(rank_pairs(plan) if plan.n <= 32 else ()):
        share = pairs * plan.n / max(plan.mask.pairs, 1)
        axes.text(left[rank], rank, f"  {share:.1%} of an equal share of the pairs", va="center", fontsize=8)
    axes.set_title(f"{plan.queries.name} layout: {len(plan.mask.documents)} documents over {plan.n} ranks", fontsize=10)
    _label(axes, "tokens; numbers: documents, hatched where other ranks hold a part", "rank")
    axes.set_ylim(plan.n - 0.5, -0.5)
    axes.set_xlim(0, max(left, default=0) + 1)
    axes.spines[["top", "right"]].set_visible(False)  # shares stand to the right of the axes
    axes.set_yticks(range(0, plan.n, max(1, plan.n // 16)))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def draw_timeline(simulation: Simulation, path: Path) -> None:
    """Write a PNG with what every rank computes and transfers over time. Raises OSError: `path` cannot be written.

    Refuse a simulation that was not made with `timeline=True`.
    """
    plan = simulation.plan
    if not simulation.spans:
        raise refuse("simulation", plan.name, "one with a time line", "Call simulate(timeline=True).")
    figure = _figure(12, min(2.2 + 0.5 * plan.n, 14))
    axes = figure.subplots()
    _gantt(axes, simulation, simulation.seconds)
    axes.set_title(
        f"{plan.name} {_direction(plan)}, {plan.n} ranks, {plan.mask.length:,} tokens: "
        f"{simulation.seconds * 1e3:.3f} ms, at most {max(simulation.exposed_s) * 1e3:.3f} ms waiting for messages, "
        f"{simulation.idle_share:.1%} not computing, {simulation.peak_bytes / GIB:.2f} GiB",
        fontsize=11,
    )
    below = 0.5, -0.12 if plan.n > 6 else -0.22
    handles = _handles("number, shade: home of its keys")
    axes.legend(handles=handles, ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=below)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def draw_modes(entries: Sequence[Candidate], path: Path, title: str) -> None:
    """Write a PNG with forward and backward of every mode on one time scale, the fastest first, and their totals.

    The simulations have `timeline=True`; modes that cannot run are listed with their reasons.
    """
    ran = sorted((entry for entry in entries if entry.forward), key=lambda entry: entry.seconds)
    rows = max(len(ran), 1)
    figure = _figure(17, 1.9 * rows + 1.2, layout="constrained")
    grid = figure.subplots(rows, 3, squeeze=False, width_ratios=(1, 2.2, 0.55))
    ends = [max((getattr(entry, way).seconds for entry in ran), default=1.0) for way in ("forward", "backward")]
    for row, entry in enumerate(ran):
        for axes, simulation, end in zip(grid[row], (entry.forward, entry.backward), ends, strict=False):
            assert simulation is not None
            _gantt(axes, simulation, end, small=True)
            figures = f"{simulation.seconds * 1e3:.2f} ms, {simulation.idle_share:.0%} not computing"
            heading = f"{entry.name} {_direction(simulation.plan)}: {figures}"
            axes.set_title(heading, fontsize=9 if len(heading) < 60 else 7, loc="left")
        _totals(grid[row][2], entry, ran)
        grid[row][0].set_ylabel("ranks, 0 first", fontsize=8)
    for axes in grid[-1][:2]:
        axes.set_xlabel("milliseconds", fontsize=9)
    grid[0][2].set_title("forward and backward; memory", fontsize=9, loc="left")
    style: dict[str, Any] = {"ncols": 4, "fontsize": 9, "frameon": False, "title": title, "title_fontsize": 13}
    figure.legend(handles=_handles("shade: home of its keys"), loc="outside upper center", **style)
    reasons = "\n".join(f"{entry.name}: {entry.reason}" for entry in entries if not entry.forward)
    if reasons:
        figure.supxlabel(reasons, fontsize=9, ha="left", x=0.01)
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float, **options: Any) -> Figure:
    from matplotlib.figure import Figure  # unlike pyplot it needs no display and keeps no reference to figures

    return Figure(figsize=(width, height), **options)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)


def _direction(plan: Plan) -> str:
    return "backward" if plan.backward else "forward"


def draw_on(axes: Axes, plan: Plan) -> None:
    """Draw the load of every rank over time on `axes`: one bar per kernel call, labelled with the keys' home rank.

    A step lasts as long as its busiest rank; grey is waiting. Colour is the step, as in the pair map.
    """
    colours = _colours(len(plan.steps))
    start = 0.0
    scale = 1.0 / max(plan.mask.pairs / plan.n, 1)
    waiting: dict[str, Any] = {"color": "#e9e9e9", "hatch": "////", "edgecolor": "#c4c4c4", "linewidth": 0}
    for t, step in enumerate(plan.steps):
        width = max(sum(weighted_pairs(a) for a in attends) for attends in step.attends) * scale
        for rank, attends in enumerate(step.attends):
            left = start
            for attend in attends:
                share = weighted_pairs(attend) * scale
                axes.barh(rank, share, left=left, height=0.78, color=colours[t], edgecolor="white", linewidth=0.6)
                if share > 0.045 and plan.n <= 16:
                    homes = sorted({key.home for key in attend.keys})
                    label = str(homes[0]) if len(homes) == 1 else f"{homes[0]}…{homes[-1]}"
                    axes.text(left + share / 2, rank, label, color=_ink(colours[t]), fontsize=7.5, **_CENTRED)
                left += share
            if left < start + width - 1e-9:
                axes.barh(rank, start + width - left, left=left, height=0.78, **waiting)
        start += width
        if width:
            axes.axvline(start, color="#888888", linewidth=0.5, linestyle=":")
    axes.set_title(f"{plan.name}, {plan.n} ranks: load per rank ({idle_fraction(plan):.1%} idle)", fontsize=10)
    _label(axes, "time (1 = perfectly shared work); numbers: home rank of the keys; grey: waiting", "rank")
    axes.set_yticks(range(plan.n) if plan.n <= 16 else range(0, plan.n, max(1, plan.n // 8)))
    axes.set_ylim(plan.n - 0.5, -0.5)
    axes.set_xlim(0, max(start, 1.0) * 1.01)


def _ink(background: Any) -> str:
    """Return black or white, which has more contrast with the background (WCAG 2's relative luminance)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

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
    for t, _, attend in plan.calls():
        rows, query_rows = _gathered(attend.queries, slots)
        columns, key_rows = _gathered(attend.keys, slots)
        for each in attend.slices if rows and columns else ():
            i, j = numpy.array(query_rows)[:, None], numpy.array(key_rows)
            seen = (each.q_start <= i) & (i < each.q_stop) & (each.k_start <= j) & (j < each.k_stop)
            seen &= (each.lo <= j - i) & (j - i <= each.hi)
            block = grid[numpy.ix_(rows, columns)]
            grid[numpy.ix_(rows, columns)] = numpy.where(seen, t, block)
    end, count = max(plan.mask.length, 1), len(plan.steps)
    colours = ListedColormap(_colours(count))
    axes.imshow(grid, colours, vmin=-0.5, vmax=count - 0.5, extent=(0, end, end, 0), interpolation="nearest")
    for span in (span for spans in plan.queries.spans for span in spans if span.step == 1):
        axes.axhline(span.start, color="white", linewidth=0.5)
        axes.axvline(span.start, color="white", linewidth=0.5)
    handles = [axes.plot([], [], "s", color=colours(t))[0] for t in range(count)]
    if count <= 16:
        axes.legend(handles, [f"step {t}" for t in range(count)], fontsize=8, loc="upper right", frameon=False)
    axes.set_title(f"{plan.queries.name} layout: step that computes each query-key pair", fontsize=10)
    _label(axes, "key token", "query token")


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
            place = left + width / 2, span.rank - 0.1
            axes.text(*place, span.label, color=_ink(colour), fontsize=8, **_CENTRED)
    axes.set_xlim(0, end * scale * 1.005)
    axes.set_ylim(n - 0.4, -0.5)
    if small:
        axes.set_yticks([])
        axes.tick_params(labelsize=8)
    else:
        _label(axes, "milliseconds", "rank")
        axes.set_yticks(range(n) if n <= 16 else range(0, n, max(1, n // 8)))


def _totals(axes: Axes, entry: Candidate, ran: Sequence[Candidate]) -> None:
    """Draw time and memory of a mode as shares of the slowest and the largest."""
    slowest = max(other.seconds for other in ran)
    largest = max(other.peak_bytes for other in ran)
    shares = entry.seconds / slowest, entry.peak_bytes / largest
    axes.barh([0, 1], shares, color=["#3d6c78", "#8a5c82"], height=0.6)
    axes.set(xlim=(0, 1.02), ylim=(1.6, -0.6), xticks=[], yticks=[])
    texts = f"{entry.seconds * 1e3:.2f} ms", f"{entry.peak_bytes / GIB:.2f} GiB"
    for row, (share, text) in enumerate(zip(shares, texts, strict=True)):
        left, colour = (0.02, "white") if share > 0.4 else (share + 0.02, "black")  # inside its bar, or beside it
        axes.text(left, row, text, va="center", fontsize=9, color=colour)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _handles(marks: str) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(facecolor="#3b8d8c", label=f"kernel call ({marks})"),
        Patch(facecolor=_MERGE, label="packing and merging"),
        Patch(facecolor=_TRANSFER, label="messages of a step"),
        Patch(facecolor=_WAIT, hatch="////", edgecolor="#d0d0d0", label="waiting"),
    ]
