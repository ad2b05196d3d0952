"""What is measured on an emulated network, and what is found."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from megatron_longctx.schedules import ModeOptions
from megatron_longctx.schedules.cost import Workload
from megatron_longctx.topology import Cluster


@dataclass(frozen=True)
class Mode:
    """sum_in_node, overlap: as in `attention.*`."""

    schedule: str
    options: ModeOptions = field(default_factory=ModeOptions)
    sum_in_node: str = "false"
    overlap: bool = True

    @property
    def name(self) -> str:
        inner = self.options.inner_size
        name = f"{self.schedule} ({inner})" if inner is not None else self.schedule
        return name + ", summed" * (self.sum_in_node == "true") + ", no overlap" * (not self.overlap)


@dataclass(frozen=True)
class Job:
    """One network with the modes that run on it. Few tokens and many heads, so that the links are the limit: bytes
    grow with tokens, work with their square. others: lengths that are measured first and correct what is predicted, as
    those that `calibrate` measures do."""

    cluster: Cluster
    modes: tuple[Mode, ...]
    length: int
    workload: Workload
    causal: bool = True
    repeats: int = 3
    others: tuple[int, ...] = ()

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(path: Path) -> Job:
        """Of this program's own making, in a folder of its own."""
        job = pickle.loads(path.read_bytes())
        assert isinstance(job, Job)
        return job


@dataclass(frozen=True)
class Found:
    """One mode, measured and predicted; seconds of the slowest rank, medians. error: the largest relative (Frobenius)
    one of output and gradients against fp64. computing: forward's computation over its communication, each of the rank
    that has most of it, as TASP has the ratio; of measured kernel calls and of messages that nothing else delays."""

    network: str
    mode: str
    causal: bool
    forward_s: float
    backward_s: float
    predicted_forward_s: float
    predicted_backward_s: float
    error: float
    computing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return (self.predicted_forward_s + self.predicted_backward_s) / self.seconds


@dataclass(frozen=True)
class Outcome:
    """links: measured over described rate, of the slowest and the fastest link. step_s, message_s: as in `Costs`."""

    found: tuple[Found, ...]
    links: tuple[float, float]
    step_s: float
    message_s: float
