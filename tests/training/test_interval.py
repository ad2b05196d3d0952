"""A record of several steps has their means, not what the last of them had."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_longctx import names
from megatron_longctx.config import ModelConfig
from megatron_longctx.mcore.step import LossSum
from megatron_longctx.metrics.flops import Work
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.monitoring import Interval
from megatron_longctx.training.run_folder import RunFolder
from tests.shared.training import Job, RecordingTrainer, tiny_config, tiny_corpus

BETWEEN_S = 0.3


def record(waited: float | None) -> dict[str, float | None]:
    """Of three steps. waited: seconds of the last."""
    losses = [
        LossSum(30.0, 10, Work(10, 55, 100), 0.1, [[1.0, 1.0]]),
        LossSum(30.0, 10, Work(10, 55, 100), 0.2, [[1.0, 3.0]]),
        LossSum(60.0, 40, Work(40, 220, 400), waited, [[1.0, 1.0]]),
    ]
    return Interval(6.0, 0.9, 0.5, [1.0, 2.0, 6.0], losses).record(ModelConfig(), 512, 2, None)


def test_means_are_means_of_the_steps() -> None:
    found = record(0.6)
    wanted = {
        names.LOSS: 120 / 60,  # over tokens
        names.TOKENS_PER_S: 60 / 6,
        names.TOKENS_PER_S_PER_GPU: 60 / 6 / 2,
        names.STEP_S: 2.0,
        names.DATA_WAIT_S: 0.3,
        names.SAVE_STALL_S: 0.5,  # a sum
        names.IMBALANCE_PCT: 3.0,
        names.MEASURED_IMBALANCE_PCT: 50 / 3,
        names.EXPOSED_COMM_S: 0.3,
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)


def test_what_one_step_has_not_measured_has_no_mean() -> None:
    assert record(None)[names.EXPOSED_COMM_S] is None


class _Slow(RecordingTrainer):
    """The device still has work of the optimizer when the host asks whether to stop."""

    def _stopped(self) -> bool:
        time.sleep(BETWEEN_S)
        return super()._stopped()


def _train_slowly(rank: int, root: Path) -> None:
    _Slow(Job(tiny_config(root, "slow", {"train.steps": 3, "optim.warmup_steps": 1}))).run()


def test_a_step_lasts_until_the_next(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    run_distributed(_train_slowly, 1, tmp_path)
    folder = RunFolder.of(tiny_config(tmp_path, "slow", {}))
    steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert len(steps) == 3
    assert all(step[names.STEP_S] >= BETWEEN_S for step in steps[1:])
