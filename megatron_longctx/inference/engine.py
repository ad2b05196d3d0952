"""The inference engine: sessions over a model with a sharded KV cache, on any number of ranks.

All ranks make the same calls with the same arguments, as in training, and get the same results.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

import torch
from torch import Tensor

from ..config import InferenceConfig, check_inference
from ..core.comm import all_reduce_sum
from ..core.comm.device import synchronize
from ..core.errors import refuse
from ..core.kernels.packed import to_device
from .batch import Batch, ScheduledChunk
from .cache_manager import CacheManager
from .cached_attention import CachedModel, local_rows
from .choose_cache_mode import Chooser
from .decode import MAX_PROMPT_PAIRS, Decoder
from .sampling import PromptScorer, Sampling, Score, no_token, not_finite
from .session import (
    Generation,
    Grammars,
    NextToken,
    RunningToken,
    Session,
    check_ids,
    check_length,
    draw,
    passes,
    plain_ids,
)
from .states import StateRows

Drawn = dict[Generation, list[tuple[int | None, Score | None]]]
"""New tokens with their scores."""
MAX_RANK_TOKENS = 65536
"""The most new tokens that a rank computes in one pass, over all sequences, unless a chunk is larger. It bounds the
memory of activations (86 KB per token in the MLP of Llama 3 8B)."""


class LongContextEngine:
    """Prefill, multi-turn sessions and decode over a model.

    Attributes:
        grammars: makes the matchers of `Sampling.grammar`; None if there are none.
        mode_counts: the passes in each mode of attention, and replicated ones.

    Args:
        model: its attention holds the cache's tensors.
        manager: with as many slots per rank as the attention.
        chooser: chooses the mode of every batch.
        settings: of these the engine reads `prefill_chunk`, `exact_reuse`, `decode` and `cuda_graphs`.

    Raises:
        ValueError: a setting is out of range, `exact_reuse` is set without `prefill_chunk`, or slots differ.
    """

    def __init__(
        self, model: CachedModel, manager: CacheManager, chooser: Chooser, settings: InferenceConfig | None = None
    ) -> None:
        self.model, self.cache_manager = model, manager
        self.settings = settings or InferenceConfig()
        check_inference(self.settings)
        if (slots := model.attention.unused_slots) != manager.slots:
            raise refuse("slots of the cache manager", manager.slots, f"the attention's {slots}", "Make them equal.")
        self.rank_tokens = min(MAX_RANK_TOKENS, manager.pass_tokens)
        self.grammars: Grammars | None = None
        self.mode_counts: Counter[str] = Counter()
        self._attention = model.attention
        self._chooser = chooser
        self._open: dict[int, Session] = {}
        self._max_tokens = model.max_positions or math.inf
        self._states = StateRows(0) if model.attention.states is None else model.attention.states.rows
        self._decoder = Decoder(model, manager, self.settings, chooser.mode)

    @property
    def decoding(self) -> str:
        """How batches of single tokens are computed."""
        return self._decoder.name

    @property
    def exact_chunk(self) -> int | None:
        """The chunk whose multiples can be reused with `exact_reuse`; None without it."""
        return self.settings.prefill_chunk if self.settings.exact_reuse else None

    def replicates(self, new: int, cached: int = 0) -> bool:
        """Whether every rank computes a prompt of `new` tokens that comes alone, as in replicated decode."""
        auto = self._chooser.mode == "auto" and not self.settings.exact_reuse
        return auto and 1 < new <= self._decoder.max_prompt and new * (cached + new) <= MAX_PROMPT_PAIRS

    def release(self) -> None:
        """Drop references to process groups, before these are destroyed. Sessions can still continue."""
        self._decoder.release()

    def open(self, tokens: Sequence[int] = (), salt: int = 0) -> Session:
        """Open a session with the longest prefix of `tokens` in the cache; its `tokens` are those that were found.

        With `exact_reuse` only pages of whole exact chunks are found. Sessions with another salt find other pages.
        """
        session = self._new_session(self.cache_manager.open(tokens, salt, self.unit), salt)
        session.tokens = list(tokens[: session.cached_tokens])
        return session

    def _new_session(self, number: int, salt: int) -> Session:
        session = self._open[number] = Session(self, number, salt)
        self._cut(session, session.cached_tokens)
        session.exact_chunks = session.cached_tokens // (self.settings.prefill_chunk or 1)
        return session

    def _cut(self, session: Session, tokens: int) -> None:
        """Drop all but a session's first cached tokens, and with recurrent layers those after the last kept state."""
        self.cache_manager.truncate(session.number, tokens, self.unit)
        self._states.adopt(session.number, self.cache_manager)

    @property
    def unit(self) -> int:
        """The number of tokens that can be shared together."""
        return math.lcm(self.cache_manager.page_tokens, self.exact_chunk or 1)

    def fork(self, session: Session, tokens: int | None = None) -> Session:
        """Open a session with the first `tokens` tokens (default: all) of another, which may continue.

        Its complete pages are shared, the tokens after them are computed again. The last session that holds a page
        frees it.

        Raises:
            ValueError: the session is closed or has fewer tokens.
        """
        self._check_open(session)
        count = len(session.tokens) if tokens is None else tokens
        if not 0 <= count <= len(session.tokens):
            raise refuse("tokens", count, f"at most the {len(session.tokens)} of session {session.number}", "Lower it.")
        cached = min(count, session.cached_tokens if self.exact_chunk is None else session.exact_tokens)
        fork = self._new_session(self.cache_manager.fork(session.number, cached, self.unit), session.salt)
        fork.tokens = session.tokens[:count]
        return fork

    def close(self, session: Session) -> None:
        if not session.closed:
            self.cache_manager.close(session.number)
            self._states.close(session.number)
            del self._open[session.number]
            session.closed = True
            session.next_token = None

    def append(self, new: Mapping[Session, Sequence[int]]) -> None:
        """Prefill: add tokens to several sessions and compute them in one batch.

        Raises:
            ValueError: a session is closed or gets no tokens; tokens are not integers, not in the vocabulary, or more
                than a sequence may have. No session has changed.
            CacheFull: they do not fit; no session has changed.
        """
        ids = {session: plain_ids(tokens) for session, tokens in new.items()}
        for session, tokens in ids.items():
            self._check_open(session)
            check_ids(tokens, self.model.vocab_size)
            check_length("tokens of the session", len(session.tokens) + len(tokens), self.model.max_positions)
        self._compute(ids)

    def wait(self) -> None:
        """Make the host wait for GPUs, but not for the last layers of a prompt: it prepares the next one meanwhile."""
        if self._attention.tail is None:
            synchronize(self._attention.device)
        else:
            self._attention.tail.synchronize()

    def next_logits(self, sessions: Sequence[Session]) -> Tensor:
        """Return the logits of each session's next token on every rank, fp32 `[len(sessions), vocab_size]`.

        Raises:
            ValueError: a session is closed or empty.
            CacheFull: its tokens that are not cached do not fit.
        """
        for session in sessions:
            self._check_open(session, begun=True)
            if isinstance(session.next_token, RunningToken):
                session.next_token = None
        self._compute_pending(sessions)
        rows = torch.zeros(len(sessions), self.model.vocab_size, device=self._attention.device)
        for row, session in zip(rows, sessions, strict=True):
            if session.next_token is not None and session.next_token.logits is not None:
                row.copy_(session.next_token.logits)
        return all_reduce_sum(self._attention.group, rows)

    def start(self, session: Session, sampling: Sampling, stream: int = 0) -> Generation:
        """Start to generate for a session; `step` computes.

        Raises:
            ValueError: the session is closed or empty, or as long as a sequence may be.
        """
        self._check_open(session, begun=True)
        more = min(1, sampling.max_new_tokens)
        check_length("tokens of the session and a new one", len(session.tokens) + more, self.model.max_positions)
        session.finish_reason = None
        return Generation(session, sampling, stream, grammars=self.grammars)

    def step(self, generations: Sequence[Generation]) -> Drawn:
        """Generate for every generation in one batch, after any tokens of their sessions that are not cached: one
        token, and with `inference.speculate` those that a draft foresaw, as if each had been computed alone.

        Returns:
            the tokens with their scores (None without `Sampling.logprobs`). In place of a stop token, which only
            becomes part of its session, and of one that could not be drawn, there is None.

        Raises:
            CacheFull: the tokens to compute do not fit; nothing has changed.
        """
        drafts: dict[Session, list[int]] = {}
        if len(generations) <= self._decoder.max_drafted:
            drafts = {each.session: each.draft(self.settings.speculate, self._max_tokens) for each in generations}
        self._compute_pending([generation.session for generation in generations], drafts)
        found: Drawn = {}
        going = generations
        while going:
            self._draw(going, found)
            going = [each for each in going if each.follow()]
        return found

    def _draw(self, generations: Sequence[Generation], found: Drawn) -> None:
        for each, (token, score) in draw(generations, self._attention.group, self._attention.device).items():
            found.setdefault(each, []).append((token if each.add(token, self._max_tokens) else None, score))

    def stream(self, sessions: Sequence[Session], sampling: Sampling) -> Iterator[dict[Session, list[int]]]:
        """Generate for several sessions in one batch; each ends independently.

        Yields:
            per step, the tokens of every session that has not ended.

        Raises:
            ValueError: as `start`, the logits are not finite, or the grammar has a dead end.
            CacheFull: `max_new_tokens` do not fit; nothing has been generated.
        """
        active = [self.start(session, sampling, i) for i, session in enumerate(sessions)]
        if len(set(sessions)) < len(sessions):
            raise refuse("sessions", [s.number for s in sessions], "each one once", "Leave the repeated ones out.")
        if sampling.max_new_tokens == 0:
            return
        # The last token is returned and not computed.
        ends = {s: min(len(s.tokens) + sampling.max_new_tokens, self._max_tokens) - 1 for s in sessions}
        more = {s: int(end) - s.cached_tokens for s, end in ends.items() if end > s.cached_tokens}
        self._place(more, later=True)
        while active:
            emitted = self.step(active)
            if failed := [each for each in active if each.finish_reason == "error"]:
                raise no_token() if failed[0].dead_end else not_finite()
            yield {each.session: [token for token, _ in drawn if token is not None] for each, drawn in emitted.items()}
            active = [generation for generation in active if generation.finish_reason is None]

    def continue_all(self, sessions: Sequence[Session], sampling: Sampling) -> list[list[int]]:
        """Generate for several sessions in one batch, and return the tokens of each."""
        tokens: dict[Session, list[int]] = {session: [] for session in sessions}
        for step in self.stream(sessions, sampling):
            for session, new in step.items():
                tokens[session] += new
        return list(tokens.values())

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue several prompts in one batch, in sessions that are closed at the end."""
        with self._appended(prompts) as sessions:
            return self.continue_all(sessions, sampling)

    @contextmanager
    def _appended(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[Session]]:
        """Open sessions with these prompts and close them at the end of the context."""
        with ExitStack() as opened:
            sessions = [opened.enter_context(closing(self.open())) for _ in prompts]
            self.append(dict(zip(sessions, prompts, strict=True)))
            yield sessions

    def _check_open(self, session: Session, begun: bool = False) -> None:
        """Raise ValueError for a session of another engine, a closed one, or one without tokens if `begun`."""
        if self._open.get(session.number) is not session:
            raise refuse("session", session.number, "an open session of this engine", "Open another.")
        if begun and not session.tokens:
            raise refuse("session", session.number, "some tokens to go on from", "Append a prompt first.")

    def _compute_pending(self, sessions: Sequence[Session], drafts: Mapping[Session, list[int]] | None = None) -> None:
        """Compute the tokens that are not cached: those generated last, those of a fork after its shared pages, and the
        last page of one without any, whose logits no rank has. Then also drafts, the tokens that may follow, if each
        session has a single token to compute."""
        pending: dict[Session, list[int]] = {}
        for session in sessions:
            if session.tokens and session.next_token is None and session.cached_tokens == len(session.tokens):
                self._cut(session, (session.cached_tokens - 1) // self.unit * self.unit)
            if session.cached_tokens < len(session.tokens):
                pending[session] = []
        drafted = {session: drafts[session] for session in pending} if drafts else {}
        if any(drafted.values()) and all(len(s.tokens) - s.cached_tokens == 1 and s.scores is None for s in drafted):
            self._verify(drafted)
        else:
            self._compute(pending)

    def _verify(self, drafts: Mapping[Session, list[int]]) -> None:
        """Compute every session's last token and its draft, and keep what follows each."""
        texts = [[session.tokens[-1], *draft] for session, draft in drafts.items()]
        chunks = self._place({session: len(text) for session, text in zip(drafts, texts, strict=True)})
        try:
            found = self._decoder.verify(chunks, texts)
        except BaseException:
            self.cache_manager.undo(chunks)
            raise
        self.mode_counts["replicated"] += 1
        for (session, draft), following in zip(drafts.items(), found, strict=True):
            session.next_token = following[0]
            session.ahead = list(zip(draft, following[1:], strict=True))
            self.cache_manager.name_pages(session.number, session.tokens, len(session.tokens))

    def _place(self, counts: Mapping[Session, int], later: bool = False) -> tuple[ScheduledChunk, ...]:
        """Place new tokens. later: see `CacheManager.append`."""
        return self.cache_manager.append({session.number: count for session, count in counts.items()}, later)

    def _compute(self, new: Mapping[Session, list[int]]) -> None:
        """Compute every session's tokens that are not cached and then its new ones, all of them or none."""
        if not new:
            return
        reused = {session: session.cached_tokens for session in new}
        pending = {session: session.tokens[reused[session] :] + tokens for session, tokens in new.items()}
        exact = {session: session.exact_tokens for session in new}
        cuts = {s: s.cut(len(pending[s]), self.unit) for s in new} if self._states.total else {}
        placed: list[tuple[list[Session], tuple[ScheduledChunk, ...]]] = []
        try:
            if self.cache_manager.windows is not None:  # nothing is lost then if a later pass does not fit
                self._place({session: len(tokens) for session, tokens in pending.items()}, later=True)
            for counts in passes(self.settings, new, pending, self.rank_tokens * self.cache_manager.n, cuts):
                placed.append((list(counts), self._place(counts)))
            kept_at = {session.number: reused[session] + cut for session, cut in cuts.items() if cut}
            self._states.begin([chunks for _, chunks in placed], kept_at)
            next_tokens: dict[Session, NextToken] = {}
            for sessions, chunks in placed:
                texts = [pending[s][c.cached - reused[s] :][: c.new] for s, c in zip(sessions, chunks, strict=True)]
                ends = [c.cached + c.new == reused[s] + len(pending[s]) for s, c in zip(sessions, chunks, strict=True)]
                prompts = self.settings.exact_reuse and any(new[s] or len(pending[s]) > 1 for s in sessions)
                prompts = prompts or any(s.scores is not None for s in sessions)  # a step returns the last logits alone
                next_tokens |= self._forward(sessions, chunks, texts, ends, may_replicate=not prompts)
                whole = self.exact_chunk
                if whole and [(c.cached, c.new) for c in chunks] == [(exact[sessions[0]], whole)]:
                    exact[sessions[0]] += whole
        except BaseException:
            for _, chunks in reversed(placed):
                self.cache_manager.undo(chunks)
            self._states.end(False, self.cache_manager)
            raise
        for session, tokens in new.items():
            session.tokens += tokens
            session.next_token = next_tokens.get(session, NextToken())
            session.exact_chunks = exact[session] // (self.settings.prefill_chunk or 1)
            self.cache_manager.name_pages(session.number, session.tokens, exact[session] if self.exact_chunk else None)
            if tokens:
                session.reused_tokens = reused[session]
        self._states.end(True, self.cache_manager)

    def _forward(
        self,
        sessions: Sequence[Session],
        chunks: tuple[ScheduledChunk, ...],
        texts: Sequence[list[int]],
        ends: Sequence[bool],
        may_replicate: bool,
    ) -> dict[Session, NextToken]:
        """Run one pass of the model and return the next tokens of sessions that end in it.

        The decoder, whose results depend on which slots hold the tokens, computes it if it `may_replicate`.
        """
        self._attention.tail = None
        self._states.move(chunks)
        if may_replicate and self._decoder.takes(chunks, self._chooser.mode != "auto"):
            decoded = self._decoder(chunks, texts)
            self.mode_counts["replicated"] += 1
            return {s: next_token for s, next_token, end in zip(sessions, decoded, ends, strict=True) if end}
        attention, rank, device = self._attention, self._attention.rank, self._attention.device
        slots, windowed_slots = attention.unused_slots
        batch = Batch(attention.world, slots, chunks, windowed_slots=windowed_slots)
        mode = self._chooser.choose(batch.with_window(attention.shape.widest_window))
        attention.begin(batch, mode, joined=self.settings.exact_reuse)
        self.mode_counts[mode] += 1
        tokens, positions = local_rows(chunks, texts, rank)
        last = {s: batch.last_row(i) for i, (s, end) in enumerate(zip(sessions, ends, strict=True)) if end}
        mine = {session: row for session, (home, row) in last.items() if home == rank}
        rows = torch.tensor(list(mine.values()), dtype=torch.int64)
        wanted = [session.scores for session in sessions]
        scorer = PromptScorer(wanted, chunks, batch.row_starts[rank], positions, device) if any(wanted) else None
        tokens, positions, rows = (to_device(each, device) for each in (tokens, positions, rows))
        logits = self.model.logits(tokens, positions, rows, scorer)
        if scorer is not None:
            scorer.finish(attention.group)
        found = dict(zip(mine, logits, strict=True))
        return {session: NextToken(found.get(session)) for session in last}
