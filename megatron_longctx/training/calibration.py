"""The `calibrate` verb: measures links, messages, kernels and whole steps of modes on this machine.

Messages are measured through the channel of a pass that does nothing else, kernels in the shapes that modes need, and
modes in whole training steps. The file that `planner.calibration` reads gets the results.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..config import Config, workload_of
from ..config.cluster import Cluster, Device, save_cluster
from ..config.environment import environment
from ..config.gpus import RANKS_PER_GPU, ranks_per_gpu, refuse_peer
from ..core.attention import ContextParallelAttention
from ..core.comm import choose_transport, gather_objects
from ..core.errors import refuse
from ..core.kernels import Partial, dense_call, merge_partials
from ..core.kernels.interface import sum_dtype
from ..core.layout import contiguous
from ..core.plans import Attend, Block, Heads, Kind, Move, Plan, Recorder, Step, Target, Workload
from ..core.plans.mask import causal, full
from ..planner.calibration import Calibration, calibration_path, save_calibration
from ..planner.choose_mode import Candidate, Problem, rank_modes
from ..planner.cost import GIB, Costs, KernelSample, MessageSample, ModeSample, attention_flops
from ..planner.measure_links import measure_links, to_cluster
from .compose import compose_config
from .measure import (
    Effort,
    Testbed,
    mean_seconds,
    median_over_ranks,
    step_seconds,
    sustained_seconds,
    training_step,
    warm_up,
)
from .ranks import Ranks, run_on_ranks, world_group

logger = logging.getLogger(__name__)
_FEWEST_TOKENS = 64  # with fewer, rates cannot be fitted


def run(settings: Sequence[str], max_tokens: int | None = None, links: Path | None = None) -> None:
    """Measure on `parallelism.context_parallel_size` ranks, or one per GPU if it is 1, and store the result for `auto`.

    Refuse settings that cannot be measured. Raises JobFailed: a rank failed.

    Args:
        max_tokens: the longest kernel call with all heads; None for a default of the device.
        links: measure only links, and write them as this cluster file.
    """
    if max_tokens is not None and max_tokens < _FEWEST_TOKENS:
        raise refuse("--max-tokens", max_tokens, f"{_FEWEST_TOKENS} or more", "Raise it, or leave it out.")
    if links is not None and max_tokens is not None:
        raise refuse("--max-tokens", max_tokens, "none beside --links, which times no kernels", "Leave one out.")
    if links is not None and (links.suffix not in (".yaml", ".yml") or not os.access(links.parent, os.W_OK)):
        raise refuse("--links", links, "a .yaml file in a folder that can be written", "Give another file name.")
    if ranks_per_gpu() > 1:
        raise refuse(RANKS_PER_GPU, ranks_per_gpu(), "a GPU for each rank where times are measured", "Unset it.")
    config = compose_config(settings)
    n = config.parallelism.context_parallel_size
    ranks = Ranks.of(n if n > 1 else None, config.train.device)
    if links is not None:
        save_cluster(run_on_ranks(ranks, _measure_links, ranks), links)
        print(links.read_text(), end="")
        logger.info("written to %s", links)
    else:
        calibrate(ranks, config, max_tokens)


def calibrate(ranks: Ranks, config: Config, max_tokens: int | None = None) -> Path:
    """Measure `ranks` for a configured model, store the result, and return its file. Errors are those of `run`."""
    if ranks.device == "cpu":  # refused before ranks start; on GPUs, it would initialize CUDA here
        refuse_peer(config, "attention.transport", reduces=False)
        _testbed(None, torch.device("cpu"), config).choose_kernel()
    calibration: Calibration = run_on_ranks(ranks, _measure, ranks, config, max_tokens)
    path = calibration_path(calibration.device, calibration.cluster.n, calibration.workload, calibration.transport)
    save_calibration(calibration, path)
    logger.info("%s\ncalibration written to %s", "\n".join(summary(calibration)), path)
    return path


def _measure_links(rank: int, ranks: Ranks) -> Cluster:
    return measured_cluster(world_group(), ranks.local_device)


def _measure(rank: int, ranks: Ranks, config: Config, max_tokens: int | None = None) -> Calibration:
    """Measure everything. All ranks call this together and get the same result."""
    group, device = world_group(), ranks.local_device
    effort = Effort.of(device, max_tokens, config.data.seq_length)
    testbed = _testbed(group, device, config)
    kernel = testbed.choose_kernel()
    transport = choose_transport(config.attention.transport, group, device)
    testbed = replace(testbed, transport=transport)
    cluster = measured_cluster(group, device)
    messages, message_s = message_costs(testbed)
    costs = replace(kernel_costs(testbed, effort), message_s=message_s, messages=messages)
    if device.type == "cuda":
        costs = replace(costs, blocking=blocking_share(testbed))
    if cluster.nodes == 1:
        costs = replace(costs, modes=mode_samples(testbed, cluster, costs, effort.mode_lengths(device, cluster.n)))
    facts = environment()
    return Calibration(str(facts["device"]), kernel.name, transport.name, cluster, testbed.workload, costs, facts)


def _testbed(group: Any, device: torch.device, config: Config) -> Testbed:
    return Testbed(group, device, replace(workload_of(config), batch=1), config.attention.kernel)


def summary(result: Calibration) -> list[str]:
    """Return lines with the rates of links and kernels, and the corrections of modes."""
    costs, link = result.costs, result.cluster.route(0, 1)
    modes = [mode for mode in costs.modes if not mode.backward]
    return [
        f"{result.device}: {link.gibps:.3g} GiB/s from rank to rank, latency {link.latency_s * 1e6:.1f} us; kernel "
        f"{result.kernel} up to {costs.forward_tflops:.3g} TFLOP/s forward, {costs.backward_tflops:.3g} backward",
        *(f"  {m.mode}, {m.length:,} tokens: {m.ratio:.2f} times the simulated time" for m in modes),
    ]


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


_CLOSE, _MAX_MODES = 1.3, 8
"""Modes are measured if their simulated time is at most this factor above the fastest; this many at most."""
_LONG_S = 0.2
_STEPS, _STEPS_OF_LONG, _ALL_STEPS = 6, 3, 10
"""Timed steps in a row, of short and of long steps; the last includes those that warm up."""
_BUDGET_S = 20.0  # Seconds per length. Modes that exceed it are not measured.


def modes_to_measure(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Return the modes of a ranking that are close to the fastest, as many as the time permits."""
    if not ranking:
        return []
    fastest = ranking[0].seconds
    close = [candidate for candidate in ranking[:_MAX_MODES] if candidate.seconds <= _CLOSE * fastest]
    return close[: int(_BUDGET_S / (_ALL_STEPS * fastest))]


