"""Many requests over one engine: admitted while they fit, prefilled in chunks between decodes, prefixes shared.

Every rank runs the same scheduler on the same requests in the same order, so ranks agree without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..errors import refuse
from .cache_manager import CacheFull
from .engine import Generation, LongContextEngine, Session
from .prefixes import Prefix, common, longest, usable
from .sampling import Sampling
from .session import check_ids

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        number: chosen by the caller, new for every request.
        salt: whose it is; what requests of another one have cached is not looked at.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: int = 0

    @property
    def tokens(self) -> int:
        """That it comes to at most."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class Event:
    """What happened to a request in one `advance`.

    Attributes:
        token: the one it got; None if none was given out.
        finish_reason: stop, length, cancelled or error; None while it goes on.
        cached_tokens: of its prompt, found in the cache.
        error: why, with finish_reason error, or cancelled by the server. refused: it lies with the request.
    """

    number: int
    token: int | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Limits:
    """max_active: most sequences computed together. prefill_chunk: most prompt tokens computed between two decodes.
    keep_sessions: most finished or cancelled sequences whose caches are kept for prompts that begin as they do."""

    max_active: int = 16
    prefill_chunk: int = 2048
    keep_sessions: int = 16

    def __post_init__(self) -> None:
        for name, least in (("max_active", 1), ("prefill_chunk", 1), ("keep_sessions", 0)):
            if getattr(self, name) < least:
                raise refuse(name, getattr(self, name), f"{least} or more", f"Raise {name}.")


@dataclass(frozen=True)
class Bounds:
    """What a request may ask for of an empty cache.

    Attributes:
        tokens: of prompt and answer together, at most.
        positions: of the model, None for any number; a prompt has to leave one.
        vocab_size: ids are below it.
    """

    tokens: int
    positions: int | None
    vocab_size: int

    @property
    def prompt(self) -> int:
        """Most tokens of a prompt."""
        return min(self.tokens, self.positions or self.tokens) - 1

    def check(self, prompt: Sequence[int], more: int) -> None:
        """Raise ValueError for what cannot be served. more: tokens to generate at most."""
        if len(prompt) + more > self.tokens:
            expected = f"at most {self.tokens} tokens together"
            raise refuse("prompt and max_tokens", len(prompt) + more, expected, "Ask for fewer.")
        check_ids(prompt, self.vocab_size)
        if self.positions is not None and len(prompt) >= self.positions:
            expected = f"less than the model's {self.positions} positions"
            raise refuse("tokens of the prompt", len(prompt), expected, "Shorten it.")


@dataclass(eq=False)
class _Waiting:
    """overtaken: tokens of the requests that came later and were admitted before it."""

    request: Request
    overtaken: int = 0


@dataclass(eq=False)
class _Active:
    request: Request
    session: Session
    left: list[int]  # of the prompt, not computed yet
    pages: int  # that it may hold on any rank in the end, at most
    cached: int
    generation: Generation | None = None


