"""Checkpoints on Megatron's ``dist_checkpointing``: saved at any parallel sizes, loaded at any others.

On disk (Megatron-LM's layout)::

    <directory>/latest_checkpointed_iteration.txt    written last, atomically, by rank 0
    <directory>/iter_0000100/                        common.pt, metadata.json, .metadata, *.distcp, digests.json

Before a checkpoint is loaded its files are compared with their digests; nothing in it is unpickled freely.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from ..comm import from_all, on_rank_0
from . import checkpoint_digests, checkpoint_folder, checkpoint_optimizer, checkpoint_reader
from .checkpoint_check import REMEDY, Damaged, examine, reason, with_remedy
from .checkpoint_folder import TRACKER, iteration_directory, latest
from .checkpoint_writer import InProcessSaveStrategy

__all__ = ("TRACKER", "Loaded", "Saved", "TrainingState", "check", "latest", "load", "save")
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says besides tensors.

    Attributes:
        iteration: the checkpoint's iteration.
        extra: the dictionary given to ``save``.
        optimizer: the kind of the optimizer's state; None where there is none.
    """

    iteration: int
    extra: dict[str, Any]
    optimizer: str | None


@dataclass(frozen=True)
class Loaded(Saved):
    """What ``load`` read besides tensors.

    Attributes:
        rng_restored: False if the parallel sizes changed, so that the freshly seeded random states were kept.
    """

    rng_restored: bool


def save(
    directory: Path, iteration: int, state: TrainingState, extra: Mapping[str, Any], *, keep: int | None = None
) -> Path:
    """Write a checkpoint and make it the latest one. Collective over the world.

    With the distributed optimizer every rank gathers the optimizer state of its model-parallel shard in host memory
    (12 bytes per parameter of the shard); loading needs the same.

    Args:
        directory: the run's checkpoint directory, on storage that every rank sees.
        iteration: optimizer steps done.
        state: what to save.
        extra: JSON-able values, equal on every rank (consumed samples and the like).
        keep: if given, the number of newest checkpoints (up to ``iteration``) to keep; older ones are deleted.

    Returns:
        The checkpoint's directory.

    Raises:
        ValueError: if ``extra`` or the fingerprint is not JSON-able, or ``keep`` is below 1.
        OSError: it cannot be written; what has been written of it is deleted.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}, expected at least 1: give the number of checkpoints to keep, or None")
    extra, fingerprint = _jsonable("extra", extra), _jsonable("fingerprint", state.fingerprint)
    final = iteration_directory(directory, iteration)
    partial = final.with_name(final.name + ".partial")
    on_rank_0(lambda: checkpoint_folder.start(partial))
    _finish_parameter_gather(state.models)
    sharded = _sharded_state_dict(state, is_loading=False, with_rng=True)
    sharded |= {"iteration": iteration, "extra": extra}
    content = {"fingerprint": fingerprint, "layout": _layout(), "optimizer": checkpoint_optimizer.kind(state.optimizer)}
    try:
        digests = _write(partial, sharded, content)
        on_rank_0(lambda: checkpoint_folder.publish(partial, final, digests, keep))
    except BaseException:
        if dist.get_rank() == 0:  # it takes room that a full disk does not have
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _write(partial: Path, sharded: dict[str, Any], content: dict[str, Any]) -> checkpoint_digests.Digests:
    """All files of a checkpoint; gives the digests of those with tensors."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # Replicas hold the same tensors: let them share the writing.
    strategy = FullyParallelSaveStrategyWrapper(InProcessSaveStrategy(), group)
    try:
        dist_checkpointing.save(sharded, str(partial), strategy, content_metadata=content)
    except (
        CheckpointException
    ) as error:  # on all ranks, of which rank 0 alone knows more than that some rank has failed
        why = reason(error)
        raise OSError(on_rank_0(lambda: f"{partial} cannot be written ({why})")) from error
    # dist_checkpointing.save ends with a barrier: every rank's files are complete here.
    own = _on_every_rank(lambda: _own_digests(partial))
    return {name: digest for of_rank in own for name, digest in of_rank.items()}


