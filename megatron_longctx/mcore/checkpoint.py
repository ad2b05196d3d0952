"""Checkpoints on Megatron's ``dist_checkpointing``: saved at any parallel sizes, loaded at any others.

On disk (Megatron-LM's layout)::

    <directory>/latest_checkpointed_iteration.txt    written last, atomically, by rank 0
    <directory>/iter_0000100/                        common.pt, metadata.json, .metadata, *.distcp, digests.json

A checkpoint is saved beside training or at once, and counts when all of it is written, or not at all. Before it is
loaded its files are compared with their digests; nothing in it is unpickled freely.
"""

from __future__ import annotations

import logging
import operator
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from ..comm import gather_objects, on_rank_0
from . import checkpoint_digests, checkpoint_folder, checkpoint_optimizer, checkpoint_reader
from .checkpoint_check import REMEDY, examine, reason
from .checkpoint_folder import TRACKER, Kept, iteration_directory, latest
from .checkpoint_state import (
    TrainingState,
    finish_parameter_gather,
    jsonable,
    layout,
    named_models,
    set_rng,
    sharded_state_dict,
)
from .checkpoint_writer import HostCopies, SharedSaveStrategy, Writing
from .version import SAVE_ARGUMENTS

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: where it will be.
    """

    path: Path
    _partial: Path
    _writing: Writing
    _kept: Kept

    def wait_staged(self) -> None:
        """Until this rank's tensors may change."""
        self._writing.wait_staged()

    @property
    def written(self) -> bool:
        """Whether this rank has done its part; when all have, `finish` takes no time."""
        return self._writing.ended

    def finish(self) -> Path:
        """Wait until it is written, make it the latest, and delete those that are not kept. Collective over the world.

        Returns:
            its directory.

        Raises:
            OSError: it cannot be written; what has been written of it is deleted.
        """
        try:
            try:
                own = self._writing.finish()
            except CheckpointException as error:  # on all ranks; rank 0 alone knows more than that some rank has failed
                why = reason(error)
                raise OSError(on_rank_0(lambda: f"{self._partial} cannot be written ({why})")) from error
            ranks = gather_objects(dist.group.WORLD, own)
            digests = {name: digest for of_rank in ranks for name, digest in of_rank.items()}
            on_rank_0(lambda: checkpoint_folder.publish(self._partial, self.path, digests, self._kept))
        except BaseException:
            _remove(self._partial)
            raise
        return self.path


def begin(
    directory: Path,
    iteration: int,
    state: TrainingState,
    extra: Mapping[str, Any],
    kept: Kept = Kept(),  # noqa: B008 - frozen
    *,
    copies: HostCopies | None,
) -> Saving:
    """Begin to write a checkpoint. Collective over the world; one at a time.

    Every rank writes what it alone holds, and its share of what data-parallel ranks hold equally.

    Args:
        directory: the run's checkpoint directory, on storage that every rank sees.
        iteration: optimizer steps done.
        state: what to save. Until ``wait_staged`` returns it may not change.
        extra: JSON-able values, equal on every rank (consumed samples and the like).
        kept: which checkpoints stay afterwards.
        copies: host memory that all is copied to first, so that training goes on soon: with the distributed optimizer
            12 bytes a parameter, and its weights, divided by the data- and context-parallel ranks. None: a tensor at a
            time is.

    Raises:
        ValueError: if ``extra`` or the fingerprint is not JSON-able.
        OSError: it cannot be written; what has been written of it is deleted.
    """
    extra, fingerprint = jsonable("extra", extra), jsonable("fingerprint", state.fingerprint)
    final = iteration_directory(directory, iteration)
    partial = final.with_name(final.name + ".partial")
    on_rank_0(lambda: checkpoint_folder.start(partial))
    finish_parameter_gather(state.models)
    sharded = sharded_state_dict(state, is_loading=False, with_rng=True)
    sharded |= {"iteration": iteration, "extra": extra}
    content = {"fingerprint": fingerprint, "layout": layout(), "optimizer": checkpoint_optimizer.kind(state.optimizer)}
    strategy = SharedSaveStrategy(parallel_state.get_data_parallel_group(with_context_parallel=True))
    try:
        request = dist_checkpointing.save(
            sharded, str(partial), strategy, async_sharded_save=True, content_metadata=content, **SAVE_ARGUMENTS
        )
    except BaseException:
        _remove(partial)
        raise
    return Saving(final, partial, Writing(request, partial, copies), kept)


