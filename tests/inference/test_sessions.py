"""Sessions beyond the right numbers: harmless errors, ends, seeds, forks, warm-up, and no leaks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.batch import Batch, ScheduledChunk
from megatron_longctx.inference.cache_manager import CacheFull
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import Session
from megatron_longctx.inference.warm_up import warm_up
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import changed, tiny_config

PROMPTS = ([104, 101, 108, 108, 111], [97], [98, 99] * 9)
DOCUMENT = [random.Random(3).randrange(256) for _ in range(120)]


def opened(engine: LongContextEngine, tokens: Sequence[int]) -> Session:
    session = engine.open()
    session.append(tokens)
    return session


def close(*sessions: Session) -> None:
    for session in sessions:
        session.close()


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def batches_do_not_matter(engine: LongContextEngine) -> list[list[int]]:
    """A sequence's tokens depend only on its text, seed and stream."""
    sampling = Sampling(max_new_tokens=6, temperature=0.9, top_k=50, top_p=0.95, seed=4)
    together = engine.generate(PROMPTS, sampling)
    assert engine.generate(PROMPTS[:1], sampling) == together[:1]
    assert engine.generate(PROMPTS, sampling) == together
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=6, temperature=0.9, seed=5)) != together
    greedy = engine.generate(PROMPTS, Sampling(max_new_tokens=6))
    for prompt, tokens in zip(PROMPTS, greedy, strict=True):
        assert engine.generate([prompt], Sampling(max_new_tokens=6)) == [tokens]
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions
    return [*together, *greedy]


def sequences_end(engine: LongContextEngine) -> None:
    (free,) = engine.generate([PROMPTS[0]], Sampling(max_new_tokens=8))
    stop = next(token for token in free if token != free[0])
    session = opened(engine, PROMPTS[0])
    found = session.generate(Sampling(max_new_tokens=8, stop=(stop,)))
    assert found == free[: free.index(stop)] and session.finish_reason == "stop"
    assert session.tokens == [*PROMPTS[0], *found, stop]
    again = session.generate(Sampling(max_new_tokens=2))
    assert session.finish_reason == "length" and len(again) == 2
    (straight,) = engine.generate([[*PROMPTS[0], *found, stop]], Sampling(max_new_tokens=2))
    assert again == straight
    stream = session.stream(Sampling(max_new_tokens=5))
    taken = [next(stream), next(stream)]
    stream.close()
    assert session.tokens[-2:] == taken
    session.append([97])
    assert session.reused_tokens >= len(PROMPTS[0]) + len(found)
    close(session, session)


def errors_change_nothing(engine: LongContextEngine) -> None:
    closed, good = engine.open(), opened(engine, PROMPTS[2])
    closed.close()
    before, pages, logits = list(good.tokens), engine.cache_manager.used_pages(), engine.next_logits([good])
    empty = engine.open()
    for call, message in (
        (lambda: closed.append([1]), "expected an open session"),
        (lambda: closed.generate(), "expected an open session"),
        (lambda: closed.fork(), "expected an open session"),
        (lambda: good.append([]), "expected 1 or more"),
        (lambda: good.append([97, 10**6]), "token=1000000: expected an id from 0 to"),
        (lambda: good.append([-1]), "token=-1"),
        (lambda: engine.append({empty: [97], good: [-1]}), "token=-1"),
        (lambda: engine.next_logits([good, closed]), "expected an open session"),
        (lambda: engine.next_logits([good, empty]), "expected some tokens to go on from"),
        (lambda: empty.generate(), "expected some tokens to go on from"),
        (lambda: engine.continue_all([good, good], Sampling()), "expected each one once"),
        (lambda: engine.append({empty: [97] * 5000}), "new tokens need"),
        (lambda: good.generate(Sampling(max_new_tokens=5000)), "new tokens need"),
        (lambda: engine.append({empty: [97] * 100, good: [97] * 5000}), "new tokens need"),
        (lambda: good.fork(19), "tokens=19: expected at most the 18 of session"),
        (lambda: good.fork(-1), "tokens=-1"),
    ):
        refused(call, message)
    for wrong in ("ab", [1.5], [97, None], 97, torch.tensor([[97, 98]])):
        refused(lambda wrong=wrong: good.append(wrong), "expected integers, one after another")  # type: ignore[misc]
    assert good.tokens == before and empty.tokens == [] and engine.cache_manager.used_pages() == pages
    assert torch.equal(engine.next_logits([good]), logits)
    for ids in (numpy.array([97, 98]), torch.tensor([99]), range(100, 102)):
        empty.append(ids)  # type: ignore[arg-type]
    assert empty.tokens == list(range(97, 102)) and {type(token) for token in empty.tokens} == {int}
    close(good, empty)


