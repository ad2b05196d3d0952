"""What a bench writes while it runs: a JSON file and the Markdown beside it, anew after every measurement."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..metrics.environment import environment


@dataclass(frozen=True)
class Recorded(ABC):
    """`out`: the JSON file. `device`: cpu or cuda, where the ranks run. The process that writes need not be theirs."""

    out: Path
    device: str

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`environment()` of the ranks."""
        facts = environment()
        return facts | {"device": "cpu"} if self.device == "cpu" else facts

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured where, and when."""

    def write(self, data: Mapping[str, Any], unit: str, text: str) -> None:
        """`data` as JSON; `text` under the title, the commit and what its numbers are (`unit`)."""
        self.out.write_text(json.dumps(data, indent=1) + "\n")
        head = f"{self.title}, commit {str(self.facts['commit'])[:9]}; {unit}"
        self.out.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
