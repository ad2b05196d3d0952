"""The metrics by which runs are compared, and what the records of a run say of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

from ...config import names

Records = Mapping[int, Mapping[str, Any]]  # keyed by step
MIN_STEPS = 10  # fewer measured steps do not tell runs apart
_MAX_WARM_UP = 5


class Summary(NamedTuple):
    """A median with its quartiles, or a largest value, for which all are equal; `steps` counts the records."""

    value: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class Metric:
    """A metric of a run's records. `better` is `high` or `low`; `most`: the largest value counts, not the median."""

    title: str
    unit: str
    key: str
    spec: str
    better: str
    scale: float = 1.0
    most: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def summary_key(self) -> str:
        """The key of the summary in W&B, e.g. `median/tokens_per_s`."""
        return ("most/" if self.most else "median/") + self.key.partition("/")[2]

    def of(self, records: Records) -> Summary | None:
        """Return the summary of records; None if none has the metric. Medians leave out the first steps."""
        steps = sorted(records)
        counted = steps if self.most else steps[warm_up(len(steps)) :]
        recorded = (records[step].get(self.key) for step in counted)
        values = [v * self.scale for v in recorded if isinstance(v, (int, float)) and math.isfinite(v)]
        if not values:
            return None
        if self.most or len(values) == 1:
            return Summary(*(max(values),) * 3, len(values))
        low, value, high = quantiles(values, n=4, method="inclusive")
        return Summary(value, low, high, len(values))

    def text(self, records: Records) -> str:
        """Return the value, and half the distance of the quartiles in percent of it."""
        summary = self.of(records)
        if summary is None:
            return "—"
        spread = 50 * (summary.high - summary.low) / abs(summary.value) if summary.value else 0.0
        return format(summary.value, self.spec) + (f" ±{spread:.0f}%" if spread else "")


def warm_up(steps: int) -> int:
    """Return how many of the first steps connect ranks and compile kernels: at most 5, and at most a third."""
    return min(_MAX_WARM_UP, steps // 3)


def summaries(records: Records) -> dict[str, float]:
    """Return the values of all metrics of the records by their keys in W&B, in the units of the records."""
    found = {metric: metric.of(records) for metric in METRICS}
    return {metric.summary_key: each.value / metric.scale for metric, each in found.items() if each is not None}


METRICS = (
    Metric("tokens per second", "", names.TOKENS_PER_S, ",.0f", "high"),
    Metric("tokens per second per GPU", "", names.TOKENS_PER_S_PER_GPU, ",.0f", "high"),
    Metric("TFLOP/s per GPU", "", names.TFLOPS_PER_GPU, ".3g", "high"),
    Metric("MFU, causal", "% of the peak", names.MFU_CAUSAL_PCT, ".1f", "high"),
    Metric("MFU, dense", "% of the peak", names.MFU_DENSE_PCT, ".1f", "high"),
    Metric("MFU, causal, of FP8's peak", "% of the peak", names.MFU_FP8_PCT, ".1f", "high"),
    Metric("waiting for messages", "ms per step", names.EXPOSED_COMM_S, ",.1f", "low", scale=1e3),
    Metric("waiting for data", "ms per step", names.DATA_WAIT_S, ",.1f", "low", scale=1e3),
    Metric("imbalance, predicted", "% over the mean", names.IMBALANCE_PCT, ".1f", "low"),
    Metric("imbalance, measured", "% over the mean", names.MEASURED_IMBALANCE_PCT, ".1f", "low"),
    Metric("peak memory", "GiB per GPU", names.PEAK_ACTIVE_GIB, ".2f", "low", most=True),
)
