"""Requests that come and go beside each other get what they would get alone, and leave nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Request, Scheduler
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import changed, tiny_config


def finish(scheduler: Scheduler) -> dict[int, list[Event]]:
    """Advance until nothing is left to do."""
    events: dict[int, list[Event]] = {}
    for _ in range(500):
        if not scheduler.busy:
            return events
        for event in scheduler.advance():
            events.setdefault(event.number, []).append(event)
    raise AssertionError("the scheduler does not come to an end")


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def everybody_gets_their_own(engine: LongContextEngine) -> list[list[int]]:
    source = random.Random(0)
    requests = [
        Request(
            i,
            tuple(source.randrange(256) for _ in range(source.choice((1, 5, 30, 60)))),
            Sampling(max_new_tokens=source.randint(1, 6), temperature=source.choice((0.0, 1.0)), seed=i),
        )
        for i in range(12)
    ]
    alone = [engine.generate([request.prompt], request.sampling)[0] for request in requests]
    scheduler = Scheduler(engine, max_active=4, prefill_chunk=16, keep_sessions=2)
    early: dict[int, list[Event]] = {}
    for request in requests:
        scheduler.submit(request)
        for event in scheduler.advance():
            early.setdefault(event.number, []).append(event)
    late = finish(scheduler)
    for request, expected in zip(requests, alone, strict=True):
        events = early.get(request.number, []) + late.get(request.number, [])
        assert tokens_of(events) == expected
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0
    return alone


def a_long_prompt_stalls_nobody(engine: LongContextEngine) -> None:
    scheduler = Scheduler(engine, prefill_chunk=10)
    scheduler.submit(Request(0, (97, 98), Sampling(max_new_tokens=9)))
    scheduler.advance()
    scheduler.submit(Request(1, (99,) * 55, Sampling(max_new_tokens=1)))
    rounds = [{event.number for event in scheduler.advance()} for _ in range(6)]
    assert rounds == [{0}] * 5 + [{0, 1}]
    scheduler.close()


def a_conversation_is_found_again(engine: LongContextEngine) -> None:
    scheduler = Scheduler(engine, keep_sessions=1)
    first = Request(0, tuple(range(60, 80)), Sampling(max_new_tokens=4))
    scheduler.submit(first)
    answer = tokens_of(finish(scheduler)[0])
    second = Request(1, (*first.prompt, *answer, 10, 11), Sampling(max_new_tokens=4))
    scheduler.submit(second)
    events = finish(scheduler)[1]
    assert {event.cached_tokens for event in events} == {23}  # its last token was given out, not computed
    scheduler.close()
    assert tokens_of(events) == engine.generate([second.prompt], second.sampling)[0]


def what_was_cancelled_is_found_again(engine: LongContextEngine) -> None:
    """As after a stop text: the prompt and what was computed of the answer, though the last token was not."""
    scheduler = Scheduler(engine)
    first = Request(0, tuple(range(60, 80)), Sampling(max_new_tokens=50))
    scheduler.submit(first)
    answer = tokens_of([event for _ in range(4) for event in scheduler.advance()])
    scheduler.submit(Request(1, (1, 2, 3), first.sampling))  # cancelled before anything of it is computed
    scheduler.cancel(0)
    scheduler.cancel(1)
    assert [event.finish_reason for event in scheduler.advance()] == ["cancelled", "cancelled"]
    assert not scheduler.busy
    second = Request(2, (*first.prompt, *answer[:-1], 10, 11), Sampling(max_new_tokens=4))
    scheduler.submit(second)
    events = finish(scheduler)[2]
    assert {event.cached_tokens for event in events} == {23}
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0
    assert tokens_of(events) == engine.generate([second.prompt], second.sampling)[0]


def what_cannot_be_served_harms_nobody(engine: LongContextEngine) -> None:
    scheduler = Scheduler(engine)
    good = Sampling(max_new_tokens=3)
    scheduler.submit(Request(0, (97, 98), good))
    scheduler.submit(Request(1, (97, 10**6), good))
    scheduler.submit(Request(2, (), good))
    scheduler.submit(Request(3, (97,) * 10**5, good))
    scheduler.submit(Request(4, (97,), Sampling(max_new_tokens=50)))
    scheduler.advance()
    scheduler.cancel(4)
    scheduler.cancel(99)
    events = finish(scheduler)
    assert len(tokens_of(events[0])) == 2 and events[0][-1].finish_reason == "length"
    assert events[4][-1].finish_reason == "cancelled"
    scheduler.submit(Request(5, (97, 10**6), good))
    scheduler.submit(Request(6, (97,) * 10**5, good))
    failed = finish(scheduler)
    assert "token=1000000" in failed[5][0].error and failed[5][0].finish_reason == "error"
    assert "prompt and max_tokens=100003: expected at most" in failed[6][0].error
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def requests_wait_for_room(engine: LongContextEngine) -> None:
    """Together they need three times the cache; kept caches give way."""
    room = engine.cache_manager.slots_per_rank * engine.cache_manager.n
    scheduler = Scheduler(engine, prefill_chunk=10**6)
    for i in range(6):
        scheduler.submit(Request(i, (i + 1,) * (room // 2 - 20), Sampling(max_new_tokens=2)))
    scheduler.advance()
    assert scheduler.num_waiting >= 4
    assert all(len(tokens_of(events)) in (1, 2) for events in finish(scheduler).values())
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def short_requests_overtake_one_that_waits_for_room(engine: LongContextEngine) -> None:
    """For about as long as itself would take: together they come to fewer tokens than it does."""
    room = engine.cache_manager.slots_per_rank * engine.cache_manager.n
    scheduler, size = Scheduler(engine, max_active=3), room // 2
    scheduler.submit(Request(0, (1,) * size, Sampling(max_new_tokens=60)))
    scheduler.submit(Request(1, (2,) * size, Sampling(max_new_tokens=2)))  # waits for the first to end
    events: list[Event] = []
    for i in range(2, 6):
        scheduler.submit(Request(i, (3,) * (size // 2 - 10), Sampling(max_new_tokens=2)))
        scheduler.submit(Request(10 + i, (4,), Sampling(max_new_tokens=1)))
        for _ in range(3):
            events += scheduler.advance()
    ended = [event.number for event in events if event.finish_reason]
    assert set(ended) == {2, 3, *range(12, 16)}, "of those that are half as long two at most"
    assert scheduler.num_waiting == 3
    late = [event.number for events in finish(scheduler).values() for event in events if event.finish_reason]
    assert sorted([*ended, *late]) == sorted([0, 1, *range(2, 6), *range(12, 16)])
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def what_others_have_asked_is_not_found(engine: LongContextEngine) -> None:
    """Neither what is kept nor what is under way, nor does anybody wait for it."""
    prompt, sampling = tuple(range(60, 110)), Sampling(max_new_tokens=3)
    scheduler = Scheduler(engine, prefill_chunk=20)

    def cached(number: int, salt: int) -> int:
        scheduler.submit(Request(number, prompt, sampling, salt))
        (found,) = {event.cached_tokens for event in finish(scheduler)[number]}
        return found

    assert [cached(0, 1), cached(1, 2), cached(2, 1), cached(3, 2), cached(4, 0)] == [0, 0, 49, 49, 0]
    other = tuple(range(110, 160))
    scheduler.submit(Request(5, other, sampling, 1))
    scheduler.advance()
    scheduler.submit(Request(6, other, sampling, 2))
    scheduler.advance()
    assert scheduler.num_waiting == 0
    assert {event.cached_tokens for event in finish(scheduler)[6]} == {0}
    scheduler.close()


def nothing_promised_is_evicted(engine: LongContextEngine) -> None:
    """Two sequences wait behind a long prompt, all that they have shared with one that ended before others."""
    assert engine.settings.evict and engine.cache_manager.slots_per_rank * engine.cache_manager.n == 600
    source = random.Random(2)
    document, other, long = (tuple(source.randrange(97, 105) for _ in range(size)) for size in (200, 150, 280))
    prompts = (document, other, long, (*document[:190], 1), (*document[:190], 2))
    requests = [Request(i, prompt, Sampling(max_new_tokens=15)) for i, prompt in enumerate(prompts)]
    alone = [engine.generate([request.prompt], request.sampling)[0] for request in requests]
    scheduler, events = Scheduler(engine, prefill_chunk=20), {}
    for together in (requests[:1], requests[1:2], requests[2:]):
        for request in together:
            scheduler.submit(request)
        events |= finish(scheduler)
    assert [tokens_of(events[i]) for i in range(5)] == alone
    assert events[3][0].cached_tokens == events[4][0].cached_tokens == 190
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def prompts_that_leave_no_position_are_refused(engine: LongContextEngine) -> None:
    most = engine.model.max_positions
    assert most is not None
    scheduler = Scheduler(engine)
    for i, size in enumerate((3, most, most - 1, most + 1)):
        scheduler.submit(Request(i, (97,) * size, Sampling(max_new_tokens=4)))
    events = finish(scheduler)
    assert [len(tokens_of(events[i])) for i in range(4)] == [4, 0, 1, 0]
    assert events[1][0].refused and f"tokens of the prompt={most}: expected less than" in events[1][0].error
    assert events[3][0].refused
    scheduler.close()


def engines(rank: int, evicting: Config, learned: Config) -> None:
    with engine_of(evicting) as engine:
        nothing_promised_is_evicted(engine)
    with engine_of(learned) as engine:
        prompts_that_leave_no_position_are_refused(engine)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", [1, 2])
def test_requests_that_an_engine_alone_would_not_get_through(tmp_path: Path, n: int) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 24})
    learned = changed(config, {"model.position_embedding": "learned"})
    # Of a rank's pages some are for what ranks may differ by.
    evicting = parallel(config, n, evict=True, cache_tokens=600 - n * 4)
    run_distributed(engines, n, evicting, parallel(learned, n))


def every_promise(rank: int, config: Config) -> list[list[int]]:
    with engine_of(config) as engine:
        found = everybody_gets_their_own(engine)
        a_long_prompt_stalls_nobody(engine)
        a_conversation_is_found_again(engine)
        what_was_cancelled_is_found_again(engine)
        what_cannot_be_served_harms_nobody(engine)
        requests_wait_for_room(engine)
        short_requests_overtake_one_that_waits_for_room(engine)
        what_others_have_asked_is_not_found(engine)
    return found


@pytest.mark.usefixtures("on_cpu")
def test_requests_beside_each_other_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(every_promise, 2, parallel(tiny_config(tmp_path, "fresh"), 2))
    assert first == second and len(first) == 12


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_active=0: expected 1 or more"):
        Scheduler(None, max_active=0)  # type: ignore[arg-type]
