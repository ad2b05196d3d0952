"""What a configuration says of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedules import Mask, Workload
from ..schedules.backward import ranks_to_sum
from ..schedules.mask import documents
from ..schedules.modes import Mode, ModeOptions, find_mode
from ..topology import load_cluster
from .parallelism import ParallelismConfig
from .tree import Config


def workload_of(config: Config) -> Workload:
    """The attention of a configured model, on one tensor-parallel rank."""
    model, tp = config.model, config.parallelism.tensor_parallel_size
    return Workload(
        num_heads=model.num_attention_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        head_dim=model.kv_channels,
        batch=config.train.micro_batch_size,
        element_bytes=2 if config.train.precision == "bf16" else 4,
        v_head_dim=model.v_head_dim,
    )


def planned_mask(config: Config, lengths: Sequence[int] | None = None) -> Mask:
    """Causal documents of these lengths, or one whole sequence, as the layers that see most see it."""
    return documents(lengths or [config.data.seq_length], window=config.model.widest_window)


def mode_options(par: ParallelismConfig) -> ModeOptions:
    """What is said of modes.

    Raises:
        ValueError: a cluster that cannot be read, or has no such number of ranks.
    """
    cluster = load_cluster(par.cluster).resized(par.context_parallel_size) if par.cluster else None
    return ModeOptions(par.max_buffer_tokens, par.inner_size, par.head_chunks, par.outer_schedule, cluster)


def configured_mode(par: ParallelismConfig) -> Mode:
    """The mode with its options.

    Raises:
        ValueError: options that it refuses.
    """
    return find_mode(par.schedule, par.context_parallel_size, mode_options(par))


def ranks_summed(config: Config) -> int:
    """The ranks of a node whose partial gradients are summed before they cross to another node; 0 for none.

    Raises:
        ValueError: a cluster that cannot be read or has no such number of ranks, or none where nodes have to be known.
    """
    par = config.parallelism
    return ranks_to_sum(config.attention.sum_in_node, mode_options(par).cluster, par.context_parallel_size)


def layout_of(config: Config) -> str:
    """The name of the layout: of packs of several documents, where `data.packing` makes them."""
    par, packed = config.parallelism, config.data.packing != "none"
    return configured_mode(replace(par, cluster=None)).layout_of(documents([2] * (1 + packed)), par.layout)


def token_unit(par: ParallelismConfig) -> int:
    """What the tokens of a rank come in multiples of: ranks of sequence parallelism share them."""
    return par.tensor_parallel_size if par.uses_sequence_parallel else 1
