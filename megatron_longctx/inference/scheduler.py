"""Many requests over one engine: admitted while they fit, prefilled in chunks between decodes, caches kept for reuse.

Every rank runs the same scheduler on the same requests in the same order, so ranks agree without being told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..config import refuse
from .engine import Generation, LongContextEngine, Session
from .ledger import CacheFull
from .sampling import Sampling

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """A prompt to continue. number: chosen by the caller, new for every request."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Event:
    """What happened to a request in one `advance`.

    Attributes:
        token: the one it got; None if none was given out.
        finish_reason: stop, length, cancelled or error; None while it goes on.
        cached_tokens: of its prompt, found in the cache.
        error: why, with finish_reason error. refused: it lies with the request.
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
    keep_sessions: most finished or cancelled sequences whose caches are kept for prompts that begin with them."""

    max_active: int = 16
    prefill_chunk: int = 2048
    keep_sessions: int = 16

    def __post_init__(self) -> None:
        for name, least in (("max_active", 1), ("prefill_chunk", 1), ("keep_sessions", 0)):
            if getattr(self, name) < least:
                raise refuse(name, getattr(self, name), f"{least} or more", f"Raise {name}.")


@dataclass(eq=False)
class _Active:
    request: Request
    session: Session
    left: list[int]  # of the prompt, not computed yet
    pages: int
    cached: int
    generation: Generation | None = None


@dataclass
class Scheduler:
    """Continuous batching.

    A request is admitted when the pages that it may need at most are not promised to others, so it never fails for want
    of memory later; kept caches give way to it.
    """

    engine: LongContextEngine
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._active: dict[int, _Active] = {}
        self._kept: list[Session] = []  # the least recently finished first
        self._cancelled: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._waiting or self._active or self._cancelled)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, number: int) -> None:
        """End a request; nothing for one that has ended."""
        self._cancelled.append(number)

    def advance(self) -> list[Event]:
        """One round: admit what fits, compute a chunk of prompts, then a token for every sequence past its own."""
        events = self._cancel()
        events += self._admit()
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
            elif any(request.number == number for request in self._waiting):
                self._waiting = deque(request for request in self._waiting if request.number != number)
                events.append(Event(number, finish_reason="cancelled"))
        self._cancelled = []
        return events

    def _admit(self) -> list[Event]:
        events = []
        ledger = self.engine.ledger
        while self._waiting and len(self._active) < self.limits.max_active:
            request = self._waiting[0]
            tokens = len(request.prompt) + request.sampling.max_new_tokens
            # Ranks differ by 2 tokens of a session at most.
            pages = -(-(-(-tokens // ledger.n) + 2) // ledger.page_tokens)
            try:
                if pages > ledger.pages_per_rank:
                    most = (ledger.slots_per_rank - 2) * ledger.n
                    raise refuse("prompt and max_tokens", tokens, f"at most {most} tokens together", "Ask for fewer.")
                if pages > ledger.pages_per_rank - sum(active.pages for active in self._active.values()):
                    break
                self._start(request, pages)
            except CacheFull:
                raise
            except ValueError as error:
                events.append(Event(request.number, finish_reason="error", error=str(error), refused=True))
            self._waiting.popleft()
        return events

    def _start(self, request: Request, pages: int) -> None:
        """Give the request a session: a kept one that its prompt begins with, or a new one."""
        fresh = self.engine.open()
        try:
            self.engine.check(fresh, request.prompt)
        except ValueError:
            fresh.close()
            raise
        prompt = list(request.prompt)
        fitting = [s for s in self._kept if len(s.tokens) < len(prompt) and prompt[: len(s.tokens)] == s.tokens]
        session = max(fitting, key=lambda kept: len(kept.tokens), default=fresh)
        if session is not fresh:
            fresh.close()
            self._kept.remove(session)
        left = prompt[len(session.tokens) :]
        self._active[request.number] = _Active(request, session, left, pages, session.cached_tokens)

    def _prefill(self) -> None:
        """The next chunk of the prompts that are not computed yet, first come first served."""
        room = self.limits.prefill_chunk
        chunk: dict[Session, list[int]] = {}
        for active in self._active.values():
            if active.left and room:
                chunk[active.session] = active.left[:room]
                active.left = active.left[room:]
                room -= len(chunk[active.session])
        if chunk:
            self._with_room(lambda: self.engine.append(chunk))
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
