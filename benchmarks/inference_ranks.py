"""What every rank of the inference benchmark does: times of first tokens with a forced mode, and of decoded tokens."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron_longctx.comm import gather_objects
from megatron_longctx.comm.device import synchronize
from megatron_longctx.config import Config, InferenceConfig
from megatron_longctx.errors import refuse
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager, ScheduledChunk
from megatron_longctx.inference.choice import Chooser, Decision, rule_inputs_of_rank_0
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import NextToken, Session
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, pages_per_rank
from megatron_longctx.schedules import Target
from megatron_longctx.training.ranks import world_group

REPLICATED = "replicated"
"""Short prompts as the engine computes them where no mode is named (`inference.decode`); nothing is chosen then."""
_WARM_UP = 3


def numbers(name: str, text: str, least: float) -> tuple[float, ...]:
    """`1,2,4` as numbers, each once; whole ones if the least is.

    Raises:
        ValueError: not such numbers.
    """
    try:
        found = tuple(dict.fromkeys(map(type(least), text.split(","))))
    except ValueError:
        found = ()
    if not found or not all(number >= least for number in found):
        expected = f"{'whole ' * isinstance(least, int)}numbers of {least:g} or more, separated by commas"
        raise refuse(name, text, expected, "Correct it.")
    return found


@dataclass(frozen=True)
class Sweep:
    """What is measured, as the options say; a rank alone has the first of the modes. Prompts that the engine takes
    otherwise are measured so as well (`REPLICATED`)."""

    lengths: tuple[int, ...]
    miss_rates: tuple[float, ...]
    batches: tuple[int, ...]
    iterations: int
    tokens: int
    decode_only: bool = False
    modes: tuple[str, ...] = ("pass_kv", "pass_q")

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
    """From a prompt's arrival to its first token, of the slowest rank. ranks: context-parallel ones. seconds: by mode,
    of every iteration but the first one, unless there is no other. auto: what the settings' rule takes, of prompts that
    are computed in one pass. predicted: by mode, the simulator's seconds of one layer."""

    ranks: int
    cached: int
    new: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    auto: str | None = None
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.cached + self.new

    @property
    def slower(self) -> float | None:
        """By how much the mode that is taken is slower than the fastest one."""
        medians = {mode: statistics.median(s) for mode, s in self.seconds.items() if mode != REPLICATED}
        return medians[self.auto] / min(medians.values()) - 1 if self.auto in medians else None


@dataclass
class Decoded:
    """Seconds between tokens of a batch, of the slowest rank. ranks: context-parallel ones. mode: as the settings have
    chosen it."""

    ranks: int
    cached: int
    batch: int
    mode: str
    seconds: list[float]


class _Remembering(Chooser):
    """Knows what it was asked last, and what it said."""

    latest: tuple[Batch, Target | None, str] | None = None

    def choose(self, batch: Batch, target: Target | None = None) -> Decision:
        decision = super().choose(batch, target)
        self.latest = batch, target, decision.mode
        return decision


class _Rewindable(CacheManager):
    """Goes back to earlier books, so that a turn can be measured again over the same cache."""

    def __init__(self, n: int, pages: int, page_tokens: int) -> None:
        super().__init__(n, pages, page_tokens)
        self._placed: list[tuple[ScheduledChunk, ...]] = []

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
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
            session.next_token = NextToken()


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
        rig = _Rig(config, sweep, build_engine(config, collection, None)[0])
        try:
            return rig.run(keep if rank == 0 else lambda first, decoded: None)
        finally:
            rig.engine.release()
    finally:
        groups.destroy()


