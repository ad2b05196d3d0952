"""Measures what parts of a pass cost: links, messages as passes send them, kernel calls, and merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...config.cluster import Cluster, Device
from ...config.environment import environment
from ...core.kernels import Partial, dense_call, merge_partials
from ...core.kernels.interface import sum_dtype
from ...core.layout import contiguous
from ...core.plans import Attend, Block, Heads, Kind, Move, Plan, Recorder, Step, Target, Workload
from ...core.plans.mask import full
from ...planner.cost import GIB, Costs, KernelSample, MessageSample, attention_flops
from ...planner.measure_links import measure_links, to_cluster
from .measure import Effort, Testbed, mean_seconds, median_over_ranks, sustained_seconds, warm_up

_CUDA_MESSAGES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
_CPU_MESSAGES = (2**12, 2**16, 2**20)
_REPEATS = 12


def measured_cluster(group: dist.ProcessGroup, device: torch.device) -> Cluster:
    """Return the links between the ranks of `group`. All of them call this."""
    size = 2**26 if device.type == "cuda" else 2**20
    memory = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    described = Device(str(environment()["device"]), memory_gib=memory)
    return to_cluster(measure_links(group, device, size=size), "measured", described)


class MessageBenchmark:
    """Sends `size` bytes from every rank to each of the ranks `shifts` further on, and receives as many.

    The messages use the channel of a pass that does nothing else.
    """

    def __init__(self, testbed: Testbed, size: int, shifts: Sequence[int]) -> None:
        assert testbed.transport is not None
        self._testbed, self._transport = testbed, testbed.transport
        n, rank = testbed.n, dist.get_rank(testbed.group)
        layout = contiguous(n, n * len(shifts))
        moves = [Move(Block(Kind.KV, r, i, i + 1), r, (r + by) % n) for r in range(n) for i, by in enumerate(shifts)]
        idle: tuple[tuple[Attend, ...], ...] = ((),) * n
        steps = (Step(tuple(moves), idle), Step((), idle))
        plan = Plan("messages", full(layout.length), layout, layout, steps)
        # A token has one head, and a message is the key and value of one token.
        recorder = Recorder(plan, Target(Workload(1, 1, 1, kv_row_bytes=size), over_peers=self._transport.over_peers))
        recording, num_bytes = recorder.record(rank), recorder.send_bytes()
        sent = torch.zeros(num_bytes, dtype=torch.uint8).to(testbed.device)
        self._channel = self._transport.channel(recording, sent.numel(), lambda num_bytes: sent[:num_bytes])
        self._into = [torch.empty(size, dtype=torch.uint8, device=testbed.device) for _ in recording.receives[0]]

    def run(self, beside: Callable[[], object] | None = None) -> None:
        """Exchange the messages once, as a step of a plan does: start them, call `beside`, wait for them."""
        self._channel.begin()
        now = self._transport.record_event()
        exchange = self._channel.start(0, (), self._into, () if now is None else (now,))
        if beside is not None:
            beside()
        self._channel.wait(exchange)

    def seconds(self, beside: Callable[[], object] | None = None) -> float:
        """Return the seconds of one exchange, alone or with work that runs at the same time."""
        return _mean_over_ranks(self._testbed, lambda: self.run(beside), beside)


def message_costs(testbed: Testbed) -> tuple[tuple[MessageSample, ...], float]:
    """Return the times of messages to the next rank and to all others, by size, and the cost of another message."""
    sizes: tuple[int, ...] = _CUDA_MESSAGES if testbed.device.type == "cuda" else _CPU_MESSAGES
    others = testbed.n - 1
    samples = [MessageSample(size, 1, MessageBenchmark(testbed, size, [1]).seconds()) for size in sizes]
    if others > 1:
        shifts, small = range(1, others + 1), [size for size in sizes if size * others <= sizes[-1]]
        samples += [MessageSample(size, others, MessageBenchmark(testbed, size, shifts).seconds()) for size in small]
    many, one = (MessageBenchmark(testbed, 1024, [1] * count).seconds() for count in (8, 1))
    return tuple(samples), max((many - one) / (2 * 7), 0.0)  # each of 7 more is a send and a receive


def blocking_share(testbed: Testbed) -> float:
    """Return the share of a message's time by which it prolongs a kernel call that runs at the same time."""
    kernel = testbed.choose_kernel()
    q, k, v, _ = testbed.qkv(8192, 8192)

    def call() -> object:
        return kernel.forward(q, k, v, dense_call(8192, 8192), scale=1.0)

    messages = MessageBenchmark(testbed, 2**27, [1])
    longer = messages.seconds(call) - _mean_over_ranks(testbed, call, call)
    return min(1.0, max(0.0, longer / messages.seconds()))


