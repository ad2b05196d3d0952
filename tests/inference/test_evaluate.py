"""`megatron-longctx eval` as a user starts it: the same losses at any parallel sizes, files, and refused arguments."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config import Config, ParallelismConfig, names
from megatron_longctx.mcore.inference import with_length
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.test_generate import TRAINED, run_of
from tests.shared.jobs import CLI, clean_environment, finished
from tests.shared.training import Job, changed, run_jobs

YARN = {"model.rope_scaling.kind": "yarn", "model.rope_scaling.factor": 4}
HELD_OUT = ("data.split=60,40", "train.check_data=false")


def evaluated(folder: Path, words: Sequence[str]) -> tuple[dict[str, Any], Path, str]:
    """Run the verb, which has to succeed, and return its JSON, the folder of its files and its standard output."""
    here = Path(tempfile.mkdtemp(dir=folder))
    command = [*CLI, "eval", f"out={here}/found", *words]
    job = finished(here, command, clean_environment(CUDA_VISIBLE_DEVICES=""), quick=True)
    assert job.process.returncode == 0, job.output()
    found = json.loads((here / "found" / "eval.json").read_text())
    assert found["complete"]
    return found, here / "found", job.out.read_text()


def test_losses_are_the_same_at_any_sizes_and_as_in_validation(trained: Config, tmp_path: Path) -> None:
    words = [run_of(trained), *HELD_OUT, "lengths=96,301", "samples=4"]
    found, out, printed = evaluated(tmp_path, [*words, "parallelism.context_parallel_size=1"])
    lengths = found["tasks"]["loss_by_position"]["lengths"]
    assert found["iteration"] == 12 and list(lengths) == ["96", "301"] and found["environment"]["commit"] is not None
    for length, each in lengths.items():
        ranges = each["positions"]
        assert [r["first"] for r in ranges][:4] == [0, 16, 24, 32] and ranges[-1]["stop"] == int(length)
        assert [r["tokens"] for r in ranges] == [4 * (r["stop"] - r["first"]) for r in ranges]
        assert each["tokens"] == 4 * int(length) and each["perplexity"] == pytest.approx(math.exp(each["loss"]))
        assert each["loss"] == pytest.approx(sum(r["loss"] * r["tokens"] for r in ranges) / each["tokens"])
        assert f"| {int(length):,} | {each['loss']:.5f} |" in printed
    assert (out / "loss_by_position.png").is_file() and (out / "eval.md").read_text() in printed
    for sizes in (
        ["parallelism.context_parallel_size=2", "parallelism.schedule=ulysses"],
        ["parallelism.context_parallel_size=2", "parallelism.tensor_parallel_size=2", "data.packing=none"],
    ):
        sharded = evaluated(tmp_path, [*words, *sizes])[0]["tasks"]["loss_by_position"]["lengths"]
        for length, each in lengths.items():
            values = [[r["loss"] for r in found["positions"]] for found in (each, sharded[length])]
            assert values[1] == pytest.approx(values[0], rel=2e-6)
    assert lengths["96"]["loss"] == pytest.approx(_validation(trained, tmp_path), rel=2e-6)


def _validation(trained: Config, folder: Path) -> float:
    """Return the validation loss of training with the same weights."""
    frozen = {"train.steps": 1, "optim.warmup_steps": 0, "optim.lr": 0.0, "optim.min_lr": 0.0, "train.save": False}
    validation = {"train.eval_interval": 1, "train.eval_samples": 4, "data.split": "60,40", "run.root": str(folder)}
    config = changed(replace(trained, parallelism=ParallelismConfig()), {**frozen, **validation})
    start = Path(trained.run.root, trained.run.name, "checkpoints")
    run_distributed(run_jobs, 1, [Job(config, start_from=start)])
    (line,) = (folder / trained.run.name / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(line)[names.VALIDATION_LOSS])


def test_losses_of_packs_are_indexed_by_position_in_the_document(trained: Config, tmp_path: Path) -> None:
    words = [run_of(trained), "lengths=200", "samples=3", "data.packing=best_fit"]
    found, _, printed = evaluated(
        tmp_path, [*words, f"data={trained.data.prefix}", "parallelism.context_parallel_size=2"]
    )
    first, *_, last = found["tasks"]["loss_by_position"]["lengths"]["200"]["positions"]
    assert first["tokens"] > 3 and last["tokens"] < 3 * (last["stop"] - last["first"])
    assert "data.packing=best_fit" in printed and "no second part" not in printed
    assert "losses are from" in evaluated(tmp_path, [*words, "parallelism.context_parallel_size=1"])[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lengths=0"], "lengths=0: expected numbers separated by commas, each from 1 to 1,000,000,000. For example"),
        (["lengths=4k"], "lengths=4k: expected numbers"),
        (["samples=1,2"], "samples=1,2: expected a number from 1 to 1,000,000. For example samples=8."),
        (["samples=9999"], "samples=9999: expected at most "),
        (["lengths=99999"], "samples=8: expected at most 0: part 1 of data.split=100,0,0"),
        (["data=nowhere"], "data.prefix=nowhere: expected the files nowhere.idx"),
        (["lengths=1", "parallelism=cp2", "samples=1"], "lengths=1: expected 4 or more, so"),
        (["parallelism.pipeline_parallel_size=2"], "expected 1 for inference"),
        (["lengths=90,97", TRAINED], "lengths=97: expected at most 96 tokens (inference.max_model_len). Shorten it"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    trained: Config, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(["eval", run_of(trained), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-longctx eval: ") and message in line
    assert not Path(trained.run.root, trained.run.name, "eval").exists()


def test_an_earlier_evaluation_is_not_overwritten(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.json").write_text("{}")
    assert cli.main(["eval", run_of(trained), f"out={tmp_path}"]) == 2
    assert "expected a folder without eval.json of an earlier evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "override", "most"),
    [
        ({}, {}, 96),
        ({}, {"data.seq_length": 500}, 96),
        ({}, {"inference.max_model_len": 500}, 500),
        ({}, {"inference.max_model_len": 50}, 50),
        ({}, {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 4}, 384),
        ({"model.rope_scaling.kind": "ntk", "model.rope_scaling.factor": 2}, {}, 96),  # trained so
        ({"model.rope_scaling.kind": "ntk", "model.rope_scaling.factor": 2}, {"model.rope_scaling.factor": 8}, 384),
        ({}, {**YARN, "model.rope_scaling.original_length": 64}, 256),
        ({}, {**YARN, "model.rope_scaling.original_length": 8}, 96),
        ({"model.position_embedding": "learned"}, {}, 96),
        ({"model.position_embedding": "learned"}, {"inference.max_model_len": 97}, None),
    ],
    ids=str,
)
def test_the_length_of_a_model(own: dict[str, Any], override: dict[str, Any], most: int | None) -> None:
    run = changed(Config(), {"data.seq_length": 96, **own})
    if most is None:
        with pytest.raises(ValueError, match="max_model_len=97: expected at most 96, the positions that the model has"):
            with_length(changed(run, override), run)
    else:
        assert with_length(changed(run, override), run).inference.max_model_len == most
