"""What README.md and docs/ say is there: links, files, commands, settings, wings; and the script they print runs."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis import packages_page
from analysis.benchmarks.__main__ import parse as parse_benchmark
from megatron_longctx.cli.cli import parse
from megatron_longctx.cli.evaluate import OWN_WORDS as EVAL_WORDS
from megatron_longctx.config import Config
from megatron_longctx.serving.inference_job import split_arguments
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.sweep import sweep
from tests.shared.jobs import TORCHRUN, clean_environment, finished
from tests.test_import_law import PACKAGE, WINGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "launch" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OTHERS = (
    ROOT / "CHANGELOG.md",
    *(page for folder in ("docs/papers", "analysis/results") for page in sorted((ROOT / folder).glob("*.md"))),
)
"""Pages whose figures and names are checked elsewhere, or are those of their day."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("recipes", "launch", "analysis", "tests", "docs", PACKAGE)
GROUPS = {field.name: field.default_factory for field in dataclasses.fields(Config)}
OWN_WORDS = ("prompt", "prompt_file", "out", "train.init_from", *EVAL_WORDS)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no such heading"


def wrong_names(page: Path) -> Iterator[str]:
    """Files and settings, written as code, that are not there."""
    for code in CODE.findall(prose(page)):
        word = code.partition("=")[0]
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./+-]*", code) and not (ROOT / code).exists():
            yield f"{code}: no such file"
        elif (found := re.fullmatch(r"(\w+)\.([a-z_0-9]+)", word)) and found[1] in GROUPS:
            files = (ROOT / "launch" / word, ROOT / PACKAGE / word, ROOT / PACKAGE / found[1] / f"{found[2]}.py")
            if not any(file.exists() for file in files) and not hasattr(GROUPS[found[1]](), found[2]):
                yield f"{word}: no such setting"


def commands(page: Path) -> Iterator[str]:
    """Lines of the page's shell blocks, those that a backslash continues joined; comments stay."""
    for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            yield from filter(None, (line.strip() for line in block.replace("\\\n", " ").splitlines()))


def refuse_command(line: str) -> None:
    """Raise what `line` is refused with, if it is ours; nothing is run."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["megatron-longctx"]:
        arguments = parse(words[1:])
        if getattr(arguments, "multirun", False):
            sweep(arguments.settings)
        elif "settings" in arguments:
            compose_config(split_arguments(arguments.settings, OWN_WORDS)[1])
    elif words[:3] == ["python", "-m", "analysis.benchmarks"]:
        arguments = parse_benchmark(words[3:])[1]
        compose_config(getattr(arguments, "settings", []))
    elif words[:2] == ["python", "-m"] or words[:1] == ["python"]:
        script = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
        source = next(p for p in (ROOT / f"{script}.py", ROOT / script / "__main__.py") if p.exists()).read_text()
        missing = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
        assert not missing, f"{script} has no {', '.join(missing)}"
    elif words[:1] == ["make"]:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make has no {words[1]}"


COMMANDS = [(page.name, line) for page in PAGES for line in commands(page) if not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_files_and_settings_exist(page: Path) -> None:
    assert [*broken_links(page), *wrong_names(page)] == []


def test_links_of_all_other_pages() -> None:
    assert len(OTHERS) > 20
    wrong = [f"{page.relative_to(ROOT)}: {broken}" for page in OTHERS for broken in broken_links(page)]
    assert wrong == [], "\n".join(wrong)


def test_the_site_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.rst"
    names = re.findall(r"^   ([\w./*]+)$", index.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [page.resolve() for name in names for page in index.parent.glob(f"{name}.md")]
    assert set(listed) == {*PAGES, *OTHERS} - set((ROOT / "analysis/results").glob("*.md"))


def test_commands_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) > 20
    refused = []
    for page, line in COMMANDS:
        try:
            refuse_command(line)
        except (ValueError, AssertionError, StopIteration, SystemExit) as error:
            refused.append(f"{page}: {line}\n  {error or type(error).__name__} {capsys.readouterr().err}")
    assert refused == [], "\n".join(refused)


def test_every_wing_has_its_place_and_its_section() -> None:
    listed = re.findall(r"\[`(\w+)`\]\(packages\.md#", (ROOT / "docs/architecture.md").read_text())
    assert listed == list(WINGS), "docs/architecture.md lists the wings in the order of imports"
    assert packages_page.PAGE.read_text() == packages_page.page(), "python -m analysis.packages_page writes it again"


def test_the_script_of_docs_megatron_gives_the_same_losses_on_several_ranks(tmp_path: Path) -> None:
    script, *_ = [b for kind, b in FENCED.findall((ROOT / "docs/megatron.md").read_text()) if kind == "python"]
    path = tmp_path / "train.py"
    path.write_text(script)
    one, three = (losses(path, ranks) for ranks in (1, 3))
    assert len(one) == 4 and one[-1] < one[0]
    assert three == pytest.approx(one, abs=2e-4)


def losses(script: Path, ranks: int) -> list[float]:
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(script)]
    job = finished(script.parent, command, clean_environment(CUDA_VISIBLE_DEVICES=""), quick=True)
    assert job.process.returncode == 0, job.output()
    return [float(number) for number in re.findall(r"^step \d: loss (.*)$", job.out.read_text(), re.MULTILINE)]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[x](nowhere.md)", "nowhere.md: no such file"),
        ("# A title\n[x](#another)", "#another: no such heading"),
        ("`recipes/none.yaml`", "recipes/none.yaml: no such file"),
        ("`train.stepps=3`", "train.stepps: no such setting"),
    ],
)
def test_what_is_not_there_is_found(tmp_path: Path, text: str, wrong: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text + "\n[y](#a-title) `train.steps` `recipes/config.yaml`\n# A title\n")
    assert [*broken_links(page), *wrong_names(page)] == [wrong]


@pytest.mark.parametrize(
    "line",
    [
        "megatron-longctx plan --colour",
        "megatron-longctx train modle=tiny",
        "megatron-longctx serve checkpoint=runs/a serve.porrt=1",
        "python -m analysis.nothing",
        "python -m analysis.network --depth 3",
        "make coffee",
    ],
)
def test_a_command_that_is_not_there_is_found(line: str) -> None:
    with pytest.raises((ValueError, AssertionError, StopIteration, SystemExit)):
        refuse_command(line)
