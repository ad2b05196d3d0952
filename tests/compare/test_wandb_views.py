"""The workspace and the report: panels of what runs log, built without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_longctx import names
from megatron_longctx.compare.runs import METRICS
from megatron_longctx.verbs import cli

EVERY = {names.LOSS, names.VALIDATION_LOSS, *(metric.key for metric in METRICS)}
PANELS = ("Bar Chart", "Run History Line Plot")


def objects(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object inside of a specification."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from objects(part)


@pytest.mark.parametrize("kind", ["workspace", "report"])
@pytest.mark.parametrize("group", [None, "compare modes"])
def test_a_view_shows_what_compare_does_by_mode(
    kind: str, group: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["wandb", kind, "team/longctx", "--dry-run", *(["--group", group] if group else [])]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    parts = list(objects(told))
    shown = {view: [p["config"] for p in parts if p.get("viewType") == view] for view in PANELS}
    bars, lines = ({key for config in shown[view] for key in config["metrics"]} for view in PANELS)
    assert lines == EVERY and bars == EVERY - {names.LOSS, names.VALIDATION_LOSS}
    assert all(config["chartTitle"].startswith(config["metrics"][0]) for view in PANELS for config in shown[view])
    assert {config["xAxis"] for config in shown["Run History Line Plot"]} == {names.STEP}
    runs = [part for part in parts if "grouping" in part]
    by = [{"section": "run", "name": "group"}, {"section": "run", "name": "jobType"}]
    assert runs and all(part["grouping"] == by for part in runs)
    filters = [{"key": by[0], "op": "=", "value": group, "disabled": False}] if group else []
    assert all(part["filters"]["filters"] == filters for part in runs)
    layouts = [tuple(p["layout"].values()) for p in parts if p.get("viewType") == "Bar Chart"]
    assert kind == "workspace" or len(set(layouts)) == len(METRICS), "panels of a report lie on each other"


@pytest.mark.parametrize("place", ["project", "/project", "team/", "a/b/c"])
def test_a_place_is_an_entity_and_a_project(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wandb", "report", place, "--dry-run"]) == 2
    assert f"wandb={place}: expected ENTITY/PROJECT" in capsys.readouterr().err
