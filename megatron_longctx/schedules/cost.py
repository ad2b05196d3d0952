"""What work costs: bytes and FLOPs of an attention layer's shape, seconds on given hardware."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..config import Config, refuse
from ..topology import Device
from .plan import ALL_HEADS, Attend, Block, Heads, Kind

GIB = 2**30
_KV_SCALE_BYTES = 4
BACKWARD_FLOPS = 2.5
"""FLOPs of the backward of attention, as a multiple of its forward: five matrix products instead of two."""


@dataclass(frozen=True)
class Workload:
    """One attention layer as a rank of the context-parallel group sees it.

    num_heads, num_kv_heads: of one rank (divided by the tensor-parallel size). element_bytes: of q, k, v, out and their
    gradients. kv_int8: keys and values are 8-bit integers, with a scale in fp32 for every head of a token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 1
    element_bytes: int = 2
    kv_int8: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "batch", "element_bytes"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", f"Correct {name}.")

    @classmethod
    def of(cls, config: Config) -> Workload:
        """The attention of a configured model, on one tensor-parallel rank."""
        model, tp = config.model, config.parallelism.tensor_parallel_size
        return cls(
            num_heads=model.num_attention_heads // tp,
            num_kv_heads=model.num_kv_heads // tp,
            head_dim=model.kv_channels,
            batch=config.train.micro_batch_size,
            element_bytes=2 if config.train.precision == "bf16" else 4,
        )

    @property
    def accumulator_bytes(self) -> int:
        """Of one element of what is added up; also of one LSE."""
        return max(4, self.element_bytes)

    def elements(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Elements of q, k, v, out and gradients in one token of a block (without LSE)."""
        if kind in (Kind.KV, Kind.DKV):
            return 2 * _of_heads(self.num_kv_heads, heads) * self.head_dim * self.batch
        q = _of_heads(self.num_heads, heads) * self.head_dim * self.batch
        return 3 * q if kind is Kind.Q_GRAD else q

    def token_bytes(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Bytes of one token of a block on the wire or in a buffer."""
        if kind is Kind.KV and self.kv_int8:
            return self.elements(kind, heads) // self.head_dim * (self.head_dim + _KV_SCALE_BYTES)
        lse = kind in (Kind.OUT, Kind.Q_GRAD)
        of_lse = _of_heads(self.num_heads, heads) * self.batch * self.accumulator_bytes if lse else 0
        return self.elements(kind, heads) * self.element_bytes + of_lse

    def block_bytes(self, block: Block) -> int:
        return block.tokens * self.token_bytes(block.kind, block.heads)

    def merge_bytes(self, block: Block) -> int:
        """Bytes read and written to add a result to what has been accumulated of it."""
        per_element = self.element_bytes + 2 * self.accumulator_bytes
        return block.tokens * self.elements(block.kind, block.heads) * per_element

    def flops(self, attend: Attend, backward: bool) -> float:
        """Two matrix products of 2 FLOPs a pair and head channel, five in backward."""
        heads = _of_heads(self.num_heads, attend.heads) * self.batch
        return 4.0 * attend.pairs * heads * self.head_dim * (BACKWARD_FLOPS if backward else 1.0)


def _of_heads(count: int, part: Heads) -> int:
    """Heads in one of `part.parts` equal parts; where parts outnumber heads, neighbours share one."""
    return max(1, count // part.parts)


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
    """What one rank's hardware and software take, from data sheets (`of_device`) or measured (`bench`).

    forward_tflops, backward_tflops: of a long kernel call. call_s: what every call takes besides. merge_gibps: bytes
    read and written per second by everything elementwise. step_s: what it takes to start and await a step's messages,
    message_s: for each of them. blocking: share of the time of a message, waiting for the peer included, that is added
    to a kernel call beside it, since NCCL's kernels hold processors that the call wants. kernels: measured calls for
    the workload at hand, used instead of the rates where they are given; calls between them are interpolated.
    messages: likewise, for messages between ranks of one node. modes: whole passes by mode, which tell what simulating
    their parts leaves out. host_operation_s: what the host takes to issue one operation of an attention pass
    (`host.num_operations`); 0 for a host that is never waited for.
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

        No description tells the host's pace: 0.15 ms an operation is what `bench calibrate` found on a host of H200s.

        Raises:
            ValueError: the description does not say.
        """
        if device.kernel_tflops is None:
            expected = "peak_tflops and efficiency"
            raise refuse("device", device.name or "unnamed", expected, "Add them to the cluster file, or calibrate.")
        return cls(device.kernel_tflops, 0.87 * device.kernel_tflops, host_operation_s=1.5e-4)

    def call_seconds(self, attend: Attend, workload: Workload, backward: bool) -> float:
        """Time of one kernel call."""
        parts = attend.heads.parts
        table = self._tables.get((attend.causal, backward, parts))
        if table is not None:
            return table.seconds(attend.num_queries, attend.num_keys)
        whole = self._tables.get((attend.causal, backward, 1))
        if whole is not None:
            return whole.seconds(attend.num_queries, attend.num_keys) / parts
        rate = self.backward_tflops if backward else self.forward_tflops
        return self.call_s + workload.flops(attend, backward) / (rate * 1e12)

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
        self._least = min(sample.seconds for sample in samples)

    def seconds(self, num_queries: int, num_keys: int) -> float:
        rows = [_row(row, num_queries, num_keys) for row in self._rows]
        seconds = math.exp(_interpolate_log(num_queries, self._queries, rows)) * num_queries * num_keys
        return max(seconds, self._least)


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
