"""Runs as read from their folders, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from .. import names
from ..metrics import environment
from ..metrics.sinks import Value, decode


@dataclass(frozen=True)
class Run:
    """One run as read from its folder: `records` by step, `config` the resolved tree, `environment` what it ran on."""

    name: str
    records: dict[int, dict[str, Value]]
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)

    def loss(self, step: int) -> float:
        """Loss at `step`; NaN where none was recorded."""
        value = self.records[step].get(names.LOSS)
        return float(value) if isinstance(value, (int, float)) else math.nan

    def column(self, key: str) -> list[float]:
        """Every recorded value of one metric."""
        return [float(v) for r in self.records.values() if isinstance(v := r.get(key), (int, float))]

    def facts(self) -> dict[str, Any]:
        """What runs are told apart, grouped and filtered by."""
        return environment.facts(self.config, self.environment)


@dataclass(frozen=True)
class Metric:
    """A figure of a run: `of` makes it of the run, None where it was not recorded. better: `high`, `low`."""

    title: str
    unit: str
    key: str
    spec: str
    better: str
    pick: Callable[[Sequence[float]], float] = median
    scale: float = 1.0

    def of(self, run: Run) -> float | None:
        """Over all recorded steps."""
        values = [value * self.scale for value in run.column(self.key)]
        return self.pick(values) if values else None

    def text(self, run: Run) -> str:
        value = self.of(run)
        return "—" if value is None else format(value, self.spec)


# Of runs, in order. Blue, vermilion, green, … told apart by colour-blind readers as well.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#7F5FC1", "#8A6D3B", "#C0392B", "#607D8B"),
)
METRICS = (
    Metric("tokens/s", "tokens/s", names.TOKENS_PER_S, ",.0f", "high"),
    Metric("tokens/s/GPU", "tokens/s a GPU", names.TOKENS_PER_S_PER_GPU, ",.0f", "high"),
    Metric("TFLOP/s/GPU", "TFLOP/s a GPU", names.TFLOPS_PER_GPU, ".3g", "high"),
    Metric("MFU causal %", "% of the peak", names.MFU_CAUSAL_PCT, ".1f", "high"),
    Metric("MFU dense %", "% of the peak", names.MFU_DENSE_PCT, ".1f", "high"),
    Metric("exposed comm ms", "ms a step", names.EXPOSED_COMM_S, ",.1f", "low", scale=1e3),
    Metric("data wait ms", "ms a step", names.DATA_WAIT_S, ",.1f", "low", scale=1e3),
    Metric("predicted imbalance %", "% over the mean", names.IMBALANCE_PCT, ".1f", "low"),
    Metric("measured imbalance %", "% over the mean", names.MEASURED_IMBALANCE_PCT, ".1f", "low"),
    Metric("peak mem GiB", "GiB a GPU", names.PEAK_ACTIVE_GIB, ".2f", "low", pick=max),
)


def load_run(folder: Path | str) -> Run:
    """Read one run folder.

    Raises:
        ValueError: the folder or one of its files is missing, or there are no steps in it.
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
                continue  # a run that is still writing, or was killed while writing
            raise ValueError(f"{metrics}:{number}: not a JSON object ({error}). Remove the line.") from error
        step = record.get(names.STEP)
        if isinstance(step, int):
            records[step] = record
    if not records:
        raise ValueError(f"{metrics}: no training steps in it. Let the run finish at least one step.")
    config = OmegaConf.to_container(OmegaConf.load(resolved))
    if not isinstance(config, dict):
        raise ValueError(f"{resolved}: expected a mapping of settings. Give a folder that training wrote.")
    return Run(
        folder.resolve().name, records, {str(key): value for key, value in config.items()}, environment.read(folder)
    )


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders; runs whose folders are named alike are told apart by their paths.

    Raises:
        ValueError: as `load_run`.
    """
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    return runs


def common_steps(runs: Sequence[Run]) -> list[int]:
    """Steps that every run has, ascending.

    Raises:
        ValueError: there are none.
    """
    steps = sorted(set.intersection(*(set(run.records) for run in runs)))
    if not steps:
        spans = ", ".join(f"{run.name}: {min(run.records)} to {max(run.records)}" for run in runs)
        raise ValueError(f"the runs have no common steps ({spans}). Compare runs that trained the same steps.")
    return steps


def differences(run: Run, first: Run, steps: Sequence[int]) -> list[float]:
    """Loss of `run` minus loss of `first`, by step."""
    return [run.loss(step) - first.loss(step) for step in steps]
