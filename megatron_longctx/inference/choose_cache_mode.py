"""The choice of a cache mode for every batch: by simulation, or by the size of messages if the links are unknown."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..config import Config, check_value, workload_of
from ..config.cluster import Cluster, load_cluster
from ..config.environment import environment
from ..core.comm import on_rank_0
from ..core.plans import Kind, Target, Workload
from ..core.plans.cache_modes import CACHE_MODES
from ..planner.calibration import find_calibration, load_calibration
from ..planner.cost import Costs
from ..planner.simulate import simulate
from .batch import Batch
from .quantize_kv import Int8KV

logger = logging.getLogger(__name__)

_REST_OF_LAYER = 4
"""The host's time for the rest of a layer, in operations of an attention pass. This and `_NOT_HIDDEN` were fitted to 34
measured prompts (docs/decisions.md)."""
_NOT_HIDDEN = 0.4
"""The part of the shorter of host and device time that adds to a layer's time: neither hides the other completely."""


@dataclass(frozen=True)
class LinkFacts:
    """What the choice depends on.

    Attributes:
        workload: the heads of one rank.
        cluster: the context-parallel ranks and their links; None if nothing is known about the links.
        costs: of the device; None for those in the cluster's description.
    """

    workload: Workload
    cluster: Cluster | None = None
    costs: Costs | None = None

    def known_costs(self, cluster: Cluster) -> Costs:
        return self.costs or Costs.of_cluster(cluster)


def calibration_file(config: Config, device: torch.device, folder: Path | None = None) -> Path:
    """Return where `calibrate` saves its results for these settings, with `inference.transport` as the transport.

    With `auto` on GPUs this is the first file that exists.

    Args:
        folder: None for the user's cache.
    """
    name = "cpu" if device.type == "cpu" else str(environment()["device"])
    n, transport = config.parallelism.context_parallel_size, config.inference.transport
    return find_calibration(name, n, _workload(config), transport, folder)


def find_facts(config: Config, device: torch.device, folder: Path | None = None) -> LinkFacts:
    """Return the numbers for this device, number of ranks and heads: from a calibration if there is one, otherwise from
    `parallelism.cluster`.

    Raises:
        ValueError: the calibration cannot be read, or the cluster is unknown.
    """
    n, cluster, workload = config.parallelism.context_parallel_size, config.parallelism.cluster, _workload(config)
    if n == 1:
        return LinkFacts(workload)
    path = calibration_file(config, device, folder)
    if path.is_file():
        calibration = load_calibration(path)
        if calibration.workload.batch == 1:  # here every sequence of a batch has its own kernel calls
            logger.info("attention over the cache is priced by %s", path)
            return LinkFacts(workload, calibration.cluster, calibration.costs)
    return LinkFacts(workload, load_cluster(cluster).resized(n) if cluster else None)


def facts_of_rank_0(config: Config, device: torch.device) -> LinkFacts:
    """Return rank 0's numbers on every rank: hosts may have different files, and ranks must choose alike.

    Collective over the world.

    Raises:
        ValueError: as `find_facts`, on all ranks.
    """
    return on_rank_0(lambda: find_facts(config, device))


def _workload(config: Config) -> Workload:
    workload = replace(workload_of(config), batch=1)
    row = Int8KV(workload.head_dim, torch.bfloat16).row_bytes if config.attention.kv_int8 else None
    return replace(workload, kv_row_bytes=row)


@dataclass(frozen=True)
class Decision:
    """A mode and why it was chosen.

    Attributes:
        inputs: the sizes that were compared.
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
        mode: `auto`, or the mode for every batch. `auto` simulates if the links are known, and otherwise takes the mode
            with the smaller messages.

    Raises:
        ValueError: the mode is unknown, or the cluster has no figures for its device.
    """

    def __init__(self, facts: LinkFacts, mode: str = "auto") -> None:
        check_value("inference.mode", mode)
        self._facts = facts
        self.mode = mode
        if mode == "auto" and facts.cluster is not None:
            facts.known_costs(facts.cluster)  # refused here rather than in the first batch
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
            target: what the plan is recorded for; None for the workload of the facts, the plainest kernel and
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
        if self._facts.cluster is not None:
            cluster = self._facts.cluster
            seconds = {mode: self._layer_seconds(batch, mode, cluster, target) for mode in CACHE_MODES}
            return Decision(min(seconds, key=seconds.__getitem__), "simulation", about, seconds=seconds)
        miss, threshold = batch.new / (batch.new + batch.cached), kv_per_q(self._facts.workload)
        # With single tokens as queries, only the hops can be saved.
        mode = "pass_kv" if miss >= threshold else "one_hop" if is_decode else "pass_q"
        return Decision(mode, "bytes", about, {"miss_rate": miss, "threshold": threshold})

    def _layer_seconds(self, batch: Batch, mode: str, cluster: Cluster, target: Target | None) -> float:
        """Predict the time of one layer.

        The host launches layer after layer and never waits for the device, nor the device for the host while it has
        work left. In the long run a layer therefore takes as long as the slower of the two, plus a part of the faster.
        So communication that hides behind a slow host, as that of a long cache does for a short prompt, costs less.
        """
        costs = self._facts.known_costs(cluster)
        device = simulate(batch.plan(mode), cluster, target or Target(self._facts.workload), costs)
        host_s = costs.host_operation_s * (_REST_OF_LAYER + device.operations)
        return max(device.seconds, host_s) + _NOT_HIDDEN * min(device.seconds, host_s)


def kv_per_q(workload: Workload) -> float:
    """Return the size of a token's keys and values relative to its query."""
    return workload.token_bytes(Kind.KV) / workload.token_bytes(Kind.Q)
