"""Results of an evaluation, scores and losses by position, as JSON, tables and pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from ...config import files
from .questions import TASKS, Question

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JSON, TABLES, NEEDLES, CURVES = "eval.json", "eval.md", "needle.png", "loss_by_position.png"
_FIRST_RANGE = 16  # positions: a shorter range would have few tokens
_TASK = attrgetter("task")
Key = TypeVar("Key")


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


@dataclass(frozen=True)
class Score:
    """A model's answer to a question, and the share of the expected answers that it contains, 0 to 1."""

    question: Question
    answer: str
    share: float


def score(question: Question, answer: str) -> Score:
    """Score an answer as RULER's `string_match_all`: the share of expected answers that occur in it, in any case."""
    text = answer.lower()
    return Score(question, answer, fmean(expected.lower() in text for expected in question.answers))


def mean_scores(scores: Iterable[Score], row: Callable[[Question], Key]) -> dict[Key, dict[int, float]]:
    """Return the mean share, keyed by a property of questions and by their length."""
    shares: dict[Key, dict[int, list[float]]] = {}
    for each in scores:
        shares.setdefault(row(each.question), {}).setdefault(each.question.length, []).append(each.share)
    return {key: {length: fmean(own) for length, own in of.items()} for key, of in shares.items()}


def by_depth(scores: Iterable[Score]) -> dict[float, dict[int, float]]:
    """Return the mean share of tasks that use depths, keyed by depth, in ascending order, and length."""
    found = mean_scores((each for each in scores if TASKS[each.question.task].by_depth), lambda q: q.depth or 0.0)
    return dict(sorted(found.items()))


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
    scores: list[Score] = field(default_factory=list)
    complete: bool = False

    def write(self, out: Path) -> None:
        """Write the files into an existing folder."""
        files.write_text(out / JSON, json.dumps(self.as_dict(), indent=1) + "\n")
        files.write_text(out / TABLES, self.tables())
        if self.losses:
            _draw(out / CURVES, lambda axes: _curves(axes, self.losses, self.title))
        if needles := by_depth(self.scores):
            _draw(out / NEEDLES, lambda axes: _heat_map(axes, needles, self.title))

    def as_dict(self) -> dict[str, Any]:
        tasks: dict[str, Any] = {}
        if self.losses:
            of_length = {each.length: _losses_dict(each) for each in self.losses}
            tasks["loss_by_position"] = {"text": self.text, "lengths": of_length}
        for task, means in mean_scores(self.scores, _TASK).items():
            lengths = {}
            for length, mean in means.items():
                scores = [s for s in self.scores if (s.question.task, s.question.length) == (task, length)]
                depths = {depth: row[length] for depth, row in by_depth(scores).items()}
                lengths[length] = {"score": mean, **({"by_depth": depths} if depths else {})}
                lengths[length]["questions"] = list(map(_score_dict, scores))
            tasks[task] = {"lengths": lengths}
        return {"what": "evaluation", "complete": self.complete, **self.about, "tasks": tasks}

    def tables(self) -> str:
        """Return all tables, in Markdown."""
        parts = [self.title if self.complete else f"{self.title}. Not finished: results are missing."]
        if self.scores:
            means, counts = mean_scores(self.scores, _TASK), Counter(each.question.task for each in self.scores)
            least, most = min(counts.values()), max(counts.values())
            count = f"{least}" if least == most else f"{least} to {most}"
            parts += [f"Answers that were said, in % ({count} questions a task).", _score_table("task", means)]
        if needles := by_depth(self.scores):
            depths = {f"{100 * depth:g}%": row for depth, row in needles.items()}
            parts += ["`needle` by its depth in the text, in %.", _score_table("depth", depths)]
        if self.losses:
            parts += [f"Losses of {self.text}.", _loss_table(self.losses), _position_table(self.losses)]
        return "\n\n".join(parts) + "\n"


def _losses_dict(losses: Losses) -> dict[str, Any]:
    keys = ("first", "stop", "tokens", "loss")
    ranges = [dict(zip(keys, each, strict=True)) for each in losses.ranges()]
    return {"loss": losses.mean, "perplexity": losses.perplexity, "tokens": losses.tokens, "positions": ranges}


def _score_dict(each: Score) -> dict[str, Any]:
    """Return a score without the prompt, which the seed reproduces."""
    question = {key: value for key, value in asdict(each.question).items() if key not in ("task", "length", "prompt")}
    return {**question, "said": each.answer, "score": each.share}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _score_table(name: str, shares: Mapping[str, Mapping[int, float]]) -> str:
    """Return a table with a row per key and a column per length."""
    lengths = sorted({length for row in shares.values() for length in row})
    rows = [
        [key, *(f"{100 * row[length]:.1f}" if length in row else "" for length in lengths)]
        for key, row in shares.items()
    ]
    return _table([name, *(f"{length:,} tokens" for length in lengths)], rows)


def _loss_table(losses: Sequence[Losses]) -> str:
    rows = [
        [f"{each.length:,}", f"{each.mean:.5f}", f"{each.perplexity:.4f}", f"{each.tokens:,.0f}"] for each in losses
    ]
    return _table(["length", "loss (nats)", "perplexity", "tokens"], rows)


def _position_table(losses: Sequence[Losses]) -> str:
    columns = [{(first, stop): loss for first, stop, _, loss in each.ranges()} for each in losses]
    rows = []
    for first, stop in sorted({key for column in columns for key in column}):
        values = [column.get((first, stop)) for column in columns]
        name = f"{first:,}" if stop == first + 1 else f"{first:,} to {stop - 1:,}"
        rows.append([name, *("" if loss is None else f"{loss:.4f}" for loss in values)])
    return _table(["position", *(f"{each.length:,} tokens" for each in losses)], rows)


def _draw(path: Path, draw: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    draw(figure.add_subplot())
    partial = path.with_name(f"{path.stem}.partial.png")
    figure.savefig(partial, dpi=130)
    partial.replace(path)


def _curves(axes: Axes, losses: Sequence[Losses], title: str) -> None:
    """Plot the mean loss of every range at its middle."""
    for each in losses:
        points = [((first + stop) / 2, loss) for first, stop, _, loss in each.ranges() if loss is not None]
        axes.plot(*zip(*points, strict=True), marker=".", label=f"{each.length:,}: mean {each.mean:.4f}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the text (tokens, log scale)")
    axes.set_ylabel("mean loss (nats per token)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.figure.legend(title="tokens of the text", loc="outside right upper", fontsize=8)


def _heat_map(axes: Axes, needles: Mapping[float, Mapping[int, float]], title: str) -> None:
    lengths = list(dict.fromkeys(length for row in needles.values() for length in row))
    shares = [[100 * row[length] for length in lengths] for row in needles.values()]
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            color = "black" if 15 < share < 85 else "white"  # the other cells are dark
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(needles)), [f"{100 * depth:g}%" for depth in needles])
    axes.set_xlabel("length of the text and its answer (tokens)")
    axes.set_ylabel("depth of the needle in the text")
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(image, ax=axes, label="needles found (%)")
