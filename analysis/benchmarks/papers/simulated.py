"""What the pages of papers share: simulated passes of attention, sizes of models, and volumes of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from megatron_longctx.config.cluster import Cluster, Mesh
from megatron_longctx.core.plans import KernelSupport, Mode, Plan, Target, Workload, backward_plan, build_plan
from megatron_longctx.planner.calibration import load_calibration
from megatron_longctx.planner.cost import Costs
from megatron_longctx.planner.simulate import Simulation, simulate

from .page import RESULTS

MATMUL_SHARE = 0.7
"""The share of the peak that matrix products are assumed to reach."""


@dataclass(frozen=True)
class Machine:
    """A cluster with the costs of its ranks' work, and whether its ranks read each other's memory."""

    cluster: Cluster
    costs: Costs
    over_peers: bool = False
    matmul_share: float = MATMUL_SHARE

    @classmethod
    def measured(cls) -> Machine:
        """Return four H200s of one host over peer memory, as `megatron-longctx calibrate` measured 32:8 heads."""
        calibration = load_calibration(RESULTS / "papers_calibration_h200_x4.json")
        return cls(calibration.cluster, calibration.costs, over_peers=True)

    def target(self, workload: Workload) -> Target:
        return Target(workload, KernelSupport(), self.over_peers)


def scaled(cluster: Cluster, what: str, by: float) -> Cluster:
    """Return the cluster with one assumed figure `by` times as large: kernels, memory, links, network or latency."""
    device, intra, network = cluster.device, cluster.intra, cluster.network
    assert device.efficiency is not None and device.memory_gibps is not None
    if what == "kernels":
        return replace(cluster, device=replace(device, efficiency=by * device.efficiency))
    if what == "memory":
        return replace(cluster, device=replace(device, memory_gibps=by * device.memory_gibps))
    if what == "network":
        return replace(cluster, network=network and replace(network, nic_gibps=by * network.nic_gibps))
    if what == "latency":
        near = intra and replace(intra, latency_s=by * intra.latency_s)
        return replace(cluster, intra=near, network=network and replace(network, latency_s=by * network.latency_s))
    assert what == "links" and intra is not None and not intra.messages
    if isinstance(intra, Mesh):
        return replace(cluster, intra=replace(intra, pair_gibps=by * intra.pair_gibps))
    pair, egress, ingress = intra.pair_gibps, by * intra.egress_gibps, by * intra.ingress_gibps
    return replace(
        cluster, intra=replace(intra, egress_gibps=egress, ingress_gibps=ingress, pair_gibps=pair and by * pair)
    )


@dataclass(frozen=True)
class Passes:
    """The simulated passes of one layer's attention."""

    forward: Simulation
    backward: Simulation

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


@lru_cache(maxsize=512)
def passes(mode: Mode | str, machine: Machine, workload: Workload, length: int, layout: str = "auto") -> Passes:
    """Simulate causal attention over all ranks of the machine."""
    plan = build_plan(mode, machine.cluster.n, length, layout=layout)
    simulations = [simulate(each, machine.cluster, machine.target(workload), machine.costs, timeline=True)
             for each in (plan, backward_plan(plan))]  # fmt: skip
    return Passes(*simulations)


def one_rank(machine: Machine, workload: Workload, length: int) -> Passes:
    """Simulate the same on one rank of the machine."""
    alone = Machine(machine.cluster.resized(1), machine.costs)
    return passes("zigzag", alone, workload, length)


def not_overlapped(simulation: Simulation) -> float:
    """Return the seconds if ranks waited for every message: computation and messages of the busiest rank."""
    return max(
        sum(span.stop - span.start for span in simulation.spans if span.rank == rank)
        for rank in range(simulation.plan.n)
    )


def moved(plan: Plan, workload: Workload) -> float:
    """Return the elements that all ranks send, without log-sum-exps."""
    moves = (move for step in plan.steps for move in step.moves)
    return sum(move.block.tokens * workload.elements(move.block.kind, move.block.heads) for move in moves)


@dataclass(frozen=True)
class Llama:
    """The sizes of a dense model of the papers."""

    head_dim: ClassVar[int] = 128
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def workload(self) -> Workload:
        return Workload(self.heads, self.kv_heads, self.head_dim)

    def linear_flops(self, tokens: int) -> float:
        """Return the FLOPs of one layer's matrix products in the forward pass."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return 2.0 * tokens * (attention + 3 * self.hidden * self.ffn)


LLAMA_7B = Llama(32, 4096, 11008, 32, 32)
LLAMA_GQA = Llama(32, 4096, 11008, 32, 8)
LLAMA_33H = Llama(32, 4224, 11008, 33, 33)
