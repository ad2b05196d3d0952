"""One rank on an emulated network: measures links and modes, and predicts the modes. `python -m ... FOLDER RANK`."""

from __future__ import annotations

import datetime
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from analysis.benchmarks.papers.simulated import not_overlapped
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.core.kernels.providers.cpu import CpuKernel
from megatron_longctx.core.plans import Target
from megatron_longctx.core.plans import mask as masks
from megatron_longctx.planner.choose_mode import Candidate, Problem, rank_modes
from megatron_longctx.planner.cost import GIB, Costs, ModeSample, Workload
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.training.calibration import kernel_costs
from megatron_longctx.training.measure import Effort, Testbed

from .device import Device, EmulatedAttention
from .emulate import address
from .job import Job, Mode, Outcome, Result

_PORT = 29500
_CPU = torch.device("cpu")
_T = TypeVar("_T")


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = Job.load(folder / "job")
    n = job.cluster.n
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # has the only address of a host
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=300)
    store = TCPStore(address(0), _PORT, n, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    outcome = _Rank(job, rank).run()
    if rank == 0:
        (folder / "outcome").write_bytes(pickle.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        group = dist.group.WORLD
        assert group is not None
        self.group = group
        self.transport = P2PTransport(group, _CPU)

    def run(self) -> Outcome:
        job = self.job
        self._print(f"{job.cluster.name}: checking links")
        step_s, message_s = self._message_seconds()
        rates = self._link_rates()
        costs = job.device
        if costs is None:
            self._print("measuring kernel calls")
            effort = Effort(max_tokens=min(job.length, 512), min_tokens=8, repeats=3)
            costs = kernel_costs(Testbed(self.group, _CPU, job.workload), effort)
        costs = replace(costs, step_s=step_s, message_s=message_s)
        timed = [_Timed(self, mode, length) for mode in job.modes for length in (*job.others, job.length)]
        for _ in range(job.repeats):  # in turn, so that what else slows the machine slows all modes
            for each in timed:
                each.measure()
        results = [self._result(mode, [each for each in timed if each.mode == mode], costs) for mode in job.modes]
        for result in results:
            times = f"{result.forward_s:.2f} s + {result.backward_s:.2f} s"
            self._print(f"{result.mode}: {times}, predicted {result.ratio:.2f} of that")
        return Outcome(tuple(results), rates, step_s, message_s)

    def _print(self, text: str) -> None:
        if self.rank == 0:
            print(f"  {text}", flush=True)

    def slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def _message_seconds(self) -> tuple[float, float]:
        """Return the seconds of a step besides its bytes, and of each message that a rank sends or receives in it.

        They follow from steps with one message to the next node, or rank of a single node: of 64 KiB, of twice as much,
        and with the same 64 KiB in eight. What the host does while bytes travel costs nothing.
        """
        cluster = self.job.cluster
        to = cluster.ranks_per_node if cluster.nodes > 1 else 1
        one, long, eight = (
            self.slowest(self._exchange_seconds([to] * count, size, 5, 8))
            for count, size in ((1, 2**16), (1, 2**17), (8, 2**13))
        )
        message_s = max(0.0, eight - one) / 14  # each of 7 more is a send and a receive
        return max(0.0, 2 * one - long - 2 * message_s), message_s

    def _exchange_seconds(self, shifts: Sequence[int], size: int, repeats: int, in_a_row: int = 1) -> float:
        """Return the seconds in which every rank sends `size` bytes to the ranks `shifts` further on."""
        n = self.job.cluster.n
        out = torch.zeros(size, dtype=torch.uint8)
        into = [torch.zeros(size, dtype=torch.uint8) for _ in shifts]
        times = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row):
                sends = [(out, (self.rank + shift) % n) for shift in shifts]
                receives = [(x, (self.rank - shift) % n) for x, shift in zip(into, shifts, strict=True)]
                self.transport.wait(self.transport.start(sends, receives))
            times.append((time.perf_counter() - start) / in_a_row)
        return statistics.median(times)

    def _link_rates(self) -> tuple[float, float]:
        """Return the lowest and the highest ratio of measured to described rates, over the links of all ranks."""
        cluster = self.job.cluster
        ratios = []
        for shift in range(1, cluster.n):
            source = (self.rank - shift) % cluster.n
            route = cluster.route(source, self.rank)
            # Messages of the same shift that share a resource share its rate.
            sharing = [
                sum(resource in cluster.route(r, (r + shift) % cluster.n).resources for r in range(cluster.n))
                for resource in route.resources
            ]
            size = int(route.gibps / max(sharing) * GIB * 0.3)  # a third of a second
            sizes: list[int] = [0] * cluster.n
            dist.all_gather_object(sizes, size)
            size = min(sizes)
            seconds = self._exchange_seconds([shift], size, 2)
            if size == sizes[self.rank]:  # no other link was the limit
                ratios.append(size / seconds / GIB / (route.gibps / max(sharing)))
        low, high = self.slowest(-min(ratios)), self.slowest(max(ratios))
        return -low, high

    def _result(self, mode: Mode, timed: Sequence[_Timed], costs: Costs) -> Result:
        job, samples = self.job, list[ModeSample]()
        for each in timed[:-1]:
            candidate = each.simulate(costs)
            for backward, (seconds, predicted_s) in enumerate(zip(each.medians, candidate.predicted, strict=True)):
                samples.append(ModeSample(candidate.name, each.length, bool(backward), seconds / predicted_s))
        candidate = timed[-1].simulate(replace(costs, modes=tuple(samples)))
        assert candidate.forward is not None
        messages = [0.0] * job.cluster.n
        for span in candidate.forward.spans:
            messages[span.rank] += (span.lane == "transfer") * (span.stop - span.start)
        computing = max(candidate.forward.compute_s) / max(messages)
        predicted = candidate.predicted
        if not mode.overlap:
            assert candidate.backward is not None
            predicted = not_overlapped(candidate.forward), not_overlapped(candidate.backward)
        of_mode = job.cluster.name, mode.name, job.causal
        return Result(*of_mode, *timed[-1].medians, *predicted, timed[-1].error, computing)

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        return dense_attention(*_whole(self.job.length, self.job.workload), causal=self.job.causal)


class _Timed:
    """A mode over `length` tokens, with the seconds of its passes on the slowest rank.

    error: the largest of all ranks; 0 for other lengths than the job's.
    """

    def __init__(self, of: _Rank, mode: Mode, length: int) -> None:
        self.of, self.mode, self.length, self.error = of, mode, length, 0.0
        job, workload = of.job, of.job.workload
        self._device = Device(job.device, workload) if job.device is not None else None
        settings: dict[str, Any] = {"options": mode.options, "sum_in_node": mode.sum_in_node, "overlap": mode.overlap}
        kind = ContextParallelAttention if self._device is None else partial(EmulatedAttention, self._device)
        self.attention = kind(of.group, schedule=mode.schedule, **settings)
        self.mask = masks.causal(length) if job.causal else masks.full(length)
        layout = self.attention.layout(self.mask)
        *qkv, self._grad_out = (shard(x, layout, of.rank) for x in _whole(length, workload))
        self._leaves = [x.requires_grad_() for x in qkv]
        out = self._forward()
        results = [out.detach(), *self._backward(out)]
        if length == job.length:
            truth = [shard(x, layout, of.rank) for x in of.truth.values()]
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True) if b.numel()]
            self.error = of.slowest(max(errors, default=0.0))
        self._seconds: list[tuple[float, float]] = []

    def measure(self) -> None:
        forward, out = self._timed(self._forward)
        backward, _ = self._timed(lambda: self._backward(out))
        self._seconds.append((forward, backward))

    @property
    def medians(self) -> tuple[float, float]:
        """The seconds of forward and of backward."""
        forward, backward = map(statistics.median, zip(*self._seconds, strict=True))
        return forward, backward

    def simulate(self, costs: Costs) -> Candidate:
        options, summed = self.mode.options, self.mode.sum_in_node
        target = Target(self.of.job.workload, CpuKernel.takes)
        problem = Problem(self.of.job.cluster.n, self.mask, target, options=options, sum_in_node=summed)
        modes = [self.attention.mode]
        (candidate,) = rank_modes(problem, self.of.job.cluster, costs, candidates=modes, timeline=True)
        assert not candidate.reason, candidate.reason
        return candidate

    def _forward(self) -> Tensor:
        return self.attention(*self._leaves, mask=self.mask)

    def _backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self._leaves, self._grad_out)

    def _timed(self, work: Callable[[], _T]) -> tuple[float, _T]:
        dist.barrier()
        start = time.perf_counter()
        result = work()
        if self._device is not None:
            self._device.synchronize()
        return self.of.slowest(time.perf_counter() - start), result


def _whole(length: int, w: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of out for the whole sequence, the same on every rank."""
    return random_qkv(length, 1, w.num_heads, w.num_kv_heads, w.head_dim, torch.float32)


if __name__ == "__main__":
    main()
