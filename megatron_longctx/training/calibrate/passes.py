"""Measures whole passes: the host's time per operation, and steps of modes, which correct the simulated order."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ...config.cluster import Cluster
from ...core.attention import ContextParallelAttention
from ...core.attention.execute import Pass, Runtime
from ...core.attention.kv_format import Shapes
from ...core.comm import BufferPool, gather_objects
from ...core.plans import Kind, Recorder, Target
from ...core.plans.cache_modes import CACHE_MODES
from ...core.plans.mask import causal
from ...inference.batch import Batch
from ...inference.cache_manager import CacheManager
from ...inference.cached_attention import CacheShape
from ...planner.choose_mode import Candidate, Problem, rank_modes
from ...planner.cost import Costs, ModeSample
from ...planner.simulate import simulate
from .measure import Testbed, mean_seconds, median_over_ranks, step_seconds, training_step

_CACHED, _NEW = 64, 16
"""Tokens per rank of the pass that measures the host: kernel calls are as short as possible."""
_PASSES = 30
_CLOSE, _MAX_MODES = 1.3, 8
"""Modes are measured if their simulated time is at most this factor above the fastest; this many at most."""
_LONG_S = 0.2
_STEPS, _STEPS_OF_LONG, _ALL_STEPS = 6, 3, 10
"""Timed steps in a row, of short and of long steps; the last includes those that warm up."""
_BUDGET_S = 20.0
"""Seconds per length. Modes that exceed it are not measured."""


def host_operation_seconds(testbed: Testbed, cluster: Cluster, costs: Costs) -> float:
    """Return the host's seconds per operation (`Simulation.operations`), for the median rank and inference mode.

    They are measured by passes that need almost no device time. The host's work for the rest of a layer, or for a
    prompt as a whole, is not included. All ranks call this together and get the same result.
    """
    assert testbed.transport is not None
    n, work = testbed.n, testbed.workload
    manager = CacheManager(n, (_CACHED + _NEW) // _NEW, _NEW)
    session = manager.open()
    manager.append({session: n * _CACHED})
    batch = Batch(n, manager.slots_per_rank, manager.append({session: n * _NEW}))
    shape = CacheShape(1, work.num_heads, work.num_kv_heads, work.head_dim, testbed.dtype)
    runtime = Runtime(testbed.choose_kernel(packed=True), testbed.transport, BufferPool(testbed.device))
    target = Target(shape.workload, runtime.kernel.takes, runtime.over_peers)

    def measure() -> list[float]:
        seconds = []
        for mode in CACHE_MODES:
            recorder = Recorder(batch.plan(mode), target)
            operations = simulate(recorder.plan, cluster, target, costs).operations
            seconds.append(_pass_seconds(testbed, batch, recorder, shape, runtime) / operations)
        return [statistics.median(seconds)]

    return median_over_ranks(testbed.group, measure)[0]


@torch.inference_mode()
def _pass_seconds(testbed: Testbed, batch: Batch, recorder: Recorder, shape: CacheShape, runtime: Runtime) -> float:
    rank = torch.distributed.get_rank(testbed.group)
    shapes = Shapes(shape.workload, shape.dtype, testbed.device, shape.kv, shape.kv)
    each = Pass(recorder, rank, shapes, runtime, packed=True)
    q = testbed.random(batch.num_rows(rank), shape.num_heads)
    cache = shape.kv.spec(batch.slots, 1, shape.num_kv_heads, testbed.device).empty().normal_()

    def run() -> None:
        each.run({Kind.Q: (q,), Kind.KV: (cache,)}, shape.head_dim**-0.5)

    mean_seconds(run, testbed.device, 3)
    return statistics.median(mean_seconds(run, testbed.device, _PASSES) for _ in range(3))


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
