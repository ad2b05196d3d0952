"""Thousands of random operations leak no page, change no other session, and answer as the dense model does."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import Session
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import dense, engine_of, parallel
from tests.inference.histories import slots_of
from tests.shared.training import tiny_config

LONGEST = 110
OPERATIONS = ("open", "append", "append", "generate", "generate", "stop", "fork", "fork", "close", "drop", "bad")


@dataclass
class Sample:
    """A text and the logits of its next token."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Soak:
    """Random operations of one seed.

    Attributes:
        samples: to be compared with the dense model.
        seen: the number of operations of every kind.
    """

    engine: LongContextEngine
    seed: int
    samples: list[Sample] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)
        self._sessions: list[Session] = []
        self._cached: dict[Session, tuple[object, Tensor]] = {}

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._operate()
            self._check_caches()
            if step % 25 == 24 and self._sessions:
                self._take_sample()
        for session in self._sessions:
            session.close()
        assert self.engine.cache_manager.used_pages() == 0 and not self.engine.cache_manager.sessions

    def _operate(self) -> None:
        operation = self._source.choice(OPERATIONS)
        if operation == "open" or not self._sessions:
            operation = "open"
            self._sessions.append(self.engine.open())
        manager, some = self.engine.cache_manager, self._some()
        before = self._state()
        try:
            getattr(self, f"_{operation}")(some)
            self.seen[operation] += 1
        except CacheFull:
            self.seen["full"] += 1
            assert self._state() == before
            self._free()
        except ValueError as error:
            assert operation == "bad" and "expected" in str(error)
            assert self._state() == before
            self.seen["refused"] += 1
        assert manager.sessions == tuple(sorted(session.number for session in self._sessions))

    def _state(self) -> tuple[object, ...]:
        manager = self.engine.cache_manager
        sessions = [(s.number, list(s.tokens), s.cached_tokens if s.next_token else None) for s in self._sessions]
        # The last page of a fork may have been dropped, to be computed again.
        certain = all(s.next_token for s in self._sessions)
        return sessions, [manager.groups[0].pools[rank].available for rank in range(manager.n)] if certain else None

    def _some(self) -> list[Session]:
        """Choose up to 4 sessions that are not too long."""
        able = [s for s in self._sessions if len(s.tokens) < LONGEST]
        return self._source.sample(able, self._source.randint(min(1, len(able)), min(4, len(able))))

    def _text(self, most: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(self._source.choice((1, 2, self._source.randint(1, most))))]

    def _open(self, some: list[Session]) -> None:
        self.engine.append({self._sessions[-1]: self._text(60)})

    def _append(self, some: list[Session]) -> None:
        self.engine.append({session: self._text(25) for session in some})

    def _generate(self, some: list[Session]) -> None:
        with_text = [session for session in some if session.tokens]
        seed = self._source.randrange(1000)
        sampling = Sampling(max_new_tokens=self._source.randint(1, 4), temperature=seed % 2, seed=seed)
        self.engine.continue_all(with_text, sampling)

    def _stop(self, some: list[Session]) -> None:
        """Stop a generation early."""
        stream = self.engine.stream([session for session in some if session.tokens], Sampling(max_new_tokens=9))
        for _ in range(self._source.randint(0, 3)):
            next(stream, None)
        stream.close()

    def _fork(self, some: list[Session]) -> None:
        for session in some[:1]:
            cut = self._source.choice((None, self._source.randint(0, len(session.tokens))))
            fork = session.fork(cut)
            self._sessions.append(fork)
            assert fork.tokens == session.tokens[:cut]
            own = self._contents(fork)
            assert torch.equal(own, self._contents(session)[:, : own.shape[1]])

    def _close(self, some: list[Session]) -> None:
        for session in some[:2]:
            session.close()
            self._sessions.remove(session)

    def _drop(self, some: list[Session]) -> None:
        """Drop what is cached of a session, which is then computed again."""
        for session in some[:1]:
            self.engine.cache_manager.truncate(session.number, 0)
            self._cached.pop(session, None)

    def _bad(self, some: list[Session]) -> None:
        good = self._source.choice(self._sessions)
        closed = self.engine.open()
        closed.close()
        self._source.choice(
            [
                lambda: self.engine.append({good: [1, 10**6]}),
                lambda: self.engine.append({good: []}),
                lambda: self.engine.append({good: [1], closed: [1]}),
                lambda: self.engine.append({good: [1] * 10**4}),
                lambda: self.engine.continue_all([good, good], Sampling()) if good.tokens else good.append([]),
                lambda: good.fork(len(good.tokens) + 1),
                lambda: closed.fork(),
                lambda: Sampling(max_new_tokens=-1),
            ]
        )()
        raise AssertionError("a bad request was served")

    def _free(self) -> None:
        self._close(sorted(self._sessions, key=lambda session: -len(session.tokens))[:2])

    def _contents(self, session: Session) -> Tensor:
        """Return this rank's cached keys and values of a session in the order of positions, `[layers, tokens, ...]`."""
        attention = self.engine.model.attention
        slots = slots_of(self.engine.cache_manager, session.number, attention.rank)
        return torch.stack([layer[slots] for layer in attention.layers])

    def _check_caches(self) -> None:
        """Check that cached tokens have not changed, unless a session's were dropped, and no page leaked."""
        manager = self.engine.cache_manager
        kept: dict[Session, tuple[object, Tensor]] = {}
        for session in self._sessions:
            shards, now = manager.shards(session.number), self._contents(session)
            before, old = self._cached.get(session, (None, now))
            if shards is before:  # the same cached tokens, and more
                assert now.shape[1] >= old.shape[1] and torch.equal(now[:, : old.shape[1]], old), "a cache has changed"
                self.seen["watched"] += 1
            # The last page of a fork whose tokens are all cached is computed again, for the logits after it.
            certain = (now.shape[1] - 1) // self.engine.unit * self.engine.unit
            kept[session] = (shards, now if session.next_token else now[:, :certain])
        self._cached = kept
        used = sum(manager.held_pages(manager.sessions, rank) for rank in range(manager.n))
        assert manager.used_pages() == used, "pages have leaked"

    def _take_sample(self) -> None:
        session = self._source.choice(self._sessions)
        if session.tokens:
            try:
                logits = self.engine.next_logits([session])[0]
            except CacheFull:
                return
            self._check_caches()
            self.samples.append(Sample(list(session.tokens), logits))


