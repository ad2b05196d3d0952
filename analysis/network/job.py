"""Jobs on an emulated network, and their results as tables and as a picture."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.benchmarks.report import table as markdown
from megatron_longctx.config.cluster import Cluster
from megatron_longctx.core.plans import ModeOptions
from megatron_longctx.planner.cost import Costs, Workload

CLOSE = 0.25
"""The relative error of a prediction that needs no mark."""


@dataclass(frozen=True)
class Mode:
    """A mode with its options; `sum_in_node` and `overlap` are those of `ContextParallelAttention`."""

    schedule: str
    options: ModeOptions = field(default_factory=ModeOptions)
    sum_in_node: bool = False
    overlap: bool = True

    @property
    def name(self) -> str:
        inner = self.options.inner_size
        rounds = f", {self.options.rounds} rounds" if self.options.rounds else ""
        name = f"{self.schedule} ({inner}{rounds})" if inner is not None else self.schedule
        return name + ", summed" * self.sum_in_node + ", no overlap" * (not self.overlap)


@dataclass(frozen=True)
class Job:
    """One network with the modes to run on it.

    There are few tokens and many heads, so that links are the limit: bytes grow with tokens, work with their square.
    """

    cluster: Cluster
    modes: tuple[Mode, ...]
    length: int
    workload: Workload
    causal: bool = True
    repeats: int = 3
    # Lengths that are measured first and correct the prediction, like those that `calibrate` measures.
    others: tuple[int, ...] = ()
    device: Costs | None = None  # of an emulated device; None to compute on the CPU, whose calls are measured

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(path: Path) -> Job:
        """Load a job that this program saved into its own folder."""
        job = pickle.loads(path.read_bytes())
        assert isinstance(job, Job)
        return job


@dataclass(frozen=True)
class Result:
    """One mode, measured and predicted: medians of the seconds on the slowest rank."""

    network: str
    mode: str
    causal: bool
    forward_s: float
    backward_s: float
    predicted_forward_s: float
    predicted_backward_s: float
    error: float  # the largest relative error (Frobenius) of output and gradients against fp64
    # Computation / communication of the forward pass, as TASP defines it, each on the rank with most of it: of measured
    # kernel calls, and of messages that nothing else delays.
    computing: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.network}, {'causal' if self.causal else 'full'}"

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return (self.predicted_forward_s + self.predicted_backward_s) / self.seconds


@dataclass(frozen=True)
class Outcome:
    """The results of a job, and what was measured of the network."""

    results: tuple[Result, ...]
    links: tuple[float, float]  # measured over described rate, of the slowest and of the fastest link
    step_s: float  # as in `Costs`
    message_s: float


def groups(results: Sequence[Result]) -> list[dict[str, Result]]:
    """Return the results of every network and mask, keyed by mode, the fastest first."""
    grouped: dict[tuple[str, bool], dict[str, Result]] = {}
    for each in sorted(results, key=lambda each: each.seconds):
        grouped.setdefault((each.network, not each.causal), {})[each.mode] = each
    return [group for _, group in sorted(grouped.items())]


def table(results: Sequence[Result]) -> str:
    """Return Markdown of all results; predictions off by more than `CLOSE` are marked."""
    head = ("network", "mode", "forward", "backward", "predicted", "predicted / measured", "error")
    rows = []
    for each in (each for group in groups(results) for each in group.values()):
        mark = "" if abs(each.ratio - 1) <= CLOSE else " (!)"
        predicted = f"{each.predicted_forward_s:.2f} + {each.predicted_backward_s:.2f}"
        seconds = (f"{each.forward_s:.2f}", f"{each.backward_s:.2f}", predicted)
        rows.append([each.title, each.mode, *seconds, f"{each.ratio:.2f}{mark}", f"{each.error:.0e}"])
    return markdown(head, rows)


def speedups(results: Sequence[Result]) -> str:
    """Return Markdown with the speed-ups over the flat rings: forward / forward and backward together."""
    rows = []
    for group in groups(results):
        for each in group.values():
            cells = [
                f"{group[name].forward_s / each.forward_s:.2f} / {group[name].seconds / each.seconds:.2f}"
                if name in group
                else ""
                for name in ("ring", "zigzag")
            ]
            rows.append([each.title, each.mode, *cells])
    return markdown(["network", "mode", "against ring", "against zigzag"], rows)


def ratios(results: Sequence[Result]) -> str:
    """Return Markdown with `tasp` compared with `zigzag`, ordered by zigzag's computation / communication."""
    head = ("network", "computation / communication of zigzag", "zigzag", "tasp", "forward, times as fast", "simulated",
            "backward")  # fmt: skip
    rows = []
    for pair in sorted(groups(results), key=lambda pair: pair["zigzag"].computing):
        one, several = pair["zigzag"], pair["tasp"]
        seconds = [f"{each.forward_s:.2f} + {each.backward_s:.2f}" for each in (one, several)]
        gains = _gains(one, several, "forward_s", "predicted_forward_s", "backward_s")
        rows.append([one.network, f"{one.computing:.2f}", *seconds, *gains])
    return markdown(head, rows)


