"""What work costs: bytes and FLOPs of an attention layer's shape, seconds on given hardware."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import refuse
from ..topology import Device
from ..topology.cluster import GIB as GIB
from .kernel_calls import KernelCall
from .mask import FAR
from .plan import ALL_HEADS, FIELDS, Block, Heads, Kind

_TILE = 128
"""Queries and keys that kernels compute together, whether the mask shows all of them or few."""


@dataclass(frozen=True)
class Workload:
    """One attention layer as a rank of the context-parallel group sees it.

    num_heads, num_kv_heads: of one rank (divided by the tensor-parallel size). head_dim: of queries and keys,
    v_head_dim of values and outputs, None for the same. element_bytes: of q, k, v, out and their gradients.
    kv_row_bytes: of a token's key and value of one head as they travel; None for those of their elements.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 1
    element_bytes: int = 2
    v_head_dim: int | None = None
    kv_row_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "batch", "element_bytes"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", f"Correct {name}.")

    @property
    def accumulator_bytes(self) -> int:
        """Of one element of what is added up; also of one LSE."""
        return max(4, self.element_bytes)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def head_sizes(self) -> str:
        """In words: 128, or where values have another size 192v128."""
        return str(self.head_dim) if self.value_dim == self.head_dim else f"{self.head_dim}v{self.value_dim}"

    def head_range(self, kind: Kind, heads: Heads) -> range:
        """The heads that a part of them is; where parts outnumber heads, neighbours share one."""
        found = self._ranges.get((kind, heads))
        if found is None:
            found = self._ranges[kind, heads] = self._head_range(kind, heads)
        return found

    @cached_property
    def _ranges(self) -> dict[tuple[Kind, Heads], range]:
        return {}

    @cached_property
    def _token_bytes(self) -> dict[tuple[Kind, Heads], int]:
        return {}

    def _head_range(self, kind: Kind, heads: Heads) -> range:
        count = self.num_kv_heads if kind in _OF_KEYS else self.num_heads
        if heads.parts <= count:
            size = count // heads.parts
            return range(heads.part * size, (heads.part + 1) * size)
        head = heads.part * count // heads.parts
        return range(head, head + 1)

    def field_bytes(self, kind: Kind, heads: Heads = ALL_HEADS) -> tuple[int, ...]:
        """Bytes of one token of a block on the wire or in a buffer, by field (`plan.FIELDS`)."""
        count = len(self.head_range(kind, heads)) * self.batch
        return tuple(count * self._row_bytes[field] for field in FIELDS[kind])

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        """By field, of one head of a token."""
        plain = {field: channels * self.element_bytes for field, channels in self._channels.items()}
        kv = plain["dkv"] if self.kv_row_bytes is None else self.kv_row_bytes
        return {**plain, "kv": kv, "lse": self.accumulator_bytes}

    @cached_property
    def _channels(self) -> dict[str, int]:
        """By field but for LSE, elements of one head of a token."""
        d, e = self.head_dim, self.value_dim
        return {"q": d, "out": e, "kv": d + e, "dkv": d + e}

    def elements(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Elements of q, k, v, out and gradients in one token of a block (without LSE)."""
        count = len(self.head_range(kind, heads)) * self.batch
        return count * sum(self._channels.get(field, 0) for field in FIELDS[kind])

    def token_bytes(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Bytes of one token of a block on the wire or in a buffer."""
        found = self._token_bytes.get((kind, heads))
        if found is None:
            found = self._token_bytes[kind, heads] = sum(self.field_bytes(kind, heads))
        return found

    def block_bytes(self, block: Block) -> int:
        return block.tokens * self.token_bytes(block.kind, block.heads)

    def flops(self, pairs: float, heads: Heads, backward: bool) -> float:
        """Two matrix products of 2 FLOPs a pair and head channel, five in backward (three of queries and keys)."""
        count = len(self.head_range(Kind.Q, heads)) * self.batch
        channels = 3 * self.head_dim + 2 * self.value_dim if backward else self.head_dim + self.value_dim
        return 2.0 * pairs * count * channels


_OF_KEYS = (Kind.KV, Kind.DKV)


class KernelSample(NamedTuple):
    """One measured kernel call, with `1 / parts` of the heads."""

    num_queries: int
    num_keys: int
    causal: bool
    backward: bool
    parts: int
    seconds: float


class MessageSample(NamedTuple):
    """Every rank sends so many bytes to each of the next `peers` ranks and receives as many, all at once."""

    num_bytes: int
    peers: int
    seconds: float


class ModeSample(NamedTuple):
    """What all of a mode's pass took, as a multiple of what was simulated. mode: its name with its options."""

    mode: str
    length: int
    backward: bool
    ratio: float


@dataclass(frozen=True)
class Costs:
    """What one rank's hardware and software take, from data sheets (`of_device`) or measured (`calibrate`).

    forward_tflops, backward_tflops: of a long kernel call. call_s: what every call takes besides. merge_gibps: bytes
    read and written per second by everything elementwise. step_s: what it takes to start and await a step's messages,
    message_s: for each of them. blocking: share of the time of a message, waiting for the peer included, that is added
    to a kernel call beside it, since NCCL's kernels hold processors that the call wants. kernels: measured calls for
    the workload at hand, used instead of the rates where they are given; calls between them are interpolated.
    messages: likewise, for messages between ranks of one node. modes: whole passes by mode, which tell what simulating
    their parts leaves out. host_operation_s: what the host takes to issue one operation of an attention pass
    (`Simulation.operations`); 0 for a host that is never waited for.
    """

    forward_tflops: float
    backward_tflops: float
    call_s: float = 2e-5
    merge_gibps: float = 1000.0
    step_s: float = 5e-5
    message_s: float = 1e-5
    blocking: float = 0.0
    host_operation_s: float = 0.0
    kernels: tuple[KernelSample, ...] = ()
    messages: tuple[MessageSample, ...] = ()
    modes: tuple[ModeSample, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_tflops", "backward_tflops", "merge_gibps"):
            if not 0 < getattr(self, name) < math.inf:
                raise refuse(name, getattr(self, name), "a number above 0", "Measure it, or take a data sheet's.")

    @classmethod
    def of_device(cls, device: Device) -> Costs:
        """What a cluster description says of its processor; its backward is taken for 0.87 as fast, as cuDNN's is.

        No description tells the host's pace: 0.15 ms an operation is what `calibrate` found on a host of H200s.

        Raises:
            ValueError: the description does not say.
        """
        if device.kernel_tflops is None:
            expected = "peak_tflops and efficiency"
            raise refuse("device", device.name or "unnamed", expected, "Add them to the cluster file, or calibrate.")
        return cls(device.kernel_tflops, 0.87 * device.kernel_tflops, host_operation_s=1.5e-4)

    def call_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        """Time of one kernel call.

        A segment alone goes by the calls that were measured; ends that are aligned make of more keys than queries a
        rectangle and a square. Several segments, and windows, go by the rate of a long call for all tiles of pairs that
        they touch.
        """
        (q0, q1, k0, k1), *others = call.segments
        if others or not (call.full or call.causal):
            return self._tiled_seconds(call, heads, workload, backward)
        queries, keys = q1 - q0, k1 - k0
        if call.causal and keys > queries:
            parts = ((queries, keys - queries, False), (queries, queries, True))
            return sum(self._one_call(*part, heads, workload, backward) for part in parts) - self._least(backward)
        return self._one_call(queries, keys, call.causal, heads, workload, backward)

    def _one_call(
        self, queries: int, keys: int, causal: bool, heads: Heads, workload: Workload, backward: bool
    ) -> float:
        parts = heads.parts
        table = self._tables.get((causal, backward, parts))
        if table is not None:
            return table.seconds(queries, keys)
        whole = self._tables.get((causal, backward, 1))
        if whole is not None:
            return whole.seconds(queries, keys) / parts
        pairs = queries * (queries + 1) // 2 if causal else queries * keys
        return self.call_s + workload.flops(pairs, heads, backward) / (self._rate(backward) * 1e12)

    def _tiled_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        queries = sum(each.q_stop - each.q_start for each in call.segments)
        bounds = (call.left != FAR) + (call.right != FAR)
        edges = sum(bounds * (q1 - q0) + k1 - k0 + q1 - q0 for q0, q1, k0, k1 in call.segments)
        tiled = call.pairs + _TILE // 2 * edges
        table = self._tables.get((True, backward, heads.parts)) or self._tables.get((True, backward, 1))
        if table is None:
            return self.call_s + workload.flops(tiled, heads, backward) / (self._rate(backward) * 1e12)
        of_long = table.seconds(queries, queries) / (queries * (queries + 1) / 2)
        whole = 1 if (True, backward, heads.parts) in self._tables else heads.parts
        return max(of_long * tiled / whole, self._least(backward))

    def _rate(self, backward: bool) -> float:
        return self.backward_tflops if backward else self.forward_tflops

    def _least(self, backward: bool) -> float:
        """What a call takes however short it is."""
        return min((each.least for (_, way, _), each in self._tables.items() if way == backward), default=self.call_s)

    def message_seconds(self, num_bytes: float, peers: int = 1) -> float:
        """Time of exchanging `num_bytes` with each of so many other ranks, as measured."""
        counts = sorted(self._exchanges)
        times = []
        for count in counts:
            samples = self._exchanges[count]
            times.append(_interpolate(num_bytes, [m.num_bytes for m in samples], [m.seconds for m in samples]))
        if peers <= counts[0] or len(counts) == 1:
            return times[0]
        return _interpolate(peers, counts, times)

    def correction(self, mode: str, length: int, backward: bool) -> float:
        """What a mode's simulated pass is to be multiplied by: as measured, linear in the logarithm of the length
        between lengths and constant below them. Beyond the longest it nears 1: what simulation leaves out (launches,
        messages, a pass's own copies) grows about with the tokens, but kernel calls with their square, so that the
        share falls as 1 / length. Modes that were not measured get the largest of all others', so that one of those
        that were is taken where it comes close."""
        own = [
            (sample.length, sample.ratio) for sample in self.modes if (sample.mode, sample.backward) == (mode, backward)
        ]
        if own:
            lengths, ratios = zip(*sorted(own), strict=True)
            fading: float = min(1.0, lengths[-1] / length)
            return 1.0 + (_interpolate_log(length, lengths, ratios) - 1.0) * fading
        measured = {sample.mode for sample in self.modes if sample.backward == backward}
        return max((self.correction(other, length, backward) for other in measured), default=1.0)

    @cached_property
    def _exchanges(self) -> dict[int, list[MessageSample]]:
        """By number of peers."""
        grouped: dict[int, list[MessageSample]] = {}
        for sample in sorted(self.messages):
            grouped.setdefault(sample.peers, []).append(sample)
        return grouped

    @cached_property
    def _tables(self) -> dict[tuple[bool, bool, int], _Table]:
        grouped: dict[tuple[bool, bool, int], list[KernelSample]] = {}
        for sample in self.kernels:
            grouped.setdefault((sample.causal, sample.backward, sample.parts), []).append(sample)
        return {key: _Table(samples) for key, samples in grouped.items()}


class _Table:
    """Seconds per pair at measured numbers of queries and keys; bilinear in their logarithms between them, constant
    beyond them. No call takes less than the shortest that was measured."""

    def __init__(self, samples: Sequence[KernelSample]) -> None:
        self._queries = sorted({sample.num_queries for sample in samples})
        by_queries: dict[int, list[KernelSample]] = {}
        for sample in sorted(samples, key=lambda sample: sample.num_keys):
            by_queries.setdefault(sample.num_queries, []).append(sample)
        self._rows = [by_queries[q] for q in self._queries]
        self.least = min(sample.seconds for sample in samples)

    def seconds(self, num_queries: int, num_keys: int) -> float:
        rows = [_row(row, num_queries, num_keys) for row in self._rows]
        seconds = math.exp(_interpolate_log(num_queries, self._queries, rows)) * num_queries * num_keys
        return max(seconds, self.least)


def _row(row: Sequence[KernelSample], num_queries: int, num_keys: int) -> float:
    """Log of the seconds per pair of `num_keys` keys, at the number of queries of `row`."""
    if len(row) == 1:  # causal: squares only
        return math.log(row[0].seconds / (row[0].num_queries * row[0].num_keys))
    per_pair = [math.log(sample.seconds / (sample.num_queries * sample.num_keys)) for sample in row]
    return _interpolate_log(num_keys, [sample.num_keys for sample in row], per_pair)


def _interpolate_log(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear in log x, constant below the first and above the last point."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect_left(xs, x)
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear; constant below the first point, and above the last one at the last point's rate."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    i = bisect_left(xs, x)
    return ys[i - 1] + (x - xs[i - 1]) / (xs[i] - xs[i - 1]) * (ys[i] - ys[i - 1])
