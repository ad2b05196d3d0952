"""Every measured figure that README.md and docs/ print is a recorded one."""

from pathlib import Path

import pytest

from tests.docs.claims import Claim, claims, in_history, printed, uncovered, value, words
from tests.docs.test_docs import PAGES, ROOT

CLAIMS = list(claims())


# Of the generated page every number is a default or the end of a range.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "configuration.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_measured_figure_has_a_source(page: Path) -> None:
    own = [claim for claim in CLAIMS if claim.page == page.relative_to(ROOT).as_posix()]
    text = words(page)
    assert [claim.text for claim in own if claim.text not in text] == [], "not in the page (any more)"
    assert uncovered(text, own) == [], "no claim of docs/claims.yaml names these"


def test_figures_are_what_was_recorded() -> None:
    measured = [claim for claim in CLAIMS if claim.figures is not None]
    assert len(measured) > 20 and {claim.page for claim in CLAIMS} <= {p.relative_to(ROOT).as_posix() for p in PAGES}
    wrong = []
    for claim in measured:
        for figure, source in (claim.figures or {}).items():
            if not in_history(source):
                continue
            found = printed(figure, value(source))
            if found != figure or figure not in claim.text:
                wrong.append(f"{claim.page}: {claim.text!r}: {figure} is {found} by {source}")
    assert wrong == [], "\n".join(wrong)


def test_what_was_only_printed_is_no_source() -> None:
    with pytest.raises(KeyError, match="written down"):
        value("inference_h200_x4[printed][decode][0][ms]")
    with pytest.raises(KeyError, match="written down"):
        value("attention_peers_h200_x2[measurements][name=zigzag & length=131072 & heads=32:32][seconds]")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("took 4.1 ms", 0),
        ("took 4.2 ms", 1),
        ("took 4.1 ms and 17 ms", 1),
        ("39% here, 2.5 times there, 1,024 tokens on 4 GPUs", 2),
        ("errors of 1.3e-4, versions 0.16.1", 1),
    ],
)
def test_figures_without_a_source_are_found(text: str, left: int) -> None:
    assert len(uncovered(text, [Claim("x", "took 4.1 ms", {"4.1": "1"})])) == left


def test_sources_are_computed() -> None:
    step = "llama3_8b_training_h200_x4[runs][name=end_to_end_128k][medians][perf/step_s]"
    assert printed("3.29", value(step)) == "3.29"
    assert value(f"max({step} / {step}, 100 * 0.5)") == 50
    with pytest.raises(KeyError, match="12 items"):
        value("llama3_8b_training_h200_x4[runs][name=*][medians][perf/step_s]")
    assert printed("1,048", 1048.4) == "1,048" and printed("0.30", 0.2951) == "0.30"
