"""How much of the answers a model has said, and means of it by task, length and depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from .asking import Question

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
    return {
        task: _means((s.question.length, s.share) for s in found if s.question.task == task) for task in _tasks(found)
    }


def by_depth(found: Iterable[Score]) -> dict[int, dict[float, float]]:
    """Mean share by length and depth, of the questions of a task that have one."""
    by_length: dict[int, list[tuple[float, float]]] = {}
    for each in found:
        if each.question.depth is not None:
            by_length.setdefault(each.question.length, []).append((each.question.depth, each.share))
    return {length: _means(shares) for length, shares in by_length.items()}


def _tasks(found: Iterable[Score]) -> list[str]:
    return list(dict.fromkeys(each.question.task for each in found))


def _means(found: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    values: dict[Key, list[float]] = {}
    for key, value in found:
        values.setdefault(key, []).append(value)
    return {key: fmean(shares) for key, shares in values.items()}
