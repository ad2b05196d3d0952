"""What an evaluation has found: scores, and these and losses as JSON, as tables and as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from .. import files
from .asking import Question
from .positions import Losses
from .tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JSON, TABLES, NEEDLES, CURVES = "eval.json", "eval.md", "needle.png", "loss_by_position.png"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Score:
    """share: of the answers that were said, 0 to 1."""

    question: Question
    said: str
    share: float


def score(question: Question, said: str) -> Score:
    """RULER's `string_match_all`: the share of answers that occur in what was said, in capitals or not."""
    heard = said.lower()
    return Score(question, said, fmean(answer.lower() in heard for answer in question.answers))


def scores(found: Sequence[Score]) -> dict[str, dict[int, float]]:
    """Mean share by task and length."""
    tasks = dict.fromkeys(each.question.task for each in found)
    return {task: _means((s.question.length, s.share) for s in found if s.question.task == task) for task in tasks}


def by_depth(found: Iterable[Score]) -> dict[int, dict[float, float]]:
    """Mean share by length and depth, of the questions of tasks that are asked by depth."""
    by_length: dict[int, list[tuple[float, float]]] = {}
    for each in found:
        if TASKS[each.question.task].by_depth and each.question.depth is not None:
            by_length.setdefault(each.question.length, []).append((each.question.depth, each.share))
    return {length: _means(shares) for length, shares in by_length.items()}


def _means(found: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    values: dict[Key, list[float]] = {}
    for key, value in found:
        values.setdefault(key, []).append(value)
    return {key: fmean(shares) for key, shares in values.items()}


@dataclass
class Results:
    """about: of the run and how it was evaluated. title: of tables and pictures. text: that losses are of. complete:
    nothing that was asked for is missing; until then all that is written says so."""

    title: str
    about: Mapping[str, Any]
    text: str = ""
    losses: list[Losses] = field(default_factory=list)
    found: list[Score] = field(default_factory=list)
    complete: bool = False

    def write(self, out: Path) -> None:
        """Write what has been found so far into a folder that exists."""
        files.write_text(out / JSON, json.dumps(self.as_dict(), indent=1) + "\n")
        files.write_text(out / TABLES, self.tables())
        if self.losses:
            _draw(out / CURVES, lambda axes: _curves(axes, self.losses, self.title))
        if needles := by_depth(self.found):
            _draw(out / NEEDLES, lambda axes: _heat_map(axes, needles, self.title))

    def as_dict(self) -> dict[str, Any]:
        tasks: dict[str, Any] = {}
        if self.losses:
            tasks["loss_by_position"] = {
                "text": self.text,
                "lengths": {each.length: _told(each) for each in self.losses},
            }
        for task, by_length in scores(self.found).items():
            mine = [each for each in self.found if each.question.task == task]
            depths = by_depth(mine)
            tasks[task] = {
                "lengths": {
                    length: {
                        "score": score,
                        **({"by_depth": depths[length]} if length in depths else {}),
                        "questions": [_asked(each) for each in mine if each.question.length == length],
                    }
                    for length, score in by_length.items()
                }
            }
        return {"what": "evaluation", "complete": self.complete, **self.about, "tasks": tasks}

    def tables(self) -> str:
        """Markdown."""
        parts = [self.title if self.complete else f"{self.title}. Not finished: not all that was asked for is here."]
        if self.found:
            counts = {len([s for s in self.found if s.question.task == task]) for task in scores(self.found)}
            parts += [f"Answers that were said, in % ({_range(counts)} questions a task).", _score_table(self.found)]
        if needles := by_depth(self.found):
            parts += ["`needle` by the depth it lies at, in %.", _depth_table(needles)]
        if self.losses:
            parts += [f"Losses of {self.text}.", _loss_table(self.losses), _position_table(self.losses)]
        return "\n\n".join(parts) + "\n"


def _told(losses: Losses) -> dict[str, Any]:
    keys = ("first", "stop", "tokens", "loss")
    ranges = [dict(zip(keys, each, strict=True)) for each in losses.ranges()]
    return {"loss": losses.mean, "perplexity": losses.perplexity, "tokens": losses.tokens, "positions": ranges}


def _asked(each: Score) -> dict[str, Any]:
    """Without the text, which the seed gives again."""
    question = {key: value for key, value in asdict(each.question).items() if key not in ("task", "length", "prompt")}
    return {**question, "said": each.said, "score": each.share}


def _range(counts: Iterable[int]) -> str:
    least, most = min(found := list(counts)), max(found)
    return f"{least}" if least == most else f"{least} to {most}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _score_table(found: Sequence[Score]) -> str:
    lengths = sorted({each.question.length for each in found})
    shares = scores(found)
    rows = [[task, *(_percent(mine.get(length)) for length in lengths)] for task, mine in shares.items()]
    return _table(["task", *(f"{length:,} tokens" for length in lengths)], rows)


def _depth_table(needles: Mapping[int, Mapping[float, float]]) -> str:
    depths = sorted({depth for mine in needles.values() for depth in mine})
    rows = [[f"{100 * depth:g}%", *(_percent(mine.get(depth)) for mine in needles.values())] for depth in depths]
    return _table(["depth", *(f"{length:,} tokens" for length in needles)], rows)


def _loss_table(losses: Sequence[Losses]) -> str:
    rows = [
        [f"{each.length:,}", f"{each.mean:.5f}", f"{each.perplexity:.4f}", f"{each.tokens:,.0f}"] for each in losses
    ]
    return _table(["length", "loss (nats)", "perplexity", "tokens"], rows)


def _position_table(losses: Sequence[Losses]) -> str:
    by_range = [{(first, stop): loss for first, stop, _, loss in each.ranges()} for each in losses]
    ranges = sorted({key for mine in by_range for key in mine})
    rows = [
        [
            f"{first:,}" if stop == first + 1 else f"{first:,} to {stop - 1:,}",
            *(_loss(mine.get(key)) for mine in by_range),
        ]
        for key in ranges
        for first, stop in [key]
    ]
    return _table(["position", *(f"{each.length:,} tokens" for each in losses)], rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _draw(path: Path, draw: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    draw(figure.add_subplot())
    partial = path.with_name(f"{path.stem}.partial.png")
    figure.savefig(partial, dpi=130)
    partial.replace(path)


def _curves(axes: Axes, losses: Sequence[Losses], title: str) -> None:
    """Mean loss of every range, at its middle."""
    for each in losses:
        points = [((first + stop) / 2, loss) for first, stop, _, loss in each.ranges() if loss is not None]
        axes.plot(*zip(*points, strict=True), marker=".", label=f"{each.length:,}: mean {each.mean:.4f}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the text (tokens, log scale)")
    axes.set_ylabel("mean loss (nats per token)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.figure.legend(title="tokens of the text", loc="outside right upper", fontsize=8)


def _heat_map(axes: Axes, needles: Mapping[int, Mapping[float, float]], title: str) -> None:
    depths = sorted({depth for mine in needles.values() for depth in mine})
    shares = [[100 * mine[depth] for mine in needles.values()] for depth in depths]
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            color = "black" if 15 < share < 85 else "white"  # on cells that are dark
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(needles)), [f"{length:,}" for length in needles])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}%" for depth in depths])
    axes.set_xlabel("length of the text and its answer (tokens)")
    axes.set_ylabel("depth of the needle in the text")
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(image, ax=axes, label="needles found (%)")
