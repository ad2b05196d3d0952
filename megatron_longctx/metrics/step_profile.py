"""Where the time of one step goes: a device's operations by kind, what runs beside them, and what waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# The first kind one of whose words an operation's name contains (lower case). Names are those of CUDA kernels and, on
# CPUs, of torch's operators.
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


class Span(NamedTuple):
    """An operation on one stream (of a device) or thread (of the host); times in seconds from anywhere."""

    name: str
    stream: int
    begin: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """A step's time on one rank.

    seconds: of the step, from the first operation to the end. busy: seconds by kind on the stream that computes;
    with `IDLE` they add up to `seconds`. beside: seconds by kind on other streams, at the same time. longest: the
    names that take most of the computing stream, with seconds and calls.
    """

    seconds: float
    busy: dict[str, float]
    beside: dict[str, float]
    longest: tuple[tuple[str, float, int], ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "busy_seconds": self.busy,
            "beside_seconds": self.beside,
            "longest": [{"name": n, "seconds": s, "calls": c} for n, s, c in self.longest],
        }

    def table(self) -> str:
        """A Markdown table, largest share first."""
        lines = ["| kind | s | % of the step | beside, s |", "|---|---|---|---|"]
        kinds = sorted({*self.busy, *self.beside}, key=lambda kind: -self.busy.get(kind, 0.0))
        for kind in kinds:
            busy, beside = self.busy.get(kind, 0.0), self.beside.get(kind, 0.0)
            lines.append(f"| {kind} | {busy:.4f} | {100 * busy / self.seconds:.1f} | {beside:.4f} |")
        return "\n".join((*lines, f"| whole step | {self.seconds:.4f} | 100 | |"))


def kind_of(name: str) -> str:
    """The kind of an operation: one in `KINDS`, else `OTHER`."""
    name = name.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), OTHER)


def profile_of(spans: Iterable[Span], longest: int = 12) -> StepProfile:
    """Sum a step's operations up.

    The stream that is busy longest counts as the one that computes; where operations on it overlap (threads of the
    host), the time belongs to the earlier one.

    Raises:
        ValueError: no operation at all.
    """
    every = sorted(spans, key=lambda span: span.begin)
    if not every:
        raise ValueError("a profile of no operations: expected a step that runs some. Profile a training step.")
    totals: dict[int, float] = defaultdict(float)
    for span in every:
        totals[span.stream] += span.end - span.begin
    computing = max(totals, key=lambda stream: totals[stream])
    first, last = every[0].begin, max(span.end for span in every)
    busy: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    at = first
    idle = 0.0
    for span in (span for span in every if span.stream == computing):
        idle += max(0.0, span.begin - at)
        took = max(0.0, span.end - max(at, span.begin))
        at = max(at, span.end)
        busy[kind_of(span.name)] += took
        by_name[span.name].append(took)
    busy[IDLE] = idle + last - at
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:longest]
    names = tuple((name, sum(took), len(took)) for name, took in ranked)
    return StepProfile(last - first, dict(busy), _beside(every, computing), names)


def _beside(spans: Sequence[Span], computing: int) -> dict[str, float]:
    beside: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.stream != computing:
            beside[kind_of(span.name)] += span.end - span.begin
    return dict(beside)
