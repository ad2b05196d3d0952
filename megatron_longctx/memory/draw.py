"""Predictions as stacked bars: which piece takes how much, in which mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..topology.cluster import GIB
from .model import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(bars: Sequence[tuple[str, Prediction]], path: Path, title: str, capacity: int | None = None) -> None:
    """Write a PNG with one bar per prediction.

    Args:
        bars: names and predictions, from the top down.
        capacity: bytes of a device, drawn as a line.

    Raises:
        OSError: `path` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11.5, 1.9 + 0.62 * len(bars)))
    draw_on(axes, bars, capacity)
    axes.set_title(title, fontsize=10.5, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_on(axes: Axes, bars: Sequence[tuple[str, Prediction]], capacity: int | None = None) -> None:
    """Draw the bars on `axes`; a piece has the same colour in all of them."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(term.name for _, found in bars for term in found.terms))
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    shown = set()
    for row, (_, found) in enumerate(bars):
        left = 0.0
        for term in found.terms:
            size = term.num_bytes / GIB
            label = None if term.name in shown else term.name
            shown.add(term.name)
            axes.barh(row, size, left=left, height=0.7, color=colours[term.name], edgecolor="white", label=label)
            left += size
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(left + axes.get_xlim()[1] * 0.008, row, f"{left:.1f}", va="center", fontsize=9, bbox=frame)
    if capacity is not None:
        axes.axvline(capacity / GIB, color="black", linestyle="--", linewidth=1)
        axes.text(capacity / GIB, -0.6, f" device: {capacity / GIB:.0f} GiB", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.75)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.05)
    axes.set_xlabel("GiB a rank, at the peak of a training step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
