"""Process groups and seeds: from parallel sizes to a ``ProcessGroupCollection``."""

from __future__ import annotations

import random
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from ..comm.rendezvous import timeout_of
from ..config import ParallelismConfig
from . import cpu

# Megatron-LM's habit: pipeline stages initialise different layers, so they draw from different streams.
_SEED_STEP_PER_STAGE = 100


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

    ``torch.distributed`` must be initialised (and, on GPU, the process's device set). The data-parallel size is what
    remains of the world. A collective of any group may take as long as one of the world, which ends the job when a
    rank hangs. On a machine without CUDA the adjustments of ``mcore.cpu`` are applied first.

    Args:
        tensor: tensor-parallel size.
        context: context-parallel size.
        pipeline: pipeline-parallel size.
        expert: expert-parallel size, over neighbours of context and data parallelism.
        expert_tensor: tensor-parallel size of experts; None for that of the other layers.
        seed: seed of parameters and dropout; any value of at least 1.

    Returns:
        The groups (``.tp``, ``.cp``, ``.pp``, ``.dp``, ``.dp_cp`` and the rest).

    Raises:
        ValueError: if a size or the seed is not positive, the sizes do not divide the world, or groups exist already.
    """
    assert dist.is_initialized(), "torch.distributed must be initialised before the process groups"
    _check(tensor, context, pipeline, seed)
    cpu.apply()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        distributed_timeout_minutes=timeout_of() / timedelta(minutes=1),
        # Needed only by checkpoint formats that this project does not write.
        create_gloo_process_groups=False,
    )
    _end_left()
    seed_everything(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def of_config(par: ParallelismConfig, seed: int = 1234) -> ProcessGroupCollection:
    """`initialize` with a configuration's sizes."""
    return initialize(
        tensor=par.tensor_parallel_size,
        context=par.context_parallel_size,
        pipeline=par.pipeline_parallel_size,
        expert=par.expert_model_parallel_size,
        expert_tensor=par.expert_tensor_parallel_size,
        seed=seed,
    )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's random tracker on this rank; groups must exist.

    Data- and context-parallel ranks share a seed; pipeline stages differ; tensor-parallel ranks share the default
    stream and differ in Megatron's model-parallel stream.
    """
    stage_seed = seed + _SEED_STEP_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    # NumPy takes 32 bits.
    numpy.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    # force_reset_rng: a tracker left over from earlier groups may be of another kind.
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def destroy() -> None:
    """Forget every Megatron process group and global buffer, so that ``initialize`` can be called again."""
    _left.extend((dist.group.WORLD, group) for group in parallel_state._global_process_group_list or () if group)
    parallel_state.destroy_model_parallel()


_left: list[tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = []
"""Forgotten groups, each with the world that it is of."""


def _end_left() -> None:
    """End forgotten groups, whose threads would slow what follows: on gloo some fifty for each ``initialize``. All
    ranks have just made new ones, so nobody waits for anything in these any more."""
    for world, group in _left:
        if world is dist.group.WORLD:  # else they have ended with it
            dist.destroy_process_group(group)
    _left.clear()


def _check(tensor: int, context: int, pipeline: int, seed: int) -> None:
    for name, size in (("tensor", tensor), ("context", context), ("pipeline", pipeline), ("seed", seed)):
        if size < 1:
            raise ValueError(f"{name} is {size}, expected at least 1: set it to a positive integer")
    world, model = dist.get_world_size(), tensor * context * pipeline
    if world % model:
        raise ValueError(
            f"tensor {tensor} x context {context} x pipeline {pipeline} = {model}, expected a divisor of the "
            f"{world} processes: change a size, or start a multiple of {model} processes"
        )
    if parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "process groups exist already, expected none: call megatron_longctx.mcore.groups.destroy() first"
        )
