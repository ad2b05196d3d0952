"""One rank on an emulated network: measures links and modes, and predicts the modes. `python -m ... FOLDER RANK`."""

from __future__ import annotations

import datetime
import os
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from analysis.benchmarks.papers.simulated import not_overlapped
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.core.layout import Layout
from megatron_longctx.core.plans import Target
from megatron_longctx.core.plans import mask as masks
from megatron_longctx.planner.choose_mode import Candidate, Problem, rank_modes
from megatron_longctx.planner.cost import GIB, Costs, ModeSample, Workload
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.training.calibration import kernel_costs
from megatron_longctx.training.measure import Effort, Testbed

from .emulate import address
from .job import Job, Mode, Outcome, Result

_PORT = 29500
_CPU = torch.device("cpu")


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
        self._print("measuring kernel calls")
        effort = Effort(max_tokens=min(job.length, 512), min_tokens=8, repeats=3)
        kernels = kernel_costs(Testbed(self.group, _CPU, job.workload), effort)
        costs = replace(kernels, step_s=step_s, message_s=message_s)
        results = []
        for mode in job.modes:
            result = self._mode(mode, costs)
            results.append(result)
            times = f"{result.forward_s:.2f} s + {result.backward_s:.2f} s"
            self._print(f"{result.mode}: {times}, predicted {result.ratio:.2f} of that")
        return Outcome(tuple(results), rates, step_s, message_s)

    def _print(self, text: str) -> None:
        if self.rank == 0:
            print(f"  {text}", flush=True)

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def _message_seconds(self) -> tuple[float, float]:
        """Return the seconds of a step besides its bytes, and of each message that a rank sends or receives in it.

        They follow from steps with one small message to the next rank, and with one to every other rank. Ranks share
        processors here, so many messages take much longer than one.
        """
        shifts = range(1, self.job.cluster.n)
        one, every = (self._slowest(self._exchange_seconds(some, 64, 20)) for some in (shifts[:1], shifts))
        message_s = max(0.0, every - one) / max(1, 2 * (len(shifts) - 1))
        return max(0.0, one - 2 * message_s), message_s

    def _exchange_seconds(self, shifts: Sequence[int], size: int, repeats: int) -> float:
        """Return the seconds in which every rank sends `size` bytes to the ranks `shifts` further on."""
        n = self.job.cluster.n
        out = torch.zeros(size, dtype=torch.uint8)
        into = [torch.zeros(size, dtype=torch.uint8) for _ in shifts]
        times = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            sends = [(out, (self.rank + shift) % n) for shift in shifts]
            receives = [(x, (self.rank - shift) % n) for x, shift in zip(into, shifts, strict=True)]
            self.transport.wait(self.transport.start(sends, receives))
            times.append(time.perf_counter() - start)
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
        low, high = self._slowest(-min(ratios)), self._slowest(max(ratios))
        return -low, high

    def _mode(self, mode: Mode, costs: Costs) -> Result:
        job, samples = self.job, list[ModeSample]()
        for length in job.others:
            measured, candidate, _ = self._passes(mode, length, costs)
            for backward, (seconds, predicted_s) in enumerate(zip(measured, candidate.predicted, strict=True)):
                samples.append(ModeSample(candidate.name, length, bool(backward), seconds / predicted_s))
        measured, candidate, error = self._passes(mode, job.length, replace(costs, modes=tuple(samples)))
        assert candidate.forward is not None
        messages = [0.0] * job.cluster.n
        for span in candidate.forward.spans:
            messages[span.rank] += (span.lane == "transfer") * (span.stop - span.start)
        computing = max(candidate.forward.compute_s) / max(messages)
        predicted = candidate.predicted
        if not mode.overlap:
            assert candidate.backward is not None
            predicted = not_overlapped(candidate.forward), not_overlapped(candidate.backward)
        return Result(job.cluster.name, mode.name, job.causal, *measured, *predicted, error, computing)

    def _passes(self, mode: Mode, length: int, costs: Costs) -> tuple[tuple[float, float], Candidate, float]:
        """Measure forward and backward over `length` tokens; return median seconds, the prediction, and the error.

        The error is 0 for other lengths than the job's.
        """
        job, workload = self.job, self.job.workload
        options, summed = mode.options, mode.sum_in_node
        attention = ContextParallelAttention(
            self.group, schedule=mode.schedule, options=options, sum_in_node=summed, overlap=mode.overlap
        )
        mask = masks.causal(length) if job.causal else masks.full(length)
        layout = attention.layout(mask)
        q, k, v, grad_out = (shard(x, layout, self.rank) for x in _whole(length, workload))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def call() -> Tensor:
            return attention(q, k, v, mask=mask)

        out, error = call(), 0.0
        results = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        if length == job.length:
            error = self._error(results, layout)
        forward, backward = [], []
        for _ in range(job.repeats):
            dist.barrier()
            start = time.perf_counter()
            out = call()
            forward.append(self._slowest(time.perf_counter() - start))
            dist.barrier()
            start = time.perf_counter()
            torch.autograd.grad(out, leaves, grad_out)
            backward.append(self._slowest(time.perf_counter() - start))
        problem = Problem(job.cluster.n, mask, Target(workload), options=options, sum_in_node=summed)
        (candidate,) = rank_modes(problem, job.cluster, costs, candidates=[attention.mode], timeline=True)
        assert not candidate.reason, candidate.reason
        return (statistics.median(forward), statistics.median(backward)), candidate, error

    def _error(self, results: list[Tensor], layout: Layout) -> float:
        """Return the largest error of all ranks."""
        truth = [shard(x, layout, self.rank) for x in self.truth.values()]
        errors = [float((a - b).norm() / b.norm()) if b.numel() else 0.0 for a, b in zip(results, truth, strict=True)]
        return self._slowest(max(errors))

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        return dense_attention(*_whole(self.job.length, self.job.workload), causal=self.job.causal)


def _whole(length: int, w: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of out for the whole sequence, the same on every rank."""
    return random_qkv(length, 1, w.num_heads, w.num_kv_heads, w.head_dim, torch.float32)


if __name__ == "__main__":
    main()