def save(
    directory: Path,
    iteration: int,
    state: TrainingState,
    extra: Mapping[str, Any],
    kept: Kept = Kept(),  # noqa: B008
) -> Path:
    """``begin`` and ``Saving.finish``, with little host memory."""
    return begin(directory, iteration, state, extra, kept, copies=None).finish()


def _remove(partial: Path) -> None:
    if dist.get_rank() == 0:  # it takes room that a full disk does not have
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says besides tensors.

    Attributes:
        iteration: the checkpoint's iteration.
        extra: the dictionary given to ``save``.
        optimizer: the kind of the optimizer's state; None where there is none.
        fingerprint: of its model.
    """

    iteration: int
    extra: dict[str, Any]
    optimizer: str | None
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Loaded(Saved):
    """What ``load`` read besides tensors.

    Attributes:
        rng_restored: False if the parallel sizes changed, so that the freshly seeded random states were kept.
    """

    rng_restored: bool


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
    fingerprint = jsonable("fingerprint", state.fingerprint)
    path, common = _examine_together(Path(directory), iteration)
    content = common["content_metadata"]
    _check_content(path, content, fingerprint, checkpoint_optimizer.kind(state.optimizer), free)
    with_rng = content["layout"] == layout()
    sharded = sharded_state_dict(state, is_loading=True, with_rng=with_rng)
    stateless = {} if content["layout"] else _without_layer_state(sharded, state.models)
    loaded = _load_together(sharded, path)
    for name, model in named_models(state.models):
        model.load_state_dict(loaded[name] | stateless.get(name, {}))
    if state.optimizer is not None:
        checkpoint_optimizer.load(state.optimizer, loaded["optimizer"])
    if state.scheduler is not None:
        # Megatron's scheduler adds the saved position to its own.
        state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(loaded["scheduler"])
    if with_rng:
        set_rng(loaded["rng"])
    elif state.optimizer is not None and dist.get_rank() == 0:
        _logger.warning("random states not restored: checkpoint was saved at %s, now %s", content["layout"], layout())
    return Loaded(
        int(loaded["iteration"]), loaded["extra"], content["optimizer"], content["fingerprint"], rng_restored=with_rng
    )


def _load_together(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """As ``checkpoint_reader.load``; what fails on a rank fails on all: 0.19 lets every rank read for itself."""
    loaded: dict[str, Any] = {}
    failure = None
    try:
        loaded = checkpoint_reader.load(sharded, path)
    except (CheckpointingException, CheckpointException) as error:
        failure = reason(error)
    if found := [of_rank for of_rank in gather_objects(dist.group.WORLD, failure) if of_rank is not None]:
        raise ValueError(f"{path} cannot be loaded ({found[0]}), expected a complete checkpoint: {REMEDY}")
    return loaded


def _examine_together(directory: Path, iteration: int | None) -> tuple[Path, dict[str, Any]]:
    """See that a checkpoint is whole, each rank a part of its files; its directory, and its content without tensors."""
    number = on_rank_0(lambda: latest(directory)) if iteration is None else iteration
    if number is None:
        raise ValueError(f"{directory} has no {TRACKER}, expected a checkpoint: give the directory of a finished save")
    path, common = examine(directory, number, on_rank_0, _damage, _damage)
    if dist.get_rank() == 0 and not checkpoint_digests.exist(path):
        _logger.warning("%s was saved without digests: damage to it may go unnoticed", path)
    return path, common


def _without_layer_state(sharded: dict[str, Any], models: Sequence[torch.nn.Module]) -> dict[str, dict[str, None]]:
    """Ask only weights of a checkpoint of weights alone. By model: what layers get in the place of their state."""
    left: dict[str, dict[str, None]] = {}
    for name, _ in named_models(models):
        keys = [key for key, value in sharded[name].items() if isinstance(value, ShardedObject)]
        left[name] = dict.fromkeys(keys)
        for key in keys:
            del sharded[name][key]
    return left


def _damage(path: Path) -> str | None:
    """As ``checkpoint_digests.damage`` of all parts, each found by one rank."""
    own = checkpoint_digests.damage(path, dist.get_rank(), dist.get_world_size())
    return next(filter(None, gather_objects(dist.group.WORLD, own)), None)


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
    number = latest(directory) if iteration is None else iteration
    if number is None:
        return None

    def damage(path: Path) -> str | None:
        return checkpoint_digests.damage(path, data=False)

    path, common = examine(directory, number, operator.call, damage, checkpoint_digests.damage)
    content = common["content_metadata"]
    _check_content(path, content, jsonable("fingerprint", fingerprint), content["optimizer"], free)
    return Saved(number, common["extra"], content["optimizer"], content["fingerprint"])
