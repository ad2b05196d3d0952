"""`parallelism.schedule=auto`: the mode for this job, chosen before its ranks start."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path

from ..config import Config, ParallelismConfig, mode_options, planned_mask, token_unit, workload_of
from ..errors import refuse
from ..mcore.data import first_pack
from ..metrics.environment import environment
from ..schedules import Costs, Takes, Target
from ..schedules.calibration import find_calibration, load_calibration
from ..schedules.select import Problem, select, table
from ..topology import Cluster, load_cluster
from .preflight import device_type

logger = logging.getLogger(__name__)


def settled(config: Config, folder: Path | None = None) -> Config:
    """The configuration with a mode in the place of `auto`; any other is returned as it is.

    Priced by the calibration of this device, number of ranks and heads where there is one, else by what
    `parallelism.cluster` says; of packed data, for the first pack. The ranking is logged.

    Args:
        folder: where calibrations lie; None for the user's cache.

    Raises:
        ValueError: nothing to go by, no mode that can run, or packed data that is not there.
    """
    par = config.parallelism
    if par.schedule != "auto":
        return config
    if par.context_parallel_size == 1:
        return replace(config, parallelism=replace(par, schedule="zigzag", max_attention_gib=None))
    cluster, costs, source = _figures(config, folder)
    n = par.context_parallel_size
    over_peers = device_type(config) == "cuda" and config.attention.transport != "p2p"
    target = Target(
        workload_of(config),
        Takes(packed=True, rectangles=True, windows=True),
        (tuple(range(n)),) * n if over_peers else None,
    )
    problem = Problem(
        n=n,
        mask=planned_mask(config, None if config.data.packing == "none" else first_pack(config)),
        target=target,
        unit=token_unit(par),
        layout=par.layout,
        options=mode_options(par),
        keep_received=config.keep_received,
        max_bytes=None if par.max_attention_gib is None else int(par.max_attention_gib * 2**30),
    )
    ranking = select(problem, cluster, costs)
    best = ranking[0]
    logger.info("parallelism.schedule=auto takes %s, priced by %s:\n%s", best.name, source, table(ranking))
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
