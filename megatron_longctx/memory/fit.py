"""Does a job fit, what to change where it does not, and how long a sequence would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..config import MAX_TOKENS, RECOMPUTES, Config
from ..errors import refuse
from ..topology.cluster import GIB
from .model import OFFLOAD, predict, saved_bytes
from .shapes import Job

COMFORT = 0.9
"""Share of a device that live tensors may take without a warning: the caching allocator reserved up to 15% more than
was live in recorded runs."""
_CHEAPEST_FIRST = RECOMPUTES[:1] + RECOMPUTES[2:] + RECOMPUTES[1:2]  # in time: `layer` runs attention twice
_CHUNK, _TILE = 4096, 16384
"""Tokens at once of the LM head and of an MLP to advise: many enough for long matrix products, few beside a layer."""


def check(job: Job, capacity: int, host_capacity: int | None = None) -> str | None:
    """Refuse a job whose live tensors alone do not fit.

    Args:
        capacity: bytes of a rank's device. host_capacity: bytes of host memory for each rank, None if unknown.

    Returns:
        a warning where it will be close, else None.

    Raises:
        ValueError: says how much is needed and what to change.
    """
    found = predict(job)
    if host_capacity is not None and found.host_bytes > host_capacity:
        offload = job.config.recompute.mode == OFFLOAD
        raise refuse(
            "recompute.mode" if offload else "optim.states_on_host",
            job.config.recompute.mode if offload else True,
            f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; it takes {found.host_bytes / GIB:.1f}",
            "Set recompute=attention_output or layer, or shorten data.seq_length." if offload else "Set it to false.",
        )
    advice = "" if found.num_bytes <= COMFORT * capacity else _advice(job, int(COMFORT * capacity), host_capacity)
    if found.num_bytes > capacity:
        raise refuse(
            "data.seq_length",
            job.config.data.seq_length,
            f"a step within the device's {capacity / GIB:.1f} GiB; it is predicted to take "
            f"{found.num_bytes / GIB:.1f} GiB, most in {found.peak.name}",
            f"{advice} train.check_memory=false tries it all the same.",
        )
    train, saved = job.config.train, saved_bytes(job)
    if train.save and train.async_save and host_capacity is not None and found.host_bytes + saved > host_capacity:
        taken = f"the copy of a checkpoint takes {saved / GIB:.1f}"
        raise refuse(
            "train.async_save",
            True,
            f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; {taken}",
            "Set it to false.",
        )
    if not advice:
        return None
    return (
        f"a step is predicted to take {found.num_bytes / GIB:.1f} of the device's {capacity / GIB:.1f} GiB, "
        f"and the allocator some per cent more: it may run out. {advice}"
    )


def max_length(job: Job, capacity: int) -> int:
    """The longest `data.seq_length` whose step fits, a multiple of what divides evenly among the ranks; 0: none.

    No more than `MAX_TOKENS`.

    Args:
        capacity: bytes for live tensors.
    """
    par = job.config.parallelism
    unit = 2 * par.context_parallel_size * par.tensor_parallel_size

    def fits(units: int) -> bool:
        return predict(replace(job, config=_with_length(job.config, units * unit))).num_bytes <= capacity

    if not fits(1):
        return 0
    fitting = 1
    most = MAX_TOKENS // unit
    while 2 * fitting <= most and fits(2 * fitting):
        fitting *= 2
    step = fitting
    while step := step // 2:
        if fitting + step <= most and fits(fitting + step):
            fitting += step
    return fitting * unit


def _with_length(config: Config, length: int) -> Config:
    return replace(config, data=replace(config.data, seq_length=length))


def _advice(job: Job, capacity: int, host_capacity: int | None) -> str:
    """The first change that fits, from the cheapest on; else the longest sequence, else more ranks."""
    savers = [
        (words, saver)
        for words, saver in _savers(job)
        if predict(saver).host_bytes <= (host_capacity or 0)  # of a host that is not known nothing is asked
    ]
    for words, saver in savers:
        found = predict(saver)
        if found.num_bytes <= capacity:
            return f"Set {words} ({found.num_bytes / GIB:.1f} GiB)."
    longest = {words: max_length(saver, capacity) for words, saver in [("", job), *savers]}
    words = max(longest, key=lambda words: longest[words])
    if longest[words]:
        settings = f"{words} and data" if words else "data"
        return f"Set {settings}.seq_length={longest[words]} or less, or raise parallelism.context_parallel_size."
    return "Raise parallelism.tensor_parallel_size or pipeline_parallel_size, or take a smaller model."


def _savers(job: Job) -> Iterator[tuple[str, Job]]:
    """Settings that need less memory, in words; those that cost less time first."""
    now, before = job.config.recompute, ""
    if job.keeps_received:
        before = "attention.keep_received=false"
        job = replace(job, config=replace(job.config, attention=replace(job.config.attention, keep_received="false")))
        yield before, job
    chunk, tile = now.head_chunk_tokens or _CHUNK, now.mlp_tile_tokens or _TILE
    for mode in _CHEAPEST_FIRST[_CHEAPEST_FIRST.index(now.mode) :]:
        for changed in (
            replace(now, mode=mode),
            replace(now, mode=mode, head_chunk_tokens=chunk),
            replace(now, mode=mode, head_chunk_tokens=chunk, mlp_tile_tokens=tile),
        ):
            names = ("mode", "head_chunk_tokens", "mlp_tile_tokens")
            words = [f"recompute.{x}={getattr(changed, x)}" for x in names if getattr(changed, x) != getattr(now, x)]
            if words:
                yield (
                    " ".join([before, *words] if before else words),
                    replace(job, config=replace(job.config, recompute=changed)),
                )
