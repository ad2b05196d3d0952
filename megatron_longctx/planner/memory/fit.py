"""Whether a job fits into memory, which settings to change if it does not, and the longest sequence that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ...config import MAX_TOKENS, RECOMPUTES, token_unit, validate
from ...config.cluster import GIB
from ...core.errors import refuse
from .model import OFFLOAD, checkpoint_bytes, predict
from .shapes import Job

SAFE_SHARE = 0.9
"""The share of a device that live tensors may take without a warning. In recorded runs, the caching allocator reserved
up to 15% more than was live."""
_CHEAPEST_FIRST = (  # in time: `layer` runs attention twice; with the share of attention's results that is kept
    *((mode, 1.0) for mode in RECOMPUTES if mode != "layer"), ("attention_output", 0.5), ("layer", 1.0),
)  # fmt: skip
_CHUNK, _TILE = 4096, 16384
"""The recommended tokens per piece of the LM head and of an MLP: enough for long matrix products, few for a layer."""


def check(job: Job, capacity: int, host_capacity: int | None = None) -> str | None:
    """Refuse a job whose live tensors alone do not fit.

    Args:
        capacity: bytes of a rank's device.
        host_capacity: bytes of host memory per rank; None if unknown.

    Returns:
        a warning if little memory is left, else None.

    Raises:
        ValueError: names the required memory and the settings to change.
    """
    prediction = predict(job)
    needed, on_host, train = prediction.num_bytes, prediction.host_bytes, job.config.train
    if host_capacity is not None and on_host > host_capacity:
        expected = f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; it takes {on_host / GIB:.1f}"
        if job.config.recompute.mode == OFFLOAD:
            remedy = "Set recompute=attention_output or layer, or shorten data.seq_length."
            raise refuse("recompute.mode", OFFLOAD, expected, remedy)
        raise refuse("optim.states_on_host", True, expected, "Set it to false.")
    advice = "" if needed <= SAFE_SHARE * capacity else _advice(job, int(SAFE_SHARE * capacity), host_capacity)
    if needed > capacity:
        raise refuse(
            "data.seq_length",
            job.config.data.seq_length,
            f"a step within the device's {capacity / GIB:.1f} GiB; it is predicted to take "
            f"{needed / GIB:.1f} GiB, most in {prediction.peak.name}",
            f"{advice} train.check_memory=false starts the run nevertheless.",
        )
    saved = checkpoint_bytes(job)
    if train.save and train.async_save and host_capacity is not None and on_host + saved > host_capacity:
        copy = f"the copy of a checkpoint takes {saved / GIB:.1f}"
        expected = f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; {copy}"
        raise refuse("train.async_save", True, expected, "Set it to false.")
    if not advice:
        return None
    return (
        f"a step is predicted to take {needed / GIB:.1f} of the device's {capacity / GIB:.1f} GiB, "
        f"and the allocator needs some per cent more: it may run out. {advice}"
    )


def max_length(job: Job, capacity: int) -> int:
    """Return the longest `data.seq_length` whose step fits, or 0 if none does.

    It is a multiple of the lengths that divide evenly among the ranks, and at most `MAX_TOKENS`.

    Args:
        capacity: bytes for live tensors.
    """
    par = job.config.parallelism
    unit = math.lcm(2 * par.context_parallel_size * par.tensor_parallel_size, token_unit(job.config))

    def fits(units: int) -> bool:
        return predict(with_length(job, units * unit)).num_bytes <= capacity

    if not fits(1):
        return 0
    fitting, most = 1, MAX_TOKENS // unit
    while 2 * fitting <= most and fits(2 * fitting):
        fitting *= 2
    step = fitting
    while step := step // 2:
        if fitting + step <= most and fits(fitting + step):
            fitting += step
    return fitting * unit


def with_length(job: Job, length: int) -> Job:
    """Return the job with sequences of `length` tokens."""
    return replace(job, config=replace(job.config, data=replace(job.config.data, seq_length=length)))


def _advice(job: Job, capacity: int, host_capacity: int | None) -> str:
    """Name the cheapest settings that fit, else the longest sequence with any settings, else more ranks."""
    alternatives = [
        (settings, cheaper)
        for settings, cheaper in _alternatives(job)
        if _is_valid(cheaper) and predict(cheaper).host_bytes <= (host_capacity or 0)  # an unknown host has no room
    ]
    for settings, cheaper in alternatives:
        needed = predict(cheaper).num_bytes
        if needed <= capacity:
            return f"Set {settings} ({needed / GIB:.1f} GiB)."
    longest = {settings: max_length(cheaper, capacity) for settings, cheaper in [("", job), *alternatives]}
    settings = max(longest, key=lambda settings: longest[settings])
    if longest[settings]:
        keys = f"{settings} and data" if settings else "data"
        return f"Set {keys}.seq_length={longest[settings]} or less, or raise parallelism.context_parallel_size."
    return "Raise parallelism.tensor_parallel_size or pipeline_parallel_size, or take a smaller model."


def _is_valid(job: Job) -> bool:
    """Whether settings go together: experts and delayed scales have no tiles, for example."""
    try:
        validate(job.config)
    except ValueError:
        return False
    return True


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield settings that need less memory, as text and applied to the job, ordered by their cost in time."""
    now, fetching = job.config.recompute, []
    if any(job.plan.kept):
        fetching = ["attention.keep_received=false"]
        job = replace(job, config=replace(job.config, attention=replace(job.config.attention, keep_received="false")))
        yield fetching[0], job
    chunk, tile = now.head_chunk_tokens or _CHUNK, now.mlp_tile_tokens or _TILE
    for mode, share in _CHEAPEST_FIRST[_CHEAPEST_FIRST.index((now.mode, 1.0)) :]:
        cheaper = replace(now, mode=mode, kept_results=1.0 if mode == "layer" else min(share, now.kept_results))
        for changed in (
            cheaper,
            replace(cheaper, head_chunk_tokens=chunk),
            replace(cheaper, head_chunk_tokens=chunk, mlp_tile_tokens=tile),
        ):
            names = ("mode", "kept_results", "head_chunk_tokens", "mlp_tile_tokens")
            words = [f"recompute.{x}={getattr(changed, x)}" for x in names if getattr(changed, x) != getattr(now, x)]
            if words:
                yield " ".join([*fetching, *words]), replace(job, config=replace(job.config, recompute=changed))
