"""A prediction in words, and what `megatron-longctx plan` says of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config import RECOMPUTES, Config
from ..errors import refuse
from ..topology import load_cluster
from ..topology.cluster import GIB
from .draw import draw
from .fit import COMFORT, max_length
from .model import Prediction, predict, saved_bytes
from .shapes import Job

_MOST_GIB = 10**6  # as of a cluster's devices
_BYTE_LEVEL_ENTRIES = 512  # of Megatron's byte-level tokenizer


def summary(job: Job) -> str:
    """One line."""
    found = predict(job)
    fixed = sum(term.num_bytes for term in found.always if not term.per_token)
    host = f", and {_size(found.host_bytes)} pinned on the host" if found.host_bytes else ""
    return (
        f"memory of a training step: {_size(found.num_bytes)} a rank, most in {found.peak.name}{host} "
        f"(recompute={job.config.recompute.mode}; {_size(fixed)} whatever the length)"
    )


def report(job: Job) -> str:
    """All terms, the other phases, and bytes per token."""
    found = predict(job)
    rows = [
        (term.name, term.num_bytes, _per_token(term.num_bytes, found) if term.per_token else "") for term in found.terms
    ]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{summary(job)}\nrank with the most tokens: {found.tokens:,}"]
    if job.config.parallelism.pipeline_parallel_size > 1:
        lines[0] += f"; pipeline stage {found.stage}"
    lines += [f"  {name:{width}}  {_size(size):>12}  {per_token:>16}".rstrip() for name, size, per_token in rows]
    lines.append(f"  {'sum':{width}}  {_size(found.num_bytes):>12}")
    others = [phase for phase in found.phases if phase is not found.peak]
    lines += [f"in {phase.name}: {_size(found.always_bytes + phase.num_bytes)}" for phase in others]
    if found.host_bytes:
        lines.append(f"on the host, pinned: {_size(found.host_bytes)} a rank")
    if job.config.train.save and job.config.train.async_save:
        lines.append(f"on the host, while a checkpoint is written: {_size(saved_bytes(job))} a rank")
    return "\n".join(lines)


def _per_token(num_bytes: int, found: Prediction) -> str:
    return f"{num_bytes / 1024 / max(found.tokens, 1):.1f} KiB a token"


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB // 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def planned_job(config: Config) -> Job:
    """The configured job, as far as the configuration alone says: one data-parallel rank where it does not.

    Raises:
        ValueError: a vocabulary that only the tokenizer knows.
    """
    model = config.model
    if model.vocab_size is None and config.data.tokenizer != "byte-level":
        raise refuse("model.vocab_size", None, "a number, to predict memory", "Set it to the tokenizer's size.")
    rounded = -(-_BYTE_LEVEL_ENTRIES // model.vocab_multiple) * model.vocab_multiple
    ranks = config.parallelism.data_parallel_size or 1
    return Job(config, model.vocab_size or rounded, ranks, fused=config.train.device != "cpu")


def brief(config: Config) -> list[str]:
    """The peak, and whether the cluster's devices hold it where they are known; or why it cannot be told."""
    try:
        job, capacity = planned_job(config), _capacity(config, None)
        return [summary(job), *([] if capacity is None else [_verdict(predict(job).num_bytes, capacity)])]
    except ValueError as error:
        return [f"memory of a training step: not known ({error})"]


def show(config: Config, picture: Path | None, device_gib: float | None = None) -> bool:
    """Print every term of the configured mode, and whether a device holds them; draw all modes into `picture`.

    Args:
        device_gib: memory of a device; None for what `parallelism.cluster` says, if it does.

    Returns:
        whether a step fits, as far as that is known.

    Raises:
        ValueError: a plan that cannot be built, a vocabulary that is not known.
    """
    job = planned_job(config)
    print(report(job))
    capacity, needed = _capacity(config, device_gib), predict(job).num_bytes
    if capacity is not None:
        print(_verdict(needed, capacity))
    if picture:
        bars = [(mode, predict(_with_mode(job, mode))) for mode in RECOMPUTES]
        draw(bars, picture, _title(job), capacity)
        print(f"\ndrawn to {picture}")
    return capacity is None or needed <= capacity


def show_max_length(config: Config, device_gib: float | None) -> None:
    """Print the longest sequence that fits, for every recompute mode.

    Args:
        device_gib: memory of a device; None for what `parallelism.cluster` says.

    Raises:
        ValueError: neither is given.
    """
    job = planned_job(config)
    whole = _capacity(config, device_gib)
    if whole is None:
        raise refuse(
            "--max-length",
            "given",
            "--device-gib N, or a parallelism.cluster that says how much memory a device has, beside it",
            "For example --device-gib 139 for an H200.",
        )
    capacity = int(COMFORT * whole)
    print(
        f"longest sequences whose step takes at most {capacity / GIB:.1f} GiB a rank ({COMFORT:.0%} of a device), "
        f"by recompute mode (*: {config.recompute.mode}, as configured)"
    )
    for mode in RECOMPUTES:
        own = _with_mode(job, mode)
        length = max_length(own, capacity)
        mark = "*" if mode == config.recompute.mode else " "
        print(
            f" {mark} {mode:25}{length:>14,} tokens{_host(own, length)}" if length else f" {mark} {mode:25}{'none':>14}"
        )


def _host(job: Job, length: int) -> str:
    """What a step of that length takes on the host."""
    config = replace(job.config, data=replace(job.config.data, seq_length=length))
    pinned = predict(replace(job, config=config)).host_bytes
    return f", {pinned / GIB:.1f} GiB a rank pinned on the host" if pinned else ""


def _with_mode(job: Job, mode: str) -> Job:
    return replace(job, config=replace(job.config, recompute=replace(job.config.recompute, mode=mode)))


def _verdict(needed: int, capacity: int) -> str:
    """Whether a device holds a step, by the bounds that `train` goes by."""
    said = f"a device has {capacity / GIB:.1f} GiB: "
    if needed > capacity:
        lacks = (needed - capacity) / GIB
        return f"{said}a step does not fit, by {lacks:.2f} GiB (see --max-length, recompute and its head_chunk_tokens)"
    return said + ("a step fits" if needed <= COMFORT * capacity else f"a step takes more than {COMFORT:.0%} of it")


def _capacity(config: Config, device_gib: float | None) -> int | None:
    """Bytes of a device; None where nobody says."""
    if device_gib is not None:
        if not 0 < device_gib <= _MOST_GIB:
            expected = f"a number of GiB above 0 and at most {_MOST_GIB:,}"
            raise refuse("--device-gib", device_gib, expected, "Give a device's memory.")
        return int(device_gib * GIB)
    cluster = load_cluster(config.parallelism.cluster) if config.parallelism.cluster else None
    if cluster is None or cluster.device.memory_gib is None:
        return None
    return int(cluster.device.memory_gib * GIB)


def _title(job: Job) -> str:
    config, par = job.config, job.config.parallelism
    chunk = config.recompute.head_chunk_tokens
    head = "logits of all tokens at once" if chunk is None else f"logits of {chunk:,} tokens at once"
    ranks = par.model_parallel_size * job.data_parallel_size
    sizes = f"{ranks} ranks (CP {par.context_parallel_size}, TP {par.tensor_parallel_size})"
    return f"{config.model.name}, {config.data.seq_length:,} tokens over {sizes}, {config.train.precision}, {head}"
