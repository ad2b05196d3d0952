"""Times whole steps of attention, forward and backward, of all contenders on the same inputs.

A short problem of the same kind can be compared with dense attention in fp64 first, to see whether results are right.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.core.comm import gather_objects
from megatron_longctx.testing.references import dense_attention, visible
from megatron_longctx.training.measure import step_seconds, training_step

from .cases import Case

_ROUNDS = 3
_SHORT_TOKENS = 2048
_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-3}
"""Relative errors (Frobenius) above which results are wrong."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q, k, v of this rank `[s, b, heads, d]` to out."""


class Prepared(NamedTuple):
    """A contender that is ready for a case."""

    call: Call
    tokens: Sequence[int]  # of this rank, in the order in which `call` expects them
    alone: Case | None = None  # the case that one device computes by itself instead


@dataclass(frozen=True)
class Contender:
    """An implementation of attention."""

    name: str
    prepare: Callable[[Case], Prepared]  # raises ValueError, on all ranks alike, for an unsupported case
    ours: bool = False  # whether it belongs to this package
    release: Callable[[], None] = lambda: None  # called at the end of a case


@dataclass
class Measurement:
    """The result of one contender for one case."""

    name: str
    mask: str
    length: int
    heads: str
    ours: bool = True
    alone: bool = False
    rounds: list[float] = field(default_factory=list)  # mean seconds of steps in a row, slowest rank
    tflops: float | None = None  # per device, of visible pairs
    percent_of_one_device: float | None = None  # relative to the fastest kernel of one device, at equal FLOPs
    times_fastest_mode: float | None = None  # seconds relative to this package's fastest mode
    peak_bytes: int | None = None
    errors: dict[str, float] | None = None  # relative errors (Frobenius) of a short case over all ranks
    reason: str = ""  # why there are no rounds

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.name}: {self.reason}"
        percent = f", {self.percent_of_one_device:.1f}% of one device" if self.percent_of_one_device else ""
        return f"{self.name}: {self.seconds * 1e3:.2f} ms, {self.tflops:.3g} TFLOP/s{percent}"


@dataclass(frozen=True)
class Bench:
    """How to measure: the steps in a row, and whether a short case is checked before."""

    group: dist.ProcessGroup
    device: torch.device
    iterations: int
    check: bool

    @property
    def n(self) -> int:
        return dist.get_world_size(self.group)

    def run(self, case: Case, contenders: Sequence[Contender]) -> list[Measurement]:
        """Measure all contenders, those of one device first. Refused cases and wrong results are recorded as such."""
        measured: list[Measurement] = []
        for contender in contenders:
            current = self._measure(contender, case)
            contender.release()
            measured.append(current)
            fastest = _fastest(m for m in measured if m.alone)
            for each in measured if current.alone else [current]:
                if each.seconds is not None and fastest is not None:
                    each.percent_of_one_device = 100 * fastest / each.seconds
            if dist.get_rank(self.group) == 0:
                print(f"  {case.length:,} tokens, {case.heads}, {case.name}, {current}", file=sys.stderr)
        fastest = _fastest(m for m in measured if m.ours and not m.alone)
        for each in measured:
            if each.seconds is not None and fastest is not None:
                each.times_fastest_mode = each.seconds / fastest
        return measured

    def _measure(self, contender: Contender, case: Case) -> Measurement:
        result = Measurement(contender.name, case.name, case.length, case.heads, contender.ours)
        try:
            if self.check:
                result.errors = self.errors(contender, short(case, self.n))
                if wrong(result.errors, case.dtype):
                    result.reason = "wrong results"
                    return result
            call, tokens, alone = contender.prepare(case)
            result.alone, computed = alone is not None, alone or case
            *qkv, grad_out = _rows(computed.inputs(self.device), tokens)
            call(*qkv)  # refusals are raised here, on all ranks
        except ValueError as error:
            result.reason = str(error)
            return result
        except Exception as error:  # other packages raise anything, on all ranks alike
            if result.ours:
                raise
            result.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return result
        self._time(result, training_step(call, qkv, grad_out))
        # The time of the case if one device's share of it were computed without any loss.
        scale = case.flops / self.n / computed.flops if alone else 1.0
        result.rounds = [seconds * scale for seconds in result.rounds]
        result.tflops = case.flops / self.n / (result.seconds or 1.0) / 1e12
        return result

    def _time(self, result: Measurement, step: Callable[[], object]) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        result.rounds = step_seconds(step, self.group, self.device, self.iterations, _ROUNDS)
        if cuda:
            result.peak_bytes = max(gather_objects(self.group, torch.cuda.max_memory_allocated(self.device) - before))

    def errors(self, contender: Contender, case: Case) -> dict[str, float]:
        """Return the errors over all ranks, which call this together."""
        call, tokens, alone = contender.prepare(case)
        inputs = (alone or case).inputs(self.device)
        results, errors = _results(call, _rows(inputs, tokens)), {}
        contender.release()
        for name, truth in dense(alone or case, inputs).items():
            (expected,) = _rows([truth], tokens)
            squares = torch.stack([(results[name] - expected).square().sum(), expected.square().sum()])
            dist.all_reduce(squares, group=self.group)
            errors[name] = float((squares[0] / squares[1]).sqrt())
        return errors


def short(case: Case, n: int) -> Case:
    """Return the case, or one of about 2,048 tokens with shorter documents and a shorter window.

    Document lengths are multiples that other packages accept on `n` ranks.
    """
    factor, unit = case.length / _SHORT_TOKENS, math.lcm(16, 2 * n)
    if factor <= 1:
        return case
    lengths = tuple(max(1, round(length / factor / unit)) * unit for length in case.documents)
    return replace(case, documents=lengths, window=case.window and max(1, round(case.window / factor)))


def wrong(errors: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Whether an error is too large or NaN."""
    return not all(error <= _LIMITS[dtype] for error in errors.values())


def dense(case: Case, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return out, dq, dk and dv of `case.inputs` in fp64, by the definition of the case instead of its mask."""
    window = case.window, case.window
    seen = visible(case.documents, causal=case.causal, window=window, parents=case.parents)
    q, k, v, grad_out = inputs
    return dense_attention(q, k, v, grad_out, seen=seen)


def _rows(whole: Sequence[Tensor], tokens: Sequence[int]) -> list[Tensor]:
    mine = torch.tensor(list(tokens), dtype=torch.long, device=whole[0].device)
    return [x.index_select(0, mine) for x in whole]


def _fastest(measured: Iterable[Measurement]) -> float | None:
    return min((m.seconds for m in measured if m.seconds is not None), default=None)


def _results(call: Call, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = call(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
