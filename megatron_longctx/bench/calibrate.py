"""Measuring what the simulator needs to know: links, messages, kernel calls, elementwise work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..comm import (
    Exchange,
    MixedTransport,
    Outbox,
    P2PTransport,
    PeerTransport,
    Sent,
    choose_transport,
    transport_name,
)
from ..kernels import AttentionKernel, KernelRequest, choose, merge_into
from ..metrics.environment import environment
from ..schedules.calibration import Calibration
from ..schedules.cost import BACKWARD_FLOPS, GIB, Costs, KernelSample, MessageSample, Workload
from ..topology import Cluster, Device, to_cluster
from ..topology.measure import measure_links
from .calibrate_host import host_operation_seconds
from .calibrate_modes import Modes
from .timing import powers_of_two, put_under_load, sustained_seconds

_CUDA_MESSAGES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
_CPU_MESSAGES = (2**12, 2**16, 2**20)
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Effort:
    """How much is measured. max_tokens: longest kernel call with all heads; parts p go to p times as many, but not to
    more than a sequence over all ranks has. length: of the sequences that a job at hand has, whose whole passes are
    measured too."""

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
        """Tokens of the sequences whose whole passes are measured: what short and long ones have (one on CPUs), and
        `length`, unless all of these are longer."""
        wanted = (4096, 16384) if device.type == "cuda" else (64,)
        of_rank = [tokens for tokens in wanted if tokens <= self.max_tokens] or [self.max_tokens]
        lengths = [ranks * tokens for tokens in of_rank]
        if self.length is not None and self.length >= lengths[0]:
            lengths.append(self.length)
        return tuple(sorted(set(lengths)))


def calibrate(
    group: dist.ProcessGroup,
    device: torch.device,
    workload: Workload,
    choice: tuple[str, str] = ("auto", "auto"),
    effort: Effort | None = None,
) -> Calibration:
    """Measure; every rank of `group` calls this, all at once, and gets the same answer.

    Args:
        group: two ranks or more; gloo with a CPU device, NCCL with this rank's CUDA device.
        workload: heads and element size of the kernel calls.
        choice: kernel (a name in `kernels.PROVIDERS`, or `auto`) and transport (auto, peer or p2p).

    Raises:
        ValueError: one rank only, or a kernel that cannot serve.
    """
    effort = effort or Effort.of(device)
    kernel, transport = choice
    chosen = choose(kernel, _request(workload, device))
    cluster = measured_cluster(group, device)
    chosen_links = choose_transport(transport, group, device)
    # The slowest link counts, and between hosts messages go point to point.
    links = chosen_links.messages if isinstance(chosen_links, MixedTransport) else chosen_links
    messages, message_s = _messages(links)
    costs = kernel_costs(group, device, workload, kernel, effort)
    costs = replace(costs, message_s=message_s, messages=messages)
    if device.type == "cuda":  # a CPU attends itself, and its calls and messages are timed with what issuing them takes
        varying = choose(kernel, replace(_request(workload, device), varying=True))
        costs = replace(
            costs,
            blocking=_blocking(links, workload, chosen),
            host_operation_s=host_operation_seconds(chosen_links, varying, workload, _DTYPES[workload.element_bytes]),
        )
    name = transport_name(chosen_links)
    if cluster.nodes == 1:
        how = Modes(group, device, workload, _DTYPES[workload.element_bytes], (kernel, name))
        costs = replace(costs, modes=how.samples(cluster, costs, effort.mode_lengths(device, cluster.n)))
    facts = environment()
    return Calibration(str(facts["device"]), chosen.name, name, cluster, replace(workload, batch=1), costs, facts)


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


class _Exchanges:
    """Every rank sends `size` bytes to each of the ranks `shifts` further, and receives as many."""

    def __init__(self, links: P2PTransport | PeerTransport, size: int, shifts: Sequence[int]) -> None:
        self._links = links
        rank, n = links.rank, links.world
        self._peers = [(rank + by) % n for by in shifts]
        into = torch.empty(size * len(shifts), dtype=torch.uint8, device=links.device)
        self._receives = [(into[i * size : (i + 1) * size], (rank - by) % n) for i, by in enumerate(shifts)]
        if isinstance(links, PeerTransport):
            sends = tuple(Sent(peer, i * size, size) for i, peer in enumerate(self._peers))
            self._mailbox = links.mailbox(Outbox({}, size * len(shifts), (sends,)))
        else:
            out = torch.zeros_like(into)
            self._sends = [(out[i * size : (i + 1) * size], peer) for i, peer in enumerate(self._peers)]

    def start(self) -> Exchange:
        """As in a plan's step: the message is issued first, and may start when the call before it is done."""
        if isinstance(self._links, PeerTransport):
            self._mailbox.begin()
            return self._mailbox.start(0, (), self._receives, [self._links.now()])
        return self._links.start(self._sends, self._receives, [self._links.now()])

    def wait(self, exchange: Exchange) -> None:
        (self._mailbox if isinstance(self._links, PeerTransport) else self._links).wait(exchange)

    def seconds(self, beside: Callable[[], object] | None = None) -> float:
        """Of an exchange, alone or with something issued after its start, which also loads the device before."""

        def once() -> None:
            exchange = self.start()
            if beside is not None:
                beside()
            self.wait(exchange)

        return float(_agreed(self._links.group, lambda: [_steady_seconds(once, self._links.device, beside)])[0])


