"""Losses of texts by ranges of positions, and an evaluation's results as JSON, tables and a picture; without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import files

JSON, TABLES, CURVES = "eval.json", "eval.md", "loss_by_position.png"
_FIRST_RANGE = 16  # positions: a shorter range would have few tokens


def edges(length: int) -> list[int]:
    """Return the first position of every range, and `length`: 0, 16, 24, 32, 48, 64, … (two ranges per doubling)."""
    starts = [0, _FIRST_RANGE]
    while starts[-1] < length:
        starts.append(starts[-1] + (1 << (starts[-1].bit_length() - 2)))
    return [*(edge for edge in starts if edge < length), length]


@dataclass(frozen=True)
class Losses:
    """Losses of texts of one length: sums of token losses (nats) and of their weights, one per range of positions."""

    length: int
    sums: Sequence[float]
    weights: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.weights)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))

    @property
    def tokens(self) -> float:
        return sum(self.weights)

    def ranges(self) -> list[tuple[int, int, float, float | None]]:
        """Return first position, end, tokens and mean loss of every range; the loss is None without tokens."""
        starts = edges(self.length)
        rows = zip(starts, starts[1:], self.sums, self.weights, strict=False)
        return [(first, stop, weight, total / weight if weight else None) for first, stop, total, weight in rows]

    def as_dict(self) -> dict[str, Any]:
        keys = ("first", "stop", "tokens", "loss")
        ranges = [dict(zip(keys, each, strict=True)) for each in self.ranges()]
        return {"loss": self.mean, "perplexity": self.perplexity, "tokens": self.tokens, "positions": ranges}


@dataclass
class Results:
    """The results so far.

    Attributes:
        title: of tables and pictures.
        about: the run and the settings of the evaluation, for the JSON file.
        text: the text that losses are computed on.
        complete: whether the evaluation has ended; until then, the files say that it has not.
    """

    title: str
    about: Mapping[str, Any]
    text: str = ""
    losses: list[Losses] = field(default_factory=list)
    complete: bool = False

    def write(self, out: Path) -> None:
        """Write the files into an existing folder."""
        lengths = {each.length: each.as_dict() for each in self.losses}
        tasks = {"loss_by_position": {"text": self.text, "lengths": lengths}}
        data = {"what": "evaluation", "complete": self.complete, **self.about, "tasks": tasks}
        files.write_text(out / JSON, json.dumps(data, indent=1) + "\n")
        files.write_text(out / TABLES, self.tables())
        self._draw(out / CURVES)

    def tables(self) -> str:
        """Return all tables, in Markdown."""
        parts = [self.title if self.complete else f"{self.title}. Not finished: results are missing."]
        rows = [
            [f"{each.length:,}", f"{each.mean:.5f}", f"{each.perplexity:.4f}", f"{each.tokens:,.0f}"]
            for each in self.losses
        ]
        parts += [f"Losses of {self.text}.", _table(["length", "loss (nats)", "perplexity", "tokens"], rows)]
        columns = [{(first, stop): loss for first, stop, _, loss in each.ranges()} for each in self.losses]
        rows = []
        for first, stop in sorted({key for column in columns for key in column}):
            values = [column.get((first, stop)) for column in columns]
            name = f"{first:,}" if stop == first + 1 else f"{first:,} to {stop - 1:,}"
            rows.append([name, *("" if loss is None else f"{loss:.4f}" for loss in values)])
        parts.append(_table(["position", *(f"{each.length:,} tokens" for each in self.losses)], rows))
        return "\n\n".join(parts) + "\n"

    def _draw(self, path: Path) -> None:
        """Plot the mean loss of every range at its middle."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for each in self.losses:
            points = [((first + stop) / 2, loss) for first, stop, _, loss in each.ranges() if loss is not None]
            axes.plot(*zip(*points, strict=True), marker=".", label=f"{each.length:,}: mean {each.mean:.4f}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position in the text (tokens, log scale)")
        axes.set_ylabel("mean loss (nats per token)")
        axes.set_title(self.title, fontsize=9)
        axes.grid(alpha=0.3)
        figure.legend(title="tokens of the text", loc="outside right upper", fontsize=8)
        partial = path.with_name(f"{path.stem}.partial.png")
        figure.savefig(partial, dpi=130)
        partial.replace(path)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
