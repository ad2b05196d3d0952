"""`parallelism.schedule=auto`: the mode for this job, chosen before its ranks start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from ..config import Config, ParallelismConfig, mode_options, planned_mask, token_unit, workload_of
from ..errors import refuse
from ..mcore.data import first_pack
from ..metrics.environment import environment
from ..schedules import Costs, Target
from ..schedules.calibration import find_calibration, load_calibration
from ..schedules.kernel_calls import fa4_takes
from ..schedules.select import Candidate, Problem, select, table
from ..topology import Cluster, load_cluster
from .preflight import device_type

logger = logging.getLogger(__name__)


def settled(config: Config, folder: Path | None = None) -> Config:
    """As `explained`, without the reason, which is logged."""
    return explained(config, folder)[0]


def explained(config: Config, folder: Path | None = None) -> tuple[Config, str | None]:
    """The configuration with a mode in the place of `auto`, and why this one; any other is returned as it is.

    Priced by the calibration of this device, number of ranks and heads where there is one, else by what
    `parallelism.cluster` says; of packed data, for the first pack. The reason, a ranking, is logged.

    Args:
        folder: where calibrations lie; None for the user's cache.

    Raises:
        ValueError: nothing to go by, no mode that can run, or packed data that is not there.
    """
    par = config.parallelism
    if par.schedule != "auto":
        return config, None
    if par.context_parallel_size == 1:
        return replace(config, parallelism=replace(par, schedule="zigzag", max_attention_gib=None)), None
    cluster, costs, source = _figures(config, folder)
    lengths = None if config.data.packing == "none" else first_pack(config)
    ranking = _ranking(config, cluster, costs, lengths, on_gpus=device_type(config) == "cuda")
    reason = f"parallelism.schedule=auto takes {ranking[0].name}, priced by {source}:\n{table(ranking)}"
    logger.info(reason)
    return _with(config, ranking[0]), reason


def planned(config: Config) -> tuple[Config, list[Candidate]]:
    """The configuration with the mode that `auto` takes on `parallelism.cluster`, wherever this is asked, and the
    ranking that it is the first of. Packs count as one document where their dataset is not there.

    Raises:
        ValueError: no cluster named, no mode that can run, or packed data that is not there.
    """
    par = config.parallelism
    if par.cluster is None:
        remedy = "Name the cluster, or choose a mode."
        raise refuse("parallelism.schedule", "auto", "a mode, or parallelism.cluster=NAME to choose one by", remedy)
    cluster = load_cluster(par.cluster).resized(par.context_parallel_size)
    data = config.data
    there = all(Path(f"{prefix}.idx").is_file() for _, prefix in data.datasets)
    lengths = first_pack(config) if there and data.packing != "none" else None
    ranking = _ranking(config, cluster, None, lengths, on_gpus=config.train.device != "cpu")
    return _with(config, ranking[0]), ranking


def _ranking(
    config: Config, cluster: Cluster, costs: Costs | None, lengths: Sequence[int] | None, on_gpus: bool
) -> list[Candidate]:
    par, n = config.parallelism, config.parallelism.context_parallel_size
    over_peers = on_gpus and config.attention.transport != "p2p"
    target = Target(
        workload_of(config),
        fa4_takes(config.attention.deterministic),
        (tuple(range(n)),) * n if over_peers else None,
    )
    problem = Problem(
        n=n,
        mask=planned_mask(config, lengths),
        target=target,
        unit=token_unit(par),
        layout=par.layout,
        options=mode_options(par),
        keep_received=config.keep_received,
        sum_in_node=config.attention.sum_in_node,
        max_bytes=None if par.max_attention_gib is None else int(par.max_attention_gib * 2**30),
    )
    return select(problem, cluster, costs)


def _with(config: Config, best: Candidate) -> Config:
    par = config.parallelism
    assert best.mode is not None
    names = {each.name for each in fields(ParallelismConfig)}
    options = {each.name: getattr(best.mode, each.name) for each in fields(best.mode) if each.name in names}
    chosen = replace(par, schedule=best.mode.name, max_attention_gib=None, **options)
    return replace(config, parallelism=chosen)


def _figures(config: Config, folder: Path | None) -> tuple[Cluster, Costs | None, str]:
    par = config.parallelism
    device = "cpu" if device_type(config) == "cpu" else str(environment()["device"])
    n, transport = par.context_parallel_size, config.attention.transport
    path = find_calibration(device, n, workload_of(config), transport, folder)
    if path.is_file():
        calibration = load_calibration(path)
        return calibration.cluster, calibration.costs, str(path)
    if par.cluster is None:
        raise refuse(
            "parallelism.schedule",
            "auto",
            f"a calibration ({path}) or parallelism.cluster=NAME",
            "Run `megatron-longctx calibrate` with the same settings, name the cluster, or choose a mode.",
        )
    cluster = load_cluster(par.cluster).resized(par.context_parallel_size)
    return cluster, None, f"cluster {cluster.name}"
