"""Calibrates this machine for the `calibrate` verb: starts the ranks, measures, and stores the results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...config import Config, workload_of
from ...config.cluster import Cluster, save_cluster
from ...config.environment import environment
from ...config.gpus import RANKS_PER_GPU, ranks_per_gpu
from ...core.comm import choose_transport
from ...core.errors import refuse
from ...planner.calibration import Calibration, calibration_path, save_calibration
from ..compose import compose_config
from ..ranks import Ranks, run_on_ranks, world_group
from .costs import blocking_share, kernel_costs, measured_cluster, message_costs
from .measure import Effort, Testbed
from .passes import host_operation_seconds, mode_samples

logger = logging.getLogger(__name__)
_FEWEST_TOKENS = 64  # with fewer, rates cannot be fitted


def run(settings: Sequence[str], max_tokens: int | None = None, links: Path | None = None) -> None:
    """Measure on `parallelism.context_parallel_size` ranks, or one per GPU if it is 1, and store the result for `auto`.

    Args:
        max_tokens: the longest kernel call with all heads; None for a default of the device.
        links: measure only links, and write them as this cluster file.

    Raises:
        ValueError: settings that cannot be measured.
        JobFailed: a rank failed.
    """
    if max_tokens is not None and max_tokens < _FEWEST_TOKENS:
        raise refuse("--max-tokens", max_tokens, f"{_FEWEST_TOKENS} or more", "Raise it, or leave it out.")
    if links is not None and (links.suffix not in (".yaml", ".yml") or not links.parent.is_dir()):
        raise refuse("--links", links, "a .yaml file in a folder that exists", "Give another file name.")
    if ranks_per_gpu() > 1:
        raise refuse(RANKS_PER_GPU, ranks_per_gpu(), "a GPU for each rank where times are measured", "Unset it.")
    config = compose_config(settings)
    n = config.parallelism.context_parallel_size
    ranks = Ranks.of(n if n > 1 else None, config.train.device)
    if links is not None:
        save_cluster(run_on_ranks(ranks, _measure_links, ranks), links)
        print(links.read_text(), end="")
        logger.info("written to %s", links)
    else:
        calibrate(ranks, config, max_tokens)


def calibrate(ranks: Ranks, config: Config, max_tokens: int | None = None) -> Path:
    """Measure `ranks` for a configured model, store the result, and return its file. Errors are those of `run`."""
    if ranks.device == "cpu":  # refused before ranks start; on GPUs, it would initialize CUDA here
        _testbed(None, torch.device("cpu"), config).choose_kernel()
    calibration: Calibration = run_on_ranks(ranks, _measure, ranks, config, max_tokens)
    path = calibration_path(calibration.device, calibration.cluster.n, calibration.workload, calibration.transport)
    save_calibration(calibration, path)
    logger.info("%s\ncalibration written to %s", "\n".join(summary(calibration)), path)
    return path


def _measure_links(rank: int, ranks: Ranks) -> Cluster:
    return measured_cluster(world_group(), ranks.local_device)


def _measure(rank: int, ranks: Ranks, config: Config, max_tokens: int | None = None) -> Calibration:
    """Measure everything. All ranks call this together and get the same result."""
    group, device = world_group(), ranks.local_device
    effort = Effort.of(device, max_tokens, config.data.seq_length)
    testbed = _testbed(group, device, config)
    kernel = testbed.choose_kernel()
    transport = choose_transport(config.attention.transport, group, device)
    testbed = replace(testbed, transport=transport)
    cluster = measured_cluster(group, device)
    messages, message_s = message_costs(testbed)
    costs = replace(kernel_costs(testbed, effort), message_s=message_s, messages=messages)
    if device.type == "cuda":  # on CPUs the host computes as well, so times of calls and messages include issuing them
        host_operation_s = host_operation_seconds(testbed, cluster, costs)
        costs = replace(costs, blocking=blocking_share(testbed), host_operation_s=host_operation_s)
    if cluster.nodes == 1:
        costs = replace(costs, modes=mode_samples(testbed, cluster, costs, effort.mode_lengths(device, cluster.n)))
    facts = environment()
    return Calibration(str(facts["device"]), kernel.name, transport.name, cluster, testbed.workload, costs, facts)


def _testbed(group: Any, device: torch.device, config: Config) -> Testbed:
    return Testbed(group, device, replace(workload_of(config), batch=1), config.attention.kernel)


def summary(result: Calibration) -> list[str]:
    """Return lines with the rates of links and kernels, and the corrections of modes."""
    costs, link = result.costs, result.cluster.route(0, 1)
    modes = [mode for mode in costs.modes if not mode.backward]
    return [
        f"{result.device}: {link.gibps:.3g} GiB/s from rank to rank, latency {link.latency_s * 1e6:.1f} us; kernel "
        f"{result.kernel} up to {costs.forward_tflops:.3g} TFLOP/s forward, {costs.backward_tflops:.3g} backward",
        *(f"  {m.mode}, {m.length:,} tokens: {m.ratio:.2f} times the simulated time" for m in modes),
    ]
