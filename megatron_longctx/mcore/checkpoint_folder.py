"""What lies in a run's checkpoint directory: iterations, and which of them counts.

A checkpoint is written to ``iter_0000100.partial`` and renamed when complete, its digests included; only the tracker
file, written after that, makes it count.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import files
from . import checkpoint_digests
from .checkpoint_digests import Digests

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lies."""
    return Path(directory) / f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """Of the checkpoints that are there, in order; none where there is no directory."""
    names = [path.name.removeprefix("iter_") for path in Path(directory).glob("iter_*")]
    return sorted(int(name) for name in names if name.isdecimal())


def latest(directory: Path) -> int | None:
    """The iteration of the newest complete checkpoint, or None if there is none.

    Raises:
        ValueError: if the tracker file does not hold a number.
    """
    tracker = Path(directory) / TRACKER
    try:
        text = tracker.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not (text.isascii() and text.isdecimal()):
        there = ", ".join(map(str, iterations(directory))) or "none"
        raise ValueError(
            f"{tracker} holds {text[:40]!r}, expected an iteration number: write the number of a checkpoint into it "
            f"(there: {there})"
        )
    return int(text)


def start(partial: Path) -> None:
    """An empty ``partial``; what interrupted saves have left beside it, which takes room, goes."""
    for left in partial.parent.glob("iter_*.partial"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


@dataclass(frozen=True)
class Kept:
    """Which checkpoints stay: the newest `last` of them (None: all), and those of every multiple of `every`.

    Raises:
        ValueError: a number below 1.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, expected at least 1: give a number, or None")

    def leaves(self, iterations: list[int]) -> list[int]:
        """Those of `iterations`, in order, that are to be deleted."""
        old = iterations[: -self.last] if self.last is not None else []
        return [number for number in old if self.every is None or number % self.every]


def publish(partial: Path, final: Path, digests: Digests, kept: Kept) -> None:
    """Give a complete checkpoint its name, make it the latest, and delete those that are not kept.

    Args:
        digests: of the files whose digests are known already; those of the others are made here.
    """
    others = [path.name for path in partial.iterdir() if path.name not in digests]
    checkpoint_digests.write(partial, digests | checkpoint_digests.of_files(partial, others))
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    if replaced.exists():
        shutil.rmtree(replaced)
    iteration = int(final.name.removeprefix("iter_"))
    files.write_text(final.parent / TRACKER, str(iteration))
    # Iterations after this one belong to an abandoned branch of the run; they are the user's to delete.
    for old in kept.leaves([number for number in iterations(final.parent) if number <= iteration]):
        shutil.rmtree(iteration_directory(final.parent, old))
