"""Where the time of a step goes: a device's operations by kind, what runs at the same time, and what waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Kinds, with words. The name of such an operation contains one of them (in lower case). The first match counts. Names
# are from CUDA kernels and, on CPUs, from torch's operators.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fused elementwise", ("triton_", "_rotate_kernel")),  # torch.compile's, and RoPE
    ("attention backward", ("bprop", "flash_bwd", "sdpa_backward", "attentionfunctionbackward", "attention_backward")),
    ("attention forward", ("fprop", "flash_fwd", "sdpa", "fmha", "attentionfunction", "scaled_dot_product")),
    ("messages", ("nccl", "memcpy ptop", "gloo", "c10d")),
    ("partial results", ("_combine_kernel",)),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "aten::addmm", "linear", "matmul")),
    ("loss", ("softmax", "cross_entropy", "nll_loss")),
    ("norms", ("rms", "layernorm", "layer_norm", "norm_kernel", "gammabeta")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "lpnorm")),
    ("copies", ("memcpy", "memset", "copy", "catarray", "aten::cat", "fill")),
)
OTHER = "elementwise and other"
IDLE = "nothing runs"
_LONGEST = 12


class Span(NamedTuple):
    """An operation on a stream (of a device) or a thread (of the host), in seconds from any common start."""

    name: str
    stream: int
    begin: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """The time of a step on one rank, in types of JSON."""

    seconds: float  # from the beginning of the first operation to the end of the last
    busy_seconds: dict[str, float]  # on the compute stream by kind; with `IDLE` they add up to `seconds`
    beside_seconds: dict[str, float]  # on other streams by kind; they overlap with `busy_seconds`
    longest: list[dict[str, Any]]  # name, seconds and calls of the longest on the compute stream

    def table(self) -> str:
        """Return a Markdown table, the largest share first."""
        lines = ["| kind | s | % of the step | beside, s |", "|---|---|---|---|"]
        kinds = {*self.busy_seconds, *self.beside_seconds}
        for kind in sorted(kinds, key=lambda kind: -self.busy_seconds.get(kind, 0.0)):
            busy, beside = self.busy_seconds.get(kind, 0.0), self.beside_seconds.get(kind, 0.0)
            lines.append(f"| {kind} | {busy:.4f} | {100 * busy / self.seconds:.1f} | {beside:.4f} |")
        return "\n".join((*lines, f"| whole step | {self.seconds:.4f} | 100 | |"))


def kind_of(name: str) -> str:
    """Return the kind of an operation: one of `KINDS`, or `OTHER`."""
    name = name.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), OTHER)


def profile_of(spans: Iterable[Span]) -> StepProfile:
    """Summarize the operations of a step.

    The stream with most work is the compute stream. If operations on it overlap (threads of the host), the time counts
    for the one that began earlier.

    Raises:
        ValueError: there are no operations.
    """
    ordered = sorted(spans, key=lambda span: span.begin)
    if not ordered:
        raise ValueError("a profile of no operations: expected a step that runs some. Profile a training step.")
    totals: dict[int, float] = defaultdict(float)
    for span in ordered:
        totals[span.stream] += span.end - span.begin
    compute_stream = max(totals, key=lambda stream: totals[stream])
    busy: dict[str, float] = defaultdict(float)
    beside: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    first, last = ordered[0].begin, max(span.end for span in ordered)
    now, idle = first, 0.0
    for span in ordered:
        if span.stream != compute_stream:
            beside[kind_of(span.name)] += span.end - span.begin
            continue
        idle += max(0.0, span.begin - now)
        seconds = max(0.0, span.end - max(now, span.begin))
        now = max(now, span.end)
        busy[kind_of(span.name)] += seconds
        by_name[span.name].append(seconds)
    busy[IDLE] = idle + last - now
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    longest = [{"name": name, "seconds": sum(each), "calls": len(each)} for name, each in ranked]
    return StepProfile(last - first, dict(busy), dict(beside), longest)