@dataclass
class Scheduler:
    """Continuous batching.

    A request is admitted when the pages that it may need at most are not promised to others, so it never fails for want
    of memory later; kept caches give way to it. Its prompt shares the pages of the longest beginning that any sequence,
    under way or kept, has cached, and they count once. While a longer one is being computed for another it waits.

    Who waits may be overtaken by shorter requests that can be admitted, as long as these come to fewer tokens together
    than the request itself: by about the time of one more request like it, and no longer.

    The engine stops evicting for good: it would take pages from sequences under way, to which they are promised, and
    what these shared until then would no longer count once.
    """

    engine: LongContextEngine
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._refused: list[Event] = []
        self._active: dict[int, _Active] = {}
        self._kept: list[Session] = []  # the least recently used first
        self._cancelled: list[int] = []
        self._stuck = False  # all that wait have been looked at, and nothing has changed since
        settings = self.engine.settings = replace(self.engine.settings, evict=False)
        self._exact_chunk = settings.prefill_chunk if settings.exact else None
        manager, model = self.engine.cache_manager, self.engine.model
        # Of a session's pages some are for what ranks may differ by (`CacheManager.most_pages`).
        self.bounds = Bounds((manager.slots_per_rank - 2) * manager.n, model.max_positions, model.vocab_size)

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._waiting or self._refused or self._active or self._cancelled)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        try:
            self.bounds.check(request.prompt, request.sampling.max_new_tokens)
        except ValueError as error:
            self._refused.append(Event(request.number, finish_reason="error", error=str(error), refused=True))
        else:
            self._waiting.append(_Waiting(request))
            self._stuck = False

    def cancel(self, number: int) -> None:
        """End a request; nothing for one that has ended."""
        self._cancelled.append(number)

    def advance(self) -> list[Event]:
        """One round: admit what fits, compute a chunk of prompts, then a token for every sequence past its own."""
        events = self._refused + self._cancel()
        self._refused = []
        self._admit()
        self._prefill()
        return events + self._decode()

    def close(self) -> None:
        """Free every session."""
        for session in (*self._kept, *(active.session for active in self._active.values())):
            session.close()
        self._kept, self._active = [], {}
        self._waiting.clear()

    def _cancel(self) -> list[Event]:
        events = []
        for number in self._cancelled:
            if number in self._active:
                self._keep(self._active.pop(number).session, "cancelled")
                events.append(Event(number, finish_reason="cancelled"))
            elif any(waiting.request.number == number for waiting in self._waiting):
                self._waiting = [waiting for waiting in self._waiting if waiting.request.number != number]
                events.append(Event(number, finish_reason="cancelled"))
        self._stuck = self._stuck and not events
        self._cancelled = []
        return events

    def _admit(self) -> None:
        if self._stuck:
            return
        still: list[_Waiting] = []
        for i, waiting in enumerate(self._waiting):
            if len(self._active) >= self.limits.max_active:
                still += self._waiting[i:]
                break
            tokens = waiting.request.tokens
            may = all(before.overtaken + tokens < before.request.tokens for before in still)
            if may and self._start(waiting.request):
                for before in still:
                    before.overtaken += tokens
            else:
                still.append(waiting)
        else:
            self._stuck = bool(still)
        self._waiting = still

    def _start(self, request: Request) -> bool:
        """Give the request a session with as much of its prompt as there is; False if it has to wait."""
        prompt = list(request.prompt)
        under_way = [active.session for active in self._active.values()]
        own = [session for session in (*self._kept, *under_way) if session.salt == request.salt]
        found = longest(prompt, own, self._exact_chunk)
        if self._is_coming(request, found.tokens if found else 0):
            return False
        session = self._begin(prompt, found)
        pages = self._most_pages(session, request.tokens)
        if pages > self.engine.cache_manager.pages_per_rank:  # a fork may be less even than a session of its own
            self._drop(session)
            session = self.engine.open()
            pages = self._most_pages(session, request.tokens)
        if not self._fits(session, pages):
            self._drop(session)
            return False
        if session in self._kept:
            self._kept.remove(session)
        session.salt = request.salt
        left = prompt[len(session.tokens) :]
        self._active[request.number] = _Active(request, session, left, pages, session.cached_tokens)
        return True

    def _is_coming(self, request: Request, cached: int) -> bool:
        """Whether a beginning of the prompt that is longer by a page a rank is being computed for another request."""
        worth = cached + self.engine.cache_manager.page_tokens * self.engine.cache_manager.n
        for active in self._active.values():
            if active.left and active.request.salt == request.salt:
                shared = min(common(request.prompt, active.request.prompt), len(request.prompt) - 1)
                if usable(shared, self._exact_chunk) >= worth:
                    return True
        return False

    def _begin(self, prompt: list[int], found: Prefix | None) -> Session:
        """A kept session if the prompt goes on from its end, else a fork, or a new one if there is no room for that."""
        if found is None:
            return self.engine.open()
        source, length = found.session, len(found.session.tokens)
        if source in self._kept:
            self._kept.append(self._kept.pop(self._kept.index(source)))
            if self._exact_chunk is None and length < len(prompt) and prompt[:length] == source.tokens:
                return source
        while True:
            try:
                return source.fork(found.tokens)
            except CacheFull:
                others = [session for session in self._kept if session is not source]
                if not others:
                    return self.engine.open()
                self._drop(others[0], keep=False)

    def _drop(self, session: Session, keep: bool = True) -> None:
        """Close a session; `keep` it if it is one that is kept."""
        if session not in self._kept:
            session.close()
        elif not keep:
            self._kept.remove(session)
            session.close()

    def _most_pages(self, session: Session, tokens: int) -> int:
        return self.engine.cache_manager.most_pages(session.number, tokens - session.cached_tokens)

    def _fits(self, session: Session, pages: int) -> bool:
        """Whether all that are under way, and this one, can grow to their most; what they share is counted once."""
        manager = self.engine.cache_manager
        most = {active.session.number: active.pages for active in self._active.values()} | {session.number: pages}
        return all(
            manager.held_pages(most, rank) + sum(p - manager.num_pages(s, rank) for s, p in most.items())
            <= manager.pages_per_rank
            for rank in range(manager.n)
        )

    def _prefill(self) -> None:
        """The next chunk of the prompts that are not computed yet, first come first served."""
        room = self.limits.prefill_chunk
        chunk: dict[Session, list[int]] = {}
        for active in self._active.values():
            if active.left and room:
                # Where whole chunks matter, the first prompt gets one however little room there is.
                size = usable(room, self._exact_chunk) or (0 if chunk else self._exact_chunk or 0)
                if not size:
                    break
                chunk[active.session] = active.left[:size]
                active.left = active.left[size:]
                room = max(0, room - len(chunk[active.session]))
        if chunk:
            self._with_room(lambda: self.engine.append(chunk))
            self._stuck = False
        for active in self._active.values():
            if not active.left and active.generation is None:
                # Streams are 0: a request's tokens do not depend on what it came with.
                active.generation = self.engine.start(active.session, active.request.sampling)

    def _decode(self) -> list[Event]:
        running = {a.generation: a for a in self._active.values() if a.generation is not None}
        if not running:
            return []
        emitted = self._with_room(lambda: self.engine.step(list(running)))
        events = []
        for generation, active in running.items():
            number, reason = active.request.number, generation.finish_reason
            event = Event(number, emitted.get(generation), reason, active.cached)
            if reason == "error":
                event = replace(event, error="the model's logits are not finite")
            events.append(event)
            if reason is not None:
                del self._active[number]
                self._stuck = False
                self._keep(active.session, reason)
        return events

    def _keep(self, session: Session, reason: str) -> None:
        if reason == "error" or not session.cached_tokens:
            session.close()
            return
        del session.tokens[session.cached_tokens :]  # given out last, never computed: another may follow next time
        self._kept.append(session)
        while len(self._kept) > self.limits.keep_sessions:
            self._kept.pop(0).close()

    def _with_room(self, compute: Callable[[], _T]) -> _T:
        """Run `compute`, closing kept sessions until there is room."""
        while True:
            try:
                return compute()
            except CacheFull:
                if not self._kept:
                    raise
                self._kept.pop(0).close()
