"""The dashboard: every run's figures and curves in one HTML file, which opens without a network or a server."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import files, names
from .runs import COLOURS, METRICS, Run, common_steps, differences

_TEMPLATE = Path(__file__).with_name("dashboard.html")
_MARK = "/*RUNS*/"
_MOST_POINTS = 2000  # of a curve: more than a screen has columns
_CURVES = ((names.LOSS, "loss"), *((metric.key, metric.title) for metric in METRICS))


def write_dashboard(runs: Sequence[Run], path: Path) -> None:
    """Write the dashboard of `runs`; losses are compared with those of the first.

    Raises:
        ValueError: no common steps.
    """
    page = _TEMPLATE.read_text(encoding="utf-8")
    before, after = page.split(_MARK)
    # No text of a run may end the script: "</" is the one thing that JSON must not hold inside of it.
    data = json.dumps(content(runs), allow_nan=False).replace("</", "<\\/")
    files.write_text(path, before + data + after)


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows, as JSON's types: a value that is not known, or not finite, is null."""
    first, steps = runs[0], common_steps(runs)
    metrics = [{"key": m.key, "title": m.title, "unit": m.unit, "better": m.better} for m in METRICS]
    apart = {"key": "difference", "title": "largest loss difference", "unit": f"to {first.name}", "better": "low"}
    return {
        "first": first.name,
        "colours": COLOURS,
        "metrics": [*metrics, apart],
        "curves": [{"key": key, "title": title} for key, title in _CURVES],
        "runs": [_run(run, first, steps) for run in runs],
    }


def _run(run: Run, first: Run, steps: Sequence[int]) -> dict[str, Any]:
    apart = [abs(each) for each in differences(run, first, steps)]
    largest = None if run is first or any(map(math.isnan, apart)) else max(apart)
    shown = sorted(run.records)
    shown = shown[:: -(-len(shown) // _MOST_POINTS)]
    curves = {key: [_finite(run.records[step].get(key)) for step in shown] for key, _ in _CURVES}
    return {
        "name": run.name,
        **run.facts(),
        "values": {**{m.key: _finite(m.of(run)) for m in METRICS}, "difference": _finite(largest)},
        "steps": shown,
        "curves": curves,
    }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
