"""The choice of a cache mode for every batch: the rules of the paper, or the simulator's prediction.

The rules are from "Context Parallelism for Scalable Million-Token Inference": Algorithm 1 (section 3.4), Algorithm 5
(appendix C, which counts pass-Q's exchange of results) and the empirical rule (appendix D; with the printed
coefficients it takes pass-Q in every row of the paper's own table 4, so fit your own). Their T and P are the new and
the cached tokens; for a batch, those of all its sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..attention.kv_format import Int8KV
from ..comm import on_rank_0
from ..config import Config, check_value, workload_of
from ..errors import refuse
from ..metrics.environment import environment
from ..schedules import Kind, Target, Workload
from ..schedules.cache_modes import CACHE_MODES
from ..schedules.calibration import find_calibration, load_calibration
from ..schedules.cost import Costs
from ..schedules.simulate import simulate
from ..topology import Cluster, load_cluster
from .batch import Batch

logger = logging.getLogger(__name__)

_REST_OF_LAYER = 4
"""The host's time for the rest of a layer, in operations of an attention pass. This and `_NOT_HIDDEN` were fitted to 34
measured prompts (docs/decisions.md)."""
_NOT_HIDDEN = 0.4
"""The part of the shorter of host and device time that adds to a layer's time: neither hides the other completely."""


@dataclass(frozen=True)
class RuleInputs:
    """The numbers that rules depend on.

    Attributes:
        workload: the heads of one rank.
        cluster: the context-parallel ranks and their links; None if nothing is known about the links.
        costs: of the device; None for those in the cluster's description.
        empirical: alpha, beta and gamma of the empirical rule; the defaults are the paper's, fitted on its hardware.
    """

    workload: Workload
    cluster: Cluster | None = None
    costs: Costs | None = None
    empirical: tuple[float, float, float] = (-1.059, 1.145, 12.112)

    @property
    def flops(self) -> float:
        """The FLOP/s of one rank's attention."""
        return self.known_costs.forward_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """The bytes per second of the slowest link between neighbours of the ring."""
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


def calibration_file(config: Config, device: torch.device, folder: Path | None = None) -> Path:
    """Return where `calibrate` saves its results for these settings, with `inference.transport` as the transport.

    With `auto` on GPUs this is the first file that exists.

    Args:
        folder: None for the user's cache.
    """
    name = "cpu" if device.type == "cpu" else str(environment()["device"])
    n, transport = config.parallelism.context_parallel_size, config.inference.transport
    return find_calibration(name, n, _workload(config), transport, folder)


def find_rule_inputs(config: Config, device: torch.device, folder: Path | None = None) -> RuleInputs:
    """Return the numbers for this device, number of ranks and heads: from a calibration if there is one, otherwise from
    `parallelism.cluster`.

    Raises:
        ValueError: the calibration cannot be read, or the cluster is unknown.
    """
    n, cluster, workload = config.parallelism.context_parallel_size, config.parallelism.cluster, _workload(config)
    inference = config.inference
    empirical = inference.rule_alpha, inference.rule_beta, inference.rule_gamma
    if n == 1:
        return RuleInputs(workload)
    path = calibration_file(config, device, folder)
    if path.is_file():
        calibration = load_calibration(path)
        if calibration.workload.batch == 1:  # here every sequence of a batch has its own kernel calls
            logger.info("attention over the cache is priced by %s", path)
            return RuleInputs(workload, calibration.cluster, calibration.costs, empirical)
    return RuleInputs(workload, load_cluster(cluster).resized(n) if cluster else None, empirical=empirical)


def rule_inputs_of_rank_0(config: Config, device: torch.device) -> RuleInputs:
    """Return rank 0's numbers on every rank: hosts may have different files, and ranks must choose alike.

    Collective over the world.

    Raises:
        ValueError: as `find_rule_inputs`, on all ranks.
    """
    return on_rank_0(lambda: find_rule_inputs(config, device))


def _workload(config: Config) -> Workload:
    workload = replace(workload_of(config), batch=1)
    row = Int8KV(workload.head_dim, torch.bfloat16).row_bytes if config.attention.kv_int8 else None
    return replace(workload, kv_row_bytes=row)


@dataclass(frozen=True)
class Decision:
    """A mode and why it was chosen.

    Attributes:
        inputs: the numbers that the rule compared.
        seconds: keyed by mode, the predicted time of one layer from the device's and the host's time.
    """

    mode: str
    rule: str
    batch: str
    inputs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        details = [f"{name}={value:.4g}" for name, value in self.inputs.items()]
        details += [f"{mode} {seconds * 1e6:.1f} us" for mode, seconds in self.seconds.items()]
        return f"{self.batch}: {self.mode} by {self.rule}" + (f" ({', '.join(details)})" if details else "")


