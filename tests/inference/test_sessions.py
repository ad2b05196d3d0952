"""What sessions promise besides the right numbers: errors that harm nothing, ends, seeds, eviction, no leak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull, ScheduledChunk
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import Session
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import changed, tiny_config

PROMPTS = ([104, 101, 108, 108, 111], [97], [98, 99] * 9)


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def batches_do_not_matter(engine: LongContextEngine) -> list[list[int]]:
    """A sequence's tokens depend on its own text, seed and stream only."""
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
    session = engine.open()
    session.append(PROMPTS[0])
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
    session.close()
    session.close()


def errors_harm_nothing(engine: LongContextEngine) -> None:
    good, closed = engine.open(), engine.open()
    closed.close()
    good.append(PROMPTS[2])
    before, pages, logits = list(good.tokens), engine.cache_manager.used_pages(), engine.next_logits([good])
    refused(lambda: closed.append([1]), "expected an open session")
    refused(lambda: closed.generate(), "expected an open session")
    refused(lambda: good.append([]), "expected 1 or more")
    refused(lambda: good.append([97, 10**6]), "token=1000000: expected an id from 0 to")
    refused(lambda: good.append([-1]), "token=-1")
    empty = engine.open()
    refused(lambda: engine.append({empty: [97], good: [-1]}), "token=-1")
    for wrong in ("ab", [1.5], [97, None], 97, torch.tensor([[97, 98]])):
        refused(lambda wrong=wrong: good.append(wrong), "expected integers, one after another")  # type: ignore[misc]
    refused(lambda: engine.next_logits([good, closed]), "expected an open session")
    refused(lambda: engine.next_logits([good, empty]), "expected some tokens to go on from")
    refused(lambda: empty.generate(), "expected some tokens to go on from")
    refused(lambda: engine.continue_all([good, good], Sampling()), "expected each one once")
    refused(lambda: engine.append({empty: [97] * 5000}), "new tokens need")
    refused(lambda: good.generate(Sampling(max_new_tokens=5000)), "new tokens need")
    refused(lambda: engine.append({empty: [97] * 100, good: [97] * 5000}), "new tokens need")
    assert good.tokens == before and empty.tokens == [] and engine.cache_manager.used_pages() == pages
    assert torch.equal(engine.next_logits([good]), logits)
    for ids in (numpy.array([97, 98]), torch.tensor([99]), range(100, 102)):
        empty.append(ids)  # type: ignore[arg-type]
    assert empty.tokens == list(range(97, 102)) and {type(token) for token in empty.tokens} == {int}
    for session in (good, empty):
        session.close()


def bad_logits_are_told_everywhere(engine: LongContextEngine) -> None:
    """They are on one rank only, and every rank has to hear of it instead of waiting."""
    session = engine.open()
    session.append([97, 98])
    if session.next_token is not None and session.next_token.logits is not None:
        session.next_token.logits[3] = float("nan")
    refused(lambda: session.generate(), "logits=not finite")
    session.close()


def assert_as_fresh(engine: LongContextEngine, session: Session) -> None:
    logits = engine.next_logits([session])[0]
    fresh = engine.open()
    fresh.append(session.tokens)
    assert torch.allclose(engine.next_logits([fresh])[0], logits, atol=1e-5)
    fresh.close()


def eviction_computes_again(engine: LongContextEngine) -> None:
    old = engine.open()
    old.append(PROMPTS[2])
    logits = engine.next_logits([old])
    room = engine.cache_manager.n * engine.cache_manager.slots_per_rank
    new = engine.open()
    new.append([97] * (room - 8))
    assert old.cached_tokens == 0
    assert old.tokens == PROMPTS[2]
    assert torch.allclose(engine.next_logits([old]), logits, atol=1e-5) and new.cached_tokens == 0
    for session in (old, new):
        session.close()
    evicted_for_nothing(engine, room)


