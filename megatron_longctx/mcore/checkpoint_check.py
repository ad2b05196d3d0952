"""Whether a checkpoint is whole, and which other one is where it is not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import maybe_load_config
from torch.distributed.checkpoint.api import CheckpointException

from . import checkpoint_reader
from .checkpoint_folder import TRACKER, iteration_directory, iterations

REMEDY = "restore the checkpoint, or choose another iteration or directory"


class Damaged(ValueError):
    """A checkpoint that is not there, or not as it was saved."""


Once = Callable[[Callable[[], Any]], Any]
"""Does a piece of work, for all ranks that call it together, or for this process alone."""

Damage = Callable[[Path], str | None]
"""As `checkpoint_digests.damage`, by all ranks that call it together, or by this process alone."""


def examine(
    directory: Path, iteration: int, once: Once, damage: Damage, damage_of_others: Damage
) -> tuple[Path, dict[str, Any]]:
    """See that all files of a checkpoint are as they were saved, and read what it says about itself.

    Args:
        damage_of_others: of those from which a whole one is named in the place of a damaged one.

    Returns:
        its directory, and its content without tensors.

    Raises:
        Damaged: says where, and which checkpoint is whole.
        ValueError: it is none of this project's.
    """
    try:
        return _examined(directory, iteration, once, damage)
    except Damaged as error:
        raise _with_remedy(error, directory, iteration, once, damage_of_others) from error


def _examined(directory: Path, iteration: int, once: Once, damage: Damage) -> tuple[Path, dict[str, Any]]:
    path = iteration_directory(directory, iteration)
    if found := damage(path):
        raise Damaged(found)
    common: dict[str, Any] = once(lambda: _read(path))
    return path, common


def _read(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise Damaged(f"{path} does not exist, expected a checkpoint")
    try:
        if (form := maybe_load_config(str(path))) is None or form.sharded_backend != "torch_dist":
            raise ValueError(f"metadata.json names {form}, not torch_dist")
        common = checkpoint_reader.read_common(path)
        content = common.get("content_metadata")
        ends: dict[str, int] = {}
        for part in checkpoint_reader.read_metadata(path).storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:  # a damaged archive or pickle raises almost anything, by where the damage lies
        raise Damaged(f"{path} is damaged ({reason(error)}), expected a complete checkpoint") from error
    if content is None or not {"fingerprint", "layout", "optimizer"} <= content.keys():
        raise ValueError(f"{path} carries no fingerprint, expected a checkpoint of this project: {REMEDY}")
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).is_file() else 0
        if size < end:
            raise Damaged(f"{path / name} has {size} bytes, expected {end}")
    return common


def _with_remedy(error: Damaged, directory: Path, iteration: int, once: Once, damage: Damage) -> Damaged:
    """The error, and the newest older checkpoint that is as it was saved."""
    for older in once(lambda: [number for number in iterations(directory) if number < iteration][::-1]):
        try:
            path, _ = _examined(directory, older, once, damage)
        except ValueError:
            continue
        remedy = f"to use it, write {older} into {directory / TRACKER}"
        return Damaged(f"{error}. The newest checkpoint before it that is whole is {path}: {remedy}")
    return Damaged(f"{error}. No checkpoint before it is whole: {REMEDY}")


def reason(error: BaseException) -> str:
    """The first line of what has failed: on the first rank, where ranks were asked."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):  # torch advises to load it freely
        return "what should be a tensor is damaged, or is none"
    return str(error).strip().partition("\n")[0] or type(error).__name__
