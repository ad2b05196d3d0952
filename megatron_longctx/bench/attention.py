"""Context-parallel attention, mode beside mode: forward and backward times, errors, memory, and what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import ContextParallelAttention
from ..layout import Layout
from ..schedules import DEFAULT_OPTIONS, SCHEDULES, PlanOptions
from ..schedules.calibration import Calibration
from ..schedules.cost import Workload
from ..schedules.select import Problem, rank_modes
from .timing import Stopwatch, layer_seconds, layer_step, settle

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v of this rank `[s, b, heads, d]` -> out."""


@dataclass(frozen=True)
class Case:
    """One attention problem of the bench: a whole sequence, causal."""

    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    element_bytes: int = 2

    @property
    def workload(self) -> Workload:
        return Workload(self.num_heads, self.num_kv_heads, self.head_dim, element_bytes=self.element_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32}[self.element_bytes]

    @property
    def flops(self) -> float:
        """Forward and backward, of the whole sequence."""
        return 3.5 * 4 * self.length * (self.length + 1) / 2 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Contender:
    """Something that computes a case's attention. warm_up: calls, after the first, whose work is done before two more
    come, after which it is measured."""

    name: str
    make: Callable[[Case], tuple[Call, Layout]]
    schedule: str | None = None
    options: PlanOptions = DEFAULT_OPTIONS
    keep_received: str = "false"
    warm_up: Callable[[Case], int] = lambda case: 2


@dataclass(frozen=True)
class Setting:
    """What this package's modes are told besides their names, as in the configuration's `attention`."""

    kernel: str = "auto"
    transport: str = "auto"
    keep_received: str = "auto"
    graph_tokens: int = 4096


@dataclass
class Measurement:
    """Seconds are medians over iterations, of the rank whose forward and backward together take longest: nothing
    holds ranks together in between. Errors are relative (Frobenius), over all ranks. for_auto: schedule=auto may take
    it on one node."""

    name: str
    length: int
    heads: str
    forward_s: float | None = None
    backward_s: float | None = None
    percent_of_one_device: float | None = None
    peak_bytes: int | None = None
    errors: dict[str, float] | None = None
    predicted_forward_s: float | None = None
    predicted_backward_s: float | None = None
    ours: bool = True
    reason: str = ""
    for_auto: bool = True

    @property
    def seconds(self) -> float | None:
        return None if self.forward_s is None or self.backward_s is None else self.forward_s + self.backward_s


def modes(group: dist.ProcessGroup, setting: Setting, names: Sequence[str]) -> list[Contender]:
    """This package's modes as contenders; usp with every group size, ulysses also in two chunks of the heads."""
    n = dist.get_world_size(group)
    found = []
    for name in names:
        choices: list[tuple[str, PlanOptions]] = [(name, DEFAULT_OPTIONS)]
        if name == "usp":
            sizes = [k for k in range(2, n) if n % k == 0]
            choices = [(f"usp (inner_size={k})", PlanOptions(inner_size=k)) for k in sizes]
        if name == "ulysses":
            choices.append(("ulysses (head_chunks=2)", PlanOptions(head_chunks=2)))
        for label, options in choices:
            attention = ContextParallelAttention(group, schedule=name, options=options, **asdict(setting))
            contender = Contender(label, _calls_of(attention), name, options, setting.keep_received)
            found.append(replace(contender, warm_up=partial(_warm_up, attention)))
    return found


def _warm_up(attention: ContextParallelAttention, case: Case) -> int:
    return attention.warm_up_calls(case.length)


def _calls_of(attention: ContextParallelAttention) -> Callable[[Case], tuple[Call, Layout]]:
    def make(case: Case) -> tuple[Call, Layout]:
        return (lambda q, k, v: attention(q, k, v, length=case.length)), attention.layout(case.length)

    return make


