"""What all benchmarks share: options, and the JSON file and Markdown that they rewrite after every measurement."""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_longctx.config.environment import environment
from megatron_longctx.core.errors import refuse


@dataclass(frozen=True)
class Report:
    """The results of one benchmark."""

    out: Path  # the JSON file
    device: str  # `cpu` or `cuda`, where the ranks run; the process that writes may have another one
    what: str  # describes the numbers of the JSON
    about: str  # describes the measurement in the Markdown
    unit: str  # describes the numbers of the Markdown

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment of the ranks."""
        current = environment()
        return current | {"device": "cpu"} if self.device == "cpu" else current

    def write(self, data: Mapping[str, Any], text: str) -> str:
        """Write `data` as JSON and `text` as Markdown, both with their origin, and return `text`."""
        made = self.environment
        self.out.write_text(json.dumps({"what": self.what, "environment": made, **data}, indent=1) + "\n")
        head = f"{self.about}, {made['device']}, {made['date'][:10]}, commit {str(made['commit'])[:9]}; {self.unit}"
        self.out.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
        return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def paired(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the mean increase of losses of the same texts over `baseline`, and its standard error."""
    increases = [loss - before for loss, before in zip(losses, baseline, strict=True)]
    return statistics.fmean(increases), statistics.stdev(increases) / math.sqrt(len(increases))


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options `--ranks` and `--device`, for `Ranks.of`."""
    parser.add_argument("--ranks", type=int, help="ranks to start on this host (default: one per GPU, 2 on CPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def check_least(name: str, value: int, least: int = 1) -> None:
    """Raise ValueError for an option below `least`."""
    if value < least:
        raise refuse(name, value, f"{least} or more", "Raise it.")


def numbers(name: str, text: str, least: float, separator: str = ",", *, distinct: bool = True) -> tuple[Any, ...]:
    """Return numbers that are written like `1,2,4`, without duplicates if they are `distinct`.

    Args:
        least: the smallest allowed number; an int for whole numbers.

    Raises:
        ValueError: the text has another form.
    """
    try:
        values = tuple(map(type(least), text.split(separator)))
    except ValueError:
        values = ()
    if not values or not all(number >= least for number in values):
        kind = "whole numbers" if isinstance(least, int) else "numbers"
        raise refuse(name, text, f"{kind} of {least:g} or more, separated by {separator!r}", "Correct it.")
    return tuple(dict.fromkeys(values)) if distinct else values