def load(directory: Path, state: TrainingState, *, iteration: int | None = None, free: tuple[str, ...] = ()) -> Loaded:
    """Load a checkpoint into ``state``, whatever the parallel sizes it was saved at. Collective over the world.

    The run's own learning rate, betas and schedule stay in force; moments, steps and the schedule's position are
    loaded. Random states are restored only if the parallel sizes and the device type are those of the checkpoint.

    Args:
        directory: the run's checkpoint directory.
        state: what to load into, built like the saved one.
        iteration: which checkpoint; None for the latest.
        free: how keys of the fingerprint begin that may differ.

    Raises:
        ValueError: on every rank, if the checkpoint is missing, damaged, of another model or of another optimizer.
    """
    fingerprint = _jsonable("fingerprint", state.fingerprint)
    path, common = _examine_together(Path(directory), iteration)
    content = common["content_metadata"]
    _check_content(path, content, fingerprint, checkpoint_optimizer.kind(state.optimizer), free)
    with_rng = content["layout"] == _layout()
    hyperparameters = checkpoint_optimizer.hyperparameters(state.optimizer)
    sharded = _sharded_state_dict(state, is_loading=True, with_rng=with_rng)
    stateless = {} if content["layout"] else _without_layer_state(sharded, state.models)
    try:
        loaded = checkpoint_reader.load(sharded, path)
    except (CheckpointingException, CheckpointException) as error:
        raise ValueError(
            f"{path} cannot be loaded ({reason(error)}), expected a complete checkpoint: {REMEDY}"
        ) from error

    for name, model in _named_models(state.models):
        model.load_state_dict(loaded[name] | stateless.get(name, {}))
    if state.optimizer is not None:
        checkpoint_optimizer.load(state.optimizer, loaded["optimizer"])
        checkpoint_optimizer.restore_hyperparameters(state.optimizer, hyperparameters)
    if state.scheduler is not None:
        # Megatron's scheduler adds the saved position to its own.
        state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(loaded["scheduler"])
    if with_rng:
        _set_rng(loaded["rng"])
    elif state.optimizer is not None and dist.get_rank() == 0:
        _logger.warning("random states not restored: checkpoint was saved at %s, now %s", content["layout"], _layout())
    return Loaded(int(loaded["iteration"]), loaded["extra"], content["optimizer"], with_rng)


def _examine_together(directory: Path, iteration: int | None) -> tuple[Path, dict[str, Any]]:
    """See that a checkpoint is whole, each rank a part of its files; its directory, and its content without tensors."""
    number = on_rank_0(lambda: latest(directory)) if iteration is None else iteration
    if number is None:
        raise ValueError(f"{directory} has no {TRACKER}, expected a checkpoint: give the directory of a finished save")
    try:
        path, common = examine(directory, number, on_rank_0, _damage)
    except Damaged as error:
        raise with_remedy(error, directory, number, on_rank_0, _damage) from error
    if dist.get_rank() == 0 and not checkpoint_digests.exist(path):
        _logger.warning("%s was saved without digests: damage to it may go unnoticed", path)
    return path, common


