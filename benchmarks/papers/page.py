"""What a paper's page is made of: tables whose cells say where they come from, claims with verdicts, and the list of
all that the paper has (`docs/papers/PAPER.yaml`). The numbers lie in `analysis/results/papers_PAPER.json`; the page is
made of these two files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import table as grid
from megatron_longctx.files import read_yaml
from megatron_longctx.metrics.environment import environment

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "paper": "*in italics* from the paper",
    "s": "simulated from a calibration of H200s",
    "d": "simulated from data sheets, not checked by measurement",
    "p": "counted in plans",
    "f": "calculated from a formula",
    "c": "measured on the CPU of this page",
    "w": "computed with published weights",
    "m": "measured on H200s",
    "e": "measured on a network emulated between CPU processes",
}
KINDS = ("table", "figure", "algorithm", "equation")
STATES = {
    "here": "a table of this page",
    "code": "in the code",
    "drawn": "a picture of this project shows the same",
    "elsewhere": "measured; another page has it",
    "not measured": "nothing was measured or simulated yet",
    "left out": "not made, for the reason given",
}
Cell = str | dict[str, Any] | None


def cell(value: float | None, source: str, digits: int = 2, unit: str = "") -> Cell:
    """A number of a table and where it comes from (a key of `SOURCES`)."""
    if value is None or not math.isfinite(value):
        return None
    return {"value": value, "source": source, "text": f"{value:,.{digits}f}{unit}"}


def paper(value: float | None, digits: int = 2, unit: str = "") -> Cell:
    return cell(value, "paper", digits, unit)


@dataclass(frozen=True)
class Table:
    """key: its note's in the list. of: the paper's items that it stands for, as the list names them; empty for what the
    paper does not have."""

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    of: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True)
class Made:
    """What a paper's command makes. facts: what the list's claims quote, by the name that stands there in braces. raw:
    kept in the JSON for what reads it later."""

    tables: Sequence[Table]
    facts: Mapping[str, float]
    pictures: Sequence[str] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


def value(table: Table, head: tuple[str, ...], column: int) -> float:
    """The number of the first row that begins so."""
    found = next(row for row in table.rows if tuple(row[: len(head)]) == head)[column]
    assert isinstance(found, dict), (table.title, head, column)
    return float(found["value"])


def paths(name: str) -> tuple[Path, Path, Path]:
    """JSON, page and list of a paper."""
    folder = ROOT / "docs" / "papers"
    return ROOT / "analysis" / "results" / f"papers_{name}.json", folder / f"{name}.md", folder / f"{name}.yaml"


def write(name: str, made: Made) -> Path:
    """The JSON, and the page made of it."""
    results, page, _ = paths(name)
    data = {"what": f"tables of docs/papers/{name}.md", "environment": environment(), **asdict(made)}
    results.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page.write_text(render(name), encoding="utf-8")
    return page


def contents(name: str) -> dict[str, Any]:
    """The list of what a paper has."""
    found: dict[str, Any] = read_yaml(paths(name)[2])
    return found


def render(name: str) -> str:
    """The page, of the JSON and the list."""
    data, listed = json.loads(paths(name)[0].read_text(encoding="utf-8")), contents(name)
    facts, made = data["facts"], data["environment"]
    device = f"on one {made['device']}" if str(made["device"]).startswith("NVIDIA") else "without a GPU"
    by = f"Made by `python -m benchmarks.papers {name}` on {made['date'][:10]}, {device}; do not edit."
    cells = [each for table in data["tables"] for row in table["rows"] for each in row if isinstance(each, dict)]
    used = {each["source"] for each in cells}
    legend = [f"({key}) {text}" if key != "paper" else text for key, text in SOURCES.items() if key in used]
    claims = [[each["claim"], f"**{each['verdict']}**", each["why"].format(**facts)] for each in listed["claims"]]
    parts = [
        f"# {listed['title']}",
        f"{listed['authors']}. {by}",
        f"Every number is marked with its source: {'; '.join(legend)}.",
        *("## Its claims", grid(["claim", "verdict", "why"], claims)),
        "## Its tables, figures, algorithms and equations",
        grid(["", "what it is", "state", "where"], [_listed(each) for each in listed["items"]]),
        "## Numbers",
    ]
    for table in data["tables"]:
        of = ", ".join(each[0].upper() + each[1:] for each in table["of"])
        parts.append(f"### {of}: {table['title']}" if of else f"### {table['title'][0].upper()}{table['title'][1:]}")
        parts.append(grid(table["columns"], [[_printed(each) for each in row] for row in table["rows"]]))
        parts.append(listed["notes"][table["key"]].format(**facts))
    parts += [f"![{each.removesuffix('.png')}](../../analysis/results/{each})" for each in data["pictures"]]
    return "\n\n".join(parts) + "\n"


def _listed(item: Mapping[str, str]) -> list[str]:
    where = item.get("where", "")
    said = f"`{where}`" if where else ""
    if item.get("command"):
        said += f" `{item['command']}`"
    return [item["item"], item["about"], item["state"], " ".join(filter(None, (said.strip(), item.get("why", ""))))]


def _printed(each: Cell) -> str:
    if not isinstance(each, dict):
        return each or ""
    return f"*{each['text']}*" if each["source"] == "paper" else f"{each['text']} ({each['source']})"
