"""Sessions and requests with a common beginning hold its pages once, and answer as if each had its own."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Request, Scheduler
from megatron_longctx.inference.session import common_prefix
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.inference.test_scheduler import finish, tokens_of
from tests.shared.training import tiny_config

DOCUMENT = tuple(random.Random(3).randrange(256) for _ in range(120))
GREEDY = Sampling(max_new_tokens=4)


def forks_go_their_own_ways(engine: LongContextEngine) -> None:
    source = engine.open()
    source.append(DOCUMENT)
    pages = engine.cache_manager.used_pages()
    forks = [source.fork() for _ in range(3)] + [source.fork(77), source.fork(1)]
    assert engine.cache_manager.used_pages() <= pages + len(forks) * engine.cache_manager.n
    assert torch.equal(engine.next_logits([source]), engine.next_logits(forks[:1]))
    texts = {fork: [i, 2 * i, 3] for i, fork in enumerate(forks[:4])} | {source: [9]}
    engine.append(texts)  # in one batch: they share slots
    engine.continue_all([*texts, forks[4]], GREEDY)  # the last fork's only token is computed again
    for session in (*forks, source):
        fresh = engine.open()
        fresh.append(session.tokens)
        assert torch.allclose(*engine.next_logits([session, fresh]), atol=1e-5)
        fresh.close()
    source.close()
    before = engine.next_logits(forks)
    filler = engine.open()
    filler.append([1] * 60)  # into the pages that only the source had
    for fork in forks:
        fork.next_token = None  # have the last token computed again, over what is cached
    assert torch.allclose(engine.next_logits(forks), before, atol=1e-5)
    for session in (*forks, filler):
        session.close()
    assert engine.cache_manager.used_pages() == 0


def what_cannot_be_forked_harms_nothing(engine: LongContextEngine) -> None:
    source = engine.open()
    source.append(DOCUMENT[:9])
    with pytest.raises(ValueError, match="tokens=10: expected at most the 9 of session"):
        source.fork(10)
    with pytest.raises(ValueError, match="tokens=-1"):
        source.fork(-1)
    with pytest.raises(ValueError, match="tokens=3: expected a session to take them from"):
        engine.open(tokens=3)
    room = min(engine.cache_manager.free_pages(rank) for rank in range(engine.cache_manager.n))
    filler = engine.open()
    filler.append([7] * (engine.cache_manager.n * room * engine.cache_manager.page_tokens))
    before, held, count = (
        engine.next_logits([source]),
        engine.cache_manager.used_pages(),
        len(engine.cache_manager.sessions),
    )
    with pytest.raises(CacheFull, match="a fork needs 1 page on rank"):
        source.fork()
    assert (engine.cache_manager.used_pages(), len(engine.cache_manager.sessions)) == (held, count)
    assert torch.equal(engine.next_logits([source]), before)
    source.close()
    with pytest.raises(ValueError, match="expected an open session"):
        source.fork()
    filler.close()


def questions_about_one_document(engine: LongContextEngine) -> list[list[int]]:
    """Sent at once: one computes the document, the others wait for it and share its pages with one still under way."""
    requests = [Request(i, (*DOCUMENT, *([i] * (i + 2))), Sampling(max_new_tokens=6 + i)) for i in range(4)]
    alone = [engine.generate([request.prompt], request.sampling)[0] for request in requests]
    scheduler = Scheduler(engine, prefill_chunk=32)
    for request in requests:
        scheduler.submit(request)
    events: dict[int, list[Event]] = {}
    most, rounds = 0, 0
    while scheduler.busy:
        for event in scheduler.advance():
            events.setdefault(event.number, []).append(event)
        most, rounds = max(most, engine.cache_manager.used_pages()), rounds + 1
    assert [tokens_of(events[i]) for i in range(4)] == alone
    assert [events[i][0].cached_tokens for i in range(4)] == [0] + [len(DOCUMENT)] * 3
    # Each on its own would take a document's pages; all together take one's and a few a request.
    page, n = engine.cache_manager.page_tokens, engine.cache_manager.n
    assert most <= -(-len(DOCUMENT) // page) + 4 * n * (2 + -(-30 // (page * n)))
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0
    return alone


def shared_pages_are_promised_once(engine: LongContextEngine) -> None:
    """Requests that would not fit beside each other do where most of what they need is the same."""
    room = engine.cache_manager.n * engine.cache_manager.slots_per_rank
    document = tuple(random.Random(5).randrange(256) for _ in range(room // 2))
    scheduler = Scheduler(engine, prefill_chunk=10**6)
    for i in range(4):
        scheduler.submit(Request(i, (*document, i), Sampling(max_new_tokens=8)))
    scheduler.advance()
    scheduler.advance()
    assert scheduler.num_waiting == 0
    assert all(len(tokens_of(events)) >= 6 for events in finish(scheduler).values())
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def a_short_common_beginning_makes_nobody_wait(engine: LongContextEngine) -> None:
    scheduler = Scheduler(engine, prefill_chunk=200)
    for i in range(3):
        scheduler.submit(Request(i, (1, 2, 50 + i, 4), GREEDY))
    assert {event.number for event in scheduler.advance()} == {0, 1, 2}
    scheduler.close()


def whole_chunks_only(engine: LongContextEngine) -> None:
    """With exact reuse, the first logits are the same bits for a request alone, and beside others and a kept cache."""
    chunk = engine.settings.prefill_chunk
    assert chunk == 16
    prompt = (*DOCUMENT, 5, 6, 7)
    cold = engine.open()
    cold.append(prompt)
    truth = engine.next_logits([cold])
    cold.close()
    scheduler = Scheduler(engine, prefill_chunk=24)
    scheduler.submit(Request(0, (*DOCUMENT[:70], 1, 2), GREEDY))
    scheduler.submit(Request(1, (9,) * 50, Sampling(max_new_tokens=30)))
    events = [scheduler.advance() for _ in range(11)]
    assert any(event.number == 1 for round_ in events for event in round_)
    scheduler.submit(Request(2, prompt, GREEDY))
    seen: list[torch.Tensor] = []
    start = engine.start

    def started(session, *args):
        seen.append(engine.next_logits([session]))
        return start(session, *args)

    with mock.patch.object(engine, "start", started):
        found = finish(scheduler)[2]
    assert {event.cached_tokens for event in found} == {70 // chunk * chunk}
    assert torch.equal(seen[-1], truth)
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0


def a_batch_does_not_evict_its_own(engine: LongContextEngine) -> None:
    """The short sequence is placed before the long one's later chunks find no room."""
    assert engine.settings.evict and engine.settings.prefill_chunk == 8
    room = engine.cache_manager.slots_per_rank * engine.cache_manager.n
    idle, short, long = engine.open(), engine.open(), engine.open()
    idle.append([1, 2, 3])
    pages = engine.cache_manager.used_pages()
    with pytest.raises(CacheFull, match="new tokens need"):
        engine.append({short: [1, 2, 3, 4], long: [5] * (room + 50)})
    assert (short.cached_tokens, long.cached_tokens, engine.cache_manager.used_pages()) == (0, 0, pages)
    assert idle.tokens == [1, 2, 3] and idle.cached_tokens == 3  # what was evicted for it has come back
    short.append([1, 2, 3, 4])
    for session in (idle, short, long):
        session.close()


def every_promise(rank: int, config: Config, exact: Config, evicting: Config) -> list[list[int]]:
    with engine_of(config) as engine:
        forks_go_their_own_ways(engine)
        what_cannot_be_forked_harms_nothing(engine)
        found = questions_about_one_document(engine)
        shared_pages_are_promised_once(engine)
        a_short_common_beginning_makes_nobody_wait(engine)
    with engine_of(exact) as engine:
        whole_chunks_only(engine)
    with engine_of(evicting) as engine:
        a_batch_does_not_evict_its_own(engine)
    return found


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", [1, 2])
def test_common_beginnings_are_held_once(tmp_path: Path, n: int) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    exact = parallel(config, n, prefill_chunk=16, exact_reuse=True)
    evicting = parallel(config, n, prefill_chunk=8, evict=True)
    found = run_distributed(every_promise, n, parallel(config, n), exact, evicting)
    assert all(tokens == found[0] for tokens in found)


def test_the_common_beginning_of_two_texts() -> None:
    text = list(range(10_000))
    for at in (0, 1, 4095, 4096, 9_999):
        assert common_prefix(text, [*text[:at], -1, *text[at + 1 :]]) == at
    assert common_prefix(text, text[:5000]) == 5000
    assert common_prefix([], text) == 0
