"""Runs of the real trainer that keep their losses, gradient norms and gradients, to compare them with another run's."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..config import Config
from ..mcore import checkpoint
from ..mcore.checkpoint_folder import iteration_directory
from ..mcore.checkpoint_weights import Reader
from ..mcore.optimizer import named_parameters, whole_gradients
from .loop import StepResult, Trainer
from .run_folder import RunFolder
from .signals import StopRequest

_GRADIENTS = "gradients"
_STACKED = ("decoder.layers.", ".experts.experts.")  # checkpoints have one tensor of all layers, and of all experts


@dataclass(frozen=True)
class Curves:
    """Losses, and gradient norms before clipping: one per step."""

    losses: list[float]
    grad_norms: list[float]


class RecordedTrainer(Trainer):
    """The trainer with a record of losses and gradient norms. It writes the gradients of `steps`, counted from 0."""

    def __init__(self, config: Config, folder: RunFolder, steps: Collection[int] = ()) -> None:
        super().__init__(config, folder, StopRequest())
        self.curves, self._steps = Curves([], []), steps

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, keyed by parameter; see `mcore.optimizer.whole_gradients`."""
        return whole_gradients(self.models, self.groups, self.config.optim.distributed)

    def write_gradients(self, directory: Path) -> None:
        """Write the gradients of this step in fp32, as if they were the weights of a checkpoint. Collective.

        Checkpoints join what ranks of any parallel sizes hold.
        """
        gradients = self.gradients()
        of = {id(x): gradients[name] for name, x in named_parameters(self.models).items()}
        owners = [module._parameters for chunk in self.models for module in chunk.modules()]
        held = [(owner, key, x) for owner in owners for key, x in owner.items() if x is not None]
        # Others take the parameters' places: one whose data was of another dtype for a while has lost DDP's hook.
        for owner, key, x in held:
            owner[key] = torch.nn.Parameter(of[id(x)], requires_grad=False)
            vars(owner[key]).update(vars(x))
        self.write_weights(directory)
        for owner, key, x in held:
            owner[key] = x

    def write_weights(self, directory: Path) -> None:
        """Write a checkpoint of the weights alone. Collective."""
        # Of bare models: DDP would take what it gathers for this for the parameters of the next step.
        bare = [chunk.module for chunk in self.models]
        state = replace(self._state(), models=bare, optimizer=None, scheduler=None, main=self.optimizer)
        checkpoint.begin(directory, self.step, state, {}).finish()

    def _one_step(self) -> StepResult:
        result = super()._one_step()
        self.curves.losses.append(result.loss.mean)
        if result.grad_norm is not None:
            self.curves.grad_norms.append(result.grad_norm)
        return result

    def _before_optimizer_step(self) -> None:
        if self.step in self._steps:
            self.write_gradients(self.folder.path / _GRADIENTS)


def record(rank: int, config: Config, steps: Collection[int], keep_weights: bool = False) -> Curves:
    """Train as this rank of a joined process group. All ranks have the same curves.

    Args:
        config: of a run whose folder is new.
        steps: the steps, counted from 0, whose gradients are written into the run's folder.
        keep_weights: also write the initial weights, for `train.init_from`.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    trainer = RecordedTrainer(config, folder, steps)
    if keep_weights:
        trainer.write_weights(folder.checkpoints)
    trainer.train()
    return trainer.curves


def gradient_errors(run: Path, reference: Path, step: int) -> dict[str, float]:
    """Return the relative error of each parameter's gradient, keyed by parameter.

    `run` and `reference` are folders of runs by `record`, of any parallel sizes.
    """
    of_run, of_reference = (Reader(iteration_directory(each / _GRADIENTS, step)) for each in (run, reference))
    errors: dict[str, float] = {}
    tiny = torch.finfo(torch.float64).tiny
    for key in of_reference.unread(()):
        shape = of_reference.shape(key)
        tensors = (reader.read(key, None, shape).double() for reader in (of_run, of_reference))
        for name, (value, expected) in _by_layer_and_expert(key, *tensors):
            errors[name] = float((value - expected).norm() / expected.norm().clamp(min=tiny))
    return errors


def _by_layer_and_expert(key: str, *tensors: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the tensors of a checkpoint's key, or their parts with names that number the layer and the expert."""
    for stacked in _STACKED:
        before, found, rest = key.partition(stacked)
        if found and not rest[0].isdigit():
            for number, parts in enumerate(zip(*tensors, strict=True)):
                yield from _by_layer_and_expert(f"{before}{stacked}{number}.{rest}", *parts)
            return
    yield key, tensors
