"""Steps that are launched before the host has the tokens of the step before: the same tokens and the same cache."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Request, Scheduler
from megatron_longctx.inference.session import Generation, RunningToken
from megatron_longctx.inference.step_ahead import step_ahead
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.inference.test_scheduler import (
    a_cancelled_request_is_found_again,
    alone,
    answers_to_one_prompt_compute_it_once,
    finish,
    scheduling,
    tokens_of,
)
from tests.shared.training import changed, tiny_config

PAGE = 4
TEXTS = tuple(tuple(random.Random(size).choices(range(256), k=size)) for size in (5, 14, 3))


def begin(engine: LongContextEngine, new: int = 12) -> list[Generation]:
    engine.cache_manager.drop_cached()
    sessions = [engine.open() for _ in TEXTS]
    engine.append(dict(zip(sessions, TEXTS, strict=True)))
    return [engine.start(session, Sampling(max_new_tokens=new)) for session in sessions]


def launches(engine: LongContextEngine) -> Any:
    return mock.patch.object(engine._decoder, "launch", side_effect=engine._decoder.launch)


def close(generations: list[Generation]) -> None:
    for each in generations:
        each.session.close()


def a_batch_that_changes_gets_its_own_tokens(engine: LongContextEngine, answers: list[list[int]]) -> None:
    """A session that leaves the batch for a step comes back with a token of a launch that is no longer the latest."""
    generations = first, second, third = begin(engine)
    for batch in ([first, second], [first, second, third], [third, first], [first], [second], generations, generations):
        step_ahead(engine, list(batch))
    while going := [each for each in generations if each.finish_reason is None]:
        step = LongContextEngine.step if len(going) == 2 else step_ahead  # two of them do not run ahead
        step(engine, going)
    assert [each.tokens for each in generations] == answers
    close(list(generations))


def nothing_is_computed_behind_the_last_token(engine: LongContextEngine, answers: list[list[int]]) -> None:
    generations = begin(engine, 6)
    longest = generations[1]
    with mock.patch.object(engine, "_max_tokens", len(TEXTS[1]) + 4), launches(engine) as launch:
        while going := [each for each in generations if each.finish_reason is None]:
            step_ahead(engine, going)
    assert [len(each.tokens) for each in generations] == [6, 4, 6] and longest.finish_reason == "length"
    assert sum(len(call.args[1]) for call in launch.call_args_list) == 5 + 3 + 5
    close(generations)


def answers_are_found_in_the_cache(engine: LongContextEngine, answers: list[list[int]]) -> None:
    engine.cache_manager.drop_cached()
    scheduler = Scheduler(engine)
    scheduler.submit(Request(0, TEXTS[0], Sampling(max_new_tokens=12)))
    events = [event for _ in range(20) if scheduler.busy for event in scheduler.advance()]
    assert [event.token for event in events] == answers[0], "an event without a token, or another token"
    text = (*TEXTS[0], *answers[0])
    session = engine.open(text)
    assert session.cached_tokens == (len(text) - 1) // PAGE * PAGE  # all but the last token, which no step reads
    session.close()


def logits_are_computed_again(engine: LongContextEngine, answers: list[list[int]]) -> None:
    generations = begin(engine)
    for _ in range(4):
        step_ahead(engine, generations)
    found = engine.next_logits([each.session for each in generations])
    again = [engine.open() for _ in generations]
    engine.append({new: each.session.tokens for new, each in zip(again, generations, strict=True)})
    torch.testing.assert_close(found, engine.next_logits(again))
    close(generations)
    for session in again:
        session.close()


def logits_that_are_not_finite_end_their_answer_alone(engine: LongContextEngine, answers: list[list[int]]) -> None:
    generations, real = begin(engine), engine.model.logits
    broken = len(TEXTS[1]) + 3

    def logits(tokens: Tensor, positions: Tensor, rows: Tensor, scorer: Any = None) -> Tensor:
        found = real(tokens, positions, rows, scorer)
        found[positions[rows] == broken] = torch.nan
        return found

    with mock.patch.object(engine.model, "logits", logits):
        while going := [each for each in generations if each.finish_reason is None]:
            step_ahead(engine, going)
    first, second, third = generations
    assert second.finish_reason == "error" and second.tokens == answers[1][:4]
    assert second.session.cached_tokens == len(second.session.tokens)
    assert (first.tokens, third.tokens) == (answers[0], answers[2])
    close(generations)


def a_step_that_fails_leaves_the_cache_as_it_was(engine: LongContextEngine, answers: list[list[int]]) -> None:
    generations = begin(engine)
    for _ in range(2):
        step_ahead(engine, generations)
    before = [each.session.cached_tokens for each in generations]
    with mock.patch.object(engine._decoder, "launch", side_effect=MemoryError), pytest.raises(MemoryError):
        step_ahead(engine, generations)
    assert [each.session.cached_tokens for each in generations] == before
    while going := [each for each in generations if each.finish_reason is None]:
        step_ahead(engine, going)
    assert [each.tokens for each in generations] == answers
    close(generations)


def a_launch_waits_for_the_one_before_the_last(engine: LongContextEngine, answers: list[list[int]]) -> None:
    """Inputs are staged in two memories in turn."""
    generations, waited = begin(engine), []
    for number in range(4):
        step_ahead(engine, generations)
        running = engine._decoder.running
        assert running is not None
        engine._decoder.running = mock.Mock(side_effect=lambda n=number, real=running: (waited.append(n), real())[1])
        for each in generations:
            assert isinstance(each.session.next_token, RunningToken)
            each.session.next_token.ids = engine._decoder.running
    waited.clear()
    engine._decoder.launch(engine._place({generations[0].session: 1}), [1])
    assert waited == [2]
    close(generations)


CHECKS: tuple[Callable[[LongContextEngine, list[list[int]]], None], ...] = (
    a_batch_that_changes_gets_its_own_tokens,
    nothing_is_computed_behind_the_last_token,
    answers_are_found_in_the_cache,
    logits_are_computed_again,
    logits_that_are_not_finite_end_their_answer_alone,
    a_step_that_fails_leaves_the_cache_as_it_was,
    a_launch_waits_for_the_one_before_the_last,
)


def run_checks(rank: int, config: Config) -> None:
    with engine_of(config) as engine:
        answers = [engine.generate([text], Sampling(max_new_tokens=12))[0] for text in TEXTS]
        for check in CHECKS:
            check(engine, answers)
            assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions, check


@pytest.mark.parametrize("n", [1, 2, 3])
def test_steps_ahead_equal_steps_that_wait(tmp_path: Path, n: int) -> None:
    config = tiny_config(tmp_path, "ahead", {"data.seq_length": 128})
    run_distributed(run_checks, n, parallel(config, n, decode="replicated", page_tokens=PAGE))


def steps_that_run_ahead_change_no_answer(engine: LongContextEngine) -> None:
    """Requests come at different times, end by length or by a token that they meet, or are cancelled."""
    source = random.Random(9)
    texts = [tuple(source.randrange(256) for _ in range(size)) for size in (3, 40, 1, 17, 25, 9, 70, 12)]
    requests = [Request(i, text, Sampling(max_new_tokens=source.randint(2, 12))) for i, text in enumerate(texts)]
    for number in (1, 4, 6):
        ends = alone(engine, requests[number])
        stop = (ends[len(ends) // 2],)
        requests[number] = replace(requests[number], sampling=replace(requests[number].sampling, stop=stop))
    sampled = replace(requests[3].sampling, temperature=1.0, seed=4)  # no step runs ahead beside it
    requests[3] = replace(requests[3], sampling=sampled)
    expected = [alone(engine, request) for request in requests]
    launch = engine._decoder.launch
    with (
        mock.patch.object(engine._decoder, "launch", side_effect=launch) as launched,
        scheduling(engine, max_active=4, prefill_chunk=16) as scheduler,
    ):
        found: defaultdict[int, list[Event]] = defaultdict(list)
        for request in (*requests, Request(99, texts[1], Sampling(max_new_tokens=100))):
            scheduler.submit(request)
            for _ in range(3):
                for event in scheduler.advance():
                    found[event.number].append(event)
        scheduler.cancel(99)
        for number, events in finish(scheduler).items():
            found[number] += events
    assert [tokens_of(found[number]) for number in range(len(requests))] == expected
    assert found[99][-1].finish_reason == "cancelled"
    tokens = [token for call in launched.call_args_list for token in call.args[1]]
    assert min(tokens) < -1 and any(token >= 0 for token in tokens), "no step followed one that ran"


def with_every_layout(rank: int, config: Config) -> None:
    windows = changed(config, {"model.window": 12, "model.window_pattern": 2})
    shared = replace(config, inference=replace(config.inference, shard_weights=True))
    for each in (config, windows, shared):
        with engine_of(each) as engine:
            steps_that_run_ahead_change_no_answer(engine)


@pytest.mark.parametrize("n", [1, 2])
def test_requests_are_served_as_if_alone(tmp_path: Path, n: int) -> None:
    config = parallel(tiny_config(tmp_path, "fresh", {"data.seq_length": 128}), n, decode="replicated")
    run_distributed(with_every_layout, n, config)


def ahead_on_gpus(rank: int, config: Config) -> None:
    with engine_of(config) as engine:
        steps_that_run_ahead_change_no_answer(engine)
        a_cancelled_request_is_found_again(engine)
        answers_to_one_prompt_compute_it_once(engine)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "shared"), [(1, False), (2, False), (2, True)])
def test_steps_run_ahead_on_gpus(tmp_path: Path, n: int, shared: bool) -> None:
    """Steps of graphs, which follow each other on the device."""
    if max_gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices")
    settings = {"train.device": "cuda", "data.seq_length": 128, "model.hidden_size": 64}
    config = parallel(tiny_config(tmp_path, "x", settings), n, shard_weights=shared)
    run_distributed(ahead_on_gpus, n, config, backend="nccl")
