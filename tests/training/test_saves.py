"""Which checkpoints a run writes and keeps besides its last."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config, TrainConfig, validate
from megatron_longctx.mcore import checkpoint_folder
from megatron_longctx.serving.inference_job import checkpoint_of
from megatron_longctx.training.loop import Trainer
from tests.shared.training import Job, changed, recorded, tiny_config, tiny_corpus

VALIDATION = {1: 5.0, 2: 3.0, 3: math.nan, 4: 6.0, 5: 2.0, 6: 7.0}
BEST: dict[str, Any] = {
    "train.steps": 4, "optim.decay_steps": 6, "train.save": True, "train.save_interval": 1, "train.eval_interval": 1,
    "train.eval_samples": 2, "train.keep_checkpoints": 1, "train.keep_best": True, "data.split": "60,40",
}  # fmt: skip


def _validate_as_given(trainer: Trainer) -> None:
    assert trainer.validation is not None
    trainer.validation.loss = lambda: VALIDATION[trainer.step]  # type: ignore[method-assign]


def test_the_best_checkpoint_stays_and_time_saves(tmp_path: Path) -> None:
    """In one spawn: the best by validation of a run, of its continuation, and a run that saves by the clock."""
    tiny_corpus(tmp_path / "corpus")

    def job(name: str, settings: dict[str, Any], **options: Any) -> Job:
        return Job(tiny_config(tmp_path, name, {"parallelism.context_parallel_size": 2, **settings}), **options)

    clock = {"train.steps": 40, "train.save": True, "train.save_minutes": 1e-3}
    recorded(2, {
        "four steps": job("best", BEST, before_optimizer=_validate_as_given),
        "four steps again": job("on", BEST, before_optimizer=_validate_as_given),
        "six steps": job("on", {**BEST, "train.steps": 6}, before_optimizer=_validate_as_given),
        "clock": job("clock", clock),
    })  # fmt: skip
    folder = tmp_path / "best/checkpoints"
    assert checkpoint_folder.iterations(folder) == [2, 4], "the best, and the newest"
    assert checkpoint_folder.best(folder) == (3.0, 2)
    assert checkpoint_of({"checkpoint": str(tmp_path / "best"), "iteration": "best"}) == (tmp_path / "best", 2)
    assert len(checkpoint_folder.iterations(tmp_path / "clock/checkpoints")) >= 2, "60 ms are less than 40 steps"
    folder = tmp_path / "on/checkpoints"
    assert checkpoint_folder.iterations(folder) == [5, 6] and checkpoint_folder.best(folder) == (2.0, 5)


def test_a_damaged_file_of_the_best_is_refused(tmp_path: Path) -> None:
    assert checkpoint_folder.best(tmp_path) is None
    with pytest.raises(ValueError, match=r"iteration=best: expected a run with train\.keep_best=true"):
        checkpoint_of({"checkpoint": str(tmp_path), "iteration": "best"})
    (tmp_path / checkpoint_folder.BEST).write_text("{}")
    with pytest.raises(ValueError, match=r"best\.json is damaged"):
        checkpoint_folder.best(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": True}, "to be a multiple of train.eval_interval=null"),
        ({"keep_best": True, "eval_interval": 4, "save_interval": 6}, "train.save_interval=6 to be a multiple"),
        ({"save": False, "save_minutes": 5.0}, "train.save_minutes=5.0: expected null with train.save=false"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    config = changed(Config(), {"data.split": "90,10"})
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(changed_train(config, settings))


def changed_train(config: Config, settings: dict[str, Any]) -> Config:
    return Config(**{**vars(config), "train": TrainConfig(**settings)})