def mode_samples(testbed: Testbed, cluster: Cluster, costs: Costs, lengths: Sequence[int]) -> tuple[ModeSample, ...]:
    """Measure whole steps, forward and backward, for each of `lengths`, except those that take too long.

    Forward and backward get the same correction, because nothing synchronizes ranks between them. All ranks call this
    together and get the same result. The simulation uses `costs`.
    """
    assert testbed.transport is not None
    target, samples = Target(testbed.workload, testbed.choose_kernel().takes, testbed.transport.over_peers), []
    for length in lengths:
        problem = Problem(testbed.n, causal(length), target, keep_received=None)
        ranking = [each for each in rank_modes(problem, cluster, costs) if not each.reason]
        # Rank 0's choice, because costs may differ among ranks.
        chosen = gather_objects(testbed.group, [each.name for each in modes_to_measure(ranking)])[0]
        for candidate in sorted((each for each in ranking if each.name in chosen), key=lambda each: each.name):
            ratio = _step_seconds(testbed, candidate, length) / candidate.seconds
            samples += [ModeSample(candidate.name, length, backward, ratio) for backward in (False, True)]
    return tuple(samples)


def _step_seconds(testbed: Testbed, candidate: Candidate, length: int) -> float:
    """Return the seconds of a whole step of one layer on the slowest rank."""
    assert candidate.mode is not None and testbed.transport is not None
    attention = ContextParallelAttention(
        testbed.group, schedule=candidate.mode, kernel=testbed.kernel, transport=testbed.transport.name
    )
    tokens = attention.layout(length).num_tokens(dist.get_rank(testbed.group))
    q, k, v, grad_out = testbed.qkv(tokens, tokens)
    step = training_step(partial(attention, mask=length), (q, k, v), grad_out)
    count = _STEPS_OF_LONG if candidate.seconds > _LONG_S else _STEPS
    return step_seconds(step, testbed.group, testbed.device, count)[0]