def soak(rank: int, configs: list[Config], steps: int) -> list[tuple[list[Sample], Counter[str]]]:
    """Run the operations with every configuration."""
    found = []
    for number, config in enumerate(configs):
        with engine_of(config) as engine:
            work = Soak(engine, number)
            work.run(steps if number == 0 else steps * 2 // 3)  # without eviction, a cache is full less often
            found.append((work.samples, work.seen))
    return found


def dense_texts(rank: int, config: Config, texts: list[list[int]]) -> list[Tensor]:
    """Run `conversations.dense` in a world of one rank."""
    return dense(config, None, texts, False)


SETTINGS = (
    {},
    {"prefill_chunk": 8},
    {"exact_reuse": True, "prefill_chunk": 16},
    {"decode": "replicated", "prefill_chunk": 24},
)


def check(config: Config, samples: list[Sample]) -> None:
    """Compare the logits of every sample with the dense model."""
    truth = run_distributed(dense_texts, 1, config, [sample.tokens for sample in samples])[0]
    for sample, logits in zip(samples, truth, strict=True):
        assert torch.allclose(sample.logits, logits[-1], atol=1e-5)


@pytest.mark.parametrize(("n", "which"), [(1, (0, 1, 2, 3)), (2, (0, 3)), (3, (1, 3))])
def test_random_operations_leak_and_corrupt_nothing(tmp_path: Path, n: int, which: tuple[int, ...]) -> None:
    """`tests/analysis/test_soak.py` sends random requests through a scheduler."""
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    configs = [parallel(config, n, cache_tokens=350, **settings) for settings in (SETTINGS[i] for i in which)]
    first, *others = run_distributed(soak, n, configs, 700 if n == 1 else 30)
    check(configs[0], [sample for samples, _ in first for sample in samples])
    for other in others:
        for (mine, _), (same, _) in zip(first, other, strict=True):
            assert [sample.tokens for sample in mine] == [sample.tokens for sample in same]
    if n == 1:
        for _, seen in first:
            for what in ("fork", "generate", "stop", "drop", "close", "refused", "watched"):
                assert seen[what] > 20, (what, seen)
        assert first[0][1]["full"] > 20
