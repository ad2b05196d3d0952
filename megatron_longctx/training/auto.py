"""`parallelism.schedule=auto`: choose the mode of a job before its ranks start."""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from ..config import Config, ParallelismConfig, configured_mode, mode_options, planned_mask, token_unit, workload_of
from ..config.cluster import Cluster
from ..config.environment import environment
from ..config.gpus import for_other_nodes
from ..config.planned import cluster_of
from ..core.errors import refuse
from ..core.plans import Target
from ..core.plans.kernel_calls import fa4_takes
from ..core.plans.modes import Mode
from ..mcore.data import first_pack
from ..planner.calibration import find_calibration, load_calibration
from ..planner.choose_mode import Candidate, Problem, choose_mode, table
from ..planner.cost import Costs
from ..planner.messages import MessageTimes
from .preflight import device_type

logger = logging.getLogger(__name__)


def resolve_schedule(config: Config) -> tuple[Config, str | None]:
    """Replace `auto` by the fastest mode in simulation, and log the ranking. Any other mode is returned unchanged.

    The simulation uses the calibration of this device, number of ranks and heads if there is one, otherwise
    `parallelism.cluster`. For packed data it uses the mask of the first pack. Refuse if none of these, or no mode, can
    be used. Return the ranking as text as well; None if nothing was chosen.
    """
    par = config.parallelism
    if par.schedule != "auto":
        return config, None
    if par.context_parallel_size == 1:
        return replace(config, parallelism=replace(par, schedule="zigzag", max_attention_gib=None)), None
    if for_other_nodes() and (par.cluster or not torch.cuda.is_available()):  # this host has no calibration of theirs
        resolved, ranking = resolve_for_cluster(config)
        return resolved, table(ranking)
    cluster, costs, source = _figures(config)
    pack = () if config.data.packing == "none" else first_pack(config)
    ranking = _ranking(config, cluster, costs, pack, on_gpus=device_type(config) == "cuda")
    reason = f"parallelism.schedule=auto takes {ranking[0].name}, priced by {source}:\n{table(ranking)}"
    if config.model.recurrent:
        reason += f"\n{_beside_resharding(config, ranking[0], cluster, costs, pack)}"
    logger.info(reason)
    return _with_mode(config, ranking[0]), reason


def resolve_for_cluster(config: Config) -> tuple[Config, list[Candidate]]:
    """Replace `auto` by the mode that it chooses on `parallelism.cluster`, on any machine. Return the ranking as well.

    If a dataset is missing, packs are simulated as one document. Refuse if no cluster is named, or no mode can run.
    """
    if (cluster := cluster_of(config.parallelism)) is None:
        remedy = "Name the cluster, or choose a mode."
        raise refuse("parallelism.schedule", "auto", "a mode, or parallelism.cluster=NAME to choose one by", remedy)
    data = config.data
    has_data = all(Path(f"{prefix}.idx").is_file() for _, prefix in data.datasets)
    pack = first_pack(config) if has_data and data.packing != "none" else ()
    ranking = _ranking(config, cluster, None, pack, on_gpus=config.train.device != "cpu")
    return _with_mode(config, ranking[0]), ranking


def _ranking(
    config: Config,
    cluster: Cluster,
    costs: Costs | None,
    pack: Sequence[Sequence[int] | None],
    on_gpus: bool,
    candidates: Sequence[Mode] | None = None,
) -> list[Candidate]:
    par, n = config.parallelism, config.parallelism.context_parallel_size
    over_peers = on_gpus and cluster.nodes == 1 and config.attention.transport != "p2p"
    problem = Problem(
        n=n,
        mask=planned_mask(config, *pack),
        target=Target(workload_of(config), fa4_takes(config.attention.deterministic), over_peers),
        unit=token_unit(config),
        layout=config.layout,
        options=mode_options(par),
        keep_received=config.keep_received,
        sum_in_node=config.sum_in_node,
        max_bytes=None if par.max_attention_gib is None else int(par.max_attention_gib * 2**30),
    )
    return choose_mode(problem, cluster, costs, candidates)


def _beside_resharding(
    config: Config, best: Candidate, cluster: Cluster, costs: Costs | None, pack: Sequence[Sequence[int] | None]
) -> str:
    """Compare the choice with zigzag and an all-to-all from tokens to heads, and back, around every recurrent layer.

    Megatron-Core's own gated delta nets work so. Nothing here runs it.
    """
    model, par, workload = config.model, config.parallelism, workload_of(config)
    free = replace(config, parallelism=replace(par, layout="auto"), model=replace(model, pattern=None))
    on_gpus = device_type(config) == "cuda"
    zigzag = _ranking(free, cluster, costs, pack, on_gpus, [configured_mode(replace(par, schedule="zigzag"))])[0]
    recurrent = sum(model.recurrent_layers)
    values = model.recurrent_columns[1]
    columns = model.recurrent_rows + values  # of the projection, and of the output
    n, rows = par.context_parallel_size, config.data.seq_length * config.train.micro_batch_size
    num_bytes = rows // n**2 * columns // par.tensor_parallel_size * workload.element_bytes
    messages = MessageTimes(n, cluster, workload, costs or Costs.of_cluster(cluster))
    move = 2 * messages.all_to_all_seconds(num_bytes)  # forward and backward
    layers = model.num_layers - recurrent
    seconds = layers * best.seconds, layers * zigzag.seconds + recurrent * move
    return (
        f"Recurrent layers read contiguous tokens, so nothing is re-sharded. Forward and backward of {layers} layers "
        f"of attention take {1e3 * seconds[0]:.3f} ms with {best.name}. Zigzag, and an all-to-all to heads and back "
        f"around each of {recurrent} recurrent layers ({1e3 * move:.3f} ms), would take {1e3 * seconds[1]:.3f} ms."
    )


def _with_mode(config: Config, best: Candidate) -> Config:
    assert best.mode is not None
    keys = {each.name for each in fields(ParallelismConfig)}
    options = {each.name: getattr(best.mode, each.name) for each in fields(best.mode) if each.name in keys}
    par = replace(config.parallelism, schedule=best.mode.name, layout=config.layout, max_attention_gib=None, **options)
    return replace(config, parallelism=par)


def _figures(config: Config) -> tuple[Cluster, Costs | None, str]:
    """Return the cluster, the calibrated costs if there are any, and where they come from."""
    par = config.parallelism
    device = "cpu" if device_type(config) == "cpu" else str(environment()["device"])
    n, transport = par.context_parallel_size, config.attention.transport
    path = find_calibration(device, n, workload_of(config), transport)
    if path.is_file():
        calibration = load_calibration(path)
        return calibration.cluster, calibration.costs, str(path)
    if (cluster := cluster_of(par)) is None:
        remedy = "Run `megatron-longctx calibrate` with the same settings, name the cluster, or choose a mode."
        raise refuse("parallelism.schedule", "auto", f"a calibration ({path}) or parallelism.cluster=NAME", remedy)
    return cluster, None, f"cluster {cluster.name}"
