"""What the choice of mode goes by on this machine: a saved calibration where there is one, else the cluster named."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from ..attention.kv_format import Int8KV
from ..comm import on_rank_0
from ..config import Config, workload_of
from ..metrics.environment import environment
from ..schedules import Workload
from ..schedules.calibration import find_calibration, load_calibration
from ..topology import load_cluster
from .choice import Figures

logger = logging.getLogger(__name__)


def calibration_file(config: Config, device: torch.device, folder: Path | None = None) -> Path:
    """Where `calibrate` with these settings, and `attention.transport` as `inference.transport` is, leaves its
    figures; with `auto` on GPUs, the first of those that there are.

    Args:
        folder: None for the user's cache.
    """
    name = "cpu" if device.type == "cpu" else str(environment()["device"])
    n, transport = config.parallelism.context_parallel_size, config.inference.transport
    return find_calibration(name, n, _workload(config), transport, folder)


def known_figures(config: Config, device: torch.device, folder: Path | None = None) -> Figures:
    """The figures of this device, number of ranks and heads, as this process finds them.

    Raises:
        ValueError: a calibration that cannot be read, or an unknown cluster.
    """
    n, cluster, workload = config.parallelism.context_parallel_size, config.parallelism.cluster, _workload(config)
    inference = config.inference
    empirical = inference.rule_alpha, inference.rule_beta, inference.rule_gamma
    if n == 1:
        return Figures(workload)
    path = calibration_file(config, device, folder)
    if path.is_file():
        found = load_calibration(path)
        if found.workload.batch == 1:  # a sequence of a batch gets kernel calls of its own here
            logger.info("attention over the cache is priced by %s", path)
            return Figures(workload, found.cluster, found.costs, empirical)
    return Figures(workload, load_cluster(cluster).resized(n) if cluster else None, empirical=empirical)


def agreed_figures(config: Config, device: torch.device) -> Figures:
    """What rank 0 finds, on every rank: hosts may have different files, and ranks must choose alike.

    Collective over the world.

    Raises:
        ValueError: as `known_figures`, on all ranks.
    """
    return on_rank_0(lambda: known_figures(config, device))


def _workload(config: Config) -> Workload:
    workload = replace(workload_of(config), batch=1)
    row = Int8KV(workload.head_dim, torch.bfloat16).row_bytes if config.attention.kv_int8 else None
    return replace(workload, kv_row_bytes=row)
