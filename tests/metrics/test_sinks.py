"""Sinks: valid JSON always, no doubled curves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_longctx import names
from megatron_longctx.metrics.sinks import ConsoleSink, Eta, JsonlSink, Value, clock_text, decode, encode


def record(step: int, loss: float = 2.0) -> dict[str, Value]:
    return {names.STEP: step, names.LOSS: loss, names.STEP_S: 2.0}


def write(path: Path, steps: range, resumed_step: int = 0, offset: float = 0.0) -> None:
    sink = JsonlSink(path, resumed_step)
    for step in steps:
        sink.write(record(step, step + offset))
    sink.close()


def losses(path: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row[names.STEP] for row in rows}) == len(rows), "a step is there twice"
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


def test_eta_ignores_one_slow_step() -> None:
    eta = Eta()
    assert eta.seconds(10) is None
    for step_s in (60.0, 1.0, 1.0, 1.0):
        eta.add(step_s)
    assert eta.seconds(10) == 10.0


def test_eta_forgets_old_steps() -> None:
    eta = Eta(window=3)
    for step_s in (9.0, 9.0, 9.0, 2.0, 2.0, 2.0):
        eta.add(step_s)
    assert eta.seconds(5) == 10.0


def test_clock_text() -> None:
    assert [clock_text(s) for s in (None, 0, 59.6, 3725, 90061, 180000)] == [
        "—",
        "0:00:00",
        "0:01:00",
        "1:02:05",
        "1 day 1:01:01",
        "2 days 2:00:00",
    ]
