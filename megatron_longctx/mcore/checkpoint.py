"""Checkpoints on Megatron's ``dist_checkpointing``, saved at any parallel sizes and loaded at any others.

The files have Megatron-LM's layout::

    <directory>/latest_checkpointed_iteration.txt    written last, atomically, by rank 0
    <directory>/iter_0000100/                        common.pt, metadata.json, .metadata, *.distcp, digests.json

A save can run beside training, and its checkpoint counts only when all of it is written. Before a load, the files are
compared with their digests; a load runs no code from them.
"""

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from ..core.comm import on_rank_0
from . import checkpoint_folder, checkpoint_optimizer, checkpoint_reader, fp8
from .checkpoint_folder import TRACKER, Retention, examine, iteration_directory, latest
from .checkpoint_writer import HostCopies, PendingSave, SaveStrategy, delete
from .version import SAVE_ARGUMENTS

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint is saved from and loaded into.

    models: this rank's model, wrapped in DDP or not, in a list, as Megatron passes it.
    optimizer, scheduler: None leaves them out.
    main: in the place of ``optimizer``, one whose main parameters begin with the weights that are loaded alone.
    fingerprint: JSON-able facts in which compatible models agree (layers, sizes, vocabulary); no parallel sizes.
    """

    models: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    main: MegatronOptimizer | None = None


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides tensors.

    extra: the dictionary that was given to ``begin``.
    optimizer: the kind of the optimizer's state; None without an optimizer.
    rng_restored: whether `load` has restored the random states, which needs the same parallel sizes.
    """

    iteration: int
    extra: dict[str, Any]
    optimizer: str | None
    fingerprint: dict[str, Any]
    rng_restored: bool = False


def begin(
    directory: Path,
    iteration: int,
    state: TrainingState,
    extra: Mapping[str, Any],
    retention: Retention = Retention(),  # noqa: B008 - frozen
    copies: HostCopies | None = None,
) -> PendingSave:
    """Begin to write a checkpoint. Collective over the world; one at a time.

    Every rank writes what only it holds, and its share of what data-parallel ranks hold equally.

    Args:
        directory: the run's checkpoint directory, on storage that all ranks share.
        iteration: the number of optimizer steps done.
        state: may not change until ``wait_staged`` returns.
        extra: JSON-able values, equal on every rank, such as the number of consumed samples.
        copies: host memory that everything is copied to first, so that training can continue soon. With the distributed
            optimizer it has 12 bytes per parameter, and the weights, divided by the data- and context-parallel ranks.
            None: one tensor at a time is copied.

    Raises:
        OSError: a rank cannot write; what has been written is deleted.
    """
    extra, fingerprint = (json.loads(json.dumps(dict(each))) for each in (extra, state.fingerprint))  # as it is read
    final = iteration_directory(directory, iteration)
    partial = final.with_name(final.name + ".partial")
    on_rank_0(lambda: checkpoint_folder.start(partial))
    for model in state.models:
        # With `overlap_param_gather`, parameters that other ranks updated arrive only in the next forward pass.
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            fp8.gather_parameters(model)
    sharded = sharded_state_dict(state, is_loading=False, with_rng=True)
    sharded |= {"iteration": iteration, "extra": extra}
    content = {"fingerprint": fingerprint, "layout": _layout(), "optimizer": checkpoint_optimizer.kind(state.optimizer)}
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = SaveStrategy("torch_dist", 1, thread_count=2)  # two files per rank, which two threads write
    strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)
    try:
        request = dist_checkpointing.save(
            sharded, str(partial), strategy, async_sharded_save=True, content_metadata=content, **SAVE_ARGUMENTS
        )
    except BaseException:
        delete(partial)
        raise
    return PendingSave(request, partial, final, retention, copies)


