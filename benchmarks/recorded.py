"""What a benchmark writes while it runs: a JSON file and the Markdown beside it, again after every measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_longctx.metrics.environment import environment


@dataclass(frozen=True)
class Report:
    """out: the JSON file. device: cpu or cuda, where the ranks run; the process that writes need not be theirs. what:
    the numbers of the JSON are. about: what was measured, and unit: the numbers, of the Markdown."""

    out: Path
    device: str
    what: str
    about: str
    unit: str

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`environment()` of the ranks."""
        facts = environment()
        return facts | {"device": "cpu"} if self.device == "cpu" else facts

    def write(self, data: Mapping[str, Any], text: str) -> str:
        """`data` as JSON; `text`, which is returned, under what its numbers are, where, when and of which commit."""
        facts = self.facts
        self.out.write_text(json.dumps({"what": self.what, "environment": facts, **data}, indent=1) + "\n")
        head = f"{self.about}, {facts['device']}, {facts['date'][:10]}, commit {str(facts['commit'])[:9]}; {self.unit}"
        self.out.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
        return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
