"""The page of a paper: tables whose cells name their source, claims with verdicts, and a list of the paper's items.

A page is rendered from two files: `analysis/results/papers_PAPER.json` with the numbers, and `docs/papers/PAPER.yaml`
with the claims and the list.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis.benchmarks.report import table as markdown
from megatron_longctx.config.environment import environment
from megatron_longctx.config.files import read_yaml
from megatron_longctx.core.plans import Plan
from megatron_longctx.testing.verify import verify

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "analysis" / "results"
SOURCES = {
    "paper": "*in italics* from the paper",
    "s": "simulated from a calibration of H200s",
    "d": "simulated from data sheets, not checked by measurement",
    "p": "counted in plans",
    "f": "calculated from a formula",
    "c": "measured on the CPU of this page",
    "w": "computed with published weights",
    "m": "measured on GPUs, H200s if the table names no others",
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


def cell(value: float | None, source: str, digits: int = 2) -> Cell:
    """Return a number of a table with its source, a key of `SOURCES`."""
    if value is None or not math.isfinite(value):
        return None
    return {"value": value, "source": source, "text": f"{value:,.{digits}f}"}


def paper(value: float | None, digits: int = 2) -> Cell:
    """Return a number of the paper."""
    return cell(value, "paper", digits)


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    key: str  # of its note in the list
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    of: Sequence[str] = ()  # items of the paper that it shows, as the list names them; empty if there are none

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def value(self, *head: str, column: int) -> float:
        """Return the number of a column in the first row that begins with `head`."""
        number = next(row for row in self.rows if tuple(row[: len(head)]) == head)[column]
        assert isinstance(number, dict), (self.title, head, column)
        return float(number["value"])


@dataclass(frozen=True)
class Results:
    """The numbers of a page."""

    tables: Sequence[Table]
    facts: Mapping[str, float]  # numbers in the list's claims, by their names in braces there
    raw: Mapping[str, Any] = field(default_factory=dict)  # measurements that only the JSON contains


def paths(name: str) -> tuple[Path, Path, Path]:
    """Return the JSON, the page and the list of a paper."""
    folder = ROOT / "docs" / "papers"
    return RESULTS / f"papers_{name}.json", folder / f"{name}.md", folder / f"{name}.yaml"


def recorded(name: str) -> Any:
    """Return the JSON of a recorded result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, results: Results) -> Path:
    """Write the JSON and the page; return the page."""
    path, page, _ = paths(name)
    data = {"what": f"tables of docs/papers/{name}.md", "environment": environment(), **asdict(results)}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page.write_text(render(name), encoding="utf-8")
    return page


def contents(name: str) -> dict[str, Any]:
    """Return the list of a paper."""
    listed: dict[str, Any] = read_yaml(paths(name)[2])
    return listed


def render(name: str) -> str:
    """Return the page, rendered from the JSON and the list."""
    data, listed = recorded(f"papers_{name}"), contents(name)
    facts, made = data["facts"], data["environment"]
    device = f"on one {made['device']}" if str(made["device"]).startswith("NVIDIA") else "without a GPU"
    by = f"Made by `python -m analysis.benchmarks.papers {name}` on {made['date'][:10]}, {device}; do not edit."
    cells = [each for table in data["tables"] for row in table["rows"] for each in row if isinstance(each, dict)]
    used = {each["source"] for each in cells}
    legend = [f"({key}) {text}" if key != "paper" else text for key, text in SOURCES.items() if key in used]
    claims = [[each["claim"], _verdict(each), each["why"].format(**facts)] for each in listed["claims"]]
    parts = [
        f"# {listed['title']}",
        f"{listed['authors']}. {by}",
        f"Every number is marked with its source: {'; '.join(legend)}.",
        *("## Its claims", markdown(["claim", "verdict", "why"], claims)),
        "## Its tables, figures, algorithms and equations",
        markdown(["", "what it is", "state", "where"], [_item(each) for each in listed["items"]]),
        "## Numbers",
    ]
    for table in data["tables"]:
        of = ", ".join(each[0].upper() + each[1:] for each in table["of"])
        parts.append(f"### {of}: {table['title']}" if of else f"### {table['title'][0].upper()}{table['title'][1:]}")
        parts.append(markdown(table["columns"], [[_text(each) for each in row] for row in table["rows"]]))
        parts.append(listed["notes"][table["key"]].format(**facts))
    return "\n\n".join(parts) + "\n"


def _verdict(claim: Mapping[str, Any]) -> str:
    """Return a claim's verdict with the recorded results that it rests on."""
    links = ", ".join(f"[{name}](../../analysis/results/{name}.json)" for name in claim.get("from", ()))
    return f"**{claim['verdict']}**" + (f" ({links})" if links else "")


def _item(item: Mapping[str, str]) -> list[str]:
    """Return an item of the list as a row."""
    where = [f"`{item[key]}`" for key in ("where", "command") if item.get(key)]
    return [item["item"], item["about"], item["state"], " ".join([*where, *filter(None, [item.get("why")])])]


def _text(each: Cell) -> str:
    if not isinstance(each, dict):
        return each or ""
    return f"*{each['text']}*" if each["source"] == "paper" else f"{each['text']} ({each['source']})"


def numbers(table: Table) -> list[list[float]]:
    """Return the numbers of every row."""
    return [[float(each["value"]) for each in row if isinstance(each, dict)] for row in table.rows]


class Assumption(NamedTuple):
    """An input that is assumed or taken from the paper, and a headline number by a factor of this input."""

    name: str
    headline: str
    value: Callable[[float], float]


def sensitivity(assumptions: Iterable[Assumption]) -> Table:
    """Return headlines with each assumed input a third less, as assumed, and a third more."""
    rows = [
        [each.name, each.headline, *(cell(each.value(by), "d") for by in (2 / 3, 1, 4 / 3))] for each in assumptions
    ]
    columns = ["assumed", "headline", "a third less", "as assumed", "a third more"]
    return Table("sensitivity", "how headlines move with what is assumed", columns, rows)


class Proof(NamedTuple):
    """The plans of one row of `proofs`, with the tokens in words; a page may have no backward pass."""

    mode: str
    tokens: str
    forward: Plan
    backward: Plan | None = None


def proofs(cases: Iterable[Proof]) -> Table:
    """Prove by `verify` that plans compute attention; return a table with the milliseconds of one core.

    Raises:
        PlanError: a plan that does not compute attention.
    """
    rows: list[list[Cell]] = []
    for mode, tokens, forward, backward in cases:
        plans = [forward] if backward is None else [forward, backward]
        begin = time.process_time()
        for plan in plans:
            verify(plan, forward if plan is backward else None)
        seconds = time.process_time() - begin
        rows.append([
            *(mode, str(forward.n), tokens, "forward" if backward is None else "forward, backward"),
            cell(sum(plan.mask.pairs for plan in plans) / 1e6, "p", 1),
            cell(sum(len(step.moves) for plan in plans for step in plan.steps), "p", 0),
            cell(1e3 * seconds, "c", 1),
        ])  # fmt: skip
    columns = ["mode", "ranks", "tokens", "passes", "visible pairs, millions", "messages", "ms of one core"]
    return Table("proofs", "proofs of these plans", columns, rows)
