"""A run's labels in W&B, and that W&B is never in training's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_longctx import names
from megatron_longctx.compose import compose_config
from megatron_longctx.metrics.facts import labels
from megatron_longctx.metrics.wandb_run import WandbSink
from megatron_longctx.sweep import sweep

RECORD = {names.STEP: 1, names.LOSS: 2.0, names.MFU_CAUSAL_PCT: None}
CP4 = ("parallelism=cp4", "parallelism.tensor_parallel_size=2", "data.packing=best_fit", "train.precision=bf16")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            CP4,
            {
                "group": "tiny-4096",
                "job_type": "zigzag",
                "tags": ["tiny", "zigzag", "layout balanced", "cp4", "tp2", "pp1", "dp2", "NVIDIA H200", "bf16"],
            },
        ),
        (("experiment=demo", "parallelism.schedule=ring"), {"group": "demo", "job_type": "ring"}),
        (("experiment=demo", "parallelism=single"), {"group": "demo", "job_type": "one rank"}),
        ((*CP4, "attention.baseline=te_p2p", "attention.transport=auto"), {"job_type": "te_p2p"}),
        (
            ("logging.wandb_group=a b", "logging.wandb_job_type=eval", "logging.wandb_tags=x,y z", "experiment=demo"),
            {"group": "a b", "job_type": "eval", "tags": ["x", "y z"]},
        ),
    ],
)
def test_labels_line_modes_up(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = labels(compose_config(words), {"device": "NVIDIA H200", "ranks": 16})
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "group"),
    [
        (("experiment=compare_modes",), "compare_modes"),
        (("experiment=compare_modes", "run.name=mine"), "mine"),
        (("train.steps=21,22", "run.name=mine", "logging.wandb_group=other"), "other"),
    ],
)
def test_jobs_of_a_sweep_are_one_group(words: tuple[str, ...], group: str) -> None:
    assert {compose_config(job).logging.wandb_group for job in sweep(words).jobs} == {group}


def sink(folder: Path, mode: str = "offline") -> WandbSink:
    return WandbSink(folder, compose_config([f"logging.wandb={mode}", "run.name=sink-test"]))


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    nothing = sink(tmp_path, "disabled")
    nothing.write(RECORD)
    nothing.close()
    assert list(tmp_path.iterdir()) == []


def test_failing_at_the_start_warns_once_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the run's folder should be")
    with pytest.warns(UserWarning, match=r"W&B is off for the rest of this run \(FileExistsError") as caught:
        broken = sink(tmp_path / "taken")
        broken.write(RECORD)
        broken.write(RECORD)
        broken.close()
    assert len(caught) == 1


def test_failing_midway_warns_once_and_says_why(tmp_path: Path) -> None:
    broken = sink(tmp_path)
    assert wandb.run is not None
    wandb.run.finish()  # what a user's own code, or W&B itself, may do: logging to this run raises from now on
    with pytest.warns(UserWarning, match=r"W&B is off for the rest of this run \(UsageError") as caught:
        broken.write(RECORD)
        broken.write(RECORD)
        broken.close()
    assert len(caught) == 1
