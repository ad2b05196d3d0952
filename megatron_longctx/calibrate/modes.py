"""Measuring whole steps of the modes that are fastest by simulation, by which their order is corrected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from ..attention import ContextParallelAttention
from ..comm import gather_objects
from ..schedules import MODES, Costs, Mode, Target, Workload
from ..schedules.cost import ModeSample
from ..schedules.mask import causal
from ..schedules.modes import SearchContext
from ..schedules.modes.ulysses import Ulysses
from ..schedules.select import Candidate, Problem, rank_modes
from ..topology import Cluster
from .kernels import Place
from .timing import step_seconds, training_step

_CLOSE, _MOST = 1.3, 8
"""Modes are measured that are simulated to take at most so many times what the fastest takes; so many of them."""
_LONG_S = 0.2
_STEPS, _STEPS_OF_LONG, _ALL_STEPS = 6, 3, 10
"""That are timed in a row; with those before them."""
_BUDGET_S = 20.0
"""Of a length: modes that it does not last for are left out."""


def every_mode(n: int, workload: Workload, cluster: Cluster, length: int = 0) -> list[Mode]:
    """All modes for `n` ranks: what `auto` considers, and Ulysses in two chunks of the heads."""
    context = SearchContext(n, length, workload.num_kv_heads, cluster)
    found: list[Mode] = []
    for mode in MODES.values():
        with suppress(ValueError):
            found += mode.candidates(context)
    return found if Ulysses(2) in found else [*found, Ulysses(2)]


def worth_measuring(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Of modes, the fastest by simulation first, those that are close to it, as many as the time suffices for."""
    if not ranking:
        return []
    fastest = ranking[0].seconds
    close = [candidate for candidate in ranking[:_MOST] if candidate.seconds <= _CLOSE * fastest]
    return close[: int(_BUDGET_S / (_ALL_STEPS * fastest))]


def mode_samples(place: Place, cluster: Cluster, costs: Costs, lengths: Sequence[int]) -> tuple[ModeSample, ...]:
    """Whole steps, forward and backward, over sequences of so many tokens, but those that take too long. All ranks call
    this at once, and get the same answer. costs: what they are simulated with.

    Forward and backward are corrected alike: between them nothing holds ranks together.
    """
    assert place.links is not None
    target, found = Target(place.workload, place.choose().takes, place.links.hosts), []
    for length in lengths:
        problem = Problem(place.n, causal(length), target, keep_received="auto")
        modes = every_mode(place.n, place.workload, cluster, length)
        ranking = [each for each in rank_modes(problem, cluster, costs, candidates=modes) if not each.reason]
        # The same on all ranks, whatever each has found.
        chosen = gather_objects(place.group, [each.name for each in worth_measuring(ranking)])[0]
        for candidate in sorted((each for each in ranking if each.name in chosen), key=lambda each: each.name):
            ratio = _seconds(place, candidate, length) / candidate.seconds
            found += [ModeSample(candidate.name, length, backward, ratio) for backward in (False, True)]
    return tuple(found)


def _seconds(place: Place, candidate: Candidate, length: int) -> float:
    """Of a whole step of one layer, of the slowest rank."""
    assert candidate.mode is not None and place.links is not None
    transport = place.links.name
    attention = ContextParallelAttention(place.group, schedule=candidate.mode, kernel=place.kernel, transport=transport)
    tokens = attention.layout(length).num_tokens(dist.get_rank(place.group))
    q, k, v, grad_out = place.qkv(tokens, tokens)
    step = training_step(partial(attention, mask=length), (q, k, v), grad_out)
    count = _STEPS_OF_LONG if candidate.seconds > _LONG_S else _STEPS
    return step_seconds(step, place.group, place.device, count)[0]
