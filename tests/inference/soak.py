"""Random work on an engine, watched: what no operation may do to sessions that it is not about."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.inference.session import Session
from tests.inference.conversations import dense, engine_of
from tests.inference.histories import slots_of

LONGEST = 110
OPERATIONS = ("open", "append", "append", "generate", "generate", "stop", "fork", "fork", "close", "evict", "bad")


@dataclass
class Sample:
    """A text and the logits of its next token."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Soak:
    """One seed's operations. samples: to compare with the dense model; seen: how often what happened."""

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
            self._once()
            self._watch()
            if step % 25 == 24 and self._sessions:
                self._take_sample()
        for session in self._sessions:
            session.close()
        assert self.engine.cache_manager.used_pages() == 0 and not self.engine.cache_manager.sessions

    def _once(self) -> None:
        operation = self._source.choice(OPERATIONS)
        if operation == "open" or not self._sessions:
            operation = "open"
            self._sessions.append(self.engine.open())
        manager, some = self.engine.cache_manager, self._some()
        before = self._books()
        try:
            getattr(self, f"_{operation}")(some)
            self.seen[operation] += 1
        except CacheFull:
            self.seen["full"] += 1
            if not self.engine.settings.evict:
                assert self._books() == before
            self._free()
        except ValueError as error:
            assert operation == "bad" and "expected" in str(error)
            assert self._books() == before
            self.seen["refused"] += 1
        assert manager.sessions == tuple(sorted(session.number for session in self._sessions))

    def _books(self) -> tuple[object, ...]:
        manager = self.engine.cache_manager
        sessions = [(s.number, list(s.tokens), s.cached_tokens if s.next_token else None) for s in self._sessions]
        # A fork may have given up its last token, to be computed again.
        certain = all(s.next_token for s in self._sessions)
        return sessions, [manager.free_pages(rank) for rank in range(manager.n)] if certain else None

    def _some(self) -> list[Session]:
        """Of those that are not too long."""
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
        """A continuation that is given up on its way."""
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

    def _evict(self, some: list[Session]) -> None:
        for session in some[:1]:
            self.engine.cache_manager.evict(session.number)

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
                lambda: Sampling(max_new_tokens=0),
            ]
        )()
        raise AssertionError("a bad request was served")

    def _free(self) -> None:
        self._close(sorted(self._sessions, key=lambda session: -len(session.tokens))[:2])

    def _contents(self, session: Session) -> Tensor:
        """This rank's cached keys and values of a session, in the order of their positions: `[layers, tokens, ...]`."""
        attention = self.engine.model.attention
        slots = slots_of(self.engine.cache_manager, session.number, attention.rank)
        return torch.stack([layer[slots] for layer in attention._layers])

    def _watch(self) -> None:
        """What a session has cached never changes until it is forgotten as a whole, and no page is lost."""
        manager = self.engine.cache_manager
        kept: dict[Session, tuple[object, Tensor]] = {}
        for session in self._sessions:
            books, now = manager.shards(session.number), self._contents(session)
            before, old = self._cached.get(session, (None, now))
            if books is before:  # neither evicted nor shortened since
                assert now.shape[1] >= old.shape[1] and torch.equal(now[:, : old.shape[1]], old), "a cache has changed"
                self.seen["watched"] += 1
            kept[session] = (books, now)
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
            self._watch()
            self.samples.append(Sample(list(session.tokens), logits))


@dataclass
class Served:
    """A greedy request's prompt and answer."""

    prompt: tuple[int, ...]
    answer: list[int]


def serve(engine: LongContextEngine, seed: int, requests: int) -> tuple[list[Served], Counter[str]]:
    """Random requests with common beginnings, some bad, some cancelled, through a scheduler with little room."""
    source = random.Random(seed)
    scheduler = Scheduler(engine, max_active=5, prefill_chunk=24, keep_sessions=4)
    texts = [tuple(source.randrange(256) for _ in range(size)) for size in (70, 90, 33)]
    asked: dict[int, Request] = {}
    answers: dict[int, list[int]] = {}
    seen: Counter[str] = Counter()
    while len(asked) < requests or scheduler.busy:
        if len(asked) < requests and source.random() < 0.5:
            text = source.choice(texts)
            prompt = text[: source.randint(1, len(text))] + tuple(source.randrange(256) for _ in range(3))
            if source.random() < 0.1:
                prompt = source.choice(((), (*prompt, 10**6), prompt * 100))
            sampling = Sampling(max_new_tokens=source.randint(1, 8), temperature=source.choice((0.0, 0.0, 1.0)))
            request = asked[len(asked)] = Request(len(asked), prompt, sampling)
            scheduler.submit(request)
            if source.random() < 0.3:
                texts[source.randrange(3)] = prompt if 2 < len(prompt) < 100 and max(prompt) < 256 else text
        if asked and source.random() < 0.1:
            scheduler.cancel(source.randrange(len(asked)))
        for event in scheduler.advance():
            answers.setdefault(event.number, [])
            if event.token is not None:
                answers[event.number].append(event.token)
            if event.finish_reason is not None:
                seen[event.finish_reason] += 1
                seen["reused"] += event.cached_tokens > 0
    scheduler.close()
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions
    assert sum(seen[reason] for reason in ("length", "cancelled", "error")) == requests
    greedy = [number for number, request in asked.items() if request.sampling.temperature == 0 and answers[number]]
    return [Served(asked[number].prompt, answers[number]) for number in greedy], seen


@dataclass
class Found:
    """What a soak of one configuration gave, on one rank."""

    samples: list[Sample]
    served: list[Served]
    seen: Counter[str]


def soak(rank: int, configs: list[Config], steps: int, requests: int) -> list[Found]:
    """Both kinds of work under every configuration."""
    found = []
    for number, config in enumerate(configs):
        with engine_of(config) as engine:
            work = Soak(engine, number)
            work.run(steps)
            served, seen = serve(engine, number, requests)
            found.append(Found(work.samples, served, work.seen + seen))
    return found


def dense_texts(rank: int, config: Config, texts: list[list[int]]) -> list[Tensor]:
    """`conversations.dense`, in a world of one rank."""
    return dense(config, None, texts, False)
