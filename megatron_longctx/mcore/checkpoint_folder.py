"""The files of a run's checkpoint directory: which checkpoint counts, and whether it is as it was saved.

A checkpoint is written to ``iter_0000100.partial``. It gets its final name when it is complete, digests included, and
counts only when the tracker file, written after that, names it.
"""

import hashlib
import json
import logging
import operator
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import maybe_load_config

from ..config import files
from ..core.comm import gather_objects, on_rank_0
from . import checkpoint_reader
from .checkpoint_reader import REMEDY, first_line

_logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best.json"
DIGESTS = "digests.json"

# The fastest algorithm of hashlib on processors with SHA instructions, which servers have.
_ALGORITHM = "sha256"
_MAX_THREADS = 8
_MAX_TRACKER_BYTES = 2**12
_TENSOR_FILES = ".distcp"  # nearly all bytes of a checkpoint are in files with this suffix

Digests = dict[str, tuple[int, str]]
"""The size in bytes and the digest of every file, keyed by file name."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is missing, or that is not as it was saved."""


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of ``iteration``."""
    return Path(directory) / f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """Return the iterations of all checkpoints in a directory, which need not exist, in ascending order."""
    names = [path.name.removeprefix("iter_") for path in Path(directory).glob("iter_*")]
    return sorted(int(name) for name in names if name.isdecimal())


def latest(directory: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint, or None if there is none. Refuse a tracker file without a
    number."""
    tracker = Path(directory) / TRACKER
    try:
        text = files.read_bytes(tracker, _MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except ValueError as error:
        text = str(error)
    if not (text.isascii() and text.isdecimal()):
        there = ", ".join(map(str, iterations(directory))) or "none"
        raise ValueError(
            f"{tracker} holds {text[:40]!r}, expected an iteration number: write the number of a checkpoint into it "
            f"(there: {there})"
        )
    return int(text)


def best(directory: Path) -> tuple[float, int] | None:
    """Return the lowest validation loss among a directory's checkpoints and its iteration, or None. Refuse a damaged
    file."""
    path = Path(directory) / BEST
    try:
        content = json.loads(files.read_bytes(path, _MAX_TRACKER_BYTES))
        return float(content["validation_loss"]), int(content["iteration"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}), expected validation_loss and iteration: delete it") from error


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `last` of them (None: all), every multiple of `every`, and those in `kept`."""

    last: int | None = None
    every: int | None = None
    kept: frozenset[int] = frozenset()

    def expired(self, iterations: list[int]) -> list[int]:
        """Return which of `iterations`, in ascending order, are to be deleted."""
        old = iterations[: -self.last] if self.last is not None else []
        return [number for number in old if number not in self.kept and (self.every is None or number % self.every)]


def start(partial: Path) -> None:
    """Create an empty folder, and delete what interrupted saves have left beside it, which takes disk space."""
    for left in partial.parent.glob("iter_*.partial"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def publish(partial: Path, final: Path, digests: Digests, retention: Retention) -> None:
    """Give a complete checkpoint its final name, make it the latest, and delete the expired ones.

    digests: those already known; the others are computed here.
    """
    others = [path.name for path in partial.iterdir() if path.name not in digests]
    content = {"algorithm": _ALGORITHM, "files": digests | digests_of(partial, others)}
    files.write_text(partial / DIGESTS, json.dumps(content, indent=1) + "\n")
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    if replaced.exists():
        shutil.rmtree(replaced)
    iteration = int(final.name.removeprefix("iter_"))
    files.write_text(final.parent / TRACKER, str(iteration))
    # Iterations after this one belong to an abandoned branch of the run; the user decides about them.
    for old in retention.expired([number for number in iterations(final.parent) if number <= iteration]):
        shutil.rmtree(iteration_directory(final.parent, old))


def digests_of(path: Path, names: Iterable[str]) -> Digests:
    """Return sizes and digests of files in ``path``, which several threads read."""

    def digest(name: str) -> tuple[int, str]:
        with (path / name).open("rb") as stream:
            hexadecimal = hashlib.file_digest(stream, _ALGORITHM).hexdigest()
            return stream.tell(), hexadecimal

    names = list(names)
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def examine(
    directory: Path, iteration: int, *, collective: bool, tensor_files: bool = True
) -> tuple[Path, dict[str, Any]]:
    """Check that all files of a checkpoint are as they were saved; return its folder and its content besides tensors.

    Args:
        collective: whether all ranks of the world call this, and each reads a part of the files; or one process alone.
        tensor_files: also compare the digests of files with tensors, and warn of a checkpoint without digests. False:
            whoever reads the tensors does.

    Raises:
        DamagedCheckpoint: the message names the file, and the newest older checkpoint that is undamaged.
        ValueError: the checkpoint is not this project's.
    """
    try:
        path, common = _examine(directory, iteration, collective, tensor_files)
    except DamagedCheckpoint as error:
        remedy = f"No checkpoint before it is whole: {REMEDY}"
        once: Any = on_rank_0 if collective else operator.call
        for older in once(lambda: [each for each in iterations(directory) if each < iteration][::-1]):
            try:
                path, _ = _examine(directory, older, collective, tensor_files=True)
            except ValueError:
                continue
            remedy = f"The newest checkpoint before it that is whole is {path}: to use it, write {older} into "
            remedy += str(directory / TRACKER)
            break
        raise DamagedCheckpoint(f"{error}. {remedy}") from error
    if tensor_files and not (path / DIGESTS).exists() and not (collective and dist.get_rank()):
        _logger.warning("%s was saved without digests: damage to it may go unnoticed", path)
    return path, common


def _examine(directory: Path, iteration: int, collective: bool, tensor_files: bool) -> tuple[Path, dict[str, Any]]:
    path = iteration_directory(directory, iteration)
    group, part, parts = (dist.group.WORLD, dist.get_rank(), dist.get_world_size()) if collective else (None, 0, 1)
    for damage in filter(None, gather_objects(group, _damage(path, part, parts, tensor_files))):
        raise DamagedCheckpoint(damage)
    return path, on_rank_0(lambda: _read(path)) if collective else _read(path)


def _damage(path: Path, part: int, parts: int, tensor_files: bool) -> str | None:
    """Compare all sizes, and the digests of one of ``parts`` equal parts of the files; return the first difference."""
    try:
        for each in path.iterdir() if path.is_dir() else ():
            if not each.is_file():  # a pipe has no end
                return f"{each} is not a file, expected the files of a checkpoint"
        if not (path / DIGESTS).exists():  # saved by an earlier version
            return None
        expected = _read_digests(path)
        for name, (size, _) in expected.items():
            if (found := _size(path / name)) != size:
                return f"{path / name} has {found} bytes, expected {size}"
        largest_first = sorted(expected, key=lambda name: (-expected[name][0], name))
        mine = [name for name in largest_first[part::parts] if tensor_files or not name.endswith(_TENSOR_FILES)]
        now = digests_of(path, mine)
    except OSError as error:
        return f"{path} cannot be read ({error}), expected the files of a checkpoint"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path / DIGESTS} is damaged ({error}), expected the digests of the checkpoint's files"
    for name in mine:
        if now[name] != expected[name]:
            return f"{path / name} is damaged: its {_ALGORITHM} is not the one it was saved with"
    return None


def _read_digests(path: Path) -> Digests:
    content = json.loads((path / DIGESTS).read_text(encoding="utf-8"))
    if content["algorithm"] != _ALGORITHM:
        raise ValueError(f"algorithm {content['algorithm']!r}")
    digests = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    for name in digests:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file of this checkpoint")
    return digests


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint's content besides tensors, and check that its files are as long as its metadata says."""
    if not path.is_dir():
        raise DamagedCheckpoint(f"{path} does not exist, expected a checkpoint")
    try:
        if (config := maybe_load_config(str(path))) is None or config.sharded_backend != "torch_dist":
            raise ValueError(f"metadata.json names {config}, not torch_dist")
        common = checkpoint_reader.read_common(path)
        content = common.get("content_metadata")
        ends: dict[str, int] = {}
        for part in checkpoint_reader.read_metadata(path).storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:  # a damaged archive or pickle can raise almost any class
        raise DamagedCheckpoint(f"{path} is damaged ({first_line(error)}), expected a complete checkpoint") from error
    if content is None or not {"fingerprint", "layout", "optimizer"} <= content.keys():
        raise ValueError(f"{path} carries no fingerprint, expected a checkpoint of this project: {REMEDY}")
    for name, end in ends.items():
        if (size := _size(path / name)) < end:
            raise DamagedCheckpoint(f"{path / name} has {size} bytes, expected {end}")
    return common