class _Rig:
    def __init__(self, config: Config, sweep: Sweep, engine: LongContextEngine) -> None:
        self._sweep, self._n = sweep, config.parallelism.context_parallel_size
        self._chunk = config.inference.prefill_chunk
        self._device = engine.model.attention.device
        rule = config.inference.rule if self._n > 1 else "bytes"
        self._chooser = _Remembering(rule_inputs_of_rank_0(config, self._device), config.inference.mode, rule)
        self._modes = sweep.modes if self._n > 1 else sweep.modes[:1]
        self._cache_manager = _Rewindable(self._n, pages_per_rank(config), config.inference.page_tokens)
        settings = InferenceConfig(decode=engine.settings.decode, cuda_graphs=engine.settings.cuda_graphs)
        self.engine = LongContextEngine(engine.model, self._cache_manager, self._chooser, settings)
        self._random = random.Random(0)  # the same tokens on every rank

    def run(self, keep: Keep) -> tuple[list[FirstToken], list[Decoded]]:
        self.engine.warm_up()  # as a server does, but for the shapes of its chunks: prompts are whole here
        first: list[FirstToken] = []
        decoded: list[Decoded] = []
        for length in () if self._sweep.decode_only else self._sweep.lengths:
            session = self.engine.open()
            for cached, new in self._sweep.turns(length):
                while (left := cached - len(session.tokens)) > 0:  # computed as the settings choose
                    session.append(self._prompt(min(left, self._chunk or left)))
                first.append(self._first_token(session, new))
                keep(first, decoded)
            session.close()
        self.engine.model.attention.randomize()  # times are those of any keys and values
        for length in self._sweep.lengths:
            sessions: list[Session] = []
            for batch in sorted(set(self._sweep.batches)):
                while len(sessions) < batch:
                    sessions.append(self.engine.open())
                    self._pretend(sessions[-1], length)
                decoded.append(self._decode(sessions, length))
                keep(first, decoded)
            for session in sessions:
                session.close()
        return first, decoded

    def _pretend(self, session: Session, tokens: int) -> None:
        """Give the session so many random tokens as if they had been computed."""
        self._cache_manager.append({session.number: tokens})
        session.tokens += self._prompt(tokens)
        session.next_token = NextToken()

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self.engine.model.vocab_size), k=tokens)

    def _first_token(self, session: Session, new: int) -> FirstToken:
        found = FirstToken(self._n, len(session.tokens), new)
        prompt = self._prompt(new)
        ways = [*self._modes, *([REPLICATED] if self.engine.replicates(new) else [])]
        times: dict[str, list[float]] = {way: [] for way in ways}
        self._cache_manager.keep()
        for _ in range(1 + self._sweep.iterations):
            for way in ways:  # in turns, so that a slow moment of the machine meets all of them
                with nullcontext() if way == REPLICATED else self._chooser.forcing(way):
                    times[way].append(seconds_to_first(self.engine, session, prompt))
                self._cache_manager.rewind([session])
        found.seconds = {mode: self._slowest(seconds[1:] or seconds) for mode, seconds in times.items()}
        assert self._chooser.latest is not None
        batch, target, _ = self._chooser.latest
        if batch.new == new and self._n > 1:
            decision = self._chooser.choose(batch, target)
            found.auto, found.predicted = decision.mode, decision.seconds
        medians = ", ".join(f"{mode} {statistics.median(s) * 1e3:.2f} ms" for mode, s in found.seconds.items())
        self._say(f"{new:,} new tokens over {found.cached:,}: {medians}")
        return found

    def _decode(self, sessions: list[Session], length: int) -> Decoded:
        self._cache_manager.keep()
        count = _WARM_UP + self._sweep.tokens
        generations = [self.engine.start(s, Sampling(max_new_tokens=count + 1), i) for i, s in enumerate(sessions)]
        marks = []
        for i in range(count):
            if i == _WARM_UP:
                together(self._device)
                marks.append(time.perf_counter())
            self.engine.step(generations)
            if i >= _WARM_UP:
                marks.append(time.perf_counter())
            check(generations[0].finish_reason)
        self._cache_manager.rewind(sessions)
        mode = self.engine.decoding
        if not mode.startswith("replicated") and self._chooser.latest is not None:
            mode = self._chooser.latest[2]
        seconds = self._slowest([b - a for a, b in pairwise(marks)])
        found = Decoded(self._n, length, len(sessions), mode, seconds)
        each = sum(seconds) / len(seconds) * 1e3
        self._say(f"batch {len(sessions)} over {length:,}: {each:.2f} ms per token, {mode}")
        return found

    def _slowest(self, seconds: list[float]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*gather_objects(world_group(), seconds), strict=True)]

    def _say(self, words: str) -> None:
        """A line for whoever waits for the tables."""
        if dist.get_rank() == 0:
            print(f"  CP {self._n}, {words}", file=sys.stderr, flush=True)


def seconds_to_first(engine: LongContextEngine, session: Session, prompt: list[int]) -> float:
    """From a prompt's arrival to its first token, on this rank."""
    together(engine.model.attention.device)
    start = time.perf_counter()
    session.append(prompt)
    generation = engine.start(session, Sampling())
    engine.step([generation])  # ends with the token on the host
    seconds = time.perf_counter() - start
    check(generation.finish_reason)
    return seconds


def together(device: torch.device) -> None:
    """All ranks go on with nothing left to do."""
    synchronize(device)
    dist.barrier()


def check(finish_reason: str | None) -> None:
    if finish_reason == "error":
        raise refuse("logits", "not finite", "numbers", "Use train.precision=fp32.")
