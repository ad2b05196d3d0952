"""Process groups and seeds: from parallel sizes to a `ProcessGroupCollection`."""

import random
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from ..config import ParallelismConfig
from ..core.errors import refuse
from . import cpu, fp8

# As in Megatron-LM: pipeline stages initialize different layers, so they draw from different streams.
_SEED_STEP_PER_STAGE = 100

_stale: list[tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = []
"""Groups that `destroy` has dropped, each with the world it belongs to."""


def initialize(
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    seed: int = 1234,
) -> ProcessGroupCollection:
    """Build every Megatron process group and seed every generator.

    `torch.distributed` must be initialized (and, on GPU, the process's device set). The data-parallel size is the
    world's size divided by the others. A collective of any group may take as long as one of the world, whose timeout
    ends the job if a rank hangs. On a machine without CUDA, this calls `mcore.cpu.apply` first.

    Args:
        tensor, context, pipeline: parallel sizes.
        expert: expert-parallel size, over neighbors of context and data parallelism.
        expert_tensor: tensor-parallel size of experts; None for that of the other layers.
        seed: of parameters and dropout, at least 1.

    Raises:
        ValueError: a size or the seed is not positive, the sizes do not divide the world, or groups exist already.
    """
    assert dist.is_initialized(), "torch.distributed must be initialized before the process groups"
    _check(tensor, context, pipeline, seed)
    cpu.apply()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        distributed_timeout_minutes=timeout_of() / timedelta(minutes=1),
        # Only checkpoint formats that this project does not write need them.
        create_gloo_process_groups=False,
    )
    # Threads of old groups slow down later work: on gloo about fifty per `initialize`. All ranks have just built new
    # groups, so no rank waits for anything in the old ones.
    for world, group in _stale:
        if world is dist.group.WORLD:  # groups of an earlier world ended with it
            dist.destroy_process_group(group)
    _stale.clear()
    seed_everything(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def from_config(par: ParallelismConfig, seed: int = 1234) -> ProcessGroupCollection:
    """Call `initialize` with a configuration's sizes."""
    return initialize(
        tensor=par.tensor_parallel_size,
        context=par.context_parallel_size,
        pipeline=par.pipeline_parallel_size,
        expert=par.expert_model_parallel_size,
        expert_tensor=par.expert_tensor_parallel_size,
        seed=seed,
    )


@dataclass(frozen=True)
class WeightGroups:
    """The groups of ranks that share weights: rank `slice * context + part` is in tensor-parallel group order.

    megatron: Megatron's groups, in which all ranks are tensor-parallel.
    cache: neighbouring ranks, which hold the parts of the cache of the same heads.
    gather: the same ranks, for messages beside those of `cache`.
    slices: the ranks that hold the same part of the cache, of all heads together.
    """

    megatron: ProcessGroupCollection
    cache: dist.ProcessGroup
    gather: dist.ProcessGroup
    slices: dist.ProcessGroup


def share_weights(context: int) -> WeightGroups:
    """Replace all groups: context-parallel ranks become tensor-parallel ones, of which `context` neighbours share a
    cache. Collective over the world, which must have no other kinds of ranks. Seeds stay as they are."""
    seed, world = torch.initial_seed(), dist.get_world_size()
    destroy()
    megatron = initialize(tensor=world, seed=seed)
    neighbours = [list(range(first, first + context)) for first in range(0, world, context)]
    return WeightGroups(
        megatron,
        cache=megatron.tp if context == world else _own_group(neighbours),
        gather=_own_group(neighbours),
        slices=_own_group([list(range(part, world, context)) for part in range(context)]),
    )


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make groups of these ranks, which `destroy` drops, and return that of this rank. Collective over the world."""
    own, made = dist.new_subgroups_by_enumeration(groups, timeout=timeout_of())  # type: ignore[no-untyped-call]
    assert isinstance(own, dist.ProcessGroup)
    parallel_state._global_process_group_list += [group for group in made if group is own]
    return own


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's random tracker on this rank; groups must exist.

    Data- and context-parallel ranks share a seed; pipeline stages differ. Tensor-parallel ranks share the default
    stream and differ in Megatron's model-parallel stream.
    """
    stage_seed = seed + _SEED_STEP_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed % 2**32)  # NumPy's seeds have 32 bits
    torch.manual_seed(stage_seed)
    # force_reset_rng: the tracker of earlier groups may be of another kind.
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def destroy() -> None:
    """Drop every Megatron process group and global buffer, so that `initialize` can be called again."""
    _stale.extend((dist.group.WORLD, group) for group in parallel_state._global_process_group_list or () if group)
    parallel_state.destroy_model_parallel()
    fp8.reset()


def _check(tensor: int, context: int, pipeline: int, seed: int) -> None:
    for name, size in (("tensor", tensor), ("context", context), ("pipeline", pipeline), ("seed", seed)):
        if size < 1:
            raise refuse(name, size, "at least 1", "Set it to a positive integer.")
    world, model = dist.get_world_size(), tensor * context * pipeline
    if world % model:
        sizes, expected = f"{tensor} x {context} x {pipeline}", f"a divisor of the {world} processes"
        remedy = f"Change a size, or start a multiple of {model} processes."
        raise refuse("tensor x context x pipeline", sizes, expected, remedy)
    if parallel_state.model_parallel_is_initialized():
        raise refuse("process groups", "initialized", "none", "Call megatron_longctx.mcore.groups.destroy() first.")


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of the collectives of `group`, by default of all ranks. (New groups get torch's default.)"""
    group = group or dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