def choices(results: Sequence[Result]) -> str:
    """Return Markdown with the fastest mode of every network, and how much slower the mode is that simulation takes."""
    rows = []
    for group in groups(results):
        best, *_ = group.values()
        chosen = min(group.values(), key=lambda each: each.ratio * each.seconds)
        rows.append([best.title, best.mode, chosen.mode, f"{chosen.seconds / best.seconds - 1:.1%}"])
    return markdown(["network", "fastest", "simulation takes", "slower by"], rows)


def sums(results: Sequence[Result]) -> str:
    """Return Markdown with the speed-up from sums of gradients inside nodes."""
    rows = [
        [plain.title, plain.mode, *_gains(plain, summed, "backward_s", "predicted_backward_s", "seconds")]
        for plain, summed in _pairs(results, ", summed")
    ]
    return markdown(["network", "mode", "backward, times as fast", "simulated", "forward and backward"], rows)


def overlaps(results: Sequence[Result]) -> str:
    """Return Markdown with the speed-up from overlap."""
    passes = ("forward_s", "predicted_forward_s", "backward_s", "predicted_backward_s")
    rows = [[each.title, each.mode, *_gains(apart, each, *passes)] for each, apart in _pairs(results, ", no overlap")]
    return markdown(("network", "mode", "forward, times as fast", "simulated", "backward", "simulated"), rows)


def _pairs(results: Sequence[Result], suffix: str) -> Iterator[tuple[Result, Result]]:
    """Yield the results that also exist with `suffix` in the mode's name, and the latter."""
    for group in groups(results):
        yield from ((each, group[mode + suffix]) for mode, each in group.items() if mode + suffix in group)


def _gains(slow: Result, fast: Result, *times: str) -> list[str]:
    return [f"{getattr(slow, key) / getattr(fast, key):.2f}" for key in times]


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw measured times as bars and predictions as marks, with a panel per network and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [list(group.values())[::-1] for group in groups(results)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    for panel, group in zip(axes.flat, panels, strict=False):
        names, forward = [each.mode for each in group], [each.forward_s for each in group]
        panel.barh(names, forward, color="#4477aa", label="forward")
        panel.barh(names, [each.backward_s for each in group], left=forward, color="#99bbdd", label="backward")
        predicted = [each.predicted_forward_s + each.predicted_backward_s for each in group]
        panel.plot(predicted, range(len(group)), "k|", markersize=14, markeredgewidth=2, label="simulated")
        panel.set_title(group[0].title)
        panel.set_xlabel("seconds")
        panel.legend(framealpha=0.9, loc="upper right")
    figure.savefig(path, dpi=100)
    plt.close(figure)
