"""A prediction in words."""

from __future__ import annotations

from ..topology.cluster import GIB
from .model import Prediction, predict, saved_bytes
from .shapes import Job


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
