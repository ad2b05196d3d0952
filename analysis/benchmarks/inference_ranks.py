"""What every rank of the inference benchmark measures: first tokens in given modes, and decoded tokens."""

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

from megatron_longctx.config import Config, InferenceConfig
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.comm.device import synchronize
from megatron_longctx.core.errors import refuse
from megatron_longctx.inference.batch import Batch, ScheduledChunk
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention
from megatron_longctx.inference.choose_cache_mode import Chooser
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.memory import pages_per_rank
from megatron_longctx.inference.quantize_kv import SCALE_BYTES
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import NextToken, Session
from megatron_longctx.inference.warm_up import warm_up
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine
from megatron_longctx.training.ranks import world_group

REPLICATED = "replicated"
"""Short prompts as the engine computes them (`inference.decode`) unless a mode is set; there is no choice then."""
_WARM_UP = 3


@dataclass(frozen=True)
class Sweep:
    """What to measure. A single rank uses the first mode. Prompts that the engine replicates are also measured so."""

    lengths: tuple[int, ...]
    miss_rates: tuple[float, ...]
    batches: tuple[int, ...]
    iterations: int
    tokens: int
    decode_only: bool = False
    modes: tuple[str, ...] = ("pass_kv", "pass_q")

    def prompts(self, length: int) -> list[tuple[int, int]]:
        """Return (cached, new) tokens for every miss rate, fewest cached first.

        At least 2 tokens are new: one is a decode step.
        """
        new = {min(length, max(2, round(length * rate))) for rate in self.miss_rates}
        return [(length - count, count) for count in sorted(new, reverse=True)]

    def pages(self, n: int, page_tokens: int) -> int:
        """Return the pages that a rank needs. Ranks differ by at most one page of a session."""
        prompt, decoded = max(self.lengths), max(self.lengths) + _WARM_UP + self.tokens
        pages = [-(-(-(-tokens // page_tokens) + n - 1) // n) for tokens in (prompt, decoded)]
        return max(pages[0], pages[1] * max(self.batches))


@dataclass
class FirstToken:
    """The time from a prompt's arrival to its first token on the slowest rank."""

    ranks: int  # context-parallel ranks
    cached: int
    new: int
    # of all iterations, without the first if there are others, by mode
    seconds: dict[str, list[float]] = field(default_factory=dict)
    auto: str | None = None  # the mode that `auto` chooses, for prompts that are computed in one pass

    @property
    def length(self) -> int:
        return self.cached + self.new

    @property
    def slower(self) -> float | None:
        """How much slower the chosen mode is than the fastest one."""
        medians = {mode: statistics.median(s) for mode, s in self.seconds.items() if mode != REPLICATED}
        return medians[self.auto] / min(medians.values()) - 1 if self.auto in medians else None


@dataclass
class Decoded:
    """Seconds between tokens of a batch on the slowest of `ranks` context-parallel ranks, in the chosen mode."""

    ranks: int
    cached: int
    batch: int
    mode: str
    seconds: list[float]


class _RecordingChooser(Chooser):
    """Remembers the latest batch and the mode chosen for it."""

    latest: tuple[Batch, str] | None = None

    def choose(self, batch: Batch) -> str:
        mode = super().choose(batch)
        self.latest = batch, mode
        return mode


class RewindableCacheManager(CacheManager):
    """Returns to an earlier state, so that a prompt can be measured again over the same cache."""

    def __init__(self, n: int, pages: int, page_tokens: int) -> None:
        super().__init__(n, pages, page_tokens)
        self._appended: list[tuple[ScheduledChunk, ...]] = []

    def append(self, counts: Mapping[int, int], later: bool = False) -> tuple[ScheduledChunk, ...]:
        chunks = super().append(counts, later)
        self._appended.append(chunks)
        return chunks

    def keep(self) -> None:
        """Keep all tokens that have been appended so far."""
        self._appended = []

    def rewind(self, sessions: Sequence[Session]) -> None:
        """Remove all tokens appended since `keep`, also from the `sessions`."""
        while self._appended:
            self.undo(self._appended.pop())
        for session in sessions:
            del session.tokens[self.length(session.number) :]
            # The next token of a rewound session does not affect times.
            session.next_token = NextToken()


Save = Callable[[list[FirstToken], list[Decoded]], object]
"""Receives all results so far."""


def measure(rank: int, config: Config, sweep: Sweep, save: Save) -> tuple[list[FirstToken], list[Decoded]]:
    """Measure `sweep` with random weights on the configured number of context-parallel ranks.

    Args:
        config: from `mcore.inference.inference_config`, with a cache of `sweep.pages`.
        save: called by rank 0 after every measurement, so that an aborted sweep loses nothing.
    """
    par = config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    try:
        benchmark = Benchmark(config, sweep, build_engine(config, collection, None)[0])
        try:
            return benchmark.run(save if rank == 0 else lambda first, decoded: None)
        finally:
            benchmark.engine.release()
    finally:
        groups.destroy()


class Benchmark:
    def __init__(self, config: Config, sweep: Sweep, engine: LongContextEngine) -> None:
        self._sweep, self._n = sweep, config.parallelism.context_parallel_size
        self._chunk = config.inference.prefill_chunk
        self._device = engine.model.attention.device
        self._chooser = _RecordingChooser(engine.model.attention.shape.workload, config.inference.mode)
        self._modes = sweep.modes if self._n > 1 else sweep.modes[:1]
        self._cache_manager = RewindableCacheManager(self._n, pages_per_rank(config), config.inference.page_tokens)
        settings = InferenceConfig(decode=engine.settings.decode, cuda_graphs=engine.settings.cuda_graphs)
        self.engine = LongContextEngine(engine.model, self._cache_manager, self._chooser, settings)
        self._random = random.Random(0)  # the same tokens on every rank

    def run(self, save: Save) -> tuple[list[FirstToken], list[Decoded]]:
        warm_up(self.engine)  # like a server, but without shapes of chunks: prompts are not cut here
        first: list[FirstToken] = []
        decoded: list[Decoded] = []
        for length in () if self._sweep.decode_only else self._sweep.lengths:
            session = self.engine.open()
            for cached, new in self._sweep.prompts(length):
                while (left := cached - len(session.tokens)) > 0:  # in the mode that the settings choose
                    session.append(self._prompt(min(left, self._chunk or left)))
                first.append(self._first_token(session, new))
                save(first, decoded)
            session.close()
        randomize(self.engine.model.attention)  # times do not depend on the keys and values
        for length in self._sweep.lengths:
            sessions: list[Session] = []
            for batch in sorted(set(self._sweep.batches)):
                while len(sessions) < batch:
                    sessions.append(self.engine.open())
                    self.append_uncomputed(sessions[-1], length)
                decoded.append(self.decode(sessions, length))
                save(first, decoded)
            for session in sessions:
                session.close()
        return first, decoded

    def append_uncomputed(self, session: Session, tokens: int) -> None:
        """Append random tokens to the session without computing them."""
        self._cache_manager.append({session.number: tokens})
        session.tokens += self._prompt(tokens)
        session.next_token = NextToken()

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self.engine.model.vocab_size), k=tokens)

    def _first_token(self, session: Session, new: int) -> FirstToken:
        result = FirstToken(self._n, len(session.tokens), new)
        prompt = self._prompt(new)
        ways = [*self._modes, *([REPLICATED] if self.engine.replicates(new, result.cached) else [])]
        times: dict[str, list[float]] = {way: [] for way in ways}
        self._cache_manager.keep()
        for _ in range(1 + self._sweep.iterations):
            for way in ways:  # alternating, so that a slow moment of the machine affects all of them
                with nullcontext() if way == REPLICATED else self._chooser.forcing(way):
                    times[way].append(seconds_to_first(self.engine, session, prompt))
                self._cache_manager.rewind([session])
        result.seconds = {mode: self._slowest(seconds[1:] or seconds) for mode, seconds in times.items()}
        assert self._chooser.latest is not None
        batch = self._chooser.latest[0]
        if batch.new == new and self._n > 1:
            result.auto = self._chooser.choose(batch)
        medians = ", ".join(f"{mode} {statistics.median(s) * 1e3:.2f} ms" for mode, s in result.seconds.items())
        self._print(f"{new:,} new tokens over {result.cached:,}: {medians}")
        return result

    def decode(self, sessions: list[Session], length: int) -> Decoded:
        self._cache_manager.keep()
        count = _WARM_UP + self._sweep.tokens
        generations = [self.engine.start(s, Sampling(max_new_tokens=count + 1), i) for i, s in enumerate(sessions)]
        times = []
        for i in range(count):
            if i == _WARM_UP:
                wait_for_all(self._device)
                times.append(time.perf_counter())
            self.engine.step(generations)
            if i >= _WARM_UP:
                times.append(time.perf_counter())
            _check(generations[0].finish_reason)
        self._cache_manager.rewind(sessions)
        mode = self.engine.decoding
        if not mode.startswith("replicated") and self._chooser.latest is not None:
            mode = self._chooser.latest[1]
        seconds = self._slowest([b - a for a, b in pairwise(times)])
        mean = sum(seconds) / len(seconds) * 1e3
        self._print(f"batch {len(sessions)} over {length:,}: {mean:.2f} ms per token, {mode}")
        return Decoded(self._n, length, len(sessions), mode, seconds)

    def _slowest(self, seconds: list[float]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*gather_objects(world_group(), seconds), strict=True)]

    def _print(self, words: str) -> None:
        if dist.get_rank() == 0:
            print(f"  CP {self._n}, {words}", file=sys.stderr, flush=True)


def seconds_to_first(engine: LongContextEngine, session: Session, prompt: list[int]) -> float:
    """Return the time from a prompt's arrival to its first token on this rank."""
    wait_for_all(engine.model.attention.device)
    start = time.perf_counter()
    session.append(prompt)
    generation = engine.start(session, Sampling())
    engine.step([generation])  # ends with the token on the host
    seconds = time.perf_counter() - start
    _check(generation.finish_reason)
    return seconds


def randomize(attention: CachedAttention) -> None:
    """Fill a cache with random keys and values."""
    for layer in attention.layers:
        if attention.shape.int8:
            layer.random_()[..., -SCALE_BYTES:].view(torch.float32).fill_(1 / 64)
        else:
            layer.normal_()


def wait_for_all(device: torch.device) -> None:
    """Wait until all ranks have finished all their work."""
    synchronize(device)
    dist.barrier()


def _check(finish_reason: str | None) -> None:
    if finish_reason == "error":
        raise refuse("logits", "not finite", "numbers", "Use train.precision=fp32.")