@dataclass(frozen=True)
class Bench:
    """How to measure: the ranks and their device, iterations, whether results are checked."""

    group: dist.ProcessGroup
    device: torch.device
    kernel: str
    iterations: int
    check: bool

    def run(
        self,
        cases: Sequence[Case],
        contenders: Sequence[Contender],
        calibrations: dict[str, Calibration],
        keep: Callable[[list[Measurement]], None] = lambda found: None,
    ) -> list[Measurement]:
        """Measure every contender on every case. Refusals (ValueError, on all ranks alike) are recorded.

        Args:
            calibrations: by `heads` of a measurement, what predictions rest on; without one there are none.
            keep: gets all that has been found, after every case.
        """
        found = []
        for case in cases:
            single = self._single(case)
            found.append(single)
            truth = _Truth(case, self.device, self.kernel) if self.check else None
            for contender in contenders:
                measured = self._measure(contender, case, truth)
                if measured.seconds is not None and single.seconds is not None:
                    measured.percent_of_one_device = 100 * single.seconds / measured.seconds
                calibration = calibrations.get(measured.heads)
                if calibration is not None and contender.schedule is not None and not measured.reason:
                    _predict(measured, contender, case, calibration, dist.get_world_size(self.group))
                found.append(measured)
                self._say(measured)
            del truth
            keep(found)
        return found

    def _say(self, found: Measurement) -> None:
        """A line for whoever waits for the table."""
        if dist.get_rank(self.group) == 0:
            percent = found.percent_of_one_device
            said = found.reason or f"{(found.seconds or 0) * 1e3:.2f} ms, {percent or 0:.1f}% of one device"
            print(f"  {found.length:,} tokens, {found.heads}, {found.name}: {said}", file=sys.stderr, flush=True)

    def _single(self, case: Case) -> Measurement:
        """One device with as many FLOPs as a rank has: 100%."""
        n = dist.get_world_size(self.group)
        length = round(case.length / n**0.5 / 128) * 128 or case.length
        attention = ContextParallelAttention(kernel=self.kernel)
        alone = replace(case, length=length)
        inputs = _inputs(alone, self.device)
        found = Measurement("one device, equal FLOPs", case.length, _heads(case))
        self._time(found, lambda q, k, v: attention(q, k, v, length=length), inputs)
        scale = case.flops / n / alone.flops  # rounded to whole tiles, so not quite as many
        assert found.forward_s is not None and found.backward_s is not None
        found.forward_s, found.backward_s = found.forward_s * scale, found.backward_s * scale
        found.percent_of_one_device = 100.0
        return found

    def _measure(self, contender: Contender, case: Case, truth: _Truth | None) -> Measurement:
        found = Measurement(contender.name, case.length, _heads(case), ours=contender.schedule is not None)
        found.for_auto = contender.options.head_chunks == 1
        rank = dist.get_rank(self.group)
        try:
            call, layout = contender.make(case)
            mine = torch.tensor(list(layout.tokens(rank)), dtype=torch.long, device=self.device)
            local = [x.index_select(0, mine) for x in _inputs(case, self.device)]
            call(*local[:3])  # refusals come here, on all ranks
        except ValueError as error:
            found.reason = str(error)
            return found
        except Exception as error:  # other packages fail in their own ways, on all ranks alike
            if found.ours:
                raise
            found.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return found
        if truth is not None:
            found.errors = self._errors(call, local, truth.shards(mine))
        self._time(found, call, local, contender.warm_up(case))
        return found

    def _time(self, found: Measurement, call: Call, inputs: Sequence[Tensor], warm_up: int = 2) -> None:
        *qkv, grad_out = inputs
        watch = Stopwatch(self.device)
        step = layer_step(call, qkv, grad_out, watch)
        settle(step, watch, warm_up)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        found.forward_s, found.backward_s = layer_seconds(step, watch, self.group, self.iterations)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before
            found.peak_bytes = int(self._slowest(float(peak), 0.0)[0])

    def _slowest(self, *values: float) -> list[float]:
        worst = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in worst]

    def _errors(self, call: Call, local: Sequence[Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
        *leaves, grad_out = local
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        out = call(q, k, v)
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), grad_out), strict=True))
        found["out"] = out.detach()
        errors = {}
        for name, value in found.items():
            expected = truth[name].float()
            squares = torch.stack([(value.float() - expected).square().sum(), expected.square().sum()]).double()
            dist.all_reduce(squares, group=self.group)
            errors[name] = float((squares[0] / squares[1]).sqrt())
        return errors


