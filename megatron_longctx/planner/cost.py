"""The cost of work: the seconds of kernel calls, messages and passes on given hardware."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..config.cluster import GIB as GIB
from ..config.cluster import Cluster
from ..core.errors import refuse
from ..core.plans.kernel_calls import KernelCall
from ..core.plans.plan import Heads, Kind
from ..core.plans.slices import FAR
from ..core.plans.workload import Workload as Workload

_TILE = 128
"""Queries and keys that kernels compute together, even if the mask shows few of the pairs."""


class KernelSample(NamedTuple):
    """One measured kernel call, with `1 / parts` of the heads."""

    num_queries: int
    num_keys: int
    causal: bool
    backward: bool
    parts: int
    seconds: float


class MessageSample(NamedTuple):
    """A measured exchange: every rank sends `num_bytes` to each of the next `peers` ranks, all at the same time."""

    num_bytes: int
    peers: int
    seconds: float


class ModeSample(NamedTuple):
    """The measured time of a mode's whole pass, as a multiple of its simulated time. `mode` includes the options."""

    mode: str
    length: int
    backward: bool
    ratio: float


@dataclass(frozen=True)
class Costs:
    """The speed of one rank's hardware and software, from data sheets (`of_cluster`) or measured (`calibrate`)."""

    forward_tflops: float  # of a long kernel call
    backward_tflops: float
    call_s: float = 2e-5  # overhead of every kernel call
    merge_gibps: float = 2400.0  # bytes that elementwise kernels read and write per second, here of an H100
    step_s: float = 5e-5  # to start and await the messages of a step
    message_s: float = 1e-5  # for each of these messages
    blocking: float = 0.0
    """The share of a message's time, including the wait for the peer, by which it slows down a kernel call beside it.
    NCCL's kernels occupy processors that the call could use."""
    kernels: tuple[KernelSample, ...] = ()
    """Measured calls of the workload at hand, used instead of the rates. Times between them are interpolated."""
    messages: tuple[MessageSample, ...] = ()
    """Measured messages between ranks of one node, used likewise."""
    modes: tuple[ModeSample, ...] = ()
    """Measured whole passes, which show what simulating their parts leaves out."""

    def __post_init__(self) -> None:
        for name in ("forward_tflops", "backward_tflops", "merge_gibps"):
            if not 0 < getattr(self, name) < math.inf:
                raise refuse(name, getattr(self, name), "a number above 0", "Measure it, or take a data sheet's.")

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Costs:
        """Return the costs that a cluster file describes; backward is assumed 0.87 times as fast, like cuDNN's.

        The latencies of links include the start of a step's messages; each further one costs what `calibrate` measured
        on H200s. Refuse a description without figures.
        """
        device, measured = cluster.device, cluster.intra.messages if cluster.intra else ()
        if device.kernel_tflops is None:
            expected = "peak_tflops and efficiency"
            raise refuse("device", device.name or "unnamed", expected, "Add them to the cluster file, or calibrate.")
        return cls(
            device.kernel_tflops,
            0.87 * device.kernel_tflops,
            merge_gibps=device.memory_gibps or cls.merge_gibps,
            step_s=0.0,
            message_s=3.3e-6,
            messages=tuple(MessageSample(int(size), peers, s) for size, peers, s in measured),
        )

    def call_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        """Return the time of one kernel call.

        A single full or causal segment takes the time of the measured calls. Causal with more keys than queries is a
        rectangle and a square, because ends are aligned. Several segments and windows take the rate of a long call for
        all pairs of the tiles that they touch.
        """
        (q0, q1, k0, k1), *others = call.segments
        if others or not (call.full or call.causal):
            return self._tiled_seconds(call, heads, workload, backward)
        queries, keys = q1 - q0, k1 - k0
        if call.causal and keys > queries:
            parts = ((queries, keys - queries, False), (queries, queries, True))
            seconds = sum(self._segment_seconds(*part, heads, workload, backward) for part in parts)
            return seconds - self._shortest_call(backward)
        return self._segment_seconds(queries, keys, call.causal, heads, workload, backward)

    def _segment_seconds(
        self, queries: int, keys: int, causal: bool, heads: Heads, workload: Workload, backward: bool
    ) -> float:
        table, divisor = self._table(causal, backward, heads.parts)
        if table is not None:
            return table.seconds(queries, keys) / divisor
        pairs = queries * (queries + 1) // 2 if causal else queries * keys
        return self._rated_seconds(pairs, heads, workload, backward)

    def _tiled_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        queries = sum(each.q_stop - each.q_start for each in call.segments)
        bounds = (call.left != FAR) + (call.right != FAR)
        edges = sum(bounds * (q1 - q0) + k1 - k0 + q1 - q0 for q0, q1, k0, k1 in call.segments)
        tiled = call.pairs + _TILE // 2 * edges
        table, divisor = self._table(True, backward, heads.parts)
        if table is None:
            return self._rated_seconds(tiled, heads, workload, backward)
        of_long = table.seconds(queries, queries) / (queries * (queries + 1) / 2)
        return max(of_long * tiled / divisor, self._shortest_call(backward))

    def _rated_seconds(self, pairs: int, heads: Heads, workload: Workload, backward: bool) -> float:
        rate = self.backward_tflops if backward else self.forward_tflops
        return self.call_s + attention_flops(workload, pairs, heads, backward) / (rate * 1e12)

    def _shortest_call(self, backward: bool) -> float:
        tables = self._tables.items()
        return min((table.shortest for (_, way, _), table in tables if way == backward), default=self.call_s)

    def _table(self, causal: bool, backward: bool, parts: int) -> tuple[_KernelTable | None, int]:
        """Return the measured calls with `1 / parts` of the heads, or those with all heads and a divisor of their
        time."""
        table = self._tables.get((causal, backward, parts))
        return (table, 1) if table is not None else (self._tables.get((causal, backward, 1)), parts)

    @cached_property
    def _tables(self) -> dict[tuple[bool, bool, int], _KernelTable]:
        grouped: dict[tuple[bool, bool, int], list[KernelSample]] = {}
        for sample in self.kernels:
            grouped.setdefault((sample.causal, sample.backward, sample.parts), []).append(sample)
        return {key: _KernelTable(samples) for key, samples in grouped.items()}

    def message_seconds(self, num_bytes: float, peers: int = 1) -> float:
        """Return the measured time of exchanging `num_bytes` with each of `peers` other ranks."""
        counts = sorted(self._exchanges)
        times = [_interpolate(num_bytes, *self._exchanges[count]) for count in counts]
        return times[0] if peers <= counts[0] or len(counts) == 1 else _interpolate(peers, counts, times)

    @cached_property
    def _exchanges(self) -> dict[int, tuple[list[int], list[float]]]:
        """Bytes and seconds of the measured messages, keyed by the number of peers."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for num_bytes, peers, seconds in sorted(self.messages):
            sizes, times = found.setdefault(peers, ([], []))
            sizes.append(num_bytes)
            times.append(seconds)
        return found

    def correction(self, mode: str, length: int, backward: bool) -> float:
        """Return the factor from a mode's simulated to its measured pass.

        It is linear in the logarithm of the length between measured lengths, and constant below them. Beyond the
        longest it approaches 1 as 1 / length: what simulation leaves out (launches, messages, a pass's own copies)
        grows with the tokens, but kernel calls with their square. A mode that was not measured has the largest factor
        of all others, so that a measured mode is chosen if it comes close.
        """
        own = [
            (sample.length, sample.ratio) for sample in self.modes if (sample.mode, sample.backward) == (mode, backward)
        ]
        if own:
            lengths, ratios = zip(*sorted(own), strict=True)
            fading: float = min(1.0, lengths[-1] / length)
            return 1.0 + (_interpolate(length, lengths, ratios, log=True) - 1.0) * fading
        measured = {sample.mode for sample in self.modes if sample.backward == backward}
        return max((self.correction(other, length, backward) for other in measured), default=1.0)


class _KernelTable:
    """Seconds per pair at measured numbers of queries and keys.

    They are bilinear in the logarithms of these numbers, and constant beyond them. No call takes less than the shortest
    measured one.
    """

    def __init__(self, samples: Sequence[KernelSample]) -> None:
        self._rows: dict[int, tuple[list[int], list[float]]] = {}  # keys and log seconds per pair, keyed by queries
        for queries, keys, _, _, _, seconds in sorted(samples, key=lambda sample: sample[:2]):
            all_keys, per_pair = self._rows.setdefault(queries, ([], []))
            all_keys.append(keys)
            per_pair.append(math.log(seconds / (queries * keys)))
        self.shortest = min(sample.seconds for sample in samples)

    def seconds(self, num_queries: int, num_keys: int) -> float:
        per_pair = [_interpolate(num_keys, *row, log=True) for row in self._rows.values()]
        seconds = math.exp(_interpolate(num_queries, list(self._rows), per_pair, log=True)) * num_queries * num_keys
        return max(seconds, self.shortest)


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float], log: bool = False) -> float:
    """Interpolate linearly in x or in log x. The result is constant below the first point.

    Above the last point it is proportional to x, or constant in log x.
    """
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] if log else ys[-1] * x / xs[-1]
    i = bisect_left(xs, x)
    low, high = xs[i - 1], xs[i]
    share = math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


def attention_flops(workload: Workload, pairs: float, heads: Heads, backward: bool) -> float:
    """Return the FLOPs of query-key pairs.

    A pair takes 2 per head channel of two matrix products, or of five in backward (three over queries and keys).
    """
    count = len(workload.head_range(Kind.Q, heads)) * workload.batch
    d, e = workload.head_dim, workload.value_dim
    return 2.0 * pairs * count * (3 * d + 2 * e if backward else d + e)
