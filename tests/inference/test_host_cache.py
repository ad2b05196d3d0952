"""Pages that had to give way come back from host memory, as if they had stayed."""

import random
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.host_cache import GIB, HostCache
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.inference.test_scheduler import GREEDY, alone, finish, scheduling, tokens_of
from tests.shared.training import tiny_config

SOURCE = random.Random(3)
DOCUMENT, OTHER = (tuple(SOURCE.choices(range(256), k=size)) for size in (200, 560))


def host_of(engine: LongContextEngine, pages: int, in_round: int) -> HostCache:
    """Host memory for some pages per rank, of which a round stores and fetches a few."""
    attention, manager = engine.model.attention, engine.cache_manager
    cache_bytes = sum(layer.nbytes for layer in attention.layers)
    host = HostCache(manager, attention.groups, attention.rank, -(-pages * cache_bytes // manager.pages_per_rank) / GIB)
    host.fetched = in_round
    for store in host.stores:
        store.stored = in_round
    return host


def rest(scheduler: Scheduler, number: int, prompt: tuple[int, ...]) -> None:
    """Let a prompt rest on the host: compute it, and then others that need all of the cache."""
    for i, text in enumerate((prompt, OTHER)):
        assert len(tokens_of(finish(scheduler, Request(number + i, text, GREEDY))[number + i])) == 4
    manager = scheduler.engine.cache_manager
    session = manager.open(prompt)
    assert manager.length(session) < len(prompt) // 2
    manager.close(session)


def a_document_comes_back_by_chunks(engine: LongContextEngine) -> list[int]:
    """Beside a stream, which gets a token in every round."""
    request = Request(9, (*DOCUMENT, 7, 8), GREEDY)
    expected = alone(engine, request)
    engine.cache_manager.drop_cached()
    with scheduling(engine, prefill_chunk=64, host=host_of(engine, 400, 6)) as scheduler:
        rest(scheduler, 0, DOCUMENT)
        scheduler.submit(Request(2, (5, 6, 7), Sampling(max_new_tokens=30)))
        scheduler.advance()
        scheduler.submit(request)
        rounds = [scheduler.advance() for _ in range(3)]
        assert [{event.number for event in events} for events in rounds] == [{2}] * 3
        events = finish(scheduler)
        assert tokens_of(events[9]) == expected and events[9][0].cached_tokens == 200
        # What was fetched is in the cache again, and what follows it is found, too.
        answer = (*request.prompt, *expected)
        assert finish(scheduler, Request(10, (*answer, 1), GREEDY))[10][0].cached_tokens == 204
        assert scheduler.num_pages["host"] > 100
    return expected


def a_request_that_leaves_gives_its_copies_back(engine: LongContextEngine) -> None:
    engine.cache_manager.drop_cached()
    host = host_of(engine, 400, 2)
    with scheduling(engine, prefill_chunk=64, host=host) as scheduler:
        rest(scheduler, 0, DOCUMENT)
        scheduler.submit(Request(2, (*DOCUMENT, 7, 8), GREEDY))
        scheduler.advance()
        assert host.stores[0].claims
        scheduler.cancel(2)
        finish(scheduler)
        assert not host.stores[0].claims
        assert finish(scheduler, Request(3, (*DOCUMENT, 7, 8), GREEDY))[3][0].cached_tokens == 200


def the_oldest_copies_give_way(engine: LongContextEngine) -> None:
    """Little memory keeps the beginning of what was used last; other clients do not find it."""
    engine.cache_manager.drop_cached()
    expected = alone(engine, Request(9, (*DOCUMENT, 7, 8), GREEDY))
    engine.cache_manager.drop_cached()
    with scheduling(engine, prefill_chunk=64, host=host_of(engine, 10, 100)) as scheduler:
        for salt in (0, 1):
            for number, text in enumerate((DOCUMENT, OTHER, (*DOCUMENT, 7, 8))):
                events = finish(scheduler, Request(10 * salt + number, text, GREEDY, salt))[10 * salt + number]
                assert number < 2 or tokens_of(events) == expected
            assert scheduler.num_pages["host"] == 10 * engine.cache_manager.n


def with_engines(rank: int, config: Config, exact: Config) -> list[int]:
    with engine_of(config) as engine:
        found = a_document_comes_back_by_chunks(engine)
        a_request_that_leaves_gives_its_copies_back(engine)
        the_oldest_copies_give_way(engine)
    with engine_of(exact) as engine, scheduling(engine, prefill_chunk=64, host=host_of(engine, 400, 3)) as scheduler:
        rest(scheduler, 0, DOCUMENT)
        events = finish(scheduler, Request(2, (*DOCUMENT, 7, 8), GREEDY))[2]
        assert events[0].cached_tokens == 192 and tokens_of(events) == found, "whole chunks of 16"
    return found


@pytest.mark.parametrize(("n", "window"), [(1, None), (2, 10)])
def test_prompts_find_what_rests_on_the_host(tmp_path: Path, n: int, window: int | None) -> None:
    windows = {} if window is None else {"model.window": window, "model.window_pattern": 2, "serve.max_active": 2}
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128, **windows})
    exact = parallel(config, n, prefill_chunk=16, exact_reuse=True)
    found = run_distributed(with_engines, n, parallel(config, n, prefill_chunk=128 if window else None), exact)
    assert all(tokens == found[0] for tokens in found)


def test_memory_that_holds_no_page_or_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, layers = CacheManager(1, 4, 2), [[torch.zeros(8, 2, 16)]]
    with pytest.raises(ValueError, match=r"serve.host_cache_gib=1e-09: expected 0, or room for a page of"):
        HostCache(manager, layers, 0, 1e-9)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(2**60))
    with pytest.raises(ValueError, match=r"serve.host_cache_gib=0.01: expected memory that a rank's host has \("):
        HostCache(manager, layers, 0, 0.01)


def keep_and_find(device: str) -> None:
    """Store all pages of a session, overwrite the cache, and fetch them."""
    manager, layers = CacheManager(1, 40, 4), [torch.randn(160, 2, 1, 2, 8, device=device) for _ in range(3)]
    host, text = HostCache(manager, [layers], 0, 0.01), list(range(150))

    class Follower:
        number = 0

        def resume(self, text: list[int]) -> None:
            """Take no notice."""

    first, follower = manager.open(), Follower()
    manager.append({first: 150})
    manager.name_pages(first, text)
    slots = [slot for run in manager.shards(first)[0].slots for slot in run][:148]
    expected = [layer[slots].clone() for layer in layers]
    manager.close(first)
    while host.pending:
        host.store()
    manager.drop_cached()
    for layer in layers:
        layer.zero_()
    follower.number = manager.open()
    copies = host.claim(follower, text, 1)  # type: ignore[arg-type]
    assert len(copies) == 37
    while copies:
        host.fetch(follower, copies, 8, text)  # type: ignore[arg-type]
    slots = [slot for run in manager.shards(follower.number)[0].slots for slot in run]
    assert all(torch.equal(layer[slots], truth) for layer, truth in zip(layers, expected, strict=True))
    assert host.stores[0].blocks[0].is_pinned() == (device == "cuda")


def test_copies_have_the_bytes_of_their_pages() -> None:
    keep_and_find("cpu")


@pytest.mark.gpu
def test_copies_of_a_gpu_are_pinned_and_have_the_bytes_of_their_pages() -> None:
    keep_and_find("cuda")
