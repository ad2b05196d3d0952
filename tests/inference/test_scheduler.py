"""Concurrent requests get the same answers as alone, share prefixes, and leave nothing in the cache."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Request, Scheduler
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import changed, tiny_config

DOCUMENT = tuple(random.Random(3).randrange(256) for _ in range(120))
GREEDY = Sampling(max_new_tokens=4)


@contextmanager
def scheduling(engine: LongContextEngine, **limits: int) -> Iterator[Scheduler]:
    engine.cache_manager.drop_cached()
    scheduler = Scheduler(engine, **limits)
    yield scheduler
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions


def finish(scheduler: Scheduler, *requests: Request) -> dict[int, list[Event]]:
    """Submit requests and run rounds until nothing is left; return the events of every request."""
    for request in requests:
        scheduler.submit(request)
    events: defaultdict[int, list[Event]] = defaultdict(list)
    for _ in range(500):
        if not scheduler.busy:
            return events
        for event in scheduler.advance():
            events[event.number].append(event)
    raise AssertionError("the scheduler does not finish")


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def alone(engine: LongContextEngine, request: Request) -> list[int]:
    return engine.generate([request.prompt], request.sampling)[0]


def concurrent_requests_get_their_own_answers(engine: LongContextEngine) -> list[list[int]]:
    source = random.Random(0)
    requests = [
        Request(
            i,
            tuple(source.randrange(256) for _ in range(source.choice((1, 5, 30, 60)))),
            Sampling(max_new_tokens=source.randint(1, 6), temperature=source.choice((0.0, 1.0)), seed=i),
        )
        for i in range(12)
    ]
    expected = [alone(engine, request) for request in requests]
    with scheduling(engine, max_active=4, prefill_chunk=16) as scheduler:
        early: defaultdict[int, list[Event]] = defaultdict(list)
        for request in requests:
            scheduler.submit(request)
            for event in scheduler.advance():
                early[event.number].append(event)
        late = finish(scheduler)
    for request, tokens in zip(requests, expected, strict=True):
        events = early[request.number] + late[request.number]
        assert [event.token for event in events] == tokens
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    return expected


def a_long_prompt_stalls_no_other_request(engine: LongContextEngine) -> None:
    with scheduling(engine, prefill_chunk=10) as scheduler:
        scheduler.submit(Request(0, (97, 98), Sampling(max_new_tokens=9)))
        scheduler.advance()
        scheduler.submit(Request(1, (99,) * 55, Sampling(max_new_tokens=1)))
        rounds = [{event.number for event in scheduler.advance()} for _ in range(6)]
        assert rounds == [{0}] * 5 + [{0, 1}]


def a_conversation_is_found_again(engine: LongContextEngine) -> None:
    with scheduling(engine) as scheduler:
        first = Request(0, tuple(range(60, 80)), GREEDY)
        answer = tokens_of(finish(scheduler, first)[0])
        second = Request(1, (*first.prompt, *answer, 10, 11), GREEDY)
        events = finish(scheduler, second)[1]
        assert {event.cached_tokens for event in events} == {20}  # the pages of 4 tokens that 23 computed ones fill
    assert tokens_of(events) == alone(engine, second)


def a_cancelled_request_is_found_again(engine: LongContextEngine) -> None:
    """The prompt and the computed part of the answer are kept, but not the last token."""
    with scheduling(engine) as scheduler:
        first = Request(0, tuple(range(60, 80)), Sampling(max_new_tokens=50))
        scheduler.submit(first)
        answer = tokens_of([event for _ in range(4) for event in scheduler.advance()])
        scheduler.submit(Request(1, (1, 2, 3), first.sampling))  # cancelled before any of it is computed
        scheduler.cancel(0)
        scheduler.cancel(1)
        assert [event.finish_reason for event in scheduler.advance()] == ["cancelled", "cancelled"]
        assert not scheduler.busy
        second = Request(2, (*first.prompt, *answer[:-1], 10, 11), GREEDY)
        events = finish(scheduler, second)[2]
        assert {event.cached_tokens for event in events} == {20}
    assert tokens_of(events) == alone(engine, second)


def a_retry_continues_where_a_client_left(engine: LongContextEngine) -> None:
    """The chunks of a prompt that were computed when its request was cancelled are not computed again."""
    with scheduling(engine, prefill_chunk=32) as scheduler:
        scheduler.submit(Request(0, DOCUMENT, GREEDY))
        scheduler.advance()
        scheduler.advance()
        scheduler.cancel(0)
        events = finish(scheduler, Request(1, DOCUMENT, GREEDY))
        assert [event.finish_reason for event in events[0]] == ["cancelled"]
        assert {event.cached_tokens for event in events[1]} == {64}
        scored = Request(2, DOCUMENT, Sampling(max_new_tokens=1, prompt_logprobs=0))
        scheduler.submit(scored)
        scheduler.advance()
        (first, *_) = finish(scheduler, Request(3, DOCUMENT, GREEDY))[3]
        assert first.cached_tokens == 116, "it need not wait for one that computes what is there"
    assert tokens_of(events[1]) == alone(engine, Request(1, DOCUMENT, GREEDY))


def bad_requests_harm_no_other(engine: LongContextEngine) -> None:
    with scheduling(engine) as scheduler:
        good = Sampling(max_new_tokens=3)
        for number, prompt in enumerate([(97, 98), (97, 10**6), (), (97,) * 10**5]):
            scheduler.submit(Request(number, prompt, good))
        scheduler.submit(Request(4, (97,), Sampling(max_new_tokens=50)))
        scheduler.advance()
        scheduler.cancel(4)
        scheduler.cancel(99)
        events = finish(scheduler)
        assert len(tokens_of(events[0])) == 2 and events[0][-1].finish_reason == "length"
        assert events[4][-1].finish_reason == "cancelled"
        failed = finish(scheduler, Request(5, (97, 10**6), good), Request(6, (97,) * 10**5, good))
        assert "token=1000000" in failed[5][0].error and failed[5][0].finish_reason == "error"
        assert "prompt and max_tokens=100003: expected at most" in failed[6][0].error


def requests_wait_for_room(engine: LongContextEngine) -> None:
    """Together they need three times the cache; kept caches give way."""
    room = engine.cache_manager.slots[0] * engine.cache_manager.n
    with scheduling(engine, prefill_chunk=10**6) as scheduler:
        for i in range(6):
            scheduler.submit(Request(i, (i + 1,) * (room // 2 - 20), Sampling(max_new_tokens=2)))
        scheduler.advance()
        assert scheduler.num_requests["waiting"] >= 4
        assert all(len(tokens_of(events)) in (1, 2) for events in finish(scheduler).values())


def short_requests_overtake_one_that_waits_for_room(engine: LongContextEngine) -> None:
    """They may as long as their tokens together are fewer than its own."""
    size = engine.cache_manager.slots[0] * engine.cache_manager.n // 2
    with scheduling(engine, max_active=3) as scheduler:
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
        assert scheduler.num_requests["waiting"] == 3
        late = [event.number for events in finish(scheduler).values() for event in events if event.finish_reason]
        assert sorted([*ended, *late]) == sorted([0, 1, *range(2, 6), *range(12, 16)])


def a_request_that_waits_for_room_is_tried_after_every_end(engine: LongContextEngine) -> None:
    """Also when another has computed a prefix of it, but not in every round: finding a long prefix takes long."""
    size, opened = engine.cache_manager.slots[0] * engine.cache_manager.n // 2, list[int]()

    def counted(tokens: tuple[int, ...], salt: int) -> object:
        opened.append(len(tokens))
        return LongContextEngine.open(engine, tokens, salt)

    with scheduling(engine, prefill_chunk=16) as scheduler, mock.patch.object(engine, "open", counted):
        for number, token, count in ((0, 71, size), (1, 72, size + 10), (2, 72, 40)):
            scheduler.submit(Request(number, (token,) * count + (9,), Sampling(max_new_tokens=2)))
        found = finish(scheduler)
        assert opened == [size, size + 10, 40, *[size + 10] * 3]
        assert all(len(tokens_of(events)) == 2 for events in found.values())


def a_request_waits_for_a_prefix_that_is_its_own(engine: LongContextEngine) -> None:
    """Other tokens than its own may be between equal ones."""
    with scheduling(engine, prefill_chunk=64) as scheduler:
        for number, token in enumerate((74, 73)):
            scheduler.submit(Request(number, (73,) * 20 + (token,) + (73,) * 80, Sampling(max_new_tokens=1)))
        waiting = []
        for _ in range(2):
            scheduler.advance()
            waiting.append(scheduler.num_requests["waiting"])
        assert waiting == [1, 0]


def other_clients_caches_are_not_found(engine: LongContextEngine) -> None:
    """Neither kept nor active ones, and no request waits for one."""
    prompt, sampling = tuple(range(60, 110)), Sampling(max_new_tokens=3)
    with scheduling(engine, prefill_chunk=20) as scheduler:

        def cached(number: int, salt: int) -> int:
            (found,) = {e.cached_tokens for e in finish(scheduler, Request(number, prompt, sampling, salt))[number]}
            return found

        assert [cached(0, 1), cached(1, 2), cached(2, 1), cached(3, 2), cached(4, 0)] == [0, 0, 48, 48, 0]
        for number, salt in ((5, 1), (6, 2)):
            scheduler.submit(Request(number, tuple(range(110, 160)), sampling, salt))
            scheduler.advance()
        assert scheduler.num_requests["waiting"] == 0
        assert {event.cached_tokens for event in finish(scheduler)[6]} == {0}


def promised_pages_are_kept(engine: LongContextEngine) -> None:
    """Two sequences wait behind a long prompt; all that they have was shared with one that ended before others."""
    assert engine.cache_manager.slots[0] * engine.cache_manager.n == 600
    source = random.Random(2)
    document, other, long = (tuple(source.randrange(97, 105) for _ in range(size)) for size in (200, 150, 280))
    prompts = (document, other, long, (*document[:190], 1), (*document[:190], 2))
    requests = [Request(i, prompt, Sampling(max_new_tokens=15)) for i, prompt in enumerate(prompts)]
    expected, events = [alone(engine, request) for request in requests], {}
    with scheduling(engine, prefill_chunk=20) as scheduler:
        for together in (requests[:1], requests[1:2], requests[2:]):
            events |= finish(scheduler, *together)
    assert [tokens_of(events[i]) for i in range(5)] == expected
    assert events[3][0].cached_tokens == events[4][0].cached_tokens == 188


def prompts_that_leave_no_room_for_their_answers_are_refused(engine: LongContextEngine) -> None:
    most = engine.model.max_positions
    assert most is not None
    with scheduling(engine) as scheduler:
        requests = [Request(i, (97,) * size, GREEDY) for i, size in enumerate((3, most, most - 4, most - 3))]
        events = finish(scheduler, *requests)
    assert [len(tokens_of(events[i])) for i in range(4)] == [4, 0, 4, 0]
    assert events[1][0].refused and f"prompt and max_tokens={most + 4}: expected at most {most}" in events[1][0].error
    assert events[3][0].refused


def questions_about_one_document_share_it(engine: LongContextEngine) -> list[list[int]]:
    """One request computes the document; the others wait for it and share its pages while it is still active."""
    requests = [Request(i, (*DOCUMENT, *([i] * (i + 2))), Sampling(max_new_tokens=6 + i)) for i in range(4)]
    expected = [alone(engine, request) for request in requests]
    with scheduling(engine, prefill_chunk=32) as scheduler:
        for request in requests:
            scheduler.submit(request)
        events: defaultdict[int, list[Event]] = defaultdict(list)
        most = 0
        while scheduler.busy:
            for event in scheduler.advance():
                events[event.number].append(event)
            most = max(most, engine.cache_manager.used_pages())
    assert [tokens_of(events[i]) for i in range(4)] == expected
    assert [events[i][0].cached_tokens for i in range(4)] == [0] + [len(DOCUMENT)] * 3
    # Each request alone would hold the document's pages; together they hold them once and a few pages each.
    page, n = engine.cache_manager.page_tokens, engine.cache_manager.n
    assert most <= -(-len(DOCUMENT) // page) + 4 * n * (2 + -(-30 // (page * n)))
    return expected


def shared_pages_are_promised_once(engine: LongContextEngine) -> None:
    """Requests that would not fit together do if most of their pages are shared."""
    room = engine.cache_manager.n * engine.cache_manager.slots[0]
    document = tuple(random.Random(5).randrange(256) for _ in range(room // 2))
    with scheduling(engine, prefill_chunk=10**6) as scheduler:
        for i in range(4):
            scheduler.submit(Request(i, (*document, i), Sampling(max_new_tokens=8)))
        scheduler.advance()
        scheduler.advance()
        assert scheduler.num_requests["waiting"] == 0
        assert all(len(tokens_of(events)) >= 6 for events in finish(scheduler).values())


def no_request_waits_for_a_short_prefix(engine: LongContextEngine) -> None:
    with scheduling(engine, prefill_chunk=200) as scheduler:
        for i in range(3):
            scheduler.submit(Request(i, (1, 2, 50 + i, 4), GREEDY))
        assert {event.number for event in scheduler.advance()} == {0, 1, 2}


def answers_to_one_prompt_compute_it_once(engine: LongContextEngine) -> None:
    """Its complete pages, also those of a short one."""
    sampling = Sampling(max_new_tokens=5, temperature=1.0, seed=3)
    with scheduling(engine) as scheduler:
        requests = [Request(i, (1, 2, 3, 4, 5), sampling, stream=i) for i in range(3)]
        events = finish(scheduler, *requests)
    assert [events[i][0].cached_tokens for i in range(3)] == [0, 4, 4]
    assert tokens_of(events[0]) == alone(engine, requests[0])
    assert len({tuple(tokens_of(events[i])) for i in range(3)}) == 3


def exact_reuse_takes_whole_chunks(engine: LongContextEngine) -> None:
    """The first logits are bit-identical for a request alone, and beside others and a kept cache."""
    chunk = engine.settings.prefill_chunk
    assert chunk == 16
    prompt = (*DOCUMENT, 5, 6, 7)
    cold = engine.open()
    cold.append(prompt)
    truth = engine.next_logits([cold])
    cold.close()
    with scheduling(engine, prefill_chunk=24) as scheduler:
        scheduler.submit(Request(0, (*DOCUMENT[:70], 1, 2), GREEDY))
        scheduler.submit(Request(1, (9,) * 50, Sampling(max_new_tokens=30)))
        events = [scheduler.advance() for _ in range(11)]
        assert any(event.number == 1 for round_ in events for event in round_)
        seen: list[torch.Tensor] = []
        start = engine.start

        def started(session, *args):  # type: ignore[no-untyped-def]
            seen.append(engine.next_logits([session]))
            return start(session, *args)

        with mock.patch.object(engine, "start", started):
            found = finish(scheduler, Request(2, prompt, GREEDY))[2]
        assert {event.cached_tokens for event in found} == {70 // chunk * chunk}
        assert torch.equal(seen[-1], truth)


def with_every_engine(rank: int, plain: Config, small: Config, learned: Config, exact: Config) -> list[list[int]]:
    with engine_of(plain) as engine:
        found = [*concurrent_requests_get_their_own_answers(engine), *questions_about_one_document_share_it(engine)]
        a_long_prompt_stalls_no_other_request(engine)
        a_conversation_is_found_again(engine)
        a_cancelled_request_is_found_again(engine)
        a_retry_continues_where_a_client_left(engine)
        bad_requests_harm_no_other(engine)
        requests_wait_for_room(engine)
        short_requests_overtake_one_that_waits_for_room(engine)
        a_request_that_waits_for_room_is_tried_after_every_end(engine)
        a_request_waits_for_a_prefix_that_is_its_own(engine)
        other_clients_caches_are_not_found(engine)
        shared_pages_are_promised_once(engine)
        no_request_waits_for_a_short_prefix(engine)
        answers_to_one_prompt_compute_it_once(engine)
    ahead = replace(plain, inference=replace(plain.inference, decode="replicated"))
    with engine_of(ahead) as engine:
        bad_requests_harm_no_other(engine)
        requests_wait_for_room(engine)
        a_cancelled_request_is_found_again(engine)
        answers_to_one_prompt_compute_it_once(engine)
        assert concurrent_requests_get_their_own_answers(engine) == found[:12]
    with engine_of(small) as engine:
        promised_pages_are_kept(engine)
    with engine_of(learned) as engine:
        prompts_that_leave_no_room_for_their_answers_are_refused(engine)
    with engine_of(exact) as engine:
        exact_reuse_takes_whole_chunks(engine)
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_requests_are_served_as_if_alone(tmp_path: Path, n: int) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    # Ranks may differ by a page.
    small = parallel(config, n, cache_tokens=600 - (n - 1) * 4)
    learned = parallel(changed(config, {"model.position_embedding": "learned", "data.seq_length": 24}), n)
    exact = parallel(config, n, prefill_chunk=16, exact_reuse=True)
    found = run_distributed(with_every_engine, n, parallel(config, n), small, learned, exact)
    assert all(tokens == found[0] for tokens in found) and len(found[0]) == 16


def with_windows(rank: int, config: Config) -> list[list[int]]:
    with engine_of(config) as engine:
        assert engine.cache_manager.groups[1].num_pages < engine.cache_manager.pages_per_rank
        found = [*concurrent_requests_get_their_own_answers(engine), *questions_about_one_document_share_it(engine)]
        a_long_prompt_stalls_no_other_request(engine)
        a_conversation_is_found_again(engine)
        a_cancelled_request_is_found_again(engine)
        a_retry_continues_where_a_client_left(engine)
        shared_pages_are_promised_once(engine)
        answers_to_one_prompt_compute_it_once(engine)
        assert not engine.cache_manager.groups[1].used
    return found


def test_layers_with_windows_have_room_for_all_active_requests(tmp_path: Path) -> None:
    windows = {"model.window": 10, "model.window_pattern": 2, "serve.max_active": 4}
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128, **windows})
    found = run_distributed(with_windows, 2, parallel(config, 2, prefill_chunk=128))
    assert found[0] == found[1]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_active=0: expected 1 or more"):
        Scheduler(None, max_active=0)  # type: ignore[arg-type]
