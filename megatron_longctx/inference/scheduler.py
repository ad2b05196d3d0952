"""Continuous batching: requests are admitted while they fit, prefilled in chunks between decodes, and share prefixes.

Every rank runs the same scheduler on the same requests in the same order, so that ranks agree without messages.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.errors import refuse
from .engine import LongContextEngine
from .host_cache import HostCache
from .pace import Pace
from .pages import Copy
from .sampling import PromptScores, Sampling, Score, no_token
from .session import Generation, Session, check_ids, check_length
from .step_ahead import step_ahead


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
    left: int  # tokens of the prompt, not computed yet
    max_pages: int  # the most that it can hold on a rank at its end
    cached: int  # tokens of the prompt
    coming: list[Copy]  # pages of the prompt that are copied from the host before the rest is computed
    generation: Generation | None = None
    alike: dict[int, int] = field(default_factory=dict)  # its first tokens that waiting requests are known to have


@dataclass
class Scheduler:
    """Continuous batching over one engine.

    A request is admitted if the pages that it may need are not promised to other active requests, so that it never
    runs out of memory later; pages that no active request holds give way to it. It shares the pages of the longest
    prefix of its prompt that the cache has, whoever computed them, and these count once. It waits while the next page
    is being computed for another request. An answer's pages stay in the cache at its end, also if it was cancelled.

    A waiting request may be overtaken by shorter ones that can be admitted, as long as their tokens together are fewer
    than its own. It is thus delayed by about the time of one more request of its size.

    Half of a round's work on prompts is for the shortest ones, half for those that came first. Prompts that need more
    than half a round's work are computed in at most half of the places, so that short ones find one; without limit,
    short ones overtake a prompt that waits for such a place.

    Attributes:
        max_active: the most sequences computed together.
        prefill_chunk: the most prompt tokens computed between two decodes, without a `pace`.
        pace: sizes the chunks of prompts by the times that `observe` gets.
        host: keeps copies of pages that active requests do not hold; None for none.
        work: on prompts, of the round that runs or ran last, in the pace's unit.
    """

    engine: LongContextEngine
    max_active: int = 16
    prefill_chunk: int = 2048
    pace: Pace | None = None
    host: HostCache | None = None

    def __post_init__(self) -> None:
        for name in ("max_active", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", f"Raise {name}.")
        self._waiting: list[Request] = []
        self._overtaken_by: Counter[int] = Counter()  # per waiting request, the tokens of later ones admitted first
        # Per waiting request that was tried since the latest end of one, its cached tokens and whether it fits: a try
        # takes 10 us for every cached page, and only an end makes room.
        self._tried: dict[int, tuple[int, bool]] = {}
        self._refused: list[Event] = []
        self._active: dict[int, _Active] = {}
        self._cancelled: list[int] = []
        self._pace = self.pace or Pace(self.prefill_chunk)
        self.work = 0.0
        self._timed = False  # whether it computed anything, and copied nothing from the host
        self._untimed: deque[tuple[bool, float]] = deque(maxlen=9)  # these of rounds whose time is not known yet
        self._stuck = False  # no waiting request could be admitted, and nothing has changed since
        self._exact_chunk = self.engine.exact_chunk
        manager, model = self.engine.cache_manager, self.engine.model
        # Ranks may differ by a page (`CacheManager.max_pages`).
        tokens = (manager.pages_per_rank * manager.n - (manager.n - 1)) * manager.page_tokens
        self.request_limits = RequestLimits(tokens, model.max_positions, model.vocab_size)

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        storing = self.host is not None and self.host.pending
        return bool(self._waiting or self._refused or self._active or self._cancelled or storing)

    @property
    def num_requests(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "running": len(self._active)}

    @property
    def num_pages(self) -> dict[str, int]:
        """The pages on all ranks that active sequences hold, that are kept for prompts with their prefix, and that are
        free, and the copies on the host. Layers with windows have other pages."""
        found = {"host": 0 if self.host is None else self.host.num_pages}
        for kind, group in zip(("", "windowed_"), self.engine.cache_manager.groups, strict=False):
            used, kept = group.used, group.cached
            free = group.num_pages * len(group.pools) - used - kept
            found |= {f"{kind}used": used, f"{kind}kept": kept, f"{kind}free": free}
        return found

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
        events, self._refused = self._refused + self._cancel(), []
        self._admit()
        self.work, self._timed = 0.0, bool(self._active)
        if not (self._pace.owes_decode and any(active.generation for active in self._active.values())):
            self._prefill()
        events += self._decode()
        if self.host is not None:
            self.host.store()
        self._untimed.append((self._timed, self.work))
        return events

    def observe(self, seconds: float) -> None:
        """Note the time of the first `advance` whose time is not noted. All ranks note the same."""
        timed, work = self._untimed.popleft()
        if timed:
            self._pace.observe(seconds, work)

    def close(self) -> None:
        """Close every session."""
        for active in self._active.values():
            self._close(active.session, active.coming)
        self._active, self._waiting = {}, []

    def _close(self, session: Session, coming: Sequence[Copy]) -> None:
        session.close()
        if self.host is not None:
            self.host.release(coming)

    def _cancel(self) -> list[Event]:
        events = []
        for number in self._cancelled:
            if number in self._active:
                active = self._active.pop(number)
                self._close(active.session, active.coming)
                events.append(Event(number, finish_reason="cancelled"))
            elif any(request.number == number for request in self._waiting):
                self._waiting = [request for request in self._waiting if request.number != number]
                del self._overtaken_by[number]  # of a counter, which may lack it
                events.append(Event(number, finish_reason="cancelled"))
        if events:
            self._ended()
        self._cancelled = []
        return events

    def _ended(self) -> None:
        """Try waiting requests again."""
        self._stuck, self._tried = False, {}

    def _admit(self) -> None:
        if self._stuck:
            return
        still, behind = list[Request](), list[Request]()  # behind: the ones that wait for room in the cache
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
        prompt, top, number = request.prompt, request.sampling.prompt_logprobs, request.number
        if top is None and self._is_computing(request):
            self._tried.pop(number, None)  # its prefix grows
            return False
        cached, fits = self._tried.get(number, (len(prompt), True))
        if not (may := self._may_start(request, cached, fits)):
            return may
        session, coming = self._open(prompt if top is None else (), request.salt)
        manager = self.engine.cache_manager
        pages = self._max_pages(session, request.tokens, coming)
        if pages > manager.pages_per_rank:  # a prefix may be less even than a new session
            self._close(session, coming)
            session, coming = self._open((), request.salt)
            pages = self._max_pages(session, request.tokens, coming)
        cached = session.cached_tokens + len(coming) * manager.page_tokens
        fits = self._fits(session, pages)
        if not (may := self._may_start(request, cached, fits)):
            self._tried[number] = cached, fits
            self._close(session, coming)
            return may
        session.scores = None if top is None else PromptScores(prompt, top)
        session.keep_at = (len(prompt) - 1) // self.engine.unit * self.engine.unit
        self._active[request.number] = _Active(request, session, len(prompt) - cached, pages, cached, coming)
        return True

    def _open(self, prompt: tuple[int, ...], salt: int) -> tuple[Session, list[Copy]]:
        """Open a session with the longest prefix of the prompt in the cache, and claim the copies that follow it."""
        text = prompt[:-1]  # the last token is always left to compute, because its logits are needed
        session = self.engine.open(text, salt)
        pages = self.engine.unit // self.engine.cache_manager.page_tokens
        return session, [] if self.host is None else self.host.claim(session, text, pages)

    def _may_start(self, request: Request, cached: int, fits: bool) -> bool | None:
        """Return `fits`; None for a long prompt if such ones have half of the places."""
        computing = sum(self._is_long(a.session.cached_tokens, a.left) for a in self._active.values())
        waits = computing >= max(1, self.max_active // 2) and self._is_long(cached, len(request.prompt) - cached)
        return None if waits else fits

    def _is_long(self, cached: int, left: int) -> bool:
        return self._pace.work(cached, left) > self._pace.room / 2

    def _is_computing(self, request: Request) -> bool:
        """Whether another request is computing the next page of a prefix that both prompts have, and that it looked for
        in the cache itself."""
        unit = self.engine.unit
        for active in self._active.values():
            end = (active.session.cached_tokens // unit + 1) * unit
            if self.engine.model.attention.states is not None:  # a prefix is found only where its state is kept
                end = max(end, active.session.keep_at or 0)
            alike = active.request.salt == request.salt and active.session.scores is None
            if active.left and alike and end < len(request.prompt):
                # The last tokens first, which are the likeliest to differ.
                for start in (end - unit, active.alike.get(request.number, 0)):
                    if request.prompt[start:end] != active.request.prompt[start:end]:
                        break
                else:
                    active.alike[request.number] = end
                    return True
        return False

    def _max_pages(self, session: Session, tokens: int, ahead: Sequence[Copy]) -> int:
        return self.engine.cache_manager.max_pages(session.number, tokens - session.cached_tokens, ahead)

    def _fits(self, session: Session, pages: int) -> bool:
        """Whether all active sessions and this one can grow to their most pages; shared pages are counted once."""
        most = {active.session.number: active.max_pages for active in self._active.values()} | {session.number: pages}
        return self.engine.cache_manager.fits(most)

    def _prefill(self) -> None:
        """Fetch the next pages of prompts from the host, and compute the next chunk of those that have fetched all."""
        fetching = [active for active in self._active.values() if active.coming]
        for active in fetching:
            assert self.host is not None
            self.host.fetch(active.session, active.coming, len(fetching), active.request.prompt)
            self._timed = self._stuck = False
        prompts = [active for active in self._active.values() if active.left and not active.coming]
        states = [(active.session.cached_tokens, active.left) for active in prompts]
        sizes, self.work = self._pace.shares(states, self._exact_chunk)
        chunk: dict[Session, tuple[int, ...]] = {}
        for active, size in zip(prompts, sizes, strict=True):
            if size:
                start = len(active.request.prompt) - active.left
                chunk[active.session] = active.request.prompt[start : start + size]
                active.left -= size
        if chunk:
            self.engine.append(chunk)
            self.engine.wait()  # a round's time includes that of its prompts
            self._stuck = False
        for active in self._active.values():
            if not active.left and active.generation is None:
                # Not by its place in the batch: a request's tokens do not depend on the requests beside it.
                active.generation = self.engine.start(active.session, active.request.sampling, active.request.stream)

    def _decode(self) -> list[Event]:
        running = {a.generation: a for a in self._active.values() if a.generation is not None}
        drawing = [generation for generation in running if generation.finish_reason is None]
        drawn = step_ahead(self.engine, drawing) if drawing else {}
        events = []
        for generation, active in running.items():
            number, reason = active.request.number, generation.finish_reason
            if reason is None and generation not in drawn:  # its next token is being computed
                continue
            scores, active.session.scores = active.session.scores, None
            found = None if scores is None else scores.found
            *before, (token, score) = drawn.get(generation, [(None, None)])
            for each, its_score in before:
                events.append(Event(number, each, None, active.cached, score=its_score, prompt_scores=found))
                found = None
            dead_end = generation.dead_end
            error = "" if reason != "error" else str(no_token()) if dead_end else "the model's logits are not finite"
            events.append(Event(number, token, reason, active.cached, error, dead_end, score, found))
            if reason is not None:
                del self._active[number]
                self._ended()
                if reason == "error" and not dead_end:  # the cache of its tokens may be what is wrong
                    self.engine.cache_manager.forget(active.session.number)
                    if self.host is not None:
                        self.host.clear()
                active.session.close()
        return events
