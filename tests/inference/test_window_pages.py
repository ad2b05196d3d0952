"""Layers with windows free their pages, and results stay the same."""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull, CacheManager
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.memory import cache_bytes, check_cache, fitting_pages, weight_bytes
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import Session
from megatron_longctx.inference.window_pages import Windows, most_pages
from megatron_longctx.mcore.inference import CachedGPT
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import dense, engine_of, parallel
from tests.inference.test_windows import with_large_sinks
from tests.shared.training import changed, tiny_config

MODELS: dict[str, dict[str, Any]] = {
    "five of six": {"model.window": 12, "model.window_pattern": 6, "model.num_layers": 6},
    "every second, with sinks": {"model.window": 5, "model.window_pattern": 2, "model.sinks": "learnable"},
    "all": {"model.window": 9},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "pass_kv": ("five of six", {"mode": "pass_kv"}),
    "pass_q": ("every second, with sinks", {"mode": "pass_q"}),
    "one_hop": ("all", {"mode": "one_hop"}),
    "replicated": ("every second, with sinks", {"decode": "replicated"}),
    "drafts": ("five of six", {"decode": "replicated", "speculate": 3}),
    "exact": ("five of six", {"mode": "pass_kv", "prefill_chunk": 40, "exact_reuse": True}),
}
NUMBERS = {1: ("pass_q", "drafts"), 2: ("pass_q", "replicated", "drafts", "exact"), 3: ("pass_kv", "one_hop")}
SOURCE = random.Random(2)
TEXT, OTHER = (SOURCE.choices(range(97, 105), k=size) for size in (333, 700))


def small(config: Config, n: int, **inference: Any) -> Config:
    """Room for two sequences in layers with windows, and for a pass of 128 tokens."""
    settings = {"cache_tokens": 1600, "prefill_chunk": 128} | inference
    return changed(parallel(config, n, **settings), {"serve.max_active": 2})


Logits = list[tuple[list[int], Tensor]]


def converse(engine: LongContextEngine) -> Iterator[tuple[list[int], Tensor]]:
    """Yield texts and the logits after them: several turns and forks, and prefixes that are found or lost."""
    manager = engine.cache_manager
    group, windows = manager.groups[1], manager.windows
    assert windows is not None and group.num_pages == windows.pages < manager.pages_per_rank
    assert engine.rank_tokens == windows.pass_tokens == 128, "there is room for no larger pass"
    most = most_pages(windows.tokens, manager.page_tokens) * manager.n

    def logits(session: Session) -> tuple[list[int], Tensor]:
        return list(session.tokens), engine.next_logits([session])[0].clone()

    first = engine.open()
    for start, stop in ((0, 150), (150, 151), (151, 300)):
        first.append(TEXT[start:stop])
        yield logits(first)
    first.generate(Sampling(max_new_tokens=30))
    assert group.used <= most < manager.used_pages()
    yield logits(first)
    fork, early = first.fork(), first.fork(41)
    engine.append({fork: [97, 98], early: [99], first: [100, 101, 102]})
    for session in (fork, early, first):
        yield logits(session)
    assert group.used <= 3 * most
    text = list(first.tokens)
    for session in (fork, early, first):
        session.close()
    assert group.used == manager.used_pages() == 0
    again = engine.open([*text, 97])
    end = len(text) - manager.page_tokens if engine.exact_chunk is None else 120  # the chunks that were whole
    assert len(again.tokens) >= end, "the end of a text is found"
    again.append([*text, 97][len(again.tokens) :])
    yield logits(again)
    again.close()
    filler = engine.open()
    filler.append(OTHER)
    yield logits(filler)
    filler.close()
    cut = engine.open([*text[:200], 97])
    cut.append([*text[:200], 97][len(cut.tokens) :])
    cut.generate(Sampling(max_new_tokens=2))
    yield logits(cut)
    cut.close()
    assert group.used == manager.used_pages() == 0


def with_engines(rank: int, cases: list[Config]) -> list[Logits]:
    found = []
    for config in cases:
        with engine_of(config) as engine:
            assert isinstance(engine.model, CachedGPT)
            with_large_sinks(engine.model._gpt)
            found.append(list(converse(engine)))
    return found


def truths(rank: int, texts: list[tuple[Config, list[list[int]]]]) -> list[list[Tensor]]:
    found = []
    for config, its in texts:
        whole = dense(config, None, its, fp64=True, change=with_large_sinks)
        found.append([logits[-1] for logits in whole])
    return found


@pytest.mark.parametrize("n", NUMBERS)
def test_logits_are_those_of_the_training_forward_pass(n: int, tmp_path: Path) -> None:
    configs = {name: tiny_config(tmp_path, "x", settings) for name, settings in MODELS.items()}
    cases = [(configs[WAYS[way][0]], small(configs[WAYS[way][0]], n, **WAYS[way][1])) for way in NUMBERS[n]]
    ranks = run_distributed(with_engines, n, [config for _, config in cases])
    texts = [(base, [text for text, _ in found]) for (base, _), found in zip(cases, ranks[0], strict=True)]
    exact = run_distributed(truths, 1, texts)[0]
    for found in ranks:
        for logits, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(
                torch.stack([each for _, each in logits]).double(), torch.stack(truth), rtol=2e-5, atol=2e-5
            )