def _named_models(models: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """Megatron-LM's names: ``model`` for one chunk, ``model0``, ``model1`` for several."""
    bare = unwrap_model(list(models))
    return [("model" if len(bare) == 1 else f"model{index}", model) for index, model in enumerate(bare)]


def _finish_parameter_gather(models: Sequence[torch.nn.Module]) -> None:
    """With ``overlap_param_gather`` the parameters updated by other ranks arrive only in the next forward pass."""
    for model in models:
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def _sharded_state_dict(state: TrainingState, *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {name: model.sharded_state_dict(metadata=metadata) for name, model in _named_models(state.models)}
    sharded: dict[str, Any] = dict(models)
    if state.optimizer is not None:
        # The optimizer finds each parameter's sharding by the parameter object inside the model's dictionary.
        model_part: dict[str, Any] = models["model"] if len(models) == 1 else models
        checkpoint_optimizer.create_missing_state(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model_part, is_loading=is_loading, metadata=metadata)
    if state.scheduler is not None:
        sharded["scheduler"] = state.scheduler.state_dict()
    if with_rng:
        # One state per rank of the world: pipeline stages and tensor-parallel ranks differ.
        sharded["rng"] = ShardedObject("rng_state", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return sharded


def _without_layer_state(sharded: dict[str, Any], models: Sequence[torch.nn.Module]) -> dict[str, dict[str, None]]:
    """Ask only weights of a checkpoint of weights alone. By model: what layers get in the place of their state."""
    left: dict[str, dict[str, None]] = {}
    for name, _ in _named_models(models):
        keys = [key for key, value in sharded[name].items() if isinstance(value, ShardedObject)]
        left[name] = dict.fromkeys(keys)
        for key in keys:
            del sharded[name][key]
    return left


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


def _on_every_rank(work: Callable[[], _T]) -> list[_T]:
    """What every rank's ``work`` gives, by rank, or the first failure of reading or writing, to every rank."""
    mine: Any
    try:
        mine = work()
    except OSError as error:
        mine = error
    found = from_all(dist.group.WORLD, mine)
    for outcome in found:
        if isinstance(outcome, OSError):
            raise outcome
    return found


def _own_digests(partial: Path) -> checkpoint_digests.Digests:
    """Of the files with tensors that this rank has written."""
    return checkpoint_digests.of_files(partial, [path.name for path in partial.glob(f"__{dist.get_rank()}_*")])


def _damage(path: Path) -> str | None:
    """As ``checkpoint_digests.damage`` of all parts, each found by one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return next(filter(None, _on_every_rank(lambda: checkpoint_digests.damage(path, rank, world))), None)


def _check_content(
    path: Path, content: Mapping[str, Any], fingerprint: Mapping[str, Any], kind: str | None, free: tuple[str, ...]
) -> None:
    """Refuse another model or optimizer; every rank has the same arguments, so all raise or none."""
    saved = content["fingerprint"]
    missing = "(absent)"
    differing = [
        f"{key}: checkpoint {saved.get(key, missing)!r}, model {fingerprint.get(key, missing)!r}"
        for key in sorted(saved.keys() | fingerprint.keys())
        if not key.startswith(free) and saved.get(key, missing) != fingerprint.get(key, missing)
    ]
    if differing:
        raise ValueError(
            f"{path} is of another model ({'; '.join(differing)}), expected equal fingerprints: "
            "configure the model that was saved, or choose another directory"
        )
    if kind is not None and content["optimizer"] != kind:
        raise ValueError(
            f"{path} holds optimizer state of kind {content['optimizer']!r}, expected {kind!r}: use the optimizer "
            "settings (distributed, bf16) that it was saved with, or load weights only"
        )


def _jsonable(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as JSON would give it back, so that what is compared is what was stored."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {value!r} ({error}), expected JSON values: convert it to numbers, strings, lists and dicts"
        ) from error
    return copy


def check(
    directory: Path, fingerprint: Mapping[str, Any], iteration: int | None = None, free: tuple[str, ...] = ()
) -> Saved | None:
    """See, in one process and without loading, that a checkpoint of ``directory`` is there and of this model.

    The digests of files with tensors, nearly all of its bytes, are left to ``load``.

    Args:
        iteration: which checkpoint; None for the latest.
        free: how keys of the fingerprint begin that may differ.

    Returns:
        What it says; None if there is no checkpoint.

    Raises:
        ValueError: as ``load`` does.
    """

    def once(work: Callable[[], _T]) -> _T:
        return work()

    number = latest(directory) if iteration is None else iteration
    if number is None:
        return None
    try:
        path, common = examine(directory, number, once, lambda path: checkpoint_digests.damage(path, data=False))
    except Damaged as error:
        raise with_remedy(error, directory, number, once, checkpoint_digests.damage) from error
    content = common["content_metadata"]
    _check_content(path, content, _jsonable("fingerprint", fingerprint), content["optimizer"], free)
    return Saved(number, common["extra"], content["optimizer"])