def _mean_over_ranks(testbed: Testbed, work: Callable[[], object], load: Callable[[], object] | None) -> float:
    """Return the seconds of one call in a row, as the median over ranks; `load` warms the device up before."""

    def measure() -> list[float]:
        if load is not None:
            warm_up(load, testbed.device)
        mean_seconds(work, testbed.device, 3)
        return [mean_seconds(work, testbed.device, _REPEATS)]

    return median_over_ranks(testbed.group, measure)[0]


class _Shape(NamedTuple):
    queries: int
    keys: int
    causal: bool
    parts: int  # equal parts of the heads


def kernel_costs(testbed: Testbed, effort: Effort) -> Costs:
    """Return the costs of computation, measured by all ranks at the same time. Messages cost only what links say."""
    shapes = list(_shapes(testbed, effort))
    seconds = median_over_ranks(
        testbed.group, lambda: [s for shape in shapes for s in _call_seconds(testbed, shape, effort.repeats)]
    )
    passes = [(*shape[:3], backward, shape.parts) for shape in shapes for backward in (False, True)]
    samples = [KernelSample(*each, s) for each, s in zip(passes, seconds, strict=True)]
    forward, backward = (
        max(_tflops(s, testbed.workload) for s in samples if s.backward == backward) for backward in (False, True)
    )
    (merge_gibps,) = median_over_ranks(testbed.group, lambda: [_merge_gibps(testbed, effort)])
    return Costs(forward, backward, merge_gibps=merge_gibps, step_s=0.0, message_s=0.0, kernels=tuple(samples))


def _shapes(testbed: Testbed, effort: Effort) -> Iterator[_Shape]:
    work, ranks = testbed.workload, testbed.n
    for parts in _doubled(1, ranks):
        if work.num_heads % parts:
            continue
        sizes = _doubled(effort.min_tokens, effort.max_tokens * parts)
        rectangles = [(q, k) for q in sizes for k in sizes if q * k <= effort.max_tokens**2]
        if parts > 1:  # the calls of modes that share heads: long sequences, nearly square; every other size suffices
            sizes = sizes[::-2][::-1]
            rectangles = [(q, k) for q in sizes for k in (q // 2, q, 2 * q)]
        yield from (_Shape(size, size, True, parts) for size in sizes)
        yield from (_Shape(q, k, False, parts) for q, k in rectangles)


def _call_seconds(testbed: Testbed, shape: _Shape, repeats: int) -> list[float]:
    """Return the seconds of the forward and the backward pass of one call."""
    queries, keys, causal, parts = shape
    kernel, call = testbed.choose_kernel(parts), dense_call(queries, keys, causal)
    scale = testbed.workload.head_dim**-0.5
    q, k, v, grad_out = testbed.qkv(queries, keys, parts)
    forward = partial(kernel.forward, q, k, v, call, scale=scale)
    backward = partial(kernel.backward, grad_out, q, k, v, *forward(), call, scale=scale)
    return [sustained_seconds(work, testbed.device, repeats) for work in (forward, backward)]


def _tflops(sample: KernelSample, workload: Workload) -> float:
    q = sample.num_queries
    pairs = q * (q + 1) // 2 if sample.causal else q * sample.num_keys
    return attention_flops(workload, pairs, Heads(0, sample.parts), sample.backward) / sample.seconds / 1e12


def _merge_gibps(testbed: Testbed, effort: Effort) -> float:
    """Return the rate at which merging two partial outputs reads and writes memory."""
    tokens, work = effort.max_tokens // 4, testbed.workload
    outs = [testbed.random(tokens, work.num_heads, work.value_dim) for _ in range(3)]
    lses = [
        torch.randn(1, work.num_heads, tokens, device=testbed.device, dtype=sum_dtype(testbed.dtype)).permute(2, 0, 1)
        for _ in outs
    ]
    parts = [Partial(0, 0, out, lse) for out, lse in zip(outs[1:], lses[1:], strict=True)]
    seconds = sustained_seconds(lambda: merge_partials(parts, outs[0], lses[0]), testbed.device, effort.repeats)
    return 3 * tokens * work.token_bytes(Kind.OUT) / seconds / GIB


def _doubled(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... up to last."""
    return [first << i for i in range(max(1, (last // first).bit_length()))]
