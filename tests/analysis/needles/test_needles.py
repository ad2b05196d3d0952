"""`python -m analysis.needles` as a user starts it, and the files that it writes."""

import json
import re
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from analysis.needles.__main__ import main
from analysis.needles.questions import Haystack, make_questions, score
from analysis.needles.scores import JSON, NEEDLES, TABLES, Results, by_depth, mean_scores
from megatron_longctx.config import Config
from tests.inference.conftest import trained as trained
from tests.inference.test_generate import run_of
from tests.shared.jobs import clean_environment, finished

QUESTIONS = list(make_questions(["needle", "niah_multivalue"], [1_200, 2_400], 2, Haystack.noise(), len, [0.0, 1.0]))


def test_answers_are_the_same_on_several_ranks(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    words = [run_of(trained), "tasks=needle,niah_multivalue", "lengths=1100", "depths=0,.5", "samples=1", "chat=true"]
    words.append(f"inference.chat_template={tmp_path}/chat.jinja")
    found = {}
    for ranks in (1, 2):
        out = tmp_path / f"on{ranks}"
        command = [sys.executable, "-m", "analysis.needles", *words, f"out={out}"]
        command.append(f"parallelism.context_parallel_size={ranks}")
        job = finished(tmp_path, command, clean_environment(CUDA_VISIBLE_DEVICES=""))
        assert job.process.returncode == 0, job.output()
        found[ranks] = json.loads((out / JSON).read_text())
        printed = job.out.read_text()
        assert found[ranks]["complete"] and "| 50% |" in printed and "| niah_multivalue |" in printed
        assert (out / NEEDLES).is_file() and {path.name for path in out.iterdir()} == {JSON, TABLES, NEEDLES}
    assert found[1]["tasks"] == found[2]["tasks"] and list(found[1]["tasks"]) == ["needle", "niah_multivalue"]
    of_length = found[1]["tasks"]["needle"]["lengths"]["1100"]
    assert list(of_length["by_depth"]) == ["0.0", "0.5"] and len(of_length["questions"]) == 2
    for question in of_length["questions"]:
        assert 1080 < question["prompt_tokens"] + question["answer_tokens"] <= 1100
        assert question["said"] and question["score"] == float(question["answers"][0] in question["said"])


def test_a_chats_template_counts(trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}" + 300 * "!")
    words = [run_of(trained), "tasks=needle", "lengths=300", "depths=0"]
    least = []
    for more in ([], ["chat=true", f"inference.chat_template={tmp_path}/chat.jinja"]):
        assert main([*words, *more]) == 2
        found = re.search(r"at least (\d+) tokens for needle", capsys.readouterr().err)
        assert found is not None
        least.append(int(found[1]))
    assert least[1] - least[0] == 300 + len("[]") - len(" ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=nedle"], "tasks=nedle: expected `all`, or some of needle, niah_single,"),
        (["depths=1.5", "lengths=900"], "depths=1.5: expected numbers separated by commas, each from"),
        (["seed=x", "lengths=900"], "seed=x: expected a number from 0"),
        (["lengths=900", "chat=yes"], "chat=yes: expected true or false"),
        (["lengths=900", "chat=true"], "chat=True: expected false: the byte-level tokenizer has no"),
        (["lengths=900", "haystack=nowhere"], "haystack=nowhere: expected a folder with .txt files"),
        (["lengths=300"], "lengths=300: expected at least "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    trained: Config, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([run_of(trained), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("needles: ") and message in line
    assert not Path(trained.run.root, trained.run.name, "eval").exists()


def test_scores_are_shares_of_answers_by_length_and_depth() -> None:
    assert len(QUESTIONS) == 2 * 2 * 2 + 2 * 2
    scores = [score(q, f"x {q.answers[0]} y") for q in QUESTIONS]
    task = attrgetter("task")
    expected = {"needle": {1_200: 1.0, 2_400: 1.0}, "niah_multivalue": {1_200: 0.25, 2_400: 0.25}}
    assert mean_scores(scores, task) == expected
    scores[0] = score(QUESTIONS[0], QUESTIONS[1].answers[0])
    assert mean_scores(scores, task)["needle"] == {1_200: 0.75, 2_400: 1.0}
    assert by_depth(scores) == {0.0: {1_200: 0.5, 2_400: 1.0}, 1.0: {1_200: 1.0, 2_400: 1.0}}


def test_scores_are_written_by_task_length_and_depth(tmp_path: Path) -> None:
    results = Results("a run", {"run": "runs/a"})
    results.scores = [score(q, q.answers[0] if q.depth != 1.0 else "no") for q in QUESTIONS]
    results.write(tmp_path)
    written = json.loads((tmp_path / JSON).read_text())
    assert written["complete"] is False and "Not finished" in (tmp_path / TABLES).read_text()
    results.complete = True
    results.write(tmp_path)
    written = json.loads((tmp_path / JSON).read_text())
    assert written["complete"] and written["run"] == "runs/a"
    needle = written["tasks"]["needle"]["lengths"]["2400"]
    assert needle["score"] == 0.5 and needle["by_depth"] == {"0.0": 1.0, "1.0": 0.0} and len(needle["questions"]) == 4
    first = needle["questions"][0]
    assert (first["said"], first["score"], first["depth"]) == (first["answers"][0], 1.0, 0.0) and "prompt" not in first
    several = written["tasks"]["niah_multivalue"]["lengths"]["1200"]
    assert several["score"] == 0.25 and "by_depth" not in several
    tables = (tmp_path / TABLES).read_text()
    for row in ("| needle | 50.0 | 50.0 |", "| niah_multivalue | 25.0 | 25.0 |", "| 0% | 100.0 | 100.0 |"):
        assert row in tables
    assert "4 to 8 questions a task" in tables and "Not finished" not in tables
