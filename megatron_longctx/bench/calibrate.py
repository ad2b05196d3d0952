"""Measuring what the simulator needs to know: links, messages, kernel calls, elementwise work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..comm import P2PTransport
from ..kernels import AttentionKernel, KernelRequest, choose, merge_into
from ..metrics.environment import environment
from ..schedules.calibration import Calibration
from ..schedules.cost import BACKWARD_FLOPS, GIB, Costs, KernelSample, MessageSample, Workload
from ..topology import Cluster, Device, to_cluster
from ..topology.measure import measure_links
from .timing import median_seconds, powers_of_two

_CUDA_MESSAGES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
_CPU_MESSAGES = (2**12, 2**16, 2**20)
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Effort:
    """How much is measured. max_tokens: longest kernel call with all heads; parts p go to p times as many."""

    max_tokens: int
    min_tokens: int
    repeats: int

    @classmethod
    def of(cls, device: torch.device, max_tokens: int | None = None) -> Effort:
        cuda = device.type == "cuda"
        most = max_tokens or (32768 if cuda else 1024)
        return cls(most, min(most, 512 if cuda else 64), 5 if cuda else 3)


def calibrate(
    group: dist.ProcessGroup,
    device: torch.device,
    workload: Workload,
    kernel: str = "auto",
    effort: Effort | None = None,
) -> Calibration:
    """Measure; every rank of `group` calls this, all at once, and gets the same answer.

    Args:
        group: two ranks or more; gloo with a CPU device, NCCL with this rank's CUDA device.
        workload: heads and element size of the kernel calls.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.

    Raises:
        ValueError: one rank only, or a kernel that cannot serve.
    """
    effort = effort or Effort.of(device)
    chosen = choose(kernel, _request(workload, device))
    cluster = measured_cluster(group, device)
    messages, message_s = _messages(group, device)
    costs = kernel_costs(group, device, workload, kernel, effort)
    blocking = _blocking(group, device, workload, chosen) if device.type == "cuda" else 0.0
    costs = replace(costs, message_s=message_s, messages=messages, blocking=blocking)
    facts = environment()
    return Calibration(str(facts["device"]), chosen.name, cluster, replace(workload, batch=1), costs, facts)


def kernel_costs(
    group: dist.ProcessGroup, device: torch.device, workload: Workload, kernel: str, effort: Effort
) -> Costs:
    """What computing takes, measured by all ranks at once; messages are taken to cost no more than their links say."""
    samples = _agreed(group, lambda: list(_kernels(dist.get_world_size(group), device, workload, kernel, effort)))
    forward, backward = (_best_tflops(samples, workload, way) for way in (False, True))
    merge_gibps = _agreed(group, lambda: [_merge_gibps(device, workload, effort)])[0]
    return Costs(forward, backward, merge_gibps=merge_gibps, step_s=0.0, message_s=0.0, kernels=tuple(samples))


def _request(workload: Workload, device: torch.device, parts: int = 1) -> KernelRequest:
    heads, kv = max(1, workload.num_heads // parts), max(1, workload.num_kv_heads // parts)
    return KernelRequest(device.type, _DTYPES[workload.element_bytes], workload.head_dim, heads, kv)


def _agreed(group: dist.ProcessGroup, measure: Callable[[], list[Any]]) -> list[Any]:
    """The median over ranks of numbers, or of samples' seconds, measured by all at once."""
    dist.barrier(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, measure(), group=group)
    return [_middle(values) for values in zip(*found, strict=True)]


def _middle(values: Sequence[Any]) -> Any:
    if isinstance(values[0], KernelSample):
        return values[0]._replace(seconds=statistics.median(sample.seconds for sample in values))
    return statistics.median(values)


def measured_cluster(group: dist.ProcessGroup, device: torch.device) -> Cluster:
    """The links between the ranks of `group`, all of which call this."""
    sizes = (8, 2**26) if device.type == "cuda" else (8, 2**20)
    name = str(environment()["device"])
    memory = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    return to_cluster(measure_links(group, device, sizes=sizes), "measured", Device(name, memory_gib=memory))


def _messages(group: dist.ProcessGroup, device: torch.device) -> tuple[tuple[MessageSample, ...], float]:
    """Times of sending to the next rank and to all others at once, by size; what each further message costs."""
    transport = P2PTransport(group, device)
    rank, n = transport.rank, transport.world
    sizes: tuple[int, ...] = _CUDA_MESSAGES if device.type == "cuda" else _CPU_MESSAGES
    out = torch.zeros(sizes[-1], dtype=torch.uint8, device=device)
    into = torch.zeros_like(out)

    def send(size: int, shifts: Sequence[int]) -> None:
        sends = [(out[i * size : (i + 1) * size], (rank + by) % n) for i, by in enumerate(shifts)]
        receives = [(into[i * size : (i + 1) * size], (rank - by) % n) for i, by in enumerate(shifts)]
        transport.wait(transport.start(sends, receives))

    def seconds(size: int, shifts: Sequence[int]) -> float:
        return float(_agreed(group, lambda: [_steady_seconds(lambda: send(size, shifts), device)])[0])

    samples = [MessageSample(size, 1, seconds(size, [1])) for size in sizes]
    if n > 2:
        sizes = tuple(size for size in sizes if size * (n - 1) <= out.numel())
        samples += [MessageSample(size, n - 1, seconds(size, range(1, n))) for size in sizes]
    many = 8
    more = (seconds(1024, [1] * many) - seconds(1024, [1])) / (2 * (many - 1))  # a shift is a send and a receive
    return tuple(samples), max(more, 0.0)


