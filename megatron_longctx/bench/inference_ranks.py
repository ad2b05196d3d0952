"""What every rank of `bench inference` does: times of first tokens with a forced mode, and of decoded tokens."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from ..config import CACHE_RULES, Config, refuse
from ..inference.choice import Chooser, Decision, Figures
from ..inference.decode import why_no_graphs
from ..inference.engine import EngineSettings, LongContextEngine, Session
from ..inference.figures import agreed_figures
from ..inference.ledger import CacheLedger, Turn
from ..inference.plan import Batch
from ..inference.sampling import Sampling
from ..kernels.paged import Pages
from ..mcore import groups
from ..mcore.inference import build_engine, pages_per_rank
from .timing import median_seconds

RINGS = ("pass_kv", "pass_q")
RULES = tuple(rule for rule in CACHE_RULES if rule != "auto")
REPLICATED = "replicated"
"""Short prompts as the engine computes them where no mode is named (`inference.decode`); no rule is asked then."""
_WARM_UP = 3


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        lengths: tokens of a sequence, cached and new together; also cached tokens of the decoded sequences.
        miss_rates: new tokens as a share of the length.
        batches: sequences decoded together.
        iterations: of every time to first token, besides the first time; 0 for that alone.
        tokens: decoded by every sequence while the clock runs.
        decode_only: no first tokens.
        modes: whose first tokens are measured, of `inference.plan.MODES`; a rank alone has the first of them. Prompts
            that the engine takes otherwise are measured so as well (`REPLICATED`).
    """

    lengths: tuple[int, ...]
    miss_rates: tuple[float, ...]
    batches: tuple[int, ...]
    iterations: int
    tokens: int
    decode_only: bool = False
    modes: tuple[str, ...] = RINGS

    def turns(self, length: int) -> list[tuple[int, int]]:
        """(cached, new) tokens of every miss rate, the least cached first; 2 new ones at least, as one is a decode."""
        new = {min(length, max(2, round(length * rate))) for rate in self.miss_rates}
        return [(length - count, count) for count in sorted(new, reverse=True)]

    def pages(self, n: int, page_tokens: int) -> int:
        """Pages a rank needs; ranks differ by 2 tokens of a session at most."""
        alone, decoded = max(self.lengths), max(self.lengths) + _WARM_UP + self.tokens
        of = [-(-(-(-tokens // n) + 2) // page_tokens) for tokens in (alone, decoded)]
        return max(of[0], of[1] * max(self.batches))


@dataclass
class FirstToken:
    """From a prompt's arrival to its first token on every rank, of the slowest rank.

    Attributes:
        ranks: context-parallel ones.
        seconds: by mode, of every iteration; without any, `unseen`.
        taken: by rule, the mode that it takes; of prompts that are computed in one pass.
        predicted: by mode, the simulator's seconds of one layer.
        unseen: by mode, of one before all iterations, with numbers of tokens that come for the first time to an engine
            that has warmed up; shapes that kernels plan are not met before.
    """

    ranks: int
    cached: int
    new: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    unseen: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.cached + self.new

    @property
    def modes(self) -> tuple[str, ...]:
        """Those of plans."""
        return tuple(mode for mode in self.seconds if mode != REPLICATED)

    def choices(self, rule: str) -> tuple[str, ...]:
        """The measured modes that a rule can take: of the paper's rules the two rings, of `simulate` any."""
        return self.modes if rule == "simulate" else RINGS


@dataclass
class Decoded:
    """Seconds between tokens of a batch, of the slowest rank.

    Attributes:
        ranks: context-parallel ones.
        mode: as the settings choose it.
        attention_s: that the kernels of replicated steps take for a rank's part of the cache, in all layers together.
        read_bytes: of keys and values meanwhile.
    """

    ranks: int
    cached: int
    batch: int
    mode: str
    seconds: list[float]
    attention_s: float
    read_bytes: int


class _Remembering(Chooser):
    """Knows what it was asked last, and what it said."""

    def __init__(self, figures: Figures, mode: str, rule: str) -> None:
        super().__init__(figures, mode, rule)
        self.latest: tuple[Batch, str] | None = None

    def choose(self, batch: Batch) -> Decision:
        decision = super().choose(batch)
        self.latest = (batch, decision.mode)
        return decision


class _Rewindable(CacheLedger):
    """Goes back to earlier books, so that a turn can be measured again over the same cache."""

    def __init__(self, n: int, pages: int, page_tokens: int) -> None:
        super().__init__(n, pages, page_tokens)
        self._placed: list[tuple[Turn, ...]] = []

    def append(self, counts: Mapping[int, int]) -> tuple[Turn, ...]:
        turns = super().append(counts)
        self._placed.append(turns)
        return turns

    def keep(self) -> None:
        """What is placed now stays."""
        self._placed = []

    def rewind(self, sessions: Sequence[Session]) -> None:
        """Forget all tokens placed since `keep`, in the books and in the `sessions`."""
        while self._placed:
            self.undo(self._placed.pop())
        for session in sessions:
            del session.tokens[self.length(session.number) :]
            # Whatever token a rewound session goes on with takes the same time.
            session.logits = session.likeliest = None
            session.ready = True


Keep = Callable[[list[FirstToken], list[Decoded]], object]
"""Gets all that has been found so far."""


def measure(rank: int, config: Config, sweep: Sweep, keep: Keep) -> tuple[list[FirstToken], list[Decoded]]:
    """Everything of `sweep` with as many context-parallel ranks as `config` says; weights are random.

    Args:
        config: of `mcore.inference.for_inference`, with a cache of `sweep.pages`.
        keep: told by rank 0 after every measurement, as whatever ends a long sweep must not take it along.
    """
    par = config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    try:
        engine = build_engine(config, collection, None)[0]
        rig = _Rig(config, sweep, engine)
        try:
            return rig.run(keep if rank == 0 else lambda first, decoded: None)
        finally:
            rig.release()
    finally:
        groups.destroy()


class _Rig:
    def __init__(self, config: Config, sweep: Sweep, engine: LongContextEngine) -> None:
        self._sweep = sweep
        self._n = config.parallelism.context_parallel_size
        self._chunk = config.inference.prefill_chunk
        self._device = engine.model.attention.device
        self._figures = agreed_figures(config, self._device)
        rule = config.inference.rule if self._n > 1 else "bytes"
        self._chooser = _Remembering(self._figures, config.inference.mode, rule)
        self._modes = sweep.modes if self._n > 1 else sweep.modes[:1]
        self._ledger = _Rewindable(self._n, pages_per_rank(config), config.inference.page_tokens)
        settings = EngineSettings(decode=engine.settings.decode)
        self._engine = LongContextEngine(engine.model, self._ledger, self._chooser, settings)
        self._random = random.Random(0)  # the same tokens on every rank
        judged = set(RINGS) <= set(self._modes) and not sweep.decode_only
        self._rules = [Chooser(self._figures, rule=rule, modes=self._modes) for rule in RULES] if judged else []

    def run(self, keep: Keep) -> tuple[list[FirstToken], list[Decoded]]:
        self._engine.warm_up()  # as a server does, but for the shapes of its chunks: prompts are whole here
        first: list[FirstToken] = []
        decoded: list[Decoded] = []
        for length in () if self._sweep.decode_only else self._sweep.lengths:
            session = self._engine.open()
            for cached, new in self._sweep.turns(length):
                self._fill(session, cached)
                first.append(self._first_token(session, new))
                keep(first, decoded)
            session.close()
        self._engine.model.attention.randomize()  # times are those of any keys and values
        for length in self._sweep.lengths:
            sessions: list[Session] = []
            for batch in sorted(set(self._sweep.batches)):
                while len(sessions) < batch:
                    sessions.append(self._engine.open())
                    self._pretend(sessions[-1], length)
                decoded.append(self._decode(sessions, length))
                keep(first, decoded)
            for session in sessions:
                session.close()
        return first, decoded

    def release(self) -> None:
        """Before process groups are destroyed."""
        self._engine.release()

    def _pretend(self, session: Session, tokens: int) -> None:
        """Give the session so many random tokens as if they had been computed."""
        self._ledger.append({session.number: tokens})
        session.tokens += self._prompt(tokens)
        session.ready = True

    def _fill(self, session: Session, tokens: int) -> None:
        """Give the session random tokens up to so many, computed as the settings choose."""
        while len(session.tokens) < tokens:
            left = tokens - len(session.tokens)
            session.append(self._prompt(min(left, self._chunk or left)))

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._engine.model.vocab_size), k=tokens)

    def _first_token(self, session: Session, new: int) -> FirstToken:
        found = FirstToken(self._n, len(session.tokens), new)
        prompt = self._prompt(new)
        ways = [*self._modes, *([REPLICATED] if self._engine.replicates(new) else [])]
        times: dict[str, list[float]] = {way: [] for way in ways}
        self._ledger.keep()
        for _ in range(1 + self._sweep.iterations):
            for way in ways:  # in turns, so that a slow moment of the machine meets all of them
                with nullcontext() if way == REPLICATED else self._chooser.taking(way):
                    times[way].append(self._seconds_to_first(session, prompt))
                self._ledger.rewind([session])
        slowest = {mode: self._slowest(seconds) for mode, seconds in times.items()}
        found.seconds = {mode: seconds[1:] or seconds for mode, seconds in slowest.items()}
        found.unseen = {mode: seconds[0] for mode, seconds in slowest.items()}
        assert self._chooser.latest is not None
        batch = self._chooser.latest[0]
        for rule, chooser in zip(RULES, self._rules if batch.new == new else (), strict=False):
            decision = chooser.choose(batch)
            found.taken[rule] = decision.mode
            found.predicted = decision.seconds or found.predicted
        medians = ", ".join(f"{mode} {sorted(s)[len(s) // 2] * 1e3:.2f} ms" for mode, s in found.seconds.items())
        self._say(f"{new:,} new tokens over {found.cached:,}: {medians}")
        return found

    def _seconds_to_first(self, session: Session, prompt: list[int]) -> float:
        self._together()
        start = time.perf_counter()
        session.append(prompt)
        generation = self._engine.start(session, Sampling())
        self._engine.step([generation])  # ends with the token on the host
        seconds = time.perf_counter() - start
        _check(generation.finish_reason)
        return seconds

    def _decode(self, sessions: list[Session], length: int) -> Decoded:
        self._ledger.keep()
        count = _WARM_UP + self._sweep.tokens
        generations = [self._engine.start(s, Sampling(max_new_tokens=count + 1), i) for i, s in enumerate(sessions)]
        marks = []
        for i in range(count):
            if i == _WARM_UP:
                self._together()
                marks.append(time.perf_counter())
            self._engine.step(generations)
            if i >= _WARM_UP:
                marks.append(time.perf_counter())
            _check(generations[0].finish_reason)
        alone, read_bytes = attention_alone(self._engine, sessions)
        self._ledger.rewind(sessions)
        mode = self._engine.decoding
        if not mode.startswith("replicated") and self._chooser.latest is not None:
            mode = self._chooser.latest[1]
        seconds = self._slowest([b - a for a, b in pairwise(marks)])
        found = Decoded(self._n, length, len(sessions), mode, seconds, self._slowest([alone])[0], read_bytes)
        each = sum(seconds) / len(seconds) * 1e3
        self._say(f"batch {len(sessions)} over {length:,}: {each:.2f} ms per token, {mode}")
        return found

    def _together(self) -> None:
        """All ranks start with nothing left to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()

    def _slowest(self, seconds: list[float]) -> list[float]:
        worst = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        found: list[float] = worst.tolist()
        return found

    def _say(self, words: str) -> None:
        """A line for whoever waits for the tables."""
        if dist.get_rank() == 0:
            print(f"  CP {self._n}, {words}", file=sys.stderr, flush=True)


def attention_alone(engine: LongContextEngine, sessions: Sequence[Session]) -> tuple[float, int]:
    """Seconds of paged attention over what this rank holds of the sessions, in all layers, and the bytes it reads."""
    attention, ledger, rank = engine.model.attention, engine.ledger, engine.model.attention.rank
    shape, device = attention.shape, attention.device
    held = [torch.tensor(ledger.pages(session.number, rank), dtype=torch.int32) for session in sessions]
    counts = torch.tensor([ledger.num_tokens(session.number, rank) for session in sessions])
    table = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)
    pages = Pages(table.to(device), counts.to(device), ledger.page_tokens)
    q = torch.randn(len(sessions), shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)

    def work() -> None:
        for layer in range(shape.num_layers):
            attention.attend_here(layer, q, pages, shape.head_dim**-0.5)

    timed: Callable[[], None] = work
    if why_no_graphs(attention) is None:  # launches would take longer than short kernels do
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        timed = graph.replay
    return median_seconds(timed, device, 5), int(counts.sum()) * shape.token_bytes


def _check(finish_reason: str | None) -> None:
    if finish_reason == "error":
        raise refuse("logits", "not finite", "numbers", "Use train.precision=fp32.")
