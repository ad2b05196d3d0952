"""Runs of the real trainer whose losses, gradient norms and gradients are kept, to be compared with those of others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..mcore.optimizer import whole_gradients
from .loop import StepResult, Trainer
from .run_folder import RunFolder
from .signals import StopRequest

_EXPERTS, _SHARE = ".mlp.experts.", "_of_"


@dataclass(frozen=True)
class Figures:
    """By step. grad_norms: before clipping."""

    losses: list[float]
    grad_norms: list[float]


class RecordedTrainer(Trainer):
    """The trainer, observed between backward and the optimizer, and after each step."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        super().__init__(config, folder, StopRequest())
        self.figures = Figures([], [])
        optimizer_step = self.optimizer.step

        def observed_step() -> Any:
            self.observe()
            return optimizer_step()

        self.optimizer.step = observed_step

    def observe(self) -> None:
        """Called by every rank in every step between backward and the optimizer."""

    def gradients(self) -> dict[str, Tensor]:
        """See `mcore.optimizer.whole_gradients`."""
        return whole_gradients(self.models, self.groups, self.config.optim.distributed)

    def _one_step(self) -> StepResult:
        result = super()._one_step()
        self.figures.losses.append(result.loss.mean)
        if result.grad_norm is not None:
            self.figures.grad_norms.append(result.grad_norm)
        return result


class _Exporting(RecordedTrainer):
    """Writes the gradients of some steps, a file for every share of the model that ranks hold."""

    def __init__(self, config: Config, folder: RunFolder, steps: Collection[int]) -> None:
        super().__init__(config, folder)
        self._steps = steps

    def observe(self) -> None:
        if self.step in self._steps:
            gradients, groups = self.gradients(), self.groups
            stage = self.folder.path / f"gradients_step_{self.step}_pp_{groups.pp.rank()}"
            experts = {name: gradients.pop(name) for name in list(gradients) if _EXPERTS in name}
            if groups.dp_cp.rank() == 0:
                torch.save(gradients, f"{stage}_tp_{groups.tp.rank()}.pt")
            if experts and groups.expt_dp.rank() == 0:
                torch.save(experts, f"{stage}_experts_{groups.expt_tp.rank()}{_SHARE}{groups.ep.rank()}.pt")


def _exported(run: Path, step: int) -> dict[str, dict[str, Tensor]]:
    """Gradients by stage and tensor-parallel shard; experts of all expert-parallel ranks together."""
    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted(run.glob(f"gradients_step_{step}_pp_*")):
        shard = found.setdefault(path.stem.partition(_SHARE)[0], {})
        shard.update(torch.load(path, mmap=True, map_location="cpu"))
    return found


def record(rank: int, config: Config, steps: Collection[int]) -> Figures:
    """Train as this rank of a joined group; rank 0's figures are all ranks'.

    Args:
        config: of a run whose folder is new.
        steps: counted from 0, whose gradients are kept in the run's folder.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    trainer = _Exporting(config, folder, steps)
    trainer.train()
    return trainer.figures


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of `reference`."""
    return _error(*_squares(value, reference))


def gradient_errors(run: Path, reference: Path, step: int) -> dict[str, float]:
    """Relative error of every parameter's gradient, by name: of all the shares that tensor-parallel ranks hold of it.

    run, reference: folders of runs by `record`, with equal tensor- and pipeline-parallel sizes, of experts too.
    """
    squares: dict[str, tuple[float, float]] = {}
    found = _exported(run, step)
    for shard, expected in _exported(reference, step).items():
        for name, gradient in expected.items():
            before, share = squares.get(name, (0.0, 0.0)), _squares(found[shard][name], gradient)
            squares[name] = before[0] + share[0], before[1] + share[1]
    return {name: _error(*both) for name, both in squares.items()}


def _squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Squared norms of the difference and of the reference."""
    reference = reference.double()
    return float((value.double() - reference).square().sum()), float(reference.square().sum())


def _error(difference: float, reference: float) -> float:
    return float((difference / max(reference, torch.finfo(torch.float64).tiny)) ** 0.5)
