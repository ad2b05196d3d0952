"""Measuring what computing takes: kernel calls of the shapes that modes make, and elementwise work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Transport
from ..kernels import AttentionKernel, KernelRequest, Partial, choose, dense_call, merge_partials
from ..kernels.interface import sum_dtype
from ..schedules import Costs, Heads, KernelSample, Kind, Workload
from ..schedules.cost import GIB
from .timing import agreed, sustained_seconds


@dataclass(frozen=True)
class Place:
    """What is measured on: the ranks of `group`, each with its `device`. links: how messages travel."""

    group: dist.ProcessGroup
    device: torch.device
    workload: Workload
    kernel: str = "auto"
    links: Transport | None = None

    @property
    def n(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def dtype(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[self.workload.element_bytes]

    def choose(self, parts: int = 1, packed: bool = False) -> AttentionKernel:
        """The kernel for an equal part of the heads.

        Raises:
            ValueError: it cannot serve.
        """
        work = self.workload
        heads, kv_heads = max(1, work.num_heads // parts), max(1, work.num_kv_heads // parts)
        request = KernelRequest(
            self.device.type, self.dtype, work.head_dim, heads, kv_heads, v_head_dim=work.v_head_dim, packed=packed
        )
        return choose(self.kernel, request)

    def random(self, tokens: int, heads: int, size: int | None = None) -> Tensor:
        """`[tokens, 1, heads, head_dim]`, or with heads of another `size`."""
        return torch.randn(tokens, 1, heads, size or self.workload.head_dim, device=self.device).to(self.dtype)

    def qkv(self, queries: int, keys: int, parts: int = 1) -> list[Tensor]:
        """q, k, v and the gradient of out, with an equal part of the heads."""
        work = self.workload
        h, g = max(1, work.num_heads // parts), max(1, work.num_kv_heads // parts)
        sizes = ((queries, h, None), (keys, g, None), (keys, g, work.value_dim), (queries, h, work.value_dim))
        return [self.random(*size) for size in sizes]


@dataclass(frozen=True)
class Effort:
    """How much is measured. max_tokens: longest kernel call with all heads; parts p go to p times as many, but not to
    more than a sequence over all ranks has. length: of the job's sequences, whose whole steps are measured too."""

    max_tokens: int
    min_tokens: int
    repeats: int
    length: int | None = None

    @classmethod
    def of(cls, device: torch.device, max_tokens: int | None = None, length: int | None = None) -> Effort:
        cuda = device.type == "cuda"
        most = max_tokens or (32768 if cuda else 1024)
        return cls(most, min(most, 512 if cuda else 64), 5 if cuda else 3, length)

    def mode_lengths(self, device: torch.device, ranks: int) -> tuple[int, ...]:
        """Of sequences whose whole steps are measured: short and long ones (one on CPUs), and `length`, unless all of
        these are longer."""
        wanted = (4096, 16384) if device.type == "cuda" else (64,)
        found = {ranks * tokens for tokens in wanted if tokens <= self.max_tokens} or {ranks * self.max_tokens}
        return tuple(sorted(found | ({self.length} if self.length and self.length >= min(found) else set())))


def kernel_costs(place: Place, effort: Effort) -> Costs:
    """What computing takes, measured by all ranks at once; messages are taken to cost no more than their links say."""
    shapes = list(_shapes(place, effort))
    seconds = agreed(place.group, lambda: [s for shape in shapes for s in _call_seconds(place, shape, effort.repeats)])
    ways = [(*shape[:3], backward, shape[3]) for shape in shapes for backward in (False, True)]
    samples = [KernelSample(*way, each) for way, each in zip(ways, seconds, strict=True)]
    forward, backward = (
        max(_tflops(s, place.workload) for s in samples if s.backward == backward) for backward in (False, True)
    )
    (merge_gibps,) = agreed(place.group, lambda: [_merge_gibps(place, effort)])
    return Costs(forward, backward, merge_gibps=merge_gibps, step_s=0.0, message_s=0.0, kernels=tuple(samples))


_Shape = tuple[int, int, bool, int]
"""Queries, keys, causal, parts of the heads."""


def _shapes(place: Place, effort: Effort) -> Iterator[_Shape]:
    work, ranks = place.workload, place.n
    halves = 2 * ranks  # parts of heads that are exchanged in two chunks
    for parts in _doubled(1, halves if work.num_kv_heads % halves == 0 else ranks):
        if work.num_heads % parts:
            continue
        sizes = _doubled(effort.min_tokens, effort.max_tokens * min(parts, ranks))
        rectangles = [(q, k) for q in sizes for k in sizes if q * k <= effort.max_tokens**2]
        if parts > 1:  # what modes that share heads call: long sequences, nearly square; every other size is enough
            sizes = sizes[::-2][::-1]
            rectangles = [(q, k) for q in sizes for k in (q // 2, q, 2 * q)]
        yield from ((size, size, True, parts) for size in sizes)
        yield from ((q, k, False, parts) for q, k in rectangles)


def _call_seconds(place: Place, shape: _Shape, repeats: int) -> list[float]:
    """[forward, backward] of one call."""
    queries, keys, causal, parts = shape
    kernel, call, scale = place.choose(parts), dense_call(queries, keys, causal), place.workload.head_dim**-0.5
    q, k, v, grad_out = place.qkv(queries, keys, parts)
    forward = partial(kernel.forward, q, k, v, call, scale=scale)
    backward = partial(kernel.backward, grad_out, q, k, v, *forward(), call, scale=scale)
    return [sustained_seconds(work, place.device, repeats) for work in (forward, backward)]


def _tflops(sample: KernelSample, workload: Workload) -> float:
    q = sample.num_queries
    pairs = q * (q + 1) // 2 if sample.causal else q * sample.num_keys
    return workload.flops(pairs, Heads(0, sample.parts), sample.backward) / sample.seconds / 1e12


def _merge_gibps(place: Place, effort: Effort) -> float:
    """Bytes read and written per second by the merge of two partial outputs."""
    tokens, work = effort.max_tokens // 4, place.workload
    outs = [place.random(tokens, work.num_heads, work.value_dim) for _ in range(3)]
    lses = [
        torch.randn(1, work.num_heads, tokens, device=place.device, dtype=sum_dtype(place.dtype)).permute(2, 0, 1)
        for _ in outs
    ]
    parts = [Partial(0, 0, out, lse) for out, lse in zip(outs[1:], lses[1:], strict=True)]
    seconds = sustained_seconds(lambda: merge_partials(parts, outs[0], lses[0]), place.device, effort.repeats)
    return 3 * tokens * work.token_bytes(Kind.OUT) / seconds / GIB


def _doubled(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to last."""
    return [first << i for i in range(max(1, (last // first).bit_length()))]
