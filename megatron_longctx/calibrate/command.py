"""The `calibrate` verb: start the ranks, measure, keep what was found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..comm import choose_transport
from ..compose import compose_config
from ..config import Config, workload_of
from ..errors import refuse
from ..gpus import RANKS_PER_GPU, ranks_per_gpu
from ..metrics.environment import environment
from ..schedules.calibration import Calibration, calibration_path, save_calibration
from ..topology import Cluster, save_cluster
from ..training.ranks import Ranks, run_on_ranks, world_group
from .host import host_operation_seconds
from .kernels import Effort, Place, kernel_costs
from .messages import blocking, measured_cluster, message_costs
from .modes import mode_samples

logger = logging.getLogger(__name__)
_FEWEST_TOKENS = 64  # below, nothing is left to fit rates to


def run(settings: Sequence[str], max_tokens: int | None = None, links: Path | None = None) -> None:
    """Measure on as many ranks as `parallelism.context_parallel_size` says, or one per GPU here where it is 1, and keep
    what was found for `auto`. max_tokens: of the longest kernel call with all heads; None for what suits the device.
    links: measure links alone, and write them as this cluster file.

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
    where = Ranks.of(n if n > 1 else None, config.train.device)
    if links is not None:
        save_cluster(run_on_ranks(where, _links, where), links)
        print(links.read_text(), end="")
        logger.info("written to %s", links)
    else:
        calibrate(where, config, max_tokens)


def calibrate(where: Ranks, config: Config, max_tokens: int | None = None) -> Path:
    """Measure for a configured model, whatever its own number of ranks, and keep it; returns the file.

    Raises:
        ValueError, JobFailed: as `run`.
    """
    found: Calibration = run_on_ranks(where, measure, where, config, max_tokens)
    path = calibration_path(found.device, found.cluster.n, found.workload, found.transport)
    save_calibration(found, path)
    logger.info("%s\ncalibration written to %s", "\n".join(_said(found)), path)
    return path


def _links(rank: int, where: Ranks) -> Cluster:
    return measured_cluster(world_group(), where.local_device)


def measure(rank: int, where: Ranks, config: Config, max_tokens: int | None = None) -> Calibration:
    """All ranks call this at once, and get the same answer.

    Raises:
        ValueError: a kernel or transport that cannot serve.
    """
    group, device, workload = world_group(), where.local_device, replace(workload_of(config), batch=1)
    effort = Effort.of(device, max_tokens, config.data.seq_length)
    place = Place(group, device, workload, config.attention.kernel)
    kernel = place.choose()
    links = choose_transport(config.attention.transport, group, device)
    place = replace(place, links=links)
    cluster = measured_cluster(group, device)
    messages, message_s = message_costs(place)
    costs = replace(kernel_costs(place, effort), message_s=message_s, messages=messages)
    if device.type == "cuda":  # a CPU attends itself, and its calls and messages are timed with what issuing them takes
        pace = host_operation_seconds(place, cluster, costs)
        costs = replace(costs, blocking=blocking(place), host_operation_s=pace)
    if cluster.nodes == 1:
        costs = replace(costs, modes=mode_samples(place, cluster, costs, effort.mode_lengths(device, cluster.n)))
    facts = environment()
    return Calibration(str(facts["device"]), kernel.name, links.name, cluster, workload, costs, facts)


def _said(found: Calibration) -> list[str]:
    costs, link = found.costs, found.cluster.route(0, 1)
    modes = [mode for mode in costs.modes if not mode.backward]
    return [
        f"{found.device}: {link.gibps:.3g} GiB/s from rank to rank, latency {link.latency_s * 1e6:.1f} us; kernel "
        f"{found.kernel} up to {costs.forward_tflops:.3g} TFLOP/s forward, {costs.backward_tflops:.3g} backward",
        *(f"  {m.mode}, {m.length:,} tokens: {m.ratio:.2f} times what its parts come to" for m in modes),
    ]
