"""Runs of the real trainer that keep their losses, gradient norms and gradients, to compare them with another run's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..config import Config
from ..mcore.optimizer import whole_gradients
from .loop import StepResult, Trainer
from .run_folder import RunFolder
from .signals import StopRequest

_EXPERTS, _SHARD = ".mlp.experts.", "_of_"


@dataclass(frozen=True)
class Curves:
    """Losses, and gradient norms before clipping: one per step."""

    losses: list[float]
    grad_norms: list[float]


class RecordedTrainer(Trainer):
    """The trainer with a record of losses and gradient norms."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        super().__init__(config, folder, StopRequest())
        self.curves = Curves([], [])

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, keyed by parameter; see `mcore.optimizer.whole_gradients`."""
        return whole_gradients(self.models, self.groups, self.config.optim.distributed)

    def _one_step(self) -> StepResult:
        result = super()._one_step()
        self.curves.losses.append(result.loss.mean)
        if result.grad_norm is not None:
            self.curves.grad_norms.append(result.grad_norm)
        return result


class _ExportingTrainer(RecordedTrainer):
    """Writes the gradients of some steps, one file per shard of the model."""

    def __init__(self, config: Config, folder: RunFolder, steps: Collection[int]) -> None:
        super().__init__(config, folder)
        self._steps = steps

    def _before_optimizer_step(self) -> None:
        if self.step in self._steps:
            gradients, groups = self.gradients(), self.groups
            stage = self.folder.path / f"gradients_step_{self.step}_pp_{groups.pp.rank()}"
            experts = {name: gradients.pop(name) for name in list(gradients) if _EXPERTS in name}
            if groups.dp_cp.rank() == 0:
                torch.save(gradients, f"{stage}_tp_{groups.tp.rank()}.pt")
            if experts and groups.expt_dp.rank() == 0:
                torch.save(experts, f"{stage}_experts_{groups.expt_tp.rank()}{_SHARD}{groups.ep.rank()}.pt")


def _exported(run: Path, step: int) -> dict[str, dict[str, Tensor]]:
    """Read gradients, keyed by stage and tensor-parallel shard. Experts of all expert-parallel ranks are together."""
    shards: dict[str, dict[str, Tensor]] = {}
    for path in sorted(run.glob(f"gradients_step_{step}_pp_*")):
        shard = shards.setdefault(path.stem.partition(_SHARD)[0], {})
        shard.update(torch.load(path, mmap=True, map_location="cpu"))
    return shards


def record(rank: int, config: Config, steps: Collection[int]) -> Curves:
    """Train as this rank of a joined process group. All ranks have the same curves.

    Args:
        config: of a run whose folder is new.
        steps: the steps, counted from 0, whose gradients are written into the run's folder.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    trainer = _ExportingTrainer(config, folder, steps)
    trainer.train()
    return trainer.curves


def gradient_errors(run: Path, reference: Path, step: int) -> dict[str, float]:
    """Return the relative error of each parameter's gradient over all tensor-parallel shards, keyed by parameter.

    Args:
        run, reference: folders of runs by `record` with equal tensor- and pipeline-parallel sizes, also of experts.
    """
    squares: dict[str, tuple[float, float]] = {}
    exported = _exported(run, step)
    for shard, expected in _exported(reference, step).items():
        for name, gradient in expected.items():
            before, here = squares.get(name, (0.0, 0.0)), _squares(exported[shard][name], gradient)
            squares[name] = before[0] + here[0], before[1] + here[1]
    tiny = torch.finfo(torch.float64).tiny
    return {name: (error / max(norm, tiny)) ** 0.5 for name, (error, norm) in squares.items()}


def _squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the squared norms of the difference and of the reference."""
    reference = reference.double()
    return float((value.double() - reference).square().sum()), float(reference.square().sum())
