"""What a configuration determines about plans and ranks: the mode, the mask, the workload, the data-parallel size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..core.errors import nearest, refuse
from ..core.plans import Mask, Plan, Workload, build_plan
from ..core.plans.backward import node_size_to_sum
from ..core.plans.mask import documents
from ..core.plans.modes import Mode, ModeOptions, find_mode
from .cluster import Cluster, load_cluster
from .model import RopeScaling
from .parallelism import ParallelismConfig
from .tree import Config

_KEYS = {
    "ranks": "parallelism.context_parallel_size",
    **{name: f"parallelism.{name}" for name in ("schedule", "layout", "max_buffer_tokens", "inner_size", "rounds")},
    "outer_schedule": "parallelism.outer_schedule",
}


@contextmanager
def names_as_keys() -> Iterator[None]:
    """Name the key, not the argument of a plan that it is passed as, in errors that are raised inside."""
    try:
        yield
    except ValueError as error:
        name = getattr(error, "argument", "")
        if name not in _KEYS:
            raise
        raise ValueError(_KEYS[name] + str(error).removeprefix(name)) from None


def workload_of(config: Config) -> Workload:
    """Return the attention of a configured model, on one tensor-parallel rank."""
    model, tp = config.model, config.parallelism.tensor_parallel_size
    return Workload(
        num_heads=model.num_attention_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),  # ranks beyond their number repeat them
        head_dim=model.kv_channels,
        batch=config.train.micro_batch_size,
        element_bytes=2 if config.train.precision == "bf16" else 4,
        v_head_dim=model.v_head_dim,
    )


def planned_mask(config: Config, lengths: Sequence[int] | None = None, parents: Sequence[int] | None = None) -> Mask:
    """Return the mask of the layers with the widest window, for causal documents of `lengths` or one whole sequence.

    For `parents`, see `core.plans.mask.documents`.
    """
    return documents(lengths or [config.data.seq_length], window=config.model.widest_window, parents=parents)


def cluster_of(par: ParallelismConfig) -> Cluster | None:
    """Return `parallelism.cluster` with the context-parallel ranks, or None. Refuse what cannot be read or resized."""
    return load_cluster(par.cluster).resized(par.context_parallel_size) if par.cluster else None


def mode_options(par: ParallelismConfig) -> ModeOptions:
    """Return the options of modes. Raises like `cluster_of`."""
    return ModeOptions(par.max_buffer_tokens, par.inner_size, par.outer_schedule, cluster_of(par), par.rounds)


@names_as_keys()
def configured_mode(par: ParallelismConfig) -> Mode:
    """Return the mode with its options. Raises ValueError: the mode refuses its options."""
    return find_mode(par.schedule, par.context_parallel_size, mode_options(par))


def summed_node_size(config: Config) -> int:
    """Return the ranks of a node whose partial gradients are summed before they are sent to another node; 0: none.

    Refuse what `cluster_of` refuses, and a cluster that is required and missing.
    """
    par = config.parallelism
    return node_size_to_sum(config.sum_in_node, cluster_of(par), par.context_parallel_size)


@names_as_keys()
def configured_plan(config: Config, mask: Mask) -> Plan:
    """Return the forward plan of an attention call of a layer with this mask, as training executes it.

    Refuse options or sizes of the mode; raises as `summed_node_size`.
    """
    par = config.parallelism
    return build_plan(
        par.schedule,
        par.context_parallel_size,
        mask,
        mode_options(par),
        token_unit(config),
        config.layout,
        keep_received=config.keep_received,
        batch=config.train.micro_batch_size,
        sum_in_node=summed_node_size(config),
    )


def layout_of(config: Config) -> str:
    """Return the name of the layout, which may be another one for packs of several documents."""
    par, packed = config.parallelism, config.data.packing != "none"
    return configured_mode(replace(par, cluster=None)).layout_of(documents([2] * (1 + packed)), config.layout)


def token_unit(config: Config) -> int:
    """Return the number that a rank's tokens are a multiple of.

    Ranks of sequence parallelism share them equally, and products in FP8 take blocks of them.
    """
    par = config.parallelism
    return (par.tensor_parallel_size if par.uses_sequence_parallel else 1) * config.train.fp8_block


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of data-parallel ranks among `world_size` ranks.

    Refuse sizes that do not multiply to `world_size`, and a batch that does not divide among the ranks.
    """
    par, train = config.parallelism, config.train
    tp, cp, pp = par.tensor_parallel_size, par.context_parallel_size, par.pipeline_parallel_size
    product = f"tensor {tp} x context {cp} x pipeline {pp}"
    if world_size % par.model_parallel_size:
        remedy = "Start that many ranks or change the parallelism sizes."
        raise refuse("world size", world_size, f"a multiple of {product} = {par.model_parallel_size}", remedy)
    ep, etp = par.expert_model_parallel_size, par.tensor_size_of_experts
    if world_size % (etp * ep * pp):
        sizes = f"expert tensor {etp} x expert {ep} x pipeline {pp} = {etp * ep * pp}"
        expected = f"a size with which {sizes} divides the {world_size} ranks"
        remedy = "Change a size, or start another number of ranks."
        raise refuse("parallelism.expert_model_parallel_size", ep, expected, remedy)
    size = world_size // par.model_parallel_size
    if par.data_parallel_size not in (None, size):
        expected = f"{size}, because {world_size} ranks / ({product}) = {size}"
        ranks = par.model_parallel_size * (par.data_parallel_size or 1)
        remedy = f"Set it to {size} or null, or start {ranks} ranks."
        raise refuse("parallelism.data_parallel_size", par.data_parallel_size, expected, remedy)
    step = train.micro_batch_size * size
    if train.global_batch_size % step:
        expected = f"a multiple of train.micro_batch_size x data-parallel ranks = {train.micro_batch_size} x {size}"
        remedy = f"Nearest: {nearest(train.global_batch_size, step)}."
        raise refuse("train.global_batch_size", train.global_batch_size, expected, remedy)
    return size


def trained_length(run: Config, scaling: RopeScaling | None = None) -> int:
    """Return the most tokens that a run's model can read: those that it was trained on, or that its RoPE is scaled to.

    `scaling` is that of RoPE if it is not the run's own.
    """
    length, own = run.data.seq_length, run.model.rope_scaling
    scaling = scaling or own
    if scaling.original_length is not None:
        return max(length, int(scaling.original_length * scaling.factor))
    return max(length, int(length * scaling.factor / (own.factor if own.kind == scaling.kind else 1)))
