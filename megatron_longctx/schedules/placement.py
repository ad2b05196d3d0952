"""Where the documents of a pack lie: in words, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .cost import Workload
from .plan import Plan
from .simulate import Simulation

_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}  # behind numbers on hatching


class Piece(NamedTuple):
    """Tokens of a document, by its number, on a rank. is_whole: they are all of it."""

    rank: int
    document: int
    tokens: int
    is_whole: bool


def pieces(plan: Plan) -> Iterator[Piece]:
    """By rank, in the order of its slots."""
    for rank in range(plan.n):
        found: dict[int, int] = {}
        for _, span in plan.queries.slot_spans(rank):
            for number, document in enumerate(plan.mask.documents):
                first = max(0, -((span.start - document.start) // span.step))
                stop = min(len(span), -((span.start - document.stop) // span.step))
                if first < stop:
                    found[number] = found.get(number, 0) + stop - first
        for number, tokens in found.items():
            start, stop, _ = plan.mask.documents[number]
            yield Piece(rank, number, tokens, tokens == stop - start)


def placement(plan: Plan, workload: Workload, simulation: Simulation | None = None) -> str:
    """By rank: tokens, documents, pairs, bytes sent, and the time that a simulation gives; and how uneven they are."""
    sent = [sum(map(workload.block_bytes, (m.block for moves in plan.sends(r) for m in moves))) for r in range(plan.n)]
    tokens, pairs = map(plan.queries.num_tokens, range(plan.n)), [plan.pairs(rank) for rank in range(plan.n)]
    columns: dict[str, list[float]] = {"tokens": [*tokens], "pairs": pairs, "MiB sent": [each / 2**20 for each in sent]}
    if simulation is not None:
        columns["computing ms"] = [1e3 * seconds for seconds in simulation.compute_s]
    on = [[each for each in pieces(plan) if each.rank == rank] for rank in range(plan.n)]
    lines = ["  rank " + "".join(f"{name:>16}" for name in columns) + "  documents whole, in part"]
    for rank in range(plan.n):
        values = "".join(f"{column[rank]:>16,.{3 if '.' in str(column[rank]) else 0}f}" for column in columns.values())
        whole = sum(each.is_whole for each in on[rank])
        lines.append(f"  {rank:>4} {values}  {whole}, {len(on[rank]) - whole}")
    uneven = (100 * (max(c) * plan.n / sum(c) - 1) if sum(c) else 0.0 for c in columns.values())
    said = ", ".join(f"{name} {by:.1f}%" for name, by in zip(columns, uneven, strict=True) if name != "MiB sent")
    of = f"{len(plan.mask.documents)} documents in the {plan.queries.name} layout"
    return "\n".join([f"{of}; the most above the average: {said}", *lines])


def draw_placement(plan: Plan, path: Path) -> None:
    """Write a PNG: a bar a rank, of its tokens and of its work, coloured by document; hatched where that is cut.

    Raises:
        OSError: `path` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    figure, axes = pyplot.subplots(figsize=(11, min(max(3.2, 0.42 * plan.n + 1.6), 12.0)))
    left = [0] * plan.n
    for rank, number, tokens, is_whole in pieces(plan):
        colour = colormaps["tab20"](number % 20)
        hatch = None if is_whole else "///"
        axes.barh(
            rank, tokens, left=left[rank], height=0.8, color=colour, edgecolor="white", linewidth=0.6, hatch=hatch
        )
        if tokens * 28 > plan.mask.length / plan.n and plan.n <= 32:
            axes.text(left[rank] + tokens / 2, rank, str(number), ha="center", va="center", fontsize=8, bbox=_PAPER)
        left[rank] += tokens
    for rank in range(plan.n) if plan.n <= 32 else ():
        share = plan.pairs(rank) * plan.n / max(plan.mask.pairs, 1)
        axes.text(left[rank], rank, f"  {share:.1%} of a share of the pairs", va="center", fontsize=8)
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
