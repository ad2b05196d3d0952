"""docs/troubleshooting.md quotes what the code says."""

import re

import pytest

from megatron_longctx.cli.cli import main
from tests.docs.test_docs import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| symptom")
]
COMMAND = "megatron-longctx "


@pytest.fixture(scope="module")
def code() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "megatron_longctx").rglob("*.py")))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_symptom_is_known_by_is_said_by_the_code(row: list[str], code: str) -> None:
    symptom, said, cure = row
    assert symptom and cure
    for quote in re.findall("`([^`]+)`", said):
        if quote.startswith(COMMAND):
            with pytest.raises(SystemExit) as ended:
                main([quote.removeprefix(COMMAND), "--help"])
            assert ended.value.code == 0
        else:
            assert quote in code, quote


def test_every_symptom_of_a_long_run_is_there() -> None:
    page = " ".join(row[0] for row in ROWS)
    for word in ("hang", "NaN", "slow", "out of memory", "wrong loss", "refused", "lost node", "disk", "checkpoint"):
        assert word in page, word
