"""The comparison of runs: numbers of the tables, the pictures, and runs that cannot be compared."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_longctx.cli import cli
from megatron_longctx.config import Config, DataConfig, ParallelismConfig, names
from megatron_longctx.training import comparison as compare
from megatron_longctx.training.comparison import load_run
from megatron_longctx.training.metrics import METRICS, JsonlSink


def make_run(
    folder: Path, losses: Sequence[float], first_step: int = 1, world: int = 1, schedule: str = "zigzag"
) -> Path:
    """Write a run folder with these losses, as training does."""
    folder.mkdir(parents=True)
    parallelism = ParallelismConfig(context_parallel_size=world, schedule=schedule)
    config = Config(parallelism=parallelism, data=DataConfig(seq_length=64))
    OmegaConf.save(OmegaConf.create(config.as_dict()), folder / "resolved.yaml")
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, loss in enumerate(losses, start=first_step):
        sink.write(
            {
                names.STEP: step,
                names.LOSS: loss,
                names.TOKENS_PER_S: 1000.0 * step,
                names.TOKENS_PER_S_PER_GPU: 1000.0 * step / world,
                names.TFLOPS_PER_GPU: 1.5,
                names.MFU_CAUSAL_PCT: None,
                names.PEAK_ACTIVE_GIB: 0.5 * step,
            }
        )
    sink.close()
    return folder


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(" | ")]


def test_two_runs_print_loss_difference_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "demo-cp1", [3.0, 2.0, 1.0])
    b = make_run(tmp_path / "demo-cp4", [3.0, 2.5, 0.75], world=4)
    assert cli.main(["compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cells(lines[0]) == ["step", "loss demo-cp1", "loss demo-cp4", "difference"]
    assert [cells(line) for line in lines[2:5]] == [
        ["1", "3.000000", "3.000000", "+0.00e+00"],
        ["2", "2.000000", "2.500000", "+5.00e-01"],
        ["3", "1.000000", "0.750000", "-2.50e-01"],
    ]
    assert lines[6] == "Largest difference from the loss of demo-cp1 at 3 common steps: 5.0e-01 (demo-cp4)."
    header, first, second = (cells(lines[i]) for i in (8, 10, 11))
    assert dict(zip(header, first, strict=True)) == {
        "run": "demo-cp1",
        "mode": "one rank",
        "max |difference|": "first",
        "steps": "3",
        "tokens per second": "2,500 ±10%",
        "tokens per second per GPU": "2,500 ±10%",
        "TFLOP/s per GPU": "1.5",
        "peak memory (GiB per GPU)": "1.50",
    }
    assert (second[0], second[5], second[2]) == ("demo-cp4", "625 ±10%", "5.00e-01")
    assert lines[13].startswith("2 of 2 runs: with fewer than 10 steps after the warm-up")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_three_runs_name_each_difference(tmp_path: Path) -> None:
    runs = compare.load_runs(
        [make_run(tmp_path / name, [value]) for name, value in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    )
    lines = compare.loss_table(runs, 50).splitlines()
    assert cells(lines[0])[4:] == ["b - a", "c - a"] and cells(lines[2])[4:] == ["+1.00e+00", "+3.00e+00"]


def test_only_common_steps_are_compared(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", [5.0, 4.0, 3.0]), make_run(tmp_path / "b", [3.5, 2.0], first_step=3)
    runs = compare.load_runs([a, b])
    assert compare.common_steps(runs) == [3]
    assert cells(compare.loss_table(runs, 50).splitlines()[2]) == ["3", "3.000000", "3.500000", "+5.00e-01"]


def test_long_runs_show_some_steps_and_both_ends(tmp_path: Path) -> None:
    runs = compare.load_runs([make_run(tmp_path / "a", [float(i) for i in range(1, 102)])])
    lines = compare.loss_table(runs, 5).splitlines()
    assert [cells(line)[0] for line in lines[2:7]] == ["1", "26", "51", "76", "101"]
    assert lines[7] == "(5 of 101 common steps)"


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", [1.0, 1.0, 1.0]), make_run(tmp_path / "b", [1.0, math.nan, 1.5])
    runs = compare.load_runs([a, b])
    assert cells(compare.loss_table(runs, 50).splitlines()[3])[2:] == ["nan", "+nan"]
    assert cells(compare.summary_table(runs).splitlines()[3])[2] == "nan"
    assert compare.agreement(runs).endswith(": nan (b).")
    compare.draw(runs)


def test_runs_of_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "demo", [1.0]) for parent in ("x", "y")]
    assert [run.name for run in compare.load_runs(folders)] == [str(folder) for folder in folders]


def test_an_incomplete_last_line_is_skipped_and_a_broken_line_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [2.0, 1.0])
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"train/st')
    assert list(load_run(folder).records) == [1, 2]
    metrics.write_text("{broken\n" + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not a JSON object"):
        load_run(folder)


def test_curves_and_differences_have_the_colours_of_their_runs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, [1.0, 0.5]) for name in ("cp1", "cp4", "ring")]
    losses, differences = compare.draw(compare.load_runs(folders)).axes
    assert differences.get_title(loc="left") == "Difference from cp1" and differences.get_legend() is None
    assert [line.get_color() for line in differences.lines] == [line.get_color() for line in losses.lines[1:]]
    out = tmp_path / "pictures" / "out.png"
    assert compare.compare(folders[:1], out) == out and out.stat().st_size > 0


def test_refusals_name_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", [1.0, 2.0])
    late = make_run(tmp_path / "late", [1.0], first_step=9)
    bare = make_run(tmp_path / "bare", [])
    (tmp_path / "other").mkdir()
    expected = {
        tmp_path / "gone": "gone: expected a run folder",
        tmp_path / "other": "metrics.jsonl: no such file",
        bare: "metrics.jsonl: no training steps in it",
        late: "no common steps (a: 1 to 2, late: 9 to 9)",
    }
    for folder, words in expected.items():
        assert cli.main(["compare", str(a), str(folder)]) == 2
        assert words in capsys.readouterr().err
    for words, message in (
        (["--rows", "1"], "--rows=1"),
        (["--out", "pic"], "--out=pic: expected a file"),
        (["--html", str(tmp_path)], f"--html={tmp_path}: expected a file; this is a folder"),
    ):
        assert cli.main(["compare", str(a), *words]) == 2
        assert message in capsys.readouterr().err
    (a / "resolved.yaml").write_text("model: [")
    assert cli.main(["compare", str(a)]) == 2
    assert "resolved.yaml: expected settings (line 1: " in capsys.readouterr().err
    (a / "metrics.jsonl").write_bytes(b"\xff\n{}\n")
    assert cli.main(["compare", str(a)]) == 2
    assert "metrics.jsonl:1: not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "left_out"), [(1, 0), (2, 0), (3, 1), (12, 4), (15, 5), (1000, 5)])
def test_the_first_steps_do_not_count(steps: int, left_out: int) -> None:
    """They connect ranks and compile kernels, also where their times are not even numbers."""
    slow = dict(enumerate([9000.0, math.nan, 7000.0, 6000.0, 5000.0][:left_out]))
    records = {step: {names.TOKENS_PER_S: slow.get(step, 100.0 + step % 3)} for step in range(steps)}
    summary = METRICS[0].of(records)
    assert summary is not None and summary.steps == steps - left_out
    assert 100.0 <= summary.low <= summary.value <= summary.high <= 102.0
