"""Runs as read from their folders, and the metrics by which they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from ...config import environment, names
from ..metrics.sinks import Value, decode


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


@dataclass(frozen=True)
class Metric:
    """A metric of a run over all its steps: their median, or what `pick` returns. `better` is `high` or `low`."""

    title: str
    unit: str
    key: str
    spec: str
    better: str
    pick: Callable[[Sequence[float]], float] = median
    scale: float = 1.0

    def of(self, run: Run) -> float | None:
        """Return the value of a run; None if it was not recorded."""
        recorded = (record.get(self.key) for record in run.records.values())
        values = [float(value) * self.scale for value in recorded if isinstance(value, (int, float))]
        return self.pick(values) if values else None

    def text(self, run: Run) -> str:
        value = self.of(run)
        return "—" if value is None else format(value, self.spec)


# For runs in order: blue, vermilion, green, … which colour-blind readers can distinguish as well.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#7F5FC1", "#8A6D3B", "#C0392B", "#607D8B"),
)
METRICS = (
    Metric("tokens/s", "tokens/s", names.TOKENS_PER_S, ",.0f", "high"),
    Metric("tokens/s/GPU", "tokens/s per GPU", names.TOKENS_PER_S_PER_GPU, ",.0f", "high"),
    Metric("TFLOP/s/GPU", "TFLOP/s per GPU", names.TFLOPS_PER_GPU, ".3g", "high"),
    Metric("MFU causal %", "% of the peak", names.MFU_CAUSAL_PCT, ".1f", "high"),
    Metric("MFU dense %", "% of the peak", names.MFU_DENSE_PCT, ".1f", "high"),
    Metric("exposed comm ms", "ms per step", names.EXPOSED_COMM_S, ",.1f", "low", scale=1e3),
    Metric("data wait ms", "ms per step", names.DATA_WAIT_S, ",.1f", "low", scale=1e3),
    Metric("predicted imbalance %", "% over the mean", names.IMBALANCE_PCT, ".1f", "low"),
    Metric("measured imbalance %", "% over the mean", names.MEASURED_IMBALANCE_PCT, ".1f", "low"),
    Metric("peak mem GiB", "GiB per GPU", names.PEAK_ACTIVE_GIB, ".2f", "low", pick=max),
)


def load_run(folder: Path | str) -> Run:
    """Read one run folder.

    Raises:
        ValueError: the folder or one of its files is missing, or it has no steps.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"run {folder}: expected a run folder. Check the path; runs are in runs/<run.name>.")
    metrics, resolved = folder / "metrics.jsonl", folder / "resolved.yaml"
    for path in (metrics, resolved):
        if not path.is_file():
            raise ValueError(f"{path}: no such file. Give a folder that `megatron-longctx train` wrote.")
    lines = metrics.read_text(encoding="utf-8").splitlines()
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
    config = OmegaConf.to_container(OmegaConf.load(resolved))
    if not isinstance(config, dict):
        raise ValueError(f"{resolved}: expected a mapping of settings. Give a folder that training wrote.")
    settings = {str(key): value for key, value in config.items()}
    return Run(folder.resolve().name, records, settings, environment.read(folder))


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders. If two have the same name, paths are the names of all.

    Raises:
        ValueError: as for `load_run`.
    """
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    return runs


def common_steps(runs: Sequence[Run]) -> list[int]:
    """Return the steps that every run has, ascending.

    Raises:
        ValueError: there are none.
    """
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