def _messages(links: P2PTransport | PeerTransport) -> tuple[tuple[MessageSample, ...], float]:
    """Times of sending to the next rank and to all others at once, by size; what each further message costs."""
    sizes: tuple[int, ...] = _CUDA_MESSAGES if links.device.type == "cuda" else _CPU_MESSAGES
    others = links.world - 1
    samples = [MessageSample(size, 1, _Exchanges(links, size, [1]).seconds()) for size in sizes]
    if others > 1:
        small = tuple(size for size in sizes if size * others <= sizes[-1])
        samples += [MessageSample(s, others, _Exchanges(links, s, range(1, others + 1)).seconds()) for s in small]
    many = 8
    more = _Exchanges(links, 1024, [1] * many).seconds() - _Exchanges(links, 1024, [1]).seconds()
    return tuple(samples), max(more / (2 * (many - 1)), 0.0)  # each is a send and a receive


def _blocking(links: P2PTransport | PeerTransport, workload: Workload, kernel: AttentionKernel) -> float:
    """Share of a message's time that is added to the kernel call that runs beside it."""
    request = _request(workload, links.device)
    q = _random(8192, workload.num_heads, request, links.device)
    k, v = (_random(8192, workload.num_kv_heads, request, links.device) for _ in range(2))

    def call() -> object:
        return kernel.forward(q, k, v, causal=False, scale=1.0)

    exchanges = _Exchanges(links, 2**27, [1])
    alone = float(_agreed(links.group, lambda: [_steady_seconds(call, links.device, call)])[0])
    return min(1.0, max(0.0, (exchanges.seconds(call) - alone) / exchanges.seconds()))


def _steady_seconds(
    work: Callable[[], object], device: torch.device, load: Callable[[], object] | None = None, repeats: int = 12
) -> float:
    """Seconds of one of many in a row, by the clock: what the host takes to issue them counts.

    load: puts the device under load before.
    """
    if load is not None:
        put_under_load(load, device)
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
    halves = 2 * ranks  # parts of heads that are exchanged in two chunks
    for parts in powers_of_two(1, halves if workload.num_kv_heads % halves == 0 else ranks):
        if workload.num_heads % parts:
            continue
        request = _request(workload, device, parts)
        chosen = choose(kernel, request)
        sizes = powers_of_two(effort.min_tokens, effort.max_tokens * min(parts, ranks))
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
        sustained_seconds(lambda: kernel.forward(q, k, v, causal=causal, scale=scale), device, repeats),
        sustained_seconds(
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
    seconds = sustained_seconds(lambda: merge_into(accumulated, sums, out, lse), device, effort.repeats)
    size = out.numel() * (workload.element_bytes + 2 * workload.accumulator_bytes)
    return size / seconds / GIB
