"""Sinks: JSON is always valid, no step is written twice, W&B never ends a run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_longctx.config import names
from megatron_longctx.config.environment import labels
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.metrics import ConsoleSink, JsonlSink, Value, WandbSink, clock_text, decode, encode
from megatron_longctx.training.sweep import sweep

RECORD = {names.STEP: 1, names.LOSS: 2.0, names.MFU_CAUSAL_PCT: None}
CP4 = ("parallelism=cp4", "parallelism.tensor_parallel_size=2", "data.packing=best_fit", "train.precision=bf16")


def record(step: int, loss: float = 2.0) -> dict[str, Value]:
    return {names.STEP: step, names.LOSS: loss, names.STEP_S: 2.0}


def write(path: Path, steps: range, resumed_step: int = 0, offset: float = 0.0) -> None:
    sink = JsonlSink(path, resumed_step)
    for step in steps:
        sink.write(record(step, step + offset))
    sink.close()


def losses(path: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row[names.STEP] for row in rows}) == len(rows), "a step is written twice"
    return {row[names.STEP]: row[names.LOSS] for row in rows}


def test_jsonl_is_readable_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.write(record(step))
        assert len(losses(path)) == step
    sink.close()


def test_jsonl_resume_drops_what_is_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), resumed_step=4, offset=0.5)
    assert losses(path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.5, 7: 7.5, 8: 8.5, 9: 9.5}


def test_jsonl_of_a_run_from_scratch_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 3), offset=0.25)
    assert losses(path) == {1: 1.25, 2: 2.25}


def test_jsonl_drops_a_line_torn_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write('{"train/step": 4, "train/lo')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:4: line dropped"):
        write(path, range(4, 6), resumed_step=3)
    assert list(losses(path)) == [1, 2, 3, 4, 5]


def test_jsonl_record_needs_a_step(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(KeyError, match=names.STEP):
        sink.write({names.LOSS: 1.0})
    sink.close()


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_values_are_valid_json_and_come_back(value: float, word: str) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = encode({names.STEP: 3, names.LOSS: value, names.GRAD_NORM: 1.5, names.MFU_CAUSAL_PCT: None})
    parsed = json.loads(line, parse_constant=refuse)
    assert parsed[names.LOSS] is None and parsed["nonfinite"] == {names.LOSS: word}
    back = decode(line)
    assert str(back.pop(names.LOSS)) == word
    assert back == {names.STEP: 3, names.GRAD_NORM: 1.5, names.MFU_CAUSAL_PCT: None}


def test_finite_records_carry_no_flag() -> None:
    assert json.loads(encode(record(1))) == {names.STEP: 1, names.LOSS: 2.0, names.STEP_S: 2.0}


def test_console_line_with_everything_known() -> None:
    lines: list[str] = []
    sink = ConsoleSink(100, lines.append)
    sink.write(
        {
            names.STEP: 7,
            names.LOSS: 5.123456,
            names.GRAD_NORM: 1.25,
            names.LEARNING_RATE: 3e-4,
            names.STEP_S: 2.0,
            names.TOKENS_PER_S: 12345.6,
            names.TFLOPS_PER_GPU: 412.3,
            names.MFU_CAUSAL_PCT: 41.69,
            names.MFU_DENSE_PCT: 60.04,
            names.PEAK_ACTIVE_GIB: 71.5,
        }
    )
    assert lines == [
        "step   7/100 | loss 5.12346 | grad norm 1.250 | lr 3.00e-04 | 12,346 tokens/s | 412 TFLOP/s/GPU | "
        "MFU 41.7% causal 60.0% dense | mem 71.50 GiB | ETA 0:03:06"
    ]


def test_console_line_with_nothing_known() -> None:
    line = ConsoleSink(9, print).line({names.STEP: 1, names.LOSS: math.nan})
    assert line.startswith("step 1/9 | loss nan | grad norm — |")
    assert "MFU —" in line and "mem — GiB" in line and line.endswith("ETA —")
    assert "DP imbalance" not in line
    assert " | DP imbalance 4.6% | " in ConsoleSink(9, print).line({names.STEP: 1, names.IMBALANCE_DP: 0.0456})


def test_the_remaining_time_is_that_of_the_median_of_the_last_20_steps() -> None:
    sink = ConsoleSink(100, print)

    def eta(step: int, seconds: float) -> str:
        return sink.line(record(step) | {names.STEP_S: seconds}).rsplit(" ", 1)[1]

    assert eta(1, 60.0) == "1:39:00"
    assert [eta(step, 1.0) for step in (2, 3, 4)][-1] == "0:01:36", "one slow step does not matter"
    assert eta(5, math.nan) == "0:01:35"
    assert [eta(step, 9.0) for step in range(5, 40)][-1] == "0:09:09"
    assert [eta(step, 2.0) for step in range(40, 60)][-1] == "0:01:22"


def test_clock_text() -> None:
    assert [clock_text(s) for s in (None, 0, 59.6, 3725, 90061, 180000)] == [
        "—",
        "0:00:00",
        "0:01:00",
        "1:02:05",
        "1 day 1:01:01",
        "2 days 2:00:00",
    ]


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
        (
            ("logging.wandb_group=a b", "logging.wandb_job_type=eval", "logging.wandb_tags=x,y z", "experiment=demo"),
            {"group": "a b", "job_type": "eval", "tags": ["x", "y z"]},
        ),
    ],
)
def test_labels_group_runs_by_mode(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = labels(compose_config(words), {"device": "NVIDIA H200", "ranks": 16})
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "group"),
    [
        (("experiment=compare_modes", "parallelism.schedule=zigzag,ring"), "compare_modes"),
        (("experiment=compare_modes", "parallelism.schedule=zigzag,ring", "run.name=mine"), "mine"),
        (("train.steps=21,22", "run.name=mine", "logging.wandb_group=other"), "other"),
    ],
)
def test_jobs_of_a_sweep_share_a_group(words: tuple[str, ...], group: str) -> None:
    assert {compose_config(job).logging.wandb_group for job in sweep(words)[1]} == {group}


def wandb_sink(folder: Path, mode: str = "offline") -> WandbSink:
    return WandbSink(folder, compose_config([f"logging.wandb={mode}", "run.name=sink-test"]))


def test_disabled_wandb_writes_nothing(tmp_path: Path) -> None:
    disabled = wandb_sink(tmp_path, "disabled")
    disabled.write(RECORD)
    disabled.close()
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_fails_at_the_start_warns_once(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the run's folder should be")
    with pytest.warns(UserWarning, match=r"W&B is off for the rest of this run \(FileExistsError") as caught:
        broken = wandb_sink(tmp_path / "taken")
        broken.write(RECORD)
        broken.write(RECORD)
        broken.close()
    assert len(caught) == 1


def test_wandb_that_fails_midway_warns_once(tmp_path: Path) -> None:
    broken = wandb_sink(tmp_path)
    assert wandb.run is not None
    wandb.run.finish()  # as a user's code or W&B itself may: logging to this run raises from now on
    with pytest.warns(UserWarning, match=r"W&B is off for the rest of this run \(UsageError") as caught:
        broken.write(RECORD)
        broken.write(RECORD)
        broken.close()
    assert len(caught) == 1
