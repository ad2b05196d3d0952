"""Needles in haystacks: what is asked, and that any number of ranks answers alike."""

from __future__ import annotations

import importlib
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_longctx.mcore.data import TrainingData
from megatron_longctx.mcore.tokenizer import build_tokenizer, text_of
from megatron_longctx.testing.distributed import run_quickly

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
haystack = importlib.import_module("analysis.haystack")
needle = importlib.import_module("analysis.needle")


def test_a_needle_lies_where_it_is_asked_for() -> None:
    draw = random.Random(3)
    tokenizer = build_tokenizer("byte-level", None)
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        asked = haystack.question(900, depth, 5, draw)
        assert len(tokenizer.tokenize(asked.prompt + asked.answer)) == 900
        key = asked.question[-1]
        (found,) = re.finditer(f"#{key}([A-Z]{{4}}) ", asked.text)
        assert found[1] == asked.answer and asked.text.count("#") == 6
        places.append(found.start() / len(asked.text))
    assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.9 and abs(places[2] - 0.5) < 0.1
    assert "".join(haystack.pieces(asked.text, 7, draw)) == asked.text
    with pytest.raises(ValueError, match="length 40: expected 48 or more for 6 needles"):
        haystack.question(40, 0.5, 5, draw)
    with pytest.raises(ValueError, match="other needles: 10, expected 0 to 9"):
        haystack.question(900, 0.5, 10, draw)


def test_lessons_fill_a_sequence_and_ask_for_what_came_before() -> None:
    asked = 0
    for text in haystack.lessons(400, 50, seed=1):
        assert len(text) == 400
        known: dict[str, str] = {}
        for what, key, code in re.findall(r"([#?])([0-9])([A-Z]{4})", text):
            assert (key in known) == (what == "?") and known.setdefault(key, code) == code
            asked += what == "?"
    assert asked > 200


def test_what_a_sequence_teaches_is_one_lesson_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "_LESSON_TOKENS", 40 * 256)
    config = needle.stages_of(256, (1, 1, 1), [f"data.prefix={tmp_path}/lessons"])[-1]
    needle.write_lessons(Path(config.data.prefix), config)
    tokenizer = build_tokenizer("byte-level", None)
    batch = TrainingData(config, tokenizer, tokenizer.vocab_size)[range(40)]
    learned = [text_of(tokenizer, ids) for ids in batch.labels.tolist()]
    assert sorted(learned) == sorted(haystack.lessons(256, 40, config.train.seed))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_several_ranks_answer_as_one_does(tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "run_ranks", run_quickly)
    monkeypatch.setattr(needle, "_LESSON_TOKENS", 10_000)
    words = [
        f"run.root={tmp_path}",
        "model.hidden_size=32",
        "model.ffn_hidden_size=64",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
    ]
    stages = needle.stages_of(
        160, (1, 1, 1), [*words, f"data.prefix={tmp_path}/lessons", "optim.warmup_steps=0", "model.init_std=0.3"]
    )
    needle.train(stages, threads=1)
    questions = needle.grid((130, 160), (0.0, 0.4, 1.0), trials=2)
    asked = [needle.Setup(1, "pass_kv", 1), *(needle.Setup(2, mode, 3) for mode in needle.MODES)]
    answers = needle.ask(stages[-1], asked, questions)
    first = answers[asked[0]]
    assert len(set(first.said)) > 1 and float(first.logits.std(0).max()) > 0.1  # the text matters to it
    for each in needle.findings(questions, answers):
        assert each.different == 0 and each.off < 1e-4, each.setup


def test_what_is_found_is_told_by_length_and_depth(tmp_path: Path) -> None:
    questions = needle.grid((200, 300), (0.0, 1.0), trials=2)
    said = [q.answer for q in questions]
    logits = torch.zeros(len(said), 5)
    wrong = ["", *said[1:]]
    one, three = needle.Setup(1, "pass_kv", 1), needle.Setup(3, "pass_q", 4)
    found = needle.findings(questions, {one: needle.Answers(said, logits), three: needle.Answers(wrong, logits + 0.25)})
    assert found[0] == needle.Found(one, [[1.0, 1.0], [1.0, 1.0]], 0, 0.0)
    assert found[1] == needle.Found(three, [[0.5, 1.0], [1.0, 1.0]], 1, 0.25)
    rows = needle.table(found, [200, 300]).splitlines()
    assert rows[2] == "| 1 |  | 1 | 100.0% | 100.0% |  |  |"
    assert rows[3] == "| 3 | pass_q | 4 | 75.0% | 100.0% | 1 | 2.5e-01 |"
    needle.draw(found, questions, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