def _blocking(group: dist.ProcessGroup, device: torch.device, workload: Workload, kernel: AttentionKernel) -> float:
    """Share of a message's time that is added to the kernel calls it runs beside."""
    transport = P2PTransport(group, device)
    rank, n = transport.rank, transport.world
    request = _request(workload, device)
    q = _random(8192, workload.num_heads, request, device)
    k, v = (_random(8192, workload.num_kv_heads, request, device) for _ in range(2))
    out = torch.zeros(2**27, dtype=torch.uint8, device=device)
    into = torch.zeros_like(out)

    def step(message: bool, call: bool) -> None:
        # As in a plan's step: the message is issued first, and may start when the call before it is done.
        after = [transport.now()]
        under_way = transport.start([(out, (rank + 1) % n)], [(into, (rank - 1) % n)], after) if message else None
        if call:
            kernel.forward(q, k, v, causal=False, scale=1.0)
        if under_way is not None:
            transport.wait(under_way)

    def seconds(message: bool, call: bool) -> float:
        return float(_agreed(group, lambda: [_steady_seconds(lambda: step(message, call), device)])[0])

    both, call, message = seconds(True, True), seconds(False, True), seconds(True, False)
    return min(1.0, max(0.0, (both - call) / message))


def _steady_seconds(work: Callable[[], object], device: torch.device, repeats: int = 12) -> float:
    """Seconds of one of many in a row, by the clock: what the host takes to issue them counts."""
    for _ in range(3):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _kernels(
    ranks: int, device: torch.device, workload: Workload, kernel: str, effort: Effort
) -> Iterator[KernelSample]:
    for parts in (part for part in powers_of_two(1, ranks) if workload.num_heads % part == 0):
        request = _request(workload, device, parts)
        chosen = choose(kernel, request)
        sizes = powers_of_two(effort.min_tokens, effort.max_tokens * parts)
        rectangles = [(q, k) for q in sizes for k in sizes if q * k <= effort.max_tokens**2]
        if parts > 1:  # what modes that share heads call: long sequences, nearly square; every other size is enough
            sizes = sizes[::-2][::-1]
            rectangles = [(q, k) for q in sizes for k in (q // 2, q, 2 * q)]
        for num_queries, num_keys, causal in [(q, q, True) for q in sizes] + [(q, k, False) for q, k in rectangles]:
            seconds = _call_seconds(chosen, request, (num_queries, num_keys, causal), device, effort.repeats)
            for backward in (False, True):
                yield KernelSample(num_queries, num_keys, causal, backward, parts, seconds[backward])


def _call_seconds(
    kernel: AttentionKernel, request: KernelRequest, shape: tuple[int, int, bool], device: torch.device, repeats: int
) -> tuple[float, float]:
    """(forward, backward) of one call of (queries, keys, causal)."""
    num_queries, num_keys, causal = shape
    q, grad_out = (_random(num_queries, request.num_heads, request, device) for _ in range(2))
    k, v = (_random(num_keys, request.num_kv_heads, request, device) for _ in range(2))
    scale = request.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    return (
        median_seconds(lambda: kernel.forward(q, k, v, causal=causal, scale=scale), device, repeats),
        median_seconds(
            lambda: kernel.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale), device, repeats
        ),
    )


def _random(tokens: int, heads: int, request: KernelRequest, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, 1, heads, request.head_dim, device=device).to(request.dtype)


def _best_tflops(samples: Sequence[KernelSample], workload: Workload, backward: bool) -> float:
    """Of the fastest measured call: for shapes that no sample is near."""
    rates = [_flops(sample, workload) / sample.seconds for sample in samples if sample.backward == backward]
    return max(rates) / 1e12


def _flops(sample: KernelSample, workload: Workload) -> float:
    q = sample.num_queries
    pairs = q * (q + 1) // 2 if sample.causal else q * sample.num_keys
    heads = max(1, workload.num_heads // sample.parts)
    return 4.0 * pairs * heads * workload.head_dim * (BACKWARD_FLOPS if sample.backward else 1.0)


def _merge_gibps(device: torch.device, workload: Workload, effort: Effort) -> float:
    """Bytes per second of merging a partial output into what was accumulated."""
    tokens = effort.max_tokens // 4
    request = _request(workload, device)
    out = _random(tokens, workload.num_heads, request, device)
    accumulated = out.to(torch.float64 if request.dtype == torch.float64 else torch.float32)
    lse = torch.randn(1, workload.num_heads, tokens, device=device, dtype=accumulated.dtype).permute(2, 0, 1)
    sums = lse.clone()
    seconds = median_seconds(lambda: merge_into(accumulated, sums, out, lse), device, effort.repeats)
    size = out.numel() * (workload.element_bytes + 2 * workload.accumulator_bytes)
    return size / seconds / GIB