class _Truth:
    """Output and gradients of the whole sequence by one device's kernel, which every rank computes for itself."""

    def __init__(self, case: Case, device: torch.device, kernel: str) -> None:
        attention = ContextParallelAttention(kernel=kernel)
        *leaves, grad_out = _inputs(case, device)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = attention(q, k, v, length=case.length)
        gradients = torch.autograd.grad(out, (q, k, v), grad_out)
        self._whole = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    def shards(self, mine: Tensor) -> dict[str, Tensor]:
        return {name: value.index_select(0, mine) for name, value in self._whole.items()}


def _inputs(case: Case, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out, of the whole sequence; the same on every rank."""
    generator = torch.Generator(device).manual_seed(case.length)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    return [
        torch.randn(case.length, 1, h, case.head_dim, device=device, dtype=case.dtype, generator=generator)
        for h in heads
    ]


def _heads(case: Case) -> str:
    return f"{case.num_heads}:{case.num_kv_heads}"


def _predict(found: Measurement, contender: Contender, case: Case, calibration: Calibration, n: int) -> None:
    assert contender.schedule is not None
    problem = Problem(n, case.length, case.workload, keep_received=contender.keep_received)
    candidates = [(contender.schedule, contender.options)]
    (priced,) = rank_modes(problem, calibration.cluster, calibration.costs, candidates=candidates)
    if priced.forward and priced.backward:
        found.predicted_forward_s, found.predicted_backward_s = priced.predicted
        found.for_auto |= any(sample.mode == priced.name for sample in calibration.costs.modes)


def table(found: Sequence[Measurement]) -> str:
    """Markdown, one row a measurement; times in milliseconds."""
    head = ["tokens", "heads", "mode", "forward", "backward", "% of one device", "predicted", "ratio", "GiB", "errors"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for m in found:
        if m.reason:
            rows.append(f"| {m.length:,} | {m.heads} | {m.name} | not possible: {m.reason} |" + " |" * 6)
            continue
        predicted = ratio = ""
        if m.predicted_forward_s is not None and m.predicted_backward_s is not None and m.seconds is not None:
            predicted = f"{m.predicted_forward_s * 1e3:.2f} + {m.predicted_backward_s * 1e3:.2f}"
            ratio = f"{(m.predicted_forward_s + m.predicted_backward_s) / m.seconds:.2f}"
        cells = [
            f"{m.length:,}",
            m.heads,
            m.name,
            f"{(m.forward_s or 0) * 1e3:.3f}",
            f"{(m.backward_s or 0) * 1e3:.3f}",
            f"{m.percent_of_one_device:.1f}" if m.percent_of_one_device is not None else "",
            predicted,
            ratio,
            f"{m.peak_bytes / 2**30:.2f}" if m.peak_bytes is not None else "",
            " ".join(f"{name} {error:.1e}" for name, error in (m.errors or {}).items()),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def choices(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """By case: the mode that predictions would take, the best measured one, and by how much the first is slower."""
    cases: dict[tuple[int, str], list[Measurement]] = {}
    for m in found:
        if m.predicted_forward_s is not None and m.seconds is not None:
            cases.setdefault((m.length, m.heads), []).append(m)
    result = []
    for (length, heads), measured in cases.items():
        candidates = [m for m in measured if m.for_auto]
        if not candidates:
            continue
        taken = min(candidates, key=lambda m: (m.predicted_forward_s or 0) + (m.predicted_backward_s or 0))
        best = min(measured, key=lambda m: m.seconds or 0)
        assert taken.seconds is not None and best.seconds is not None
        slower = taken.seconds / best.seconds - 1
        result.append({"length": length, "heads": heads, "auto": taken.name, "best": best.name, "slower": slower})
    return result


def as_data(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [asdict(measurement) for measurement in found]


ALL_MODES = tuple(SCHEDULES)