def bad_logits_are_reported_on_all_ranks(engine: LongContextEngine) -> None:
    """Only one rank has them; the others must not wait for it."""
    session = opened(engine, [97, 98])
    if session.next_token is not None and session.next_token.logits is not None:
        session.next_token.logits[3] = float("nan")
    refused(lambda: session.generate(), "logits are not finite")
    session.close()


def assert_as_fresh(engine: LongContextEngine, session: Session) -> None:
    fresh = opened(engine, session.tokens)
    assert torch.allclose(*engine.next_logits([session, fresh]), atol=1e-5)
    fresh.close()


def forks_continue_independently(engine: LongContextEngine) -> None:
    source = opened(engine, DOCUMENT)
    pages = engine.cache_manager.used_pages()
    forks = [source.fork() for _ in range(3)] + [source.fork(77), source.fork(1)]
    assert engine.cache_manager.used_pages() == pages and [fork.cached_tokens for fork in forks] == [120] * 3 + [76, 0]
    assert torch.allclose(engine.next_logits([source]), engine.next_logits(forks[:1]), atol=1e-5)
    texts = {fork: [i, 2 * i, 3] for i, fork in enumerate(forks[:4])} | {source: [9]}
    engine.append(texts)  # in one batch: they share slots
    engine.continue_all([*texts, forks[4]], Sampling(max_new_tokens=4))  # the last fork's only token is recomputed
    for session in (*forks, source):
        assert_as_fresh(engine, session)
    source.close()
    before = engine.next_logits(forks)
    filler = opened(engine, [1] * 60)  # into the pages that only the source had
    for fork in forks:
        fork.next_token = None  # recompute the last tokens over the cached ones
    assert torch.allclose(engine.next_logits(forks), before, atol=1e-5)
    close(*forks, filler)
    assert engine.cache_manager.used_pages() == 0


