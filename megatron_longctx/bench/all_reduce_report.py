"""What `bench all_reduce` has measured: from which size on a way is faster, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..comm.crossover import Crossover

if TYPE_CHECKING:
    from .all_reduce import Found, Measured

_COLOURS = {"int8": "#22667a", "int6": "#7a5c99", "int4": "#c0703a", "unquantized": "#2e7d4f"}
_DASHED = "--"


def by_way(measured: Sequence[Measured]) -> dict[str, dict[int, Measured]]:
    found: dict[str, dict[int, Measured]] = {}
    for m in measured:
        found.setdefault(m.way, {})[m.num_bytes] = m
    return found


def crossovers(measured: Sequence[Measured], library: str) -> dict[str, int | None]:
    """By way, the bytes from which on it is faster than the library's all-reduce at every size; None: at none."""
    ways = by_way(measured)
    plain = ways[library]
    found = {}
    for way, sizes in ways.items():
        if way != library:
            samples = [(size, plain[size].seconds, m.seconds) for size, m in sorted(sizes.items())]
            found[way] = Crossover.between(samples).from_bytes
    return found


def tables(found: Found, library: str, starts: dict[str, int | None]) -> str:
    """Markdown; times in microseconds."""
    ways = by_way(found.measured)
    sizes = sorted({m.num_bytes for m in found.measured})
    rows = [["size", *ways], ["---"] * (1 + len(ways))]
    for size in sizes:
        seconds = {way: by_size[size].seconds for way, by_size in ways.items() if size in by_size}
        best = min(seconds.values())
        cells = [f"{seconds[way] * 1e6:.1f}" if way in seconds else "" for way in ways]
        rows.append(
            [_size(size), *(f"**{c}**" if seconds.get(w) == best else c for w, c in zip(ways, cells, strict=True))]
        )
    errors = [["way", f"faster than {library}", "relative error"], ["---"] * 3]
    for way, by_size in ways.items():
        known = [m.error for m in by_size.values() if m.error is not None]
        start = starts.get(way)
        faster = "" if way == library else "at no size" if start is None else f"from {_size(start)} up"
        errors.append([way, faster, f"{max(known):.2e}" if known else ""])
    parts = [_table(rows), "", _table(errors)]
    if found.left_out:
        parts += ["", "Left out: " + "; ".join(f"{name} ({why})" for name, why in found.left_out.items()) + "."]
    return "\n".join(parts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(measured: Sequence[Measured], path: Path, title: str) -> None:
    """Write a PNG: time by size, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.4, 5.2))
    greys = iter(("#000000", "#777777", "#aaaaaa", "#cccccc"))
    for way, sizes in by_way(measured).items():
        ours = next((colour for start, colour in _COLOURS.items() if way.startswith(start)), None)
        points = sorted(sizes.items())
        style = _DASHED if ours and "over peers" not in way else "-"
        axes.plot(
            [size for size, _ in points], [m.seconds * 1e6 for _, m in points],
            color=ours or next(greys), linestyle=style, marker="o", markersize=3, linewidth=1.4, label=way,
        )  # fmt: skip
    ticks = sorted({m.num_bytes for m in measured})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = ticks[:: 1 + len(ticks) // 10]
    axes.set_xticks(shown, [_size(size) for size in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("bytes of a rank's tensor")
    axes.set_ylabel("time, µs")
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
