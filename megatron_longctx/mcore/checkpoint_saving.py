"""Saving a checkpoint, beside training or at once; a checkpoint counts when all of it is written, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from ..comm import from_all, on_rank_0
from . import checkpoint_folder, checkpoint_optimizer
from .checkpoint_check import reason
from .checkpoint_folder import Kept, iteration_directory
from .checkpoint_state import TrainingState, finish_parameter_gather, jsonable, layout, sharded_state_dict
from .checkpoint_writer import HostCopies, SharedSaveStrategy, Writing
from .version import SAVE_ARGUMENTS


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
            digests = {name: digest for of_rank in from_all(dist.group.WORLD, own) for name, digest in of_rank.items()}
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