def requests_that_cannot_fit_change_nothing(engine: LongContextEngine) -> None:
    """However they arise, and in however many passes."""
    own, manager = engine.settings, engine.cache_manager
    room = manager.n * manager.slots[0]
    idle = [opened(engine, prompt) for prompt in PROMPTS]
    idle.append(idle[2].fork(9))  # shares pages
    logits, pages = engine.next_logits(idle), manager.used_pages()
    cached = [session.cached_tokens for session in idle]
    for chunk in (None, room // 3):  # in one pass, or in several of which the last does not fit
        engine.settings = replace(own, prefill_chunk=chunk)
        fresh = engine.open()
        for call in (
            lambda fresh=fresh: fresh.append([97] * (room + 1)),
            lambda: idle[0].generate(Sampling(max_new_tokens=room)),
            lambda fresh=fresh: engine.append({fresh: [97] * (room - 9), idle[1]: [98] * 20}),
        ):
            with pytest.raises(CacheFull):
                call()
            assert [session.cached_tokens for session in idle] == cached and manager.used_pages() == pages
        fresh.close()
    engine.settings = own
    assert torch.equal(engine.next_logits(idle), logits)
    for session in idle:
        session.append([97])
        assert_as_fresh(engine, session)
        session.close()
    assert manager.used_pages() == 0


def a_batch_that_does_not_fit_is_undone(engine: LongContextEngine) -> None:
    """The short sequence is placed before the long one's later chunks find no room."""
    own, manager = engine.settings, engine.cache_manager
    engine.settings = replace(own, prefill_chunk=8)
    idle, short, long = opened(engine, [1, 2, 3]), engine.open(), engine.open()
    pages = manager.used_pages()
    with pytest.raises(CacheFull, match="new tokens need"):
        engine.append({short: [1, 2, 3, 4], long: [5] * (manager.n * manager.slots[0] + 50)})
    assert (short.cached_tokens, long.cached_tokens, manager.used_pages()) == (0, 0, pages)
    assert idle.tokens == [1, 2, 3] and idle.cached_tokens == 3
    short.append([1, 2, 3, 4])
    close(idle, short, long)
    engine.settings = own


def warm_up_computes_two_lengths_in_every_mode(engine: LongContextEngine) -> None:
    """Of one prompt, and of two together with nothing cached and then with some tokens."""
    computed: set[tuple[str, tuple[tuple[int, int], ...]]] = set()  # mode; cached and new tokens of every chunk
    begin = engine.model.attention.begin

    def recorded(batch: Batch, mode: str, **how: bool) -> None:
        computed.add((mode, tuple((chunk.cached, chunk.new) for chunk in batch.chunks)))
        begin(batch, mode, **how)

    engine.model.attention.begin = recorded  # type: ignore[method-assign, assignment]
    try:
        warm_up(engine)
    finally:
        del engine.model.attention.begin
    batches = [((0, 67),), ((0, 130),), ((0, 67), (0, 130)), ((67, 130), (130, 67))]
    modes = engine._chooser.candidates if engine.cache_manager.n > 1 else ("pass_kv",)
    assert computed == set(product(modes, batches))
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions


def warm_up_leaves_open_sessions_alone(engine: LongContextEngine) -> None:
    """However much of the cache they hold."""
    manager = engine.cache_manager
    for pages in (1, 24, 2):
        session = engine.open()
        room = min(pool.available for pool in manager.groups[0].pools) - pages
        session.append([97] * room * manager.n * manager.page_tokens)
        before = manager.used_pages()
        warm_up(engine)
        assert session.cached_tokens == len(session.tokens) > 0 and manager.used_pages() == before
        session.close()


def passes_are_bounded(engine: LongContextEngine, each: int) -> None:
    """Over all sequences together, so that the memory of activations does not grow with prompts or their number."""
    own, default, most = engine.settings, engine.rank_tokens, each * engine.cache_manager.n
    texts = [PROMPTS[0] * 6, PROMPTS[1], PROMPTS[2], PROMPTS[2] * 2]
    for chunk in (None, 7):
        engine.settings, engine.rank_tokens = replace(own, prefill_chunk=chunk), default
        _, expected = passes(engine, texts)
        engine.rank_tokens = each
        computed, found = passes(engine, texts)
        assert sum(computed) == sum(map(len, texts)) and max(computed) <= max(most, chunk or 0)
        assert chunk or all(before + after > most for before, after in pairwise(computed)), "each takes what fits"
        assert len(computed) > 3
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    engine.settings, engine.rank_tokens = own, default


def passes(engine: LongContextEngine, texts: list[list[int]]) -> tuple[list[int], Tensor]:
    """Return the number of new tokens of every pass of these prompts, and the logits at their ends."""
    computed: list[int] = []
    forward = engine._forward

    def counted(sessions: list[Session], chunks: tuple[ScheduledChunk, ...], *rest: object, **how: object) -> object:
        computed.append(sum(chunk.new for chunk in chunks))
        return forward(sessions, chunks, *rest, **how)  # type: ignore[arg-type]

    engine._forward = counted  # type: ignore[method-assign, assignment]
    sessions = [engine.open() for _ in texts]
    try:
        engine.append(dict(zip(sessions, texts, strict=True)))
    finally:
        del engine._forward  # type: ignore[method-assign]
    logits = engine.next_logits(sessions)
    close(*sessions)
    return computed, logits


def the_host_waits_for_what_was_appended_last(engine: LongContextEngine) -> None:
    attention = engine.model.attention
    attention.tail = tail = mock.Mock()
    engine.wait()
    tail.synchronize.assert_called_once_with()
    close(opened(engine, [1]))
    assert attention.tail is None, "it is of an earlier prompt"


def learned_positions_end(engine: LongContextEngine) -> None:
    warm_up(engine)  # within the positions
    session = engine.open()
    refused(lambda: session.append([97] * 25), "tokens of the session=25: expected at most 24 tokens")
    session.append([97] * 20)
    assert len(session.generate(Sampling(max_new_tokens=10))) == 4 and session.finish_reason == "length"
    refused(lambda: session.generate(), "and a new one=25: expected at most 24")


def every_promise(rank: int, config: Config) -> tuple[list[list[int]], Tensor]:
    with engine_of(config) as engine:
        warm_up_computes_two_lengths_in_every_mode(engine)
        warm_up_leaves_open_sessions_alone(engine)
        passes_are_bounded(engine, 12)
        tokens = batches_do_not_matter(engine)
        sequences_end(engine)
        errors_change_nothing(engine)
        bad_logits_are_reported_on_all_ranks(engine)
        forks_continue_independently(engine)
        the_host_waits_for_what_was_appended_last(engine)
        requests_that_cannot_fit_change_nothing(engine)
        a_batch_that_does_not_fit_is_undone(engine)
        logits = engine.next_logits([opened(engine, PROMPTS[2])])
    learned = {"data.seq_length": 24, "model.position_embedding": "learned", "inference.cache_tokens": 100}
    with engine_of(changed(config, learned)) as engine:
        learned_positions_end(engine)
    return tokens, logits


def test_sessions_keep_their_promises_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    (alone,) = run_distributed(every_promise, 1, parallel(config, 1))
    for tokens, logits in run_distributed(every_promise, 2, parallel(config, 2)):
        assert tokens == alone[0]
        assert torch.allclose(logits, alone[1], atol=1e-5)
