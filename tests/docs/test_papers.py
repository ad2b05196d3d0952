"""Every paper's page is made of its list and its recorded numbers, and the list has all that the paper has."""

import json
import re
from pathlib import Path

import pytest

from analysis.benchmarks.papers import PAPERS
from analysis.benchmarks.papers.page import KINDS, RESULTS, ROOT, SOURCES, STATES, contents, paths, render

LISTED = [name for name in PAPERS if paths(name)[2].is_file()]
VERDICTS = {"measured", "measured elsewhere", "model agrees", "model disagrees", "not measured"}


@pytest.mark.parametrize("name", LISTED)
def test_every_item_of_a_paper_is_listed(name: str) -> None:
    listed = contents(name)
    for kind in KINDS:
        numbers = {int(match[1]) for each in listed["items"] if (match := re.match(rf"{kind} (\d+)\b", each["item"]))}
        assert numbers == set(range(1, listed["contents"][kind] + 1)), kind


@pytest.mark.parametrize("name", LISTED)
def test_items_say_where_they_are(name: str) -> None:
    tables = json.loads(paths(name)[0].read_text())["tables"]
    shown = {each for table in tables for each in table["of"]}
    for each in contents(name)["items"]:
        assert each["state"] in STATES, each
        assert (each["state"] == "here") == (each["item"] in shown), each
        assert each.get("where") or each["state"] in ("not measured", "left out"), each
        assert not each.get("where") or (ROOT / each["where"]).exists(), each
        assert each["state"] != "not measured" or each.get("command"), each
        assert each["state"] != "left out" or each.get("why"), each


@pytest.mark.parametrize("name", LISTED)
def test_a_page_is_made_of_its_numbers(name: str) -> None:
    results, page, _ = paths(name)
    assert page.read_text() == render(name), f"run python -m analysis.benchmarks.papers {name} --page"
    data = json.loads(results.read_text())
    cells = [each for table in data["tables"] for row in table["rows"] for each in row if isinstance(each, dict)]
    assert cells and {each["source"] for each in cells} <= set(SOURCES)
    assert all(float(each["text"].rstrip("%").replace(",", "")) == pytest.approx(each["value"], rel=0.6, abs=0.6)
               for each in cells)  # fmt: skip
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / Path(link)).exists(), link


@pytest.mark.parametrize("name", LISTED)
def test_verdicts_rest_on_recorded_results(name: str) -> None:
    """A verdict names a measurement only with its JSON, and no page calls a simulation a reproduction."""
    claims = contents(name)["claims"]
    assert claims and {each["verdict"] for each in claims} <= VERDICTS
    for each in claims:
        found = [json.loads((RESULTS / f"{result}.json").read_text()) for result in each.get("from", ())]
        assert found or not each["verdict"].startswith("measured"), each["claim"]
        assert each["verdict"] != "not measured" or not found, each["claim"]
        assert all("environment" in str(data) for data in found), each["claim"]
    assert "reproduced" not in paths(name)[1].read_text()


@pytest.mark.parametrize("name", LISTED)
def test_pages_show_what_assumptions_change(name: str) -> None:
    tables = {table["key"]: table for table in json.loads(paths(name)[0].read_text())["tables"]}
    rows = [[cell["value"] for cell in row[2:]] for row in tables["sensitivity"]["rows"]]
    assert len(rows) >= 4 and any(abs(less / as_is - 1) > 0.02 for less, as_is, _ in rows)
