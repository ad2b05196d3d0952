"""Whole steps of attention, forward and backward, by the clock: whoever computes them, on the same inputs. Whether they
are right is seen by a short problem of the same kind, against dense attention written out in fp64."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.calibrate.timing import step_seconds, training_step
from megatron_longctx.comm import gather_objects
from megatron_longctx.testing.references import dense_attention, visible

from .cases import Case

_ROUNDS = 3
_ABOUT_TOKENS = 2048
_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-3}
"""Relative errors (Frobenius) above which results are wrong."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v of this rank `[s, b, heads, d]` -> out."""


class Made(NamedTuple):
    """call: of this rank's `tokens`, in this order. alone: what a device computes by itself instead of the case."""

    call: Call
    tokens: Sequence[int]
    alone: Case | None = None


@dataclass(frozen=True)
class Contender:
    """Something that computes a case's attention.

    make: raises ValueError, on all ranks alike, for what it cannot do. ours: of this package. release: called when a
    case is done.
    """

    name: str
    make: Callable[[Case], Made]
    ours: bool = False
    release: Callable[[], None] = lambda: None


@dataclass
class Measurement:
    """rounds: seconds of a whole step in a row of some, of the slowest rank, as often as it was measured; their median
    counts. tflops: per device, of visible pairs. percent_of_one_device: of the fastest kernel of one device at equal
    FLOPs. times_fastest_mode: seconds, of those of this package's fastest mode. errors: relative (Frobenius), of a
    short case over all ranks. reason: why there are no rounds."""

    name: str
    mask: str
    length: int
    heads: str
    ours: bool = True
    alone: bool = False
    rounds: list[float] = field(default_factory=list)
    tflops: float | None = None
    percent_of_one_device: float | None = None
    times_fastest_mode: float | None = None
    peak_bytes: int | None = None
    errors: dict[str, float] | None = None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


@dataclass(frozen=True)
class Bench:
    """How to measure. iterations: steps of a row. check: whether a short case has to be right before."""

    group: dist.ProcessGroup
    device: torch.device
    iterations: int
    check: bool

    @property
    def n(self) -> int:
        return dist.get_world_size(self.group)

    def run(self, case: Case, contenders: Sequence[Contender]) -> list[Measurement]:
        """Measure every contender; those of one device come first. What they refuse, or get wrong, is recorded."""
        found: list[Measurement] = []
        for contender in contenders:
            measured = self._measure(contender, case)
            contender.release()
            found.append(measured)
            fastest = _fastest([m for m in found if m.alone])
            for each in found if measured.alone else [measured]:
                if each.seconds is not None and fastest is not None:
                    each.percent_of_one_device = 100 * fastest / each.seconds
            if dist.get_rank(self.group) == 0:
                print(f"  {case.length:,} tokens, {case.heads}, {case.name}, {_said(measured)}", file=sys.stderr)
        fastest = _fastest([m for m in found if m.ours and not m.alone])
        for each in found:
            if each.seconds is not None and fastest is not None:
                each.times_fastest_mode = each.seconds / fastest
        return found

    def _measure(self, contender: Contender, case: Case) -> Measurement:
        found = Measurement(contender.name, case.name, case.length, case.heads, contender.ours)
        try:
            if self.check:
                found.errors = self._errors(contender, short(case, self.n))
                if wrong(found.errors, case.dtype):
                    found.reason = "wrong results"
                    return found
            call, tokens, alone = contender.make(case)
            found.alone, computed = alone is not None, alone or case
            *qkv, grad_out = _rows(computed.inputs(self.device), tokens)
            call(*qkv)  # refusals come here, on all ranks
        except ValueError as error:
            found.reason = str(error)
            return found
        except Exception as error:  # other packages fail in their own ways, on all ranks alike
            if found.ours:
                raise
            found.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return found
        self._time(found, training_step(call, qkv, grad_out))
        # As long as the case would take, were it shared without loss.
        scale = case.flops / self.n / computed.flops if alone else 1.0
        found.rounds = [seconds * scale for seconds in found.rounds]
        found.tflops = case.flops / self.n / (found.seconds or 1.0) / 1e12
        return found

    def _time(self, found: Measurement, step: Callable[[], object]) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        found.rounds = step_seconds(step, self.group, self.device, self.iterations, _ROUNDS)
        if cuda:
            found.peak_bytes = max(gather_objects(self.group, torch.cuda.max_memory_allocated(self.device) - before))

    def _errors(self, contender: Contender, case: Case) -> dict[str, float]:
        """All ranks call this together."""
        call, tokens, alone = contender.make(case)
        inputs = (alone or case).inputs(self.device)
        found, errors = _results(call, _rows(inputs, tokens)), {}
        contender.release()
        for name, truth in dense(alone or case, inputs).items():
            (expected,) = _rows([truth], tokens)
            squares = torch.stack([(found[name] - expected).square().sum(), expected.square().sum()])
            dist.all_reduce(squares, group=self.group)
            errors[name] = float((squares[0] / squares[1]).sqrt())
        return errors


def short(case: Case, n: int) -> Case:
    """The case, or one whose documents and window are so much shorter that about 2,048 tokens are left, in multiples
    that packages take on `n` ranks."""
    factor, unit = case.length / _ABOUT_TOKENS, math.lcm(16, 2 * n)
    if factor <= 1:
        return case
    lengths = tuple(max(1, round(length / factor / unit)) * unit for length in case.documents)
    return replace(case, documents=lengths, window=case.window and max(1, round(case.window / factor)))


def wrong(errors: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Also where one is NaN."""
    return not all(error <= _LIMITS[dtype] for error in errors.values())


def dense(case: Case, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """out, dq, dk and dv of `case.inputs`, in fp64, by what the case's words mean and not by its mask."""
    seen = visible(case.documents, causal=case.causal, window=(case.window, case.window))
    q, k, v, grad_out = inputs
    return dense_attention(q, k, v, grad_out, seen=seen)


def _rows(whole: Sequence[Tensor], tokens: Sequence[int]) -> list[Tensor]:
    mine = torch.tensor(list(tokens), dtype=torch.long, device=whole[0].device)
    return [x.index_select(0, mine) for x in whole]


def _fastest(found: Sequence[Measurement]) -> float | None:
    return min((m.seconds for m in found if m.seconds is not None), default=None)


def _results(call: Call, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = call(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def _said(found: Measurement) -> str:
    if found.seconds is None:
        return f"{found.name}: {found.reason}"
    percent = f", {found.percent_of_one_device:.1f}% of one device" if found.percent_of_one_device else ""
    return f"{found.name}: {found.seconds * 1e3:.2f} ms, {found.tflops:.3g} TFLOP/s{percent}"