class Chooser:
    """Chooses a mode for every batch and logs why; with one rank there is no choice.

    Args:
        mode: `auto`, or the mode for every batch.
        rule: the rule of mode `auto`. `auto` is `simulate` if the links are known, otherwise `bytes`.

    Raises:
        ValueError: the mode or the rule is unknown, or the rule needs facts that are unknown.
    """

    def __init__(self, facts: RuleInputs, mode: str = "auto", rule: str = "auto") -> None:
        check_value("inference.mode", mode)
        check_value("inference.rule", rule)
        self._facts = facts
        self.mode = mode
        self._rule = rule if rule != "auto" else "simulate" if facts.cluster is not None else "bytes"
        if mode == "auto" and self._rule in ("simulate", "algorithm_1", "algorithm_5"):
            _ = facts.flops, facts.bandwidth  # refused here rather than in the first batch
        self._decodes: dict[tuple[int, int], Decision] = {}

    @property
    def candidates(self) -> tuple[str, ...]:
        """The modes that batches may be computed in."""
        return tuple(CACHE_MODES) if self.mode == "auto" else (self.mode,)

    @contextmanager
    def forcing(self, mode: str) -> Iterator[None]:
        """Use this mode for every batch inside the context, without effect on decisions outside."""
        before, decodes = self.mode, self._decodes
        self.mode, self._decodes = mode, {}
        try:
            yield
        finally:
            self.mode, self._decodes = before, decodes

    def choose(self, batch: Batch, target: Target | None = None) -> Decision:
        """Choose the mode for `batch`. Batches of single tokens of about the same size are decided once.

        Args:
            target: what the plan is lowered for; None for the workload of the rule's inputs, the plainest kernel and
                point-to-point messages.
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
        about = f"{batch.new} new and {batch.cached} cached tokens of {len(batch.chunks)} sequences on {batch.n} ranks"
        if batch.n == 1:
            return Decision("pass_kv" if self.mode == "auto" else self.mode, "a rank alone", about)
        if self.mode != "auto":
            return Decision(self.mode, f"inference.mode={self.mode}", about)
        if self._rule == "simulate":
            seconds = {mode: self._layer_seconds(batch, mode, target) for mode in CACHE_MODES}
            return Decision(min(seconds, key=seconds.__getitem__), "simulation", about, seconds=seconds)
        passes_kv, inputs = _RULES[self._rule](batch.new, batch.cached, batch.n, self._facts)
        # The rules compare the two rings. With single tokens as queries, only the hops can be saved.
        mode = "pass_kv" if passes_kv else "one_hop" if is_decode else "pass_q"
        return Decision(mode, self._rule, about, inputs=inputs)

    def _layer_seconds(self, batch: Batch, mode: str, target: Target | None) -> float:
        """Predict the time of one layer.

        The host launches layer after layer and never waits for the device, nor the device for the host while it has
        work left. In the long run a layer therefore takes as long as the slower of the two, plus a part of the faster.
        So communication that hides behind a slow host, as that of a long cache does for a short prompt, costs less.
        """
        facts = self._facts
        costs = facts.known_costs
        device = simulate(batch.plan(mode), facts.known_cluster, target or Target(facts.workload), costs)
        host_s = costs.host_operation_s * (_REST_OF_LAYER + device.operations)
        return max(device.seconds, host_s) + _NOT_HIDDEN * min(device.seconds, host_s)


def bytes_rule(new: int, cached: int, n: int, facts: RuleInputs) -> tuple[bool, dict[str, float]]:
    """Apply equation 1: pass whichever is smaller. Returns whether to pass K and V, and the numbers compared."""
    miss, threshold = new / (new + cached), _kv_per_q(facts)
    return miss >= threshold, {"miss_rate": miss, "threshold": threshold}


def algorithm_1(new: int, cached: int, n: int, facts: RuleInputs) -> tuple[bool, dict[str, float]]:
    """Pass K and V if their transfer hides behind the computation, or if they are smaller."""
    least = _hides_from(n, facts)
    smaller, inputs = bytes_rule(new, cached, n, facts)
    return new >= least or smaller, inputs | {"hides_from": least}


def algorithm_5(new: int, cached: int, n: int, facts: RuleInputs) -> tuple[bool, dict[str, float]]:
    """Apply algorithm 1 with the exchange of partial results counted against pass-Q."""
    least = _hides_from(n, facts)
    saved = 4 * new * facts.bandwidth / (n * facts.flops * facts.workload.element_bytes)
    miss, threshold = new / (new + cached), _kv_per_q(facts) - saved
    return new >= least or miss >= threshold, {"miss_rate": miss, "threshold": threshold, "hides_from": least}


def empirical(new: int, cached: int, n: int, facts: RuleInputs) -> tuple[bool, dict[str, float]]:
    """Pass K and V if `h = alpha ln T + beta ln(T / (T + P)) + gamma` is positive."""
    alpha, beta, gamma = facts.empirical
    h = alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma
    return h > 0, {"h": h}


_RULES = {"bytes": bytes_rule, "algorithm_1": algorithm_1, "algorithm_5": algorithm_5, "empirical": empirical}


def _kv_per_q(facts: RuleInputs) -> float:
    """Return the size of a token's keys and values relative to its query."""
    workload = facts.workload
    return workload.token_bytes(Kind.KV) / workload.token_bytes(Kind.Q)


def _hides_from(n: int, facts: RuleInputs) -> float:
    """Return the new tokens from which the computation takes longer than passing K and V (equation 2)."""
    workload = facts.workload
    flops_per_pair = 4 * workload.num_heads * workload.head_dim
    return n * facts.flops * workload.token_bytes(Kind.KV) / (flops_per_pair * facts.bandwidth)
