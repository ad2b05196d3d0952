"""Views of runs, made without a network: the dashboard in a real browser, a workspace and a report in W&B."""

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.cli import cli, hydra_options
from megatron_longctx.config import names as keys
from megatron_longctx.training.comparison import Run, content, write_dashboard
from megatron_longctx.training.metrics import METRICS

MODES = ("zigzag", "ring", "striped", "helper", "all_gather", "ulysses")
INSTALLED = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, INSTALLED)), None)
"""None for Playwright's own, if it is installed."""
EVERY = {keys.LOSS, keys.VALIDATION_LOSS, *(metric.key for metric in METRICS)}
PANELS = ("Bar Chart", "Run History Line Plot")


def run(name: str, mode: str, ranks: int, model: str, length: int, hardware: str, speed: float, steps: int = 3) -> Run:
    """Return a run as read from a folder; its speed varies by 4 tokens per second."""
    records: dict[int, dict[str, Any]] = {
        step: {
            "train/step": step,
            "train/loss": 6.0 - step + 1e-6 * speed,
            "perf/tokens_per_s": speed + (step if steps == 3 else step % 5),
            "perf/data_wait_s": 0.001,
            "cp/exposed_comm_s": 0.01 * speed,
            "mem/peak_active_gib": None,
        }
        for step in range(1, steps + 1)
    }
    config = {
        "model": {"name": model},
        "data": {"seq_length": length},
        "parallelism": {"schedule": mode, "context_parallel_size": ranks},
        "train": {"precision": "fp32"},
    }
    return Run(name, records, config, {"device": hardware})


def runs() -> list[Run]:
    found = [run("one_rank", "zigzag", 1, "tiny", 1024, "cpu", 50.0)]
    found += [run(f"compare-{mode}", mode, 4, "tiny", 1024, "cpu", 100.0 + 10 * i) for i, mode in enumerate(MODES)]
    found.append(run("</script><b>big", "usp", 8, "llama3_8b", 131072, "NVIDIA H200", 9000.0))
    return found


