"""The rules of "Context Parallelism for Scalable Million-Token Inference" that choose between pass-KV and pass-Q.

Algorithm 1 (section 3.4) and Algorithm 5 (appendix C, which counts pass-Q's exchange of results).
`analysis.benchmarks.fit` has the empirical rule (appendix D).
"""

from dataclasses import dataclass

from megatron_longctx.config.cluster import Cluster
from megatron_longctx.core.plans import Kind, Workload
from megatron_longctx.inference.choose_cache_mode import kv_per_q
from megatron_longctx.planner.cost import Costs


@dataclass(frozen=True)
class RuleInputs:
    """The numbers that rules depend on: the heads of one rank, the ranks with their links, and the device's costs."""

    workload: Workload
    cluster: Cluster
    costs: Costs

    @property
    def flops(self) -> float:
        """The FLOP/s of one rank's attention."""
        return self.costs.forward_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """The bytes per second of the slowest link between neighbours of the ring."""
        n = self.cluster.n
        return min(self.cluster.route(r, (r + 1) % n).gibps for r in range(n)) * 2**30

    def hides_from(self, n: int) -> float:
        """Return the new tokens from which the computation takes longer than passing K and V (equation 2)."""
        of = self.workload
        flops_per_pair = 4 * of.num_heads * of.head_dim
        return n * self.flops * of.token_bytes(Kind.KV) / (flops_per_pair * self.bandwidth)


def algorithm_1(new: int, cached: int, n: int, facts: RuleInputs) -> bool:
    """Pass K and V if their transfer hides behind the computation, or if they are smaller (equation 1)."""
    return new >= facts.hides_from(n) or new / (new + cached) >= kv_per_q(facts.workload)


def algorithm_5(new: int, cached: int, n: int, facts: RuleInputs) -> bool:
    """Apply algorithm 1 with the exchange of partial results counted against pass-Q."""
    return new >= facts.hides_from(n) or new / (new + cached) >= results_threshold(new, n, facts)


def results_threshold(new: int, n: int, facts: RuleInputs) -> float:
    """Return the miss rate from which algorithm 5 passes K and V (equation 5)."""
    saved = 4 * new * facts.bandwidth / (n * facts.flops * facts.workload.element_bytes)
    return kv_per_q(facts.workload) - saved