def load(directory: Path, state: TrainingState, *, iteration: int | None = None, ignore: tuple[str, ...] = ()) -> Saved:
    """Load a checkpoint into ``state``, built like the saved one, at any parallel sizes. Collective over the world.

    Moments, steps and the schedule's position are loaded. The run's own learning rate, betas and schedule stay in
    force. Random states are restored only if the checkpoint has the same parallel sizes and device type.

    Args:
        iteration: which checkpoint; None for the latest.
        ignore: prefixes of the fingerprint's keys that may differ.

    Raises:
        ValueError: the checkpoint is missing, damaged, of another model or of another optimizer; raised on every rank.
    """
    directory = Path(directory)
    number = on_rank_0(lambda: latest(directory)) if iteration is None else iteration
    if number is None:
        raise ValueError(f"{directory} has no {TRACKER}, expected a checkpoint: give the directory of a finished save")
    path, common = examine(directory, number, collective=True)
    content = common["content_metadata"]
    _check_content(path, content, state.fingerprint, checkpoint_optimizer.kind(state.optimizer), ignore)
    with_rng = content["layout"] == _layout()
    sharded = sharded_state_dict(state, is_loading=True, with_rng=with_rng)
    # State of layers that the checkpoint lacks: it has weights alone, or its layers were Megatron's local ones.
    saved = checkpoint_reader.names(path)
    objects = ((key, each) for key, each in sharded["model"].items() if isinstance(each, ShardedObject))
    layer_state = {key: None for key, each in objects if each.unique_key not in saved}
    for key in layer_state:
        del sharded["model"][key]
    loaded = checkpoint_reader.load(sharded, path)
    fp8.give_scales(_model(state), loaded["model"])
    _model(state).load_state_dict(loaded["model"] | layer_state)
    if state.optimizer is not None:
        checkpoint_optimizer.load(state.optimizer, loaded["optimizer"])
    elif state.main is not None:
        state.main.reload_model_params()
        checkpoint_optimizer.give_weights(state.main, _model(state), loaded["model"])
    if state.scheduler is not None:
        # Megatron's scheduler adds the saved position to its own.
        state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(loaded["scheduler"])
    if with_rng:
        _set_rng(loaded["rng"])
    elif state.optimizer is not None and dist.get_rank() == 0:
        _logger.warning("random states not restored: checkpoint was saved at %s, now %s", content["layout"], _layout())
    return Saved(int(loaded["iteration"]), loaded["extra"], content["optimizer"], content["fingerprint"], with_rng)


def check(
    directory: Path,
    fingerprint: Mapping[str, Any],
    iteration: int | None = None,
    ignore: tuple[str, ...] = (),
    tensor_files: bool = False,
) -> Saved | None:
    """Check, in one process and without loading it, that a checkpoint is complete and of this model.

    Args:
        iteration, ignore: as for `load`.
        tensor_files: also compare the digests of files with tensors, which are nearly all of the checkpoint's bytes.
            ``load`` does this with all ranks.

    Returns:
        What the checkpoint holds besides tensors; None if there is no checkpoint.

    Raises:
        ValueError: as ``load`` does.
    """
    number = latest(directory) if iteration is None else iteration
    if number is None:
        return None
    path, common = examine(directory, number, collective=False, tensor_files=tensor_files)
    content = common["content_metadata"]
    _check_content(path, content, fingerprint, content["optimizer"], ignore)
    return Saved(number, common["extra"], content["optimizer"], content["fingerprint"])


def _check_content(
    path: Path, content: Mapping[str, Any], fingerprint: Mapping[str, Any], kind: str | None, ignore: tuple[str, ...]
) -> None:
    """Refuse another model or optimizer; all ranks have the same arguments, so all raise or none."""
    saved, fingerprint = content["fingerprint"], json.loads(json.dumps(dict(fingerprint)))
    missing = "(absent)"
    differing = [
        f"{key}: checkpoint {saved.get(key, missing)!r}, model {fingerprint.get(key, missing)!r}"
        for key in sorted(saved.keys() | fingerprint.keys())
        if not key.startswith(ignore) and saved.get(key, missing) != fingerprint.get(key, missing)
    ]
    if differing:
        raise ValueError(
            f"{path} is of another model ({'; '.join(differing)}), expected equal fingerprints: "
            "configure the model that was saved, or name another run (in training by run.name)"
        )
    if kind is not None and content["optimizer"] != kind:
        raise ValueError(
            f"{path} holds optimizer state of kind {content['optimizer']!r}, expected {kind!r}: use the optimizer "
            "settings (distributed, bf16) that it was saved with, or load weights only"
        )


def sharded_state_dict(state: TrainingState, *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    """Return what a checkpoint holds of this rank, in the form that Megatron saves and loads."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model_part = _model(state).sharded_state_dict(metadata=metadata)
    fp8.take_scales(_model(state), model_part)
    sharded: dict[str, Any] = {"model": model_part}
    if state.optimizer is not None:
        # The optimizer finds each parameter's sharding by the parameter object inside the model's dictionary.
        checkpoint_optimizer.prepare(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model_part, is_loading=is_loading, metadata=metadata)
    if is_loading:
        checkpoint_optimizer.read_unrounded(_model(state), model_part)
    else:
        checkpoint_optimizer.take_weights(state.optimizer or state.main, _model(state), model_part)
    if state.scheduler is not None:
        sharded["scheduler"] = state.scheduler.state_dict()
    if with_rng:
        # One state per rank of the world: pipeline stages and tensor-parallel ranks differ.
        sharded["rng"] = ShardedObject("rng_state", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return sharded


def _model(state: TrainingState) -> Any:
    (model,) = unwrap_model(list(state.models))
    return model


def _layout() -> dict[str, Any]:
    expert = parallel_state.get_expert_model_parallel_world_size()
    return ({} if expert == 1 else {"expert": expert}) | {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def _get_rng() -> dict[str, Any]:
    numpy_state: Any = numpy.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
