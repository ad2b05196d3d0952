"""Drafts from the prompt change no token, whatever is drawn how, and save passes where an answer repeats its prompt."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.inference.session import Generation, NextToken, Session, draw
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import changed, tiny_config

SETTINGS = (
    Sampling(max_new_tokens=40),
    Sampling(max_new_tokens=25, temperature=0.3, seed=5, logprobs=2),
    Sampling(max_new_tokens=30, repetition_penalty=1.02, frequency_penalty=0.1, min_tokens=3, stop=(7,)),
    Sampling(max_new_tokens=1),
)


def prompts() -> list[tuple[int, ...]]:
    source = random.Random(1)
    part = [source.randrange(97, 101) for _ in range(30)]
    return [tuple(part * 3), (5,), tuple(part[:7] * 2), (97, 98)]


def answers(engine: LongContextEngine, together: bool) -> list[list[object]]:
    """What every request gets, event by event, from a scheduler that computes them together or one after another."""
    engine.cache_manager.drop_cached()
    scheduler = Scheduler(engine, prefill_chunk=64)
    found: list[list[object]] = [[] for _ in SETTINGS]
    for number, (prompt, sampling) in enumerate(zip(prompts(), SETTINGS, strict=True)):
        scheduler.submit(Request(number, prompt, sampling))
        while scheduler.busy and (not together or number == len(SETTINGS) - 1):
            for event in scheduler.advance():
                top = None if event.score is None else [token for token, _ in event.score.top]
                found[event.number].append((event.token, event.finish_reason, top))
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0
    return found


def with_and_without(rank: int, config: Config, drafted: Config) -> tuple[list[list[object]], list[int]]:
    runs, passes = [], []
    for each in (config, drafted):
        with engine_of(each) as engine:
            for together in (False, True):
                engine.mode_counts.clear()
                runs.append(answers(engine, together))
                passes.append(engine.mode_counts.total())
            if each is drafted:
                a_fork_and_an_end_inside_a_draft(engine)
    assert runs[0] == runs[1] == runs[2] == runs[3]
    return runs[0], passes


def a_fork_and_an_end_inside_a_draft(engine: LongContextEngine) -> None:
    """The session has exactly its tokens in the cache, and goes on as without drafts."""
    text = list(prompts()[0])
    straight = engine.generate([text], Sampling(max_new_tokens=30))[0]
    session, new = engine.open(), []
    session.append(text)
    for count in (3, 1, 9, 2, 15):
        new += session.generate(Sampling(max_new_tokens=count))
        assert session.tokens == [*text, *new] and not session.ahead
        assert session.cached_tokens in (len(session.tokens), len(session.tokens) - 1)
        fork = session.fork()
        assert fork.generate(Sampling(max_new_tokens=2)) == straight[len(new) :][:2] or len(new) > 28
        fork.close()
    assert new == straight
    session.close()
    assert engine.cache_manager.used_pages() == 0


@pytest.mark.parametrize("n", [1, 3])
def test_drafts_change_no_token(tmp_path: Path, n: int) -> None:
    config = parallel(tiny_config(tmp_path, "x", {"data.seq_length": 128}), n)
    results = run_distributed(with_and_without, n, config, changed(config, {"inference.speculate": 7}))
    found, passes = results[0]
    assert all(result == results[0] for result in results) and [len(events) for events in found][3] == 1
    assert passes[2] < 0.8 * passes[0] and passes[3] < passes[1], "the model repeats itself"


class _Engine:
    pass


def draft(text: list[int], most: int, new: int = 100) -> list[int]:
    session = Session(_Engine(), 0)  # type: ignore[arg-type]
    session.tokens = text
    return Generation(session, Sampling(max_new_tokens=new)).draft(most, 1000)


def test_drafts_follow_the_latest_place_that_reads_alike() -> None:
    assert draft([1, 2, 3, 4, 5, 1, 2, 3], 3) == [4, 5, 1]
    assert draft([1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3], 2) == [4, 9], "3 equal tokens rather than 2"
    assert draft([1, 2, 3, 4, 9, 2, 3, 8, 7, 2, 3], 2) == [8, 7], "the latest"
    assert draft([5, 6, 5, 6, 5, 6], 4) == [5, 6, 5, 6] and draft([5, 6, 5, 6], 4) == [5, 6], (
        "with enough after it, if there is one"
    )
    assert draft([6, 6, 6, 6, 6, 6, 6], 3) == [6, 6, 6]
    assert draft([1, 2, 3, 4, 5, 1, 2, 3], 3, new=3) == [4, 5], "the last token is drawn from the one before"
    assert draft([1, 2, 3, 1, 2, 3], 9, new=1) == draft([1, 2, 3, 4, 3], 2) == draft([1], 2) == draft([1, 1], 2) == []


def test_only_replicated_steps_have_drafts(tmp_path: Path) -> None:
    for name, value in (("decode", "plan"), ("mode", "pass_q"), ("exact_reuse", True)):
        config = tiny_config(tmp_path, "x", {})
        inference = replace(config.inference, speculate=4, prefill_chunk=16, **{name: value})
        with pytest.raises(ValueError, match=r"inference\.speculate=4: expected 0 with inference\." + name):
            LongContextEngine(None, None, None, inference)  # type: ignore[arg-type]


def test_tokens_that_all_ranks_know_are_not_drawn_again() -> None:
    """One rank has the logits of a prompt; those of its neighbour, and of one that samples, are on another."""
    known, drawn, sampled = sessions = [Session(_Engine(), number) for number in range(3)]  # type: ignore[arg-type]
    for session in sessions:
        session.tokens = [1, 2]
    known.next_token, drawn.next_token = NextToken(None, 7), NextToken(torch.tensor([0.0, 3.0, 1.0]), None)
    sampled.next_token = NextToken(torch.tensor([0.0, 50.0, 0.0]), 2)
    plain = Sampling(max_new_tokens=3)
    all_three = list(map(Generation, sessions, (plain, plain, replace(plain, temperature=1.0))))
    found = draw(all_three, None, torch.device("cpu"))
    assert [found[each] for each in all_three] == [(7, None), (1, None), (1, None)]
