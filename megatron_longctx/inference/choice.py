"""Which mode a batch is computed in: the rules of the paper, and the simulator's prediction.

"Context Parallelism for Scalable Million-Token Inference": Algorithm 1 (section 3.4), Algorithm 5 (appendix C, which
counts pass-Q's exchange of results) and the empirical rule (appendix D; with the printed coefficients it takes pass-Q
in every row of the paper's own table 4, so fit your own). Their T and P are the new and the cached tokens; of a batch,
those of all its sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..config import check_value
from ..errors import refuse
from ..schedules import Costs, Kind, Target, Workload
from ..schedules.cache_modes import CACHE_MODES
from ..schedules.simulate import simulate
from ..topology import Cluster
from .batch import Batch

logger = logging.getLogger(__name__)

_REST_OF_LAYER = 4
"""What the host takes for the rest of a layer, in operations of an attention pass. This and the share below were set by
34 measured prompts (docs/decisions.md)."""
_NOT_HIDDEN = 0.4
"""Share of the faster of host and device that a layer takes besides: neither hides the other wholly."""


@dataclass(frozen=True)
class Figures:
    """What rules go by.

    Attributes:
        workload: one rank's heads.
        cluster: of the context-parallel ranks; None where nothing is known of the links.
        costs: of the device; None for what the cluster's description says.
        empirical: alpha, beta and gamma of the empirical rule; the defaults are the paper's, fitted on its hardware.
    """

    workload: Workload
    cluster: Cluster | None = None
    costs: Costs | None = None
    empirical: tuple[float, float, float] = (-1.059, 1.145, 12.112)

    @property
    def flops(self) -> float:
        """FLOP/s of one rank's attention."""
        return self.known_costs.forward_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slowest link between neighbours of the ring."""
        cluster = self.known_cluster
        n = cluster.n
        return min(cluster.route(r, (r + 1) % n).gibps for r in range(n)) * 2**30

    @property
    def known_cluster(self) -> Cluster:
        if self.cluster is None:
            raise refuse(
                "inference.rule",
                "simulate, algorithm_1 or algorithm_5",
                "parallelism.cluster=NAME or a calibration",
                "Run `megatron-longctx calibrate` with the same settings (attention.transport as "
                "inference.transport), name the cluster, or take inference.rule=bytes or empirical.",
            )
        return self.cluster

    @property
    def known_costs(self) -> Costs:
        return self.costs or Costs.of_device(self.known_cluster.device)


@dataclass(frozen=True)
class Decision:
    """A mode, and what it was chosen by. seconds: predicted time of one layer, by mode: what attention takes on the
    device, or what the host takes to issue the layer, whichever is longer."""

    mode: str
    rule: str
    new: int
    cached: int
    sequences: int
    n: int
    inputs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{name}={value:.4g}" for name, value in self.inputs.items()]
        said += [f"{mode} {seconds * 1e6:.1f} us" for mode, seconds in self.seconds.items()]
        what = f"{self.new} new and {self.cached} cached tokens of {self.sequences} sequences on {self.n} ranks"
        return f"{what}: {self.mode} by {self.rule}" + (f" ({', '.join(said)})" if said else "")


class Chooser:
    """Chooses a mode for every batch and logs why; a rank alone has nothing to choose.

    Args:
        mode: `auto`, or the one to take always.
        rule: what `auto` goes by; itself `auto` for `simulate` where the links are known, else `bytes`.

    Raises:
        ValueError: an unknown mode or rule, or one that the figures do not serve.
    """

    def __init__(self, figures: Figures, mode: str = "auto", rule: str = "auto") -> None:
        check_value("inference.mode", mode)
        check_value("inference.rule", rule)
        self._figures = figures
        self.mode = mode
        self._rule = rule if rule != "auto" else "simulate" if figures.cluster is not None else "bytes"
        if mode == "auto" and self._rule in ("simulate", "algorithm_1", "algorithm_5"):
            _ = figures.flops, figures.bandwidth  # refused here rather than in the first batch
        self._decodes: dict[tuple[int, int], Decision] = {}

    @property
    def candidates(self) -> tuple[str, ...]:
        """The modes that batches may be computed in."""
        return tuple(CACHE_MODES) if self.mode == "auto" else (self.mode,)

    @contextmanager
    def taking(self, mode: str) -> Iterator[None]:
        """Inside, every batch is computed in this mode; what was decided before and afterwards knows nothing of it."""
        before, decodes = self.mode, self._decodes
        self.mode, self._decodes = mode, {}
        try:
            yield
        finally:
            self.mode, self._decodes = before, decodes

    def choose(self, batch: Batch, target: Target | None = None) -> Decision:
        """The mode for `batch`. Batches of single tokens of about the same size are decided once.

        target: what its plan is lowered for; None for the figures' heads, the plainest kernel and messages point to
        point.
        """
        is_decode = all(chunk.new == 1 for chunk in batch.chunks)
        key = (len(batch.chunks), (batch.cached // max(1, len(batch.chunks))).bit_length())
        if is_decode and key in self._decodes:
            return self._decodes[key]
        decision = self._decide(batch, is_decode, target)
        if batch.n > 1:
            logger.info("attention over the cache: %s", decision)
        if is_decode:
            self._decodes[key] = decision
        return decision

    def _decide(self, batch: Batch, is_decode: bool, target: Target | None) -> Decision:
        facts = (batch.new, batch.cached, len(batch.chunks), batch.n)
        if batch.n == 1:
            return Decision("pass_kv" if self.mode == "auto" else self.mode, "a rank alone", *facts)
        if self.mode != "auto":
            return Decision(self.mode, f"inference.mode={self.mode}", *facts)
        if self._rule == "simulate":
            mode, seconds = self._simulated(batch, target)
            return Decision(mode, "simulation", *facts, seconds=seconds)
        passes_kv, inputs = _RULES[self._rule](batch.new, batch.cached, batch.n, self._figures)
        # The rules compare the two rings; where queries are single tokens their hops are all there is to save.
        mode = "pass_kv" if passes_kv else "one_hop" if is_decode else "pass_q"
        return Decision(mode, self._rule, *facts, inputs=inputs)

    def _simulated(self, batch: Batch, target: Target | None) -> tuple[str, dict[str, float]]:
        """The mode, and the seconds that a layer takes in each.

        The host issues layer after layer and never waits for the device, nor the device for it while there is work
        left: in the long run a layer takes as long as the slower of them, and some of what the other takes. So what
        hides on the device behind a slow host, as the travels of a long cache do behind a short prompt, costs less.
        """
        figures = self._figures
        cluster, costs = figures.known_cluster, figures.known_costs

        def seconds_of(mode: str) -> float:
            found = simulate(batch.plan(mode), cluster, target or Target(figures.workload), costs)
            host_s = costs.host_operation_s * (_REST_OF_LAYER + found.operations)
            return max(found.seconds, host_s) + _NOT_HIDDEN * min(found.seconds, host_s)

        seconds = {mode: seconds_of(mode) for mode in CACHE_MODES}
        return min(seconds, key=seconds.__getitem__), seconds


def bytes_rule(new: int, cached: int, n: int, figures: Figures) -> tuple[bool, dict[str, float]]:
    """Equation 1: pass what is smaller. Returns whether that is K and V, and the numbers compared."""
    miss, threshold = new / (new + cached), _kv_per_q(figures)
    return miss >= threshold, {"miss_rate": miss, "threshold": threshold}


def algorithm_1(new: int, cached: int, n: int, figures: Figures) -> tuple[bool, dict[str, float]]:
    """Pass K and V where their transfer hides behind the computation, or where they are smaller."""
    least = _hides_from(n, figures)
    smaller, inputs = bytes_rule(new, cached, n, figures)
    return new >= least or smaller, inputs | {"hides_from": least}


def algorithm_5(new: int, cached: int, n: int, figures: Figures) -> tuple[bool, dict[str, float]]:
    """Algorithm 1, with the exchange of partial results counted against pass-Q."""
    least = _hides_from(n, figures)
    saved = 4 * new * figures.bandwidth / (n * figures.flops * figures.workload.element_bytes)
    miss, threshold = new / (new + cached), _kv_per_q(figures) - saved
    return new >= least or miss >= threshold, {"miss_rate": miss, "threshold": threshold, "hides_from": least}


def empirical(new: int, cached: int, n: int, figures: Figures) -> tuple[bool, dict[str, float]]:
    """`h = alpha ln T + beta ln(T / (T + P)) + gamma`; K and V where h is positive."""
    alpha, beta, gamma = figures.empirical
    h = alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma
    return h > 0, {"h": h}


_RULES = {"bytes": bytes_rule, "algorithm_1": algorithm_1, "algorithm_5": algorithm_5, "empirical": empirical}


def _kv_per_q(figures: Figures) -> float:
    """Size of a token's keys and values as a share of its query's."""
    workload = figures.workload
    return workload.token_bytes(Kind.KV) / workload.token_bytes(Kind.Q)


def _hides_from(n: int, figures: Figures) -> float:
    """Equation 2: new tokens from which on the computation takes longer than passing K and V."""
    workload = figures.workload
    flops_per_pair = 4 * workload.num_heads * workload.head_dim
    return n * figures.flops * workload.token_bytes(Kind.KV) / (flops_per_pair * figures.bandwidth)
