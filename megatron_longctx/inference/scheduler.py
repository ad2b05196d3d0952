"""Continuous batching: requests are admitted while they fit, prefilled in chunks between decodes, and share prefixes.

Every rank runs the same scheduler on the same requests in the same order, so that ranks agree without messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..core.errors import refuse
from .cache_manager import CacheFull
from .engine import LongContextEngine
from .pace import Pace
from .sampling import Sampling
from .scores import PromptScores, Score
from .session import Generation, Session, check_ids, check_length, common_prefix, longest_prefix, whole_chunks

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        number: chosen by the caller, different for every request.
        salt: identifies the client; a request does not reuse what requests with another salt have cached.
        stream: see `Sampling.seed`; the number of an answer among those to one prompt.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: int = 0
    stream: int = 0

    @property
    def tokens(self) -> int:
        """The most tokens of prompt and answer together."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class Event:
    """The progress of a request in one `advance`.

    Attributes:
        token: the token that it got; None if it got none.
        finish_reason: stop, length, cancelled or error; None while it runs.
        cached_tokens: the number of tokens of its prompt that were cached.
        error: the reason for the finish reason error, or for cancelled if the server cancelled it.
        refused: whether the error is the request's own fault.
        score: of `token`, or of the stop token that ended it; None without `Sampling.logprobs`.
        prompt_scores: with the first event after the prompt if `Sampling.prompt_logprobs` is set: of all tokens but
            the first.
    """

    number: int
    token: int | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str = ""
    refused: bool = False
    score: Score | None = None
    prompt_scores: Sequence[Score] | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What a single request may need, with the cache empty.

    Attributes:
        tokens: the most tokens of prompt and answer together.
        positions: the most tokens that the model reads and generates together; None for any number.
        vocab_size: token ids are below it.
    """

    tokens: int
    positions: int | None
    vocab_size: int

    @property
    def together(self) -> int:
        """The most tokens of prompt and answer together, in the cache and for the model."""
        return min(self.tokens, self.positions or self.tokens)

    @property
    def key(self) -> str:
        """The key of the configuration that bounds `together`."""
        return "inference.cache_tokens" if self.together == self.tokens else "inference.max_model_len"

    @property
    def prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.together - 1

    def check(self, prompt: Sequence[int], sampling: Sampling, name: str = "prompt and max_tokens") -> None:
        """Raise ValueError for a request that cannot be served. name: of its tokens together, for the message."""
        total = len(prompt) + sampling.max_new_tokens
        check_length(name, total, self.positions)
        if total > self.tokens:
            raise refuse(
                name, total, f"at most {self.tokens} tokens together (inference.cache_tokens)", "Ask for fewer."
            )
        check_ids(prompt, self.vocab_size)
        check_ids([0, *sampling.stop, *(token for token, _ in sampling.logit_bias)], self.vocab_size)


@dataclass(eq=False)
class _Active:
    request: Request
    session: Session
    left: list[int]  # of the prompt, not computed yet
    max_pages: int  # the most that it can hold on a rank at its end
    cached: int  # tokens of the prompt
    generation: Generation | None = None


@dataclass
class Scheduler:
    """Continuous batching over one engine.

    A request is admitted if the pages that it may need are not promised to other active requests, so that it never
    runs out of memory later; kept caches give way to it. It shares the pages of the longest prefix of its prompt that
    any active or kept sequence has cached, and these count once. It waits while a longer prefix is being computed for
    another request.

    A waiting request may be overtaken by shorter ones that can be admitted, as long as their tokens together are fewer
    than its own. It is thus delayed by about the time of one more request of its size.

    Half of a round's work on prompts is for the shortest ones, half for those that came first. Prompts that need more
    than half a round's work are computed in at most half of the places, so that short ones find one; without limit,
    short ones overtake a prompt that waits for such a place.

    The engine stops evicting: it would take pages of active sequences, which are promised to them, and pages that these
    shared until then would no longer count once.

    Attributes:
        max_active: the most sequences computed together.
        prefill_chunk: the most prompt tokens computed between two decodes, without a `pace`.
        keep_sessions: the most finished or cancelled sequences whose caches are kept for prompts with the same prefix.
        pace: sizes the chunks of prompts by the times that `observe` gets.
    """

    engine: LongContextEngine
    max_active: int = 16
    prefill_chunk: int = 2048
    keep_sessions: int = 16
    pace: Pace | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_active", 1), ("prefill_chunk", 1), ("keep_sessions", 0)):
            if getattr(self, name) < least:
                raise refuse(name, getattr(self, name), f"{least} or more", f"Raise {name}.")
        self._waiting: list[Request] = []
        self._overtaken_by: Counter[int] = Counter()  # per waiting request, the tokens of later ones admitted first
        self._refused: list[Event] = []
        self._active: dict[int, _Active] = {}
        self._kept: list[Session] = []  # the least recently used first
        self._cancelled: list[int] = []
        self._pace = self.pace or Pace(self.prefill_chunk)
        self._work = 0.0  # on prompts, of the latest round
        self._stuck = False  # no waiting request could be admitted, and nothing has changed since
        self.engine.settings = replace(self.engine.settings, evict=False)
        self._exact_chunk = self.engine.exact_chunk
        manager, model = self.engine.cache_manager, self.engine.model
        # Some pages are reserved for the tokens by which ranks may differ (`CacheManager.max_pages`).
        tokens = (manager.slots_per_rank - 2) * manager.n
        self.request_limits = RequestLimits(tokens, model.max_positions, model.vocab_size)

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self._waiting or self._refused or self._active or self._cancelled)

    @property
    def num_requests(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "running": len(self._active)}

    @property
    def num_pages(self) -> dict[str, int]:
        """The pages on all ranks that active sequences hold, that only finished ones hold, and that are free."""
        manager = self.engine.cache_manager
        sessions = [active.session.number for active in self._active.values()]
        used = sum(manager.held_pages(sessions, rank) for rank in range(manager.n))
        all_used = manager.used_pages()
        return {"used": used, "kept": all_used - used, "free": manager.pages_per_rank * manager.n - all_used}

    def submit(self, request: Request) -> None:
        try:
            self.request_limits.check(request.prompt, request.sampling)
        except ValueError as error:
            self._refused.append(Event(request.number, finish_reason="error", error=str(error), refused=True))
        else:
            self._waiting.append(request)
            self._stuck = False

    def cancel(self, number: int) -> None:
        """End a request; no effect if it has ended."""
        self._cancelled.append(number)

    def advance(self) -> list[Event]:
        """Run one round: admit what fits, compute a chunk of prompts, then decode a token for every complete prompt."""
        events = self._refused + self._cancel()
        self._refused = []
        self._admit()
        self._work = 0.0
        if not (self._pace.owes_decode and any(active.generation for active in self._active.values())):
            self._prefill()
        return events + self._decode()

    def observe(self, seconds: float) -> None:
        """Note the time that the latest `advance` took. All ranks note the same."""
        self._pace.observe(seconds, self._work)

    def close(self) -> None:
        """Close every session."""
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
                self._waiting = [request for request in self._waiting if request.number != number]
                events.append(Event(number, finish_reason="cancelled"))
        self._stuck = self._stuck and not events
        self._cancelled = []
        return events

    def _admit(self) -> None:
        if self._stuck:
            return
        still: list[Request] = []
        behind: list[Request] = []  # the ones that wait for room in the cache
        for i, request in enumerate(self._waiting):
            if len(self._active) >= self.max_active:
                still += self._waiting[i:]
                break
            may_overtake = all(self._overtaken_by[before.number] + request.tokens < before.tokens for before in behind)
            started = may_overtake and self._start(request)
            if started:
                self._overtaken_by.update({before.number: request.tokens for before in behind})
                del self._overtaken_by[request.number]
            else:
                still.append(request)
                behind += [] if started is None else [request]
        else:
            self._stuck = bool(still)
        self._waiting = still

    def _start(self, request: Request) -> bool | None:
        """Give the request a session with the longest cached prefix of its prompt; False if it has to wait, None if
        only for a place among long prompts."""
        prompt, top = list(request.prompt), request.sampling.prompt_logprobs
        active = [active.session for active in self._active.values()]
        visible = [session for session in (*self._kept, *active) if session.salt == request.salt and top is None]
        source, cached = longest_prefix(prompt, visible, self._exact_chunk)
        if top is None and self._is_computing_prefix(request, cached):
            return False
        computing = [a for a in self._active.values() if self._is_long(a.session.cached_tokens, len(a.left))]
        if self._is_long(cached, len(prompt) - cached) and len(computing) >= max(1, self.max_active // 2):
            return None
        session = self._open_session(prompt, source, cached)
        pages = self._max_pages(session, request.tokens)
        if pages > self.engine.cache_manager.pages_per_rank:  # a fork may be less even than a new session
            self._close_unless_kept(session)
            session = self.engine.open()
            pages = self._max_pages(session, request.tokens)
        if not self._fits(session, pages):
            self._close_unless_kept(session)
            return False
        if session in self._kept:
            self._kept.remove(session)
        session.salt = request.salt
        session.scores = None if top is None else PromptScores(prompt, top)
        left = prompt[len(session.tokens) :]
        self._active[request.number] = _Active(request, session, left, pages, session.cached_tokens)
        return True

    def _is_long(self, cached: int, left: int) -> bool:
        return self._pace.work(cached, left) > self._pace.room / 2

    def _is_computing_prefix(self, request: Request, cached: int) -> bool:
        """Whether a prefix of the prompt that is longer than `cached` by at least a page per rank is being computed,
        or the same prompt for another of its answers."""
        worth = cached + self.engine.cache_manager.page_tokens * self.engine.cache_manager.n
        for active in self._active.values():
            if active.left and active.request.salt == request.salt:
                shared = min(common_prefix(request.prompt, active.request.prompt), len(request.prompt) - 1)
                whole = whole_chunks(shared, self._exact_chunk)
                if whole >= worth or (request.stream and whole > cached and request.prompt == active.request.prompt):
                    return True
        return False

    def _open_session(self, prompt: list[int], source: Session | None, cached: int) -> Session:
        """Return a kept session that the prompt continues, else a fork, or a new session if a fork has no room."""
        if source is None:
            return self.engine.open()
        length = len(source.tokens)
        if source in self._kept:
            self._kept.append(self._kept.pop(self._kept.index(source)))
            if self._exact_chunk is None and length < len(prompt) and prompt[:length] == source.tokens:
                return source
        try:
            return self._drop_kept_to_fit(lambda: source.fork(cached), source)
        except CacheFull:
            return self.engine.open()

    def _close_unless_kept(self, session: Session) -> None:
        if session not in self._kept:
            session.close()

    def _max_pages(self, session: Session, tokens: int) -> int:
        return self.engine.cache_manager.max_pages(session.number, tokens - session.cached_tokens)

    def _fits(self, session: Session, pages: int) -> bool:
        """Whether all active sessions and this one can grow to their most pages; shared pages are counted once."""
        manager = self.engine.cache_manager
        most = {active.session.number: active.max_pages for active in self._active.values()} | {session.number: pages}
        return all(
            manager.held_pages(most, rank) + sum(p - len(manager.shards(s)[rank].pages) for s, p in most.items())
            <= manager.pages_per_rank
            for rank in range(manager.n)
        )

    def _prefill(self) -> None:
        """Compute the next chunk of the prompts that are not complete."""
        prompts = [active for active in self._active.values() if active.left]
        states = [(active.session.cached_tokens, len(active.left)) for active in prompts]
        sizes, self._work = self._pace.shares(states, self._exact_chunk)
        chunk: dict[Session, list[int]] = {}
        for active, size in zip(prompts, sizes, strict=True):
            if size:
                chunk[active.session], active.left = active.left[:size], active.left[size:]
        if chunk:
            self._drop_kept_to_fit(lambda: self.engine.append(chunk))
            self._stuck = False
        for active in self._active.values():
            if not active.left and active.generation is None:
                # Not by its place in the batch: a request's tokens do not depend on the requests beside it.
                active.generation = self.engine.start(active.session, active.request.sampling, active.request.stream)

    def _decode(self) -> list[Event]:
        running = {a.generation: a for a in self._active.values() if a.generation is not None}
        if not running:
            return []
        drawing = [generation for generation in running if generation.finish_reason is None]
        emitted = self._drop_kept_to_fit(lambda: self.engine.step(drawing)) if drawing else {}
        events = []
        for generation, active in running.items():
            number, reason = active.request.number, generation.finish_reason
            error = "the model's logits are not finite" if reason == "error" else ""
            scores, active.session.scores = active.session.scores, None
            found = None if scores is None else scores.found
            token = emitted.get(generation)
            events.append(Event(number, token, reason, active.cached, error, False, generation.score, found))
            if reason is not None:
                del self._active[number]
                self._stuck = False
                self._keep(active.session, reason)
        return events

    def _keep(self, session: Session, reason: str) -> None:
        if reason == "error" or not session.cached_tokens:
            session.close()
            return
        del session.tokens[session.cached_tokens :]  # returned last but never computed: the next prompt may differ
        self._kept.append(session)
        while len(self._kept) > self.keep_sessions:
            self._kept.pop(0).close()

    def _drop_kept_to_fit(self, compute: Callable[[], _T], source: Session | None = None) -> _T:
        """Call `compute`, and close kept sessions, except `source`, until it succeeds."""
        while True:
            try:
                return compute()
            except CacheFull:
                oldest = next((session for session in self._kept if session is not source), None)
                if oldest is None:
                    raise
                self._kept.remove(oldest)
                oldest.close()