def evicted_for_nothing(engine: LongContextEngine, room: int) -> None:
    """What can never fit costs nobody a cache, however it is asked for, and in however many passes."""
    own, manager = engine.settings, engine.cache_manager
    idle = [engine.open() for _ in range(3)]
    engine.append(dict(zip(idle, PROMPTS, strict=True)))
    idle.append(idle[2].fork(9))  # shares pages
    logits, pages = engine.next_logits(idle), manager.used_pages()
    cached = [session.cached_tokens for session in idle]
    for chunk in (None, room // 3):  # all at once; the last of several passes does not fit, nor what others share
        engine.settings = replace(own, prefill_chunk=chunk)
        fresh = engine.open()
        for ask in (
            lambda fresh=fresh: fresh.append([97] * (room + 1)),
            lambda: idle[0].generate(Sampling(max_new_tokens=room)),
            lambda fresh=fresh: engine.append({fresh: [97] * (room - 9), idle[1]: [98] * 20}),
        ):
            with pytest.raises(CacheFull):
                ask()
            assert [session.cached_tokens for session in idle] == cached and manager.used_pages() == pages
        fresh.close()
    engine.settings = own
    assert torch.equal(engine.next_logits(idle), logits)
    for session in idle:
        session.append([97])
        assert_as_fresh(engine, session)
        session.close()
    assert manager.used_pages() == 0


def warming_up_computes_and_leaves_nothing(engine: LongContextEngine) -> None:
    """Prompts of two lengths, on this rank's part of the tokens."""
    computed: list[int] = []
    modes: set[str] = set()
    original, begin = engine.model.logits, engine.model.attention.begin
    engine.model.logits = lambda tokens, *rest: computed.append(len(tokens)) or original(tokens, *rest)  # type: ignore
    engine.model.attention.begin = lambda batch, mode, **how: modes.add(mode) or begin(batch, mode, **how)  # type: ignore
    try:
        engine.warm_up()
    finally:
        del engine.model.logits
        del engine.model.attention.begin
    assert len({count for count in computed if count > 1}) == 2
    assert modes == (set(engine._chooser.candidates) if engine.cache_manager.n > 1 else {"pass_kv"})
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions


def warming_up_leaves_open_sessions_alone(engine: LongContextEngine) -> None:
    """However much of the cache they hold, and where the engine may evict them."""
    own, manager = engine.settings, engine.cache_manager
    session = engine.open()
    engine.settings = replace(own, evict=True)
    try:
        for pages in (1, 24, 2):
            session.append(
                [97] * (min(map(manager.free_pages, range(manager.n))) - pages) * manager.n * manager.page_tokens
            )
            before = manager.used_pages()
            engine.warm_up()
            assert session.cached_tokens == len(session.tokens) > 0 and manager.used_pages() == before
            manager.evict(session.number)
            session.tokens.clear()
    finally:
        engine.settings = own
        session.close()


def a_pass_takes_as_many_tokens_as_fit(engine: LongContextEngine, each: int) -> None:
    """Of all sequences together, so that activations are bounded however long prompts are and however many."""
    own, all_tokens, most = engine.settings, engine.rank_tokens, each * engine.cache_manager.n
    texts = [PROMPTS[0] * 6, PROMPTS[1], PROMPTS[2], PROMPTS[2] * 2]
    for chunk in (None, 7):
        engine.settings, engine.rank_tokens = replace(own, prefill_chunk=chunk), all_tokens
        _, expected = passes(engine, texts)
        engine.rank_tokens = each
        computed, found = passes(engine, texts)
        assert sum(computed) == sum(map(len, texts)) and max(computed) <= max(most, chunk or 0)
        assert chunk or all(before + after > most for before, after in pairwise(computed)), "each takes what fits"
        assert len(computed) > 3
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    engine.settings, engine.rank_tokens = own, all_tokens


def passes(engine: LongContextEngine, texts: list[list[int]]) -> tuple[list[int], Tensor]:
    """New tokens of every pass that prompts are computed in, and the logits at their ends."""
    computed: list[int] = []
    forward = engine._forward

    def counted(sessions: list[Session], turns: tuple[ScheduledChunk, ...], *rest: object, **how: object) -> object:
        computed.append(sum(turn.new for turn in turns))
        return forward(sessions, turns, *rest, **how)  # type: ignore[arg-type]

    engine._forward = counted  # type: ignore[method-assign, assignment]
    sessions = [engine.open() for _ in texts]
    try:
        engine.append(dict(zip(sessions, texts, strict=True)))
    finally:
        del engine._forward  # type: ignore[method-assign]
    logits = engine.next_logits(sessions)
    for session in sessions:
        session.close()
    return computed, logits


def learned_positions_end(config: Config) -> None:
    settings = {"data.seq_length": 24, "model.position_embedding": "learned", "inference.cache_tokens": 100}
    with engine_of(changed(config, settings)) as engine:
        engine.warm_up()  # no more positions than there are
        session = engine.open()
        refused(lambda: session.append([97] * 25), "tokens of the session=25: expected at most the model's 24 posit")
        session.append([97] * 20)
        assert len(session.generate(Sampling(max_new_tokens=10))) == 4 and session.finish_reason == "length"
        refused(lambda: session.generate(), "tokens of the session=24: expected less than 24")


def every_promise(rank: int, config: Config) -> tuple[list[list[int]], Tensor]:
    with engine_of(config) as engine:
        warming_up_computes_and_leaves_nothing(engine)
        warming_up_leaves_open_sessions_alone(engine)
        a_pass_takes_as_many_tokens_as_fit(engine, 12)
        tokens = batches_do_not_matter(engine)
        sequences_end(engine)
        errors_harm_nothing(engine)
        bad_logits_are_told_everywhere(engine)
        session = engine.open()
        session.append(PROMPTS[2])
        logits = engine.next_logits([session])
    with engine_of(changed(config, {"inference.evict": True})) as engine:
        eviction_computes_again(engine)
    learned_positions_end(config)
    return tokens, logits


@pytest.mark.usefixtures("on_cpu")
def test_sessions_keep_their_promises_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    (alone,) = run_distributed(every_promise, 1, parallel(config, 1))
    for tokens, logits in run_distributed(every_promise, 2, parallel(config, 2)):
        assert tokens == alone[0]
        assert torch.allclose(logits, alone[1], atol=1e-5)
