"""`megatron-longctx eval` as a user starts it: the same results at any parallel sizes, files, and refused arguments."""

import json
import math
import re
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
    words = [run_of(trained), *HELD_OUT, "tasks=loss_by_position", "lengths=96,301", "samples=4"]
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
    assert not (out / "needle.png").exists()
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
    words = [run_of(trained), "tasks=loss_by_position", "lengths=200", "samples=3", "data.packing=best_fit"]
    found, _, printed = evaluated(
        tmp_path, [*words, f"data={trained.data.prefix}", "parallelism.context_parallel_size=2"]
    )
    first, *_, last = found["tasks"]["loss_by_position"]["lengths"]["200"]["positions"]
    assert first["tokens"] > 3 and last["tokens"] < 3 * (last["stop"] - last["first"])
    assert "data.packing=best_fit" in printed and "no second part" not in printed
    assert "losses are from" in evaluated(tmp_path, [*words, "parallelism.context_parallel_size=1"])[2]


def test_answers_are_the_same_on_several_ranks(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    words = [run_of(trained), "tasks=needle,niah_multivalue", "lengths=1100", "depths=0,.5", "samples=1", "chat=true"]
    words.append(f"inference.chat_template={tmp_path}/chat.jinja")
    alone, out, printed = evaluated(tmp_path, [*words, "parallelism.context_parallel_size=1"])
    several = evaluated(tmp_path, [*words, "parallelism.context_parallel_size=2"])[0]
    assert alone["tasks"] == several["tasks"] and list(alone["tasks"]) == ["needle", "niah_multivalue"]
    found = alone["tasks"]["needle"]["lengths"]["1100"]
    assert list(found["by_depth"]) == ["0.0", "0.5"] and len(found["questions"]) == 2
    for question in found["questions"]:
        assert 1080 < question["prompt_tokens"] + question["answer_tokens"] <= 1100
        assert question["said"] and question["score"] == float(question["answers"][0] in question["said"])
    assert "| 50% |" in printed and "| niah_multivalue |" in printed
    assert (out / "needle.png").is_file() and not (out / "loss_by_position.png").exists()


def test_a_chats_template_counts(trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}" + 300 * "!")
    words = ["eval", run_of(trained), "tasks=needle", "lengths=300", "depths=0"]
    least = []
    for more in ([], ["chat=true", f"inference.chat_template={tmp_path}/chat.jinja"]):
        assert cli.main([*words, *more]) == 2
        found = re.search(r"at least (\d+) tokens for needle", capsys.readouterr().err)
        assert found is not None
        least.append(int(found[1]))
    assert least[1] - least[0] == 300 + len("[]") - len(" ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=nedle"], "tasks=nedle: expected `all`, or some of loss_by_position, needle, niah_single,"),
        (["lengths=0"], "lengths=0: expected numbers separated by commas, each from 1 to 1,000,000,000. For example"),
        (["lengths=4k"], "lengths=4k: expected numbers"),
        (["samples=1,2"], "samples=1,2: expected a number from 1 to 1,000,000. For example samples=8."),
        (["depths=1.5", "tasks=needle", "lengths=900"], "depths=1.5: expected numbers separated by commas, each from"),
        (["seed=x", "tasks=needle", "lengths=900"], "seed=x: expected a number from 0"),
        (["tasks=needle", "lengths=900", "data=x"], "data=x: expected loss_by_position among the tasks"),
        (["tasks=loss_by_position", "chat=true"], "chat=true: expected a task with questions"),
        (["tasks=loss_by_position", "seed=3"], "seed=3: expected a task with questions"),
        (["tasks=needle", "lengths=900", "chat=yes"], "chat=yes: expected true or false"),
        (["tasks=needle", "lengths=900", "chat=true"], "chat=True: expected false: the byte-level tokenizer has no"),
        (["tasks=needle", "lengths=900", "haystack=nowhere"], "haystack=nowhere: expected a folder with .txt files"),
        (["tasks=needle", "lengths=300"], "lengths=300: expected at least "),
        (["tasks=loss_by_position", "samples=9999"], "samples=9999: expected at most "),
        (["tasks=loss_by_position", "lengths=99999"], "samples=8: expected at most 0: part 1 of data.split=100,0,0"),
        (["tasks=loss_by_position", "data=nowhere"], "data.prefix=nowhere: expected the files nowhere.idx"),
        (["tasks=loss_by_position", "lengths=1", "parallelism=cp2", "samples=1"], "lengths=1: expected 4 or more, so"),
        (["tasks=loss_by_position", "parallelism.pipeline_parallel_size=2"], "expected 1 for inference"),
        ([], "lengths=96: expected at least "),
        (["lengths=90,97", TRAINED], "lengths=97: expected at most 96 tokens (inference.max_model_len). Shorten it"),
        (["tasks=loss_by_position", "lengths=97", TRAINED], "lengths=97: expected at most 96 tokens"),
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
    assert cli.main(["eval", run_of(trained), "tasks=loss_by_position", f"out={tmp_path}"]) == 2
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
