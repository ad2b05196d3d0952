"""Runs as read from their folders, how their losses differ, and what is doubtful about their speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config import environment, files, names
from ..metrics.sinks import Value, decode
from ..metrics.summary import MIN_STEPS, warm_up


@dataclass(frozen=True)
class Run:
    """One run: its records keyed by step, its resolved configuration, and what it ran on."""

    name: str
    records: dict[int, dict[str, Value]]
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)

    def loss(self, step: int) -> float:
        """Return the loss at `step`; NaN if none was recorded."""
        value = self.records[step].get(names.LOSS)
        return float(value) if isinstance(value, (int, float)) else math.nan

    def facts(self) -> dict[str, Any]:
        """Return the facts by which runs are distinguished, grouped and filtered."""
        return environment.facts(self.config, self.environment)

    def doubts(self) -> list[str]:
        """Return why its speeds cannot be ranked, in words that follow the names of runs; empty if they can."""
        measured = len(self.records) - warm_up(len(self.records))
        on_cpu = ["on CPUs, so the times say nothing about GPUs"] if self.facts()["hardware"] == "cpu" else []
        few = f"with fewer than {MIN_STEPS} steps after the warm-up, which do not tell modes apart"
        return on_cpu + ([few] if measured < MIN_STEPS else [])


# For runs in order: blue, vermilion, green, … which colour-blind readers can distinguish as well.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#7F5FC1", "#8A6D3B", "#C0392B", "#607D8B"),
)


def load_run(folder: Path | str) -> Run:
    """Read one run folder. Refuse one without settings or steps."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"run {folder}: expected a run folder. Check the path; runs are in runs/<run.name>.")
    metrics, resolved = folder / "metrics.jsonl", folder / "resolved.yaml"
    for path in (metrics, resolved):
        if not path.is_file():
            raise ValueError(f"{path}: no such file. Give a folder that `megatron-longctx train` wrote.")
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    records: dict[int, dict[str, Value]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = decode(line)
        except ValueError as error:
            if number == len(lines):
                continue  # the run is writing it, or was killed while writing it
            raise ValueError(f"{metrics}:{number}: not a JSON object ({error}). Remove the line.") from error
        step = record.get(names.STEP)
        if isinstance(step, int):
            records[step] = record
    if not records:
        raise ValueError(f"{metrics}: no training steps in it. Let the run finish at least one step.")
    try:
        config = dict(files.read_yaml(resolved))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{resolved}: expected settings ({error}). Give a folder that training wrote.") from None
    settings = {str(key): value for key, value in config.items()}
    return Run(folder.resolve().name, records, settings, environment.read(folder))


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders, as `load_run`. If two have the same name, paths are the names of all."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    return runs


def common_steps(runs: Sequence[Run]) -> list[int]:
    """Return the steps that every run has, ascending. Refuse runs that have none."""
    steps = sorted(set.intersection(*(set(run.records) for run in runs)))
    if not steps:
        spans = ", ".join(f"{run.name}: {min(run.records)} to {max(run.records)}" for run in runs)
        raise ValueError(f"the runs have no common steps ({spans}). Compare runs that trained the same steps.")
    return steps


def differences(run: Run, first: Run, steps: Sequence[int]) -> list[float]:
    """Return the loss of `run` minus the loss of `first` at every step."""
    return [run.loss(step) - first.loss(step) for step in steps]


def largest_difference(run: Run, first: Run, steps: Sequence[int]) -> float:
    """Return the largest absolute difference of the losses; NaN if one of them is."""
    sizes = [abs(each) for each in differences(run, first, steps)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)  # max() may skip a NaN


def agreement(runs: Sequence[Run]) -> str:
    """Return one sentence on how far the losses of all runs differ from the first run's."""
    first, steps = runs[0], common_steps(runs)
    apart = {run.name: largest_difference(run, first, steps) for run in runs[1:]}
    if not apart:
        return f"{first.name} is the only run: there is no loss to compare with its own."
    name = max(apart, key=lambda each: math.inf if math.isnan(apart[each]) else apart[each])
    return f"Largest difference from the loss of {first.name} at {len(steps)} common steps: {apart[name]:.1e} ({name})."
