"""The scores of answers as JSON, tables and a picture of needles by depth."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from analysis.benchmarks.report import table
from analysis.needles.questions import TASKS, Question, Score
from megatron_longctx.config import files
from megatron_longctx.inference.loss_ranges import JSON
from megatron_longctx.inference.loss_ranges import TABLES as TABLES

NEEDLES = "needle.png"
Key = TypeVar("Key")


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
    """The scores so far, in the form of `eval`'s results (`inference.loss_ranges.Results`)."""

    title: str
    about: Mapping[str, Any]
    scores: list[Score] = field(default_factory=list)
    complete: bool = False

    def means(self) -> dict[str, dict[int, float]]:
        """Return the mean share of the answers, keyed by task and length."""
        return mean_scores(self.scores, lambda question: question.task)

    def write(self, out: Path) -> None:
        """Write the files into an existing folder."""
        tasks: dict[str, Any] = {}
        for task, means in self.means().items():
            lengths = tasks.setdefault(task, {"lengths": {}})["lengths"]
            for length, mean in means.items():
                scores = [s for s in self.scores if (s.question.task, s.question.length) == (task, length)]
                depths = {depth: row[length] for depth, row in by_depth(scores).items()}
                lengths[length] = {"score": mean, **({"by_depth": depths} if depths else {})}
                lengths[length]["questions"] = list(map(_score_dict, scores))
        data = {"what": "evaluation", "complete": self.complete, **self.about, "tasks": tasks}
        files.write_text(out / JSON, json.dumps(data, indent=1) + "\n")
        files.write_text(out / TABLES, self.tables())
        if needles := by_depth(self.scores):
            _draw(out / NEEDLES, needles, self.title)

    def tables(self) -> str:
        """Return all tables, in Markdown."""
        counts = Counter(each.question.task for each in self.scores)
        least, most = min(counts.values()), max(counts.values())
        count = f"{least}" if least == most else f"{least} to {most}"
        parts = [self.title if self.complete else f"{self.title}. Not finished: results are missing."]
        parts += [f"Answers that were said, in % ({count} questions a task).", _score_table("task", self.means())]
        if needles := by_depth(self.scores):
            depths = {f"{100 * depth:g}%": row for depth, row in needles.items()}
            parts += ["`needle` by its depth in the text, in %.", _score_table("depth", depths)]
        return "\n\n".join(parts) + "\n"


def _score_dict(each: Score) -> dict[str, Any]:
    """Return a score without the prompt, which the seed reproduces."""
    question = {key: value for key, value in asdict(each.question).items() if key not in ("task", "length", "prompt")}
    return {**question, "said": each.answer, "score": each.share}


def _score_table(name: str, shares: Mapping[str, Mapping[int, float]]) -> str:
    """Return a table with a row per key and a column per length."""
    lengths = sorted({length for row in shares.values() for length in row})
    rows = [
        [key, *(f"{100 * row[length]:.1f}" if length in row else "" for length in lengths)]
        for key, row in shares.items()
    ]
    return table([name, *(f"{length:,} tokens" for length in lengths)], rows)


def _draw(path: Path, needles: Mapping[float, Mapping[int, float]], title: str) -> None:
    """Draw a heat map of needles by length and depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lengths = list(dict.fromkeys(length for row in needles.values() for length in row))
    shares = [[100 * row.get(length, 0.0) for length in lengths] for row in needles.values()]
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
    figure.colorbar(image, ax=axes, label="needles found (%)")
    figure.savefig(path, dpi=130)
