"""A training job that the preflight has accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from .compose import config_from_dict


@dataclass(frozen=True)
class Job:
    """What every rank runs.

    Attributes:
        config: the configuration, with the mode that `parallelism.schedule=auto` chose.
        device: `cpu` or `cuda`.
        resumed_step: the step of the checkpoint that the run resumes from; None for a new run.
        mode_reason: why `auto` chose the mode; None for other settings.
        identity: what the samples and their order depend on (`mcore.corpus.identity`).
    """

    config: Config
    world_size: int
    device: str
    resumed_step: int | None
    mode_reason: str | None
    identity: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the job as JSON values, for `from_dict`."""
        return vars(self) | {"config": self.config.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """Return the job of `as_dict`."""
        return cls(**{**values, "config": config_from_dict(values["config"])})