def test_content_of_the_page() -> None:
    page_data = content(runs())
    first, second = page_data["runs"][:2]
    assert (first["mode"], second["mode"], second["length"]) == ("one rank", "zigzag", 1024)
    assert first["values"]["difference"] is None
    assert second["values"]["difference"]["value"] == pytest.approx(5e-5)
    assert second["values"]["perf/tokens_per_s"] == {"value": 102.5, "low": 102.25, "high": 102.75, "steps": 2}
    assert second["values"]["mem/peak_active_gib"] is None
    assert second["values"]["cp/exposed_comm_s"]["value"] == pytest.approx(1000.0), "in ms"
    assert second["curves"]["cp/exposed_comm_s"] == pytest.approx([1000.0] * 3), "in ms as well"
    assert second["curves"]["train/loss"] == pytest.approx([5.0001, 4.0001, 3.0001])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install -e '.[dev]'")
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except Error as error:
            if "Executable doesn't exist" not in error.message:
                raise
            pytest.skip("no Chromium here: make browser")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The dashboard of `runs()`, or of the runs that a test gives, in a browser."""
    write_dashboard(getattr(request, "param", runs)(), tmp_path / "dashboard.html")
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1500})
    context.set_default_timeout(120_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto((tmp_path / "dashboard.html").as_uri())
    yield page
    if kept := os.environ.get("DASHBOARD_SCREENSHOT"):
        page.screenshot(path=kept)
    context.close()
    assert errors == []


def names(page: Any) -> list[str]:
    return [cell.removeprefix("●").strip() for cell in page.locator("tbody td:first-child").all_inner_texts()]


def test_the_page_sorts_filters_and_draws(page: Any, tmp_path: Path) -> None:
    assert names(page) == [each.name for each in runs()], "no name is interpreted as HTML"
    page.click("button[data-key='perf/tokens_per_s']")
    assert names(page)[:2] == ["</script><b>big", "compare-ulysses"], "the fastest first"
    page.click("button[data-key='perf/tokens_per_s']")
    assert names(page)[0] == "one_rank"
    page.select_option("#filter-length", "1024")
    page.select_option("#filter-hardware", "cpu")
    assert len(names(page)) == 7 and page.locator("#about").inner_text().startswith("7 of 8 runs")
    page.select_option("#filter-mode", "ring")
    assert names(page) == ["compare-ring"]
    page.click("#reset")
    page.select_option("#filter-model", "tiny")
    assert len(names(page)) == 7 and page.locator("#curves polyline").count() == 7
    page.click("tr[data-run='compare-ring']")
    assert page.locator("#curves polyline").count() == 6, "removed from the charts"
    assert page.locator("tr[data-run='compare-ring'].off").count() == 1
    page.select_option("#curve", label="loss less that of one_rank")
    flat = page.locator("#curves polyline[data-run='one_rank']").get_attribute("points")
    assert len({point.split(",")[1] for point in flat.split()}) == 1, "the first run minus itself"
    assert page.locator("#bars .panel").count() == 4, "a panel for each recorded metric"
    picture = tmp_path / "dashboard.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 20_000


def measured(speeds: dict[str, float], hardware: str = "NVIDIA H200", steps: int = 20) -> list[Run]:
    return [run(name, "zigzag", 4, "tiny", 1024, hardware, speed, steps) for name, speed in speeds.items()]


@pytest.mark.parametrize(
    ("page", "best", "doubt"),
    [
        (lambda: measured({"a": 100, "b": 101}), [], ""),
        (lambda: measured({"a": 100, "b": 120}), ["b"], ""),
        (lambda: measured({"a": 100, "b": 120, "c": 121}), [], ""),
        (lambda: measured({"a": 100, "b": 120}, hardware="cpu"), [], "a, b: on CPUs"),
        (lambda: measured({"a": 100, "b": 120}, steps=12), [], "a, b: with fewer than 10 steps"),
    ],
    ids=["noise", "apart", "two equal", "CPU", "few steps"],
    indirect=["page"],
)
def test_no_run_is_called_best_on_noise(page: Any, best: list[str], doubt: str) -> None:
    column = 1 + page.locator("thead th").all_inner_texts().index("tokens per second")
    marked = page.locator(f"tbody tr:has(td.best:nth-child({column}))")
    assert [row.get_attribute("data-run") for row in marked.all()] == best
    assert page.locator("#doubts").inner_text().startswith(doubt)
    assert page.locator("#doubts").is_visible() is bool(doubt)
    assert page.locator("h2").first.inner_text() == "Do the losses agree?"
    assert page.locator("#agreement").inner_text().startswith("Largest difference from the loss of a at")
    assert page.locator("#curve").input_value() == "difference by step"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["sweep-a-ring", "sweep-a-zigzag"], ["ring", "zigzag"]),
        (["sweep-a", "sweep-a-zigzag", "sweep-b"], ["a", "a-zigzag", "b"]),
        (["sweep-a"], ["sweep-a"]),
        (["x-", "x-1"], ["x-", "x-1"]),
        (["1234567890123456789", "b"], ["…34567890123456789", "b"]),
    ],
)
def test_charts_show_the_part_of_names_that_differs(page: Any, given: list[str], shown: list[str]) -> None:
    """Names in charts are shortened to fit; the table has whole names."""
    script = "names => { DATA.runs = names.map(name => ({name})); return DATA.runs.map(short); }"
    assert page.evaluate(script, given) == shown


def objects(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a specification."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from objects(part)


@pytest.mark.parametrize("kind", ["workspace", "report"])
@pytest.mark.parametrize("group", [None, "compare modes"])
def test_a_wandb_view_shows_the_metrics_of_compare_by_mode(
    kind: str, group: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["wandb", "views", "team/longctx", "--dry-run", *(["--group", group] if group else [])]
    assert cli.main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = printed[kind]
    parts = list(objects(stored))
    shown = {view: [p["config"] for p in parts if p.get("viewType") == view] for view in PANELS}
    bars, lines = ({key for config in shown[view] for key in config["metrics"]} for view in PANELS)
    assert lines == EVERY and bars == {metric.summary_key for metric in METRICS}
    titles = [config["chartTitle"] for view in PANELS for config in shown[view]]
    assert "waiting for messages (ms per step), median (low is better)" in titles
    assert not [title for title in titles if "_" in title], "names in words"
    assert "/team/longctx" in json.dumps(printed["report"]["spec"]), "linked"
    assert {config["xAxis"] for config in shown["Run History Line Plot"]} == {keys.STEP}
    runs = [part for part in parts if "grouping" in part]
    by = [{"section": "run", "name": "group"}, {"section": "run", "name": "jobType"}]
    assert runs and all(part["grouping"] == by for part in runs)
    filters = [{"key": by[0], "op": "=", "value": group, "disabled": False}] if group else []
    assert all(part["filters"]["filters"] == filters for part in runs)
    layouts = [tuple(p["layout"].values()) for p in parts if p.get("viewType") == "Bar Chart"]
    assert kind == "workspace" or len(set(layouts)) == len(METRICS), "panels of a report overlap"


def test_the_place_of_a_wandb_view_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    for name, value in (("WANDB_ENTITY", "theirs"), ("WANDB_PROJECT", "else")):
        monkeypatch.setenv(name, value)
    wandb.teardown()
    try:
        assert cli.main(["wandb", "views", "--dry-run"]) == 0
    finally:
        monkeypatch.undo()
        wandb.teardown()
    assert "/theirs/else" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["project", "/project", "team/", "a/b/c"])
def test_a_place_without_entity_or_project_is_refused(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wandb", "views", place, "--dry-run"]) == 2
    assert f"wandb={place}: expected ENTITY/PROJECT" in capsys.readouterr().err


def test_a_sweep_ends_with_the_commands_that_compare_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism=cp4", "parallelism.schedule=ring,zigzag"]
    options = {"multirun": True, "cfg": None, "info": None, "config_dir": None}
    arguments = argparse.Namespace(verb="train", settings=words, **options)
    trained: list[str] = []
    assert hydra_options.run(arguments, lambda job: trained.append(job.settings[-1])) == 0
    assert trained == ["run.name=default-ring", "run.name=default-zigzag"]
    *_, compared, views = capsys.readouterr().out.splitlines()
    folders = "runs/default-ring runs/default-zigzag"
    assert compared == f"to compare them: megatron-longctx compare {folders} --html runs/compare.html"
    assert views == "in W&B: megatron-longctx wandb views --group default"
