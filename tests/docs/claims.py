"""Reads `docs/claims.yaml`: which field of which recorded result a figure of the docs comes from.

By page there are `claims`: a `text` that stands in it, and the `figures` of that text with the source of each. A source
is arithmetic over fields, `result[key][key]`, of `analysis/results/`; `[name=a & length=4096]` picks the one item of a
list whose fields are so, `*` stands for anything, and what the claim says `from` comes before fields that begin with a
bracket. `result@commit` is a result that this commit had. Names of `COMPUTED` are sources, too. Texts that are
`not_measured` (sizes, defaults, rules) need none.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from analysis.recorded_memory import EARLIER, RECORDED, RESULTS, STEPS, recorded_peaks, recorded_steps
from tests.docs.test_docs import ROOT, prose

_FIELD = re.compile(r"(?:[a-z]\w*(?:@[0-9a-f]+)?)?(?:\[[^\]]+\])+")
_UNITS = "%|ms|µs|us|s|seconds|minutes|[TGM]?FLOP/s|[TG]i?B/s|[KMG]iB|Mbit/s|times|x"
_START = r"(?<![\w.,:/#-])"
_FIGURE = re.compile(
    rf"{_START}(?:(\d[\d,]*\.\d+(?:e-?\d+)?)(?!\w|\.\d)|(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?) ?(?:{_UNITS})(?![\w/]))"
)


@dataclass(frozen=True)
class Claim:
    """`text` of a page, and by figure in it the source; None: it is no measurement."""

    page: str
    text: str
    figures: Mapping[str, str] | None


def claims(source: Path = ROOT / "docs" / "claims.yaml") -> Iterator[Claim]:
    """Of all pages."""
    for page, found in yaml.safe_load(source.read_text(encoding="utf-8")).items():
        for text in found.get("not_measured", ()):
            yield Claim(page, text, None)
        for claim in found.get("claims", ()):
            before = claim.get("from", "")
            figures = claim["figures"].items()
            of = {figure: re.sub(r"(?<![\w\]])\[", f"{before}[", source) for figure, source in figures}
            yield Claim(page, claim["text"], of)


def words(page: Path) -> str:
    """A page's text without blocks of code, bold and line breaks."""
    return re.sub(r"\s+", " ", prose(page).replace("**", ""))


def value(source: str) -> float:
    """What a source says.

    Raises:
        KeyError, NameError, SyntaxError: it says nothing.
    """
    names = {name: of() for name, of in COMPUTED.items() if name in source}
    numbers = _FIELD.sub(lambda match: repr(float(field(match[0]))), source)
    return float(eval(numbers, {"__builtins__": {}}, {"min": min, "max": max, **names}))


def field(path: str) -> Any:
    """What a field of a result holds, e.g. `training[runs][name=a][medians][perf/step_s]`."""
    found: Any = _result(path.partition("[")[0])
    for key in re.findall(r"\[([^\]]+)\]", path):
        if isinstance(found, list) and "=" in key:
            wanted = [part.split("=", 1) for part in key.split(" & ")]
            items = [x for x in found if all(fnmatchcase(str(x.get(name)), like) for name, like in wanted)]
            if len(items) != 1:
                raise KeyError(f"{path}: {len(items)} items have [{key}], expected one")
            found = items[0]
        else:
            found = found[int(key) if isinstance(found, list) else key]
        if key.startswith("printed") or (isinstance(found, dict) and found.get("printed_only")):
            raise KeyError(
                f"{path}: written down from what a run printed, which is no measurement that one can look at"
            )
    return found


def printed(figure: str, number: float) -> str:
    """`number` as precisely as `figure` is printed."""
    decimals = len(figure.partition(".")[2])
    return f"{number:,.{decimals}f}" if "," in figure else f"{number:.{decimals}f}"


def uncovered(text: str, known: list[Claim]) -> list[str]:
    """Figures with a unit of measurement, or with decimals, that no claim names, with the words around them."""
    spans = [
        (match.start(), match.end(), claim.figures)
        for claim in known
        for match in re.finditer(re.escape(claim.text), text)
    ]
    wrong = []
    for match in _FIGURE.finditer(text):
        figure = match[1] or match[2]
        stop = match.start() + len(figure)
        inside = [figures for first, last, figures in spans if first <= match.start() and stop <= last]
        if not any(figures is None or figure in figures for figures in inside):
            wrong.append(text[max(0, match.start() - 50) : match.end() + 20])
    return wrong


def in_history(source: str) -> bool:
    """Whether the commit that a source names, if it does, is here: not in a shallow clone, nor without git."""
    named = re.search(r"@([0-9a-f]+)", source)
    return named is None or git("cat-file", "-e", f"{named[1]}^{{commit}}") is not None


def git(*words: str) -> str | None:
    """What it prints; None where it fails."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def _result(name: str) -> Any:
    name, _, commit = name.partition("@")
    if commit:
        found = git("show", f"{commit}:analysis/results/{name}.json")
        if found is None:
            raise KeyError(f"{commit} has no result {name}")
        return json.loads(found)
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def _over(results: tuple[str, ...]) -> list[float]:
    """By how many per cent peaks of memory are predicted higher than they were measured."""
    return [100 * (peak.predicted / peak.measured - 1) for peak in recorded_peaks(results)]


def _reserved() -> list[float]:
    found = [run["medians"] for result in (*RECORDED, *EARLIER) for run in _result(result)["runs"]]
    return [100 * (run["mem/peak_reserved_gib"] / run["mem/peak_active_gib"] - 1) for run in found]


@cache
def _steps_over(gpus: str) -> list[float]:
    """By how many per cent steps on that many GPUs are predicted longer than they took."""
    return [off for result in STEPS if result.endswith(gpus) for _, off in recorded_steps(result)]


COMPUTED = {
    "step_runs": lambda: len(_steps_over("")),
    "step_2_least": lambda: min(_steps_over("x2")),
    "step_2_most": lambda: max(_steps_over("x2")),
    "step_4_least": lambda: min(_steps_over("x4")),
    "step_4_most": lambda: max(_steps_over("x4")),
    "memory_runs": lambda: len(_over(RECORDED)),
    "memory_most_off": lambda: max(map(abs, _over(RECORDED))),
    "memory_earlier_least": lambda: min(_over(EARLIER)),
    "memory_earlier_most": lambda: max(_over(EARLIER)),
    "memory_reserved_least": lambda: min(_reserved()),
    "memory_reserved_most": lambda: max(_reserved()),
}
