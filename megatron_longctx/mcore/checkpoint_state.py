"""What a checkpoint holds of a rank, and what of it says whether another rank or model can load it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from . import checkpoint_optimizer


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint is taken from and loaded into.

    Attributes:
        models: the model chunks of this rank, wrapped in DDP or bare.
        optimizer: None to leave the optimizer out. To train on from weights alone, load with None and then call
            ``optimizer.reload_model_params()``.
        scheduler: None to leave the schedule out.
        fingerprint: JSON-able facts that make two models incompatible when they differ (layers, sizes, vocabulary);
            nothing about parallel sizes.
    """

    models: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


def named_models(models: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """Megatron-LM's names: ``model`` for one chunk, ``model0``, ``model1`` for several."""
    bare = unwrap_model(list(models))
    return [("model" if len(bare) == 1 else f"model{index}", model) for index, model in enumerate(bare)]


def finish_parameter_gather(models: Sequence[torch.nn.Module]) -> None:
    """With ``overlap_param_gather`` the parameters updated by other ranks arrive only in the next forward pass."""
    for model in models:
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def sharded_state_dict(state: TrainingState, *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {name: model.sharded_state_dict(metadata=metadata) for name, model in named_models(state.models)}
    sharded: dict[str, Any] = dict(models)
    if state.optimizer is not None:
        # The optimizer finds each parameter's sharding by the parameter object inside the model's dictionary.
        model_part: dict[str, Any] = models["model"] if len(models) == 1 else models
        checkpoint_optimizer.prepare(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model_part, is_loading=is_loading, metadata=metadata)
    if state.scheduler is not None:
        sharded["scheduler"] = state.scheduler.state_dict()
    if with_rng:
        # One state per rank of the world: pipeline stages and tensor-parallel ranks differ.
        sharded["rng"] = ShardedObject("rng_state", get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return sharded


def layout() -> dict[str, Any]:
    expert = parallel_state.get_expert_model_parallel_world_size()
    return ({} if expert == 1 else {"expert": expert}) | {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def get_rng() -> dict[str, Any]:
    numpy_state: Any = numpy.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_rng(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def jsonable(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as JSON would give it back, so that what is compared is what was stored."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {value!r} ({error}), expected JSON values: convert it to numbers, strings, lists and dicts"
        ) from error
    return copy