def grown(window: int | None, n: int, length: int) -> CacheManager:
    """The cache after a session of some length: a prompt in chunks, and then single tokens."""
    windows = None if window is None else Windows.for_sequences(window, 2, 64, 4, length)
    manager = CacheManager(n, length, 4, windows=windows)
    session = manager.open()
    while manager.length(session) < length:
        (chunk,) = manager.append({session: 64 * n if manager.length(session) < length // 2 else 1})
        if chunk.windowed is not None and window is not None:
            kept = set(chain.from_iterable(chain.from_iterable(chunk.windowed.cached_positions)))
            assert kept >= set(range(max(0, chunk.cached - window), chunk.cached))
    return manager


@pytest.mark.parametrize("n", [1, 2, 3])
def test_pages_of_layers_with_windows_stay_bounded_while_a_session_grows(n: int) -> None:
    used = [grown(20, n, length).groups[-1].used for length in (200, 1000, 3000)]
    assert max(used) <= 8 and grown(20, n, 2000).used_pages() == 500
    assert grown(None, n, 2000).groups[-1].used == 500


def named(manager: CacheManager, text: list[int]) -> int:
    """A session with a text, computed behind what is found."""
    session = manager.open(text)
    while (left := len(text) - manager.length(session)) > 0:
        manager.append({session: min(left, 16)})
        manager.name_pages(session, text)
    return session


def test_a_prefix_is_found_where_layers_with_windows_can_go_on() -> None:
    manager = CacheManager(1, 100, 4, windows=Windows(8, 20, 16))
    text = list(range(200))
    manager.close(named(manager, text[:160]))
    found = manager.open([*text[:150], -1])
    assert manager.length(found) == 148, "pages that others need first are still there"
    manager.close(found)
    manager.close(named(manager, list(range(300, 380))))
    found = manager.open(text[:160])
    assert manager.length(found) == 160, "what a text leaves behind makes room before its end"
    manager.close(found)
    other = manager.open()
    manager.append({other: 80})
    manager.close(other)
    lost = manager.open(text[:160])
    assert manager.length(lost) == 0 and manager.groups[0].cached == 60, "other layers alone still have the text"
    manager.close(lost)
    manager.close(named(manager, text[:160]))  # computed again where they were lost
    again = manager.open(text[:160])
    assert manager.length(again) == 160 and manager.held_pages([again], 0) == 40
    with pytest.raises(
        CacheFull, match=r"in layers with windows: expected at most the \d+ of 20 that are free.*max_active"
    ):
        manager.append({again: 100})


def test_a_prefix_that_was_found_stays_longer_than_what_a_text_leaves_behind() -> None:
    manager, text = CacheManager(1, 100, 4, windows=Windows(8, 20, 16, 2)), list(range(80))
    manager.close(named(manager, text))
    manager.close(named(manager, [*text, *range(500, 540)]))
    found = manager.open(text)
    assert manager.length(found) == 80
    others = [manager.open() for _ in range(2)]
    assert manager.fits({found: 21, others[0]: 1}) and not manager.fits({each: 1 for each in (found, *others)})


def test_pages_that_others_hold_give_their_place_to_those_with_windows() -> None:
    manager, text = CacheManager(1, 100, 4, windows=Windows(8, 24, 16)), list(range(200))
    holder, other = named(manager, text[:160]), manager.open()
    manager.append({other: 84})
    manager.close(other)
    again = named(manager, text[:100])
    assert manager.held_pages([holder, again], 0) == 40 + 25, "nothing was found"
    manager.close(again)
    found = manager.open(text[:100])
    assert manager.length(found) == 100 and manager.held_pages([holder, found], 0) == 40 + 25


def test_a_cache_of_windows_needs_the_memory_of_other_layers_alone(tmp_path: Path) -> None:
    settings = {"model.window": 64, "model.window_pattern": 6, "model.num_layers": 12}
    config = parallel(tiny_config(tmp_path, "x", settings), 2, cache_tokens=2_000_000, page_tokens=16)
    plain = changed(config, {"model.window": None, "model.window_pattern": None})
    sizes = [cache_bytes(each, 62_501) for each in (config, plain)]
    assert sizes[0] / sizes[1] == pytest.approx(1 / 6, rel=0.1)
    capacity = weight_bytes(config, 300) + int(sizes[1] * 0.2)
    check_cache(config, 300, capacity)
    with pytest.raises(ValueError, match=r"inference\.cache_tokens=2000000: expected at most"):
        check_cache(plain, 300, capacity)
    for capacity in (10**5, 10**7, 10**8, 10**9):
        pages = fitting_pages(config, capacity)
        assert cache_bytes(config, pages) <= capacity < cache_bytes(config, pages + 1)
    assert 5 < fitting_pages(config, 10**9) / fitting_pages(plain, 10**9) < 6
