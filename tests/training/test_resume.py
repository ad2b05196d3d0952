"""A stopped run resumes from its folder, at any other parallel sizes, with the losses of an uninterrupted run."""

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_longctx.mcore import checkpoint
from megatron_longctx.mcore.data import TrainingData, deal_rule
from megatron_longctx.mcore.model import padded_vocab_size
from megatron_longctx.mcore.packing import deal
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.training import preflight
from megatron_longctx.training.loop import Trainer
from tests.shared.training import Job, Record, changed, recorded, tiny_config, tiny_corpus

STEPS = 10
RUN: dict[str, Any] = {
    "data.seq_length": 100, "data.mask_eod_loss": True, "train.steps": STEPS,
    "optim.decay_steps": STEPS,  # the default is train.steps, which the tests change
    "train.global_batch_size": 8, "train.micro_batch_size": 2, "train.save": True,
}  # fmt: skip
PACKS = {"data.packing": "best_fit", "data.max_wait_steps": 2, "train.micro_batch_size": 1, "train.steps": 6}
LONGER = {"data.seq_length": 120, "train.check_data": False, "train.steps": 8}
CP, TP, PP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline"))
SCHEDULE = "parallelism.schedule"


def _break(trainer: Trainer) -> None:
    if trainer.step == 5:
        raise ArithmeticError("broken in the sixth step")


def _jobs(root: Path) -> list[tuple[int, dict[str, Job]]]:
    """Return the spawns in order: world size, and runs keyed by name. All runs called `chain …` share one folder."""

    def job(name: str, settings: dict[str, Any] | None = None, **options: Any) -> Job:
        return Job(tiny_config(root, name.split()[0], RUN | (settings or {})), **options)

    crash = {"train.save_interval": 2, "train.async_save": False}
    unsharded = {"optim.distributed": False}
    tied = {"model.tie_embeddings": True, "train.steps": 6}
    return [
        (1, {
            "whole": job("whole", {"train.save": False}),
            "chain single": job("chain", stop_in=1),
            "crash before": job("crash", crash, before_optimizer=_break, fails=True),
            "crash after": job("crash", crash),
            "unsharded single": job("unsharded", unsharded, stop_in=2),
            "whole tied": job("alone", {**tied, "train.save": False}),
            "tied single": job("tied", tied, stop_in=1),
            "whole packs": job("allpacks", {**PACKS, "train.save": False}),
            "packs single": job("packs", PACKS, stop_in=0),
        }),
        (2, {
            "chain cp2": job("chain", {CP: 2}, stop_in=3),
            "chain dp2": job("chain", stop_in=4),
            "chain tp2": job("chain", {TP: 2}, stop_in=5),
            "tied pp2": job("tied", {PP: 2, **tied}, stop_in=3),
            "packs dp2": job("packs", PACKS, stop_in=2),
        }),
        (4, {
            "chain pp2 cp2": job("chain", {PP: 2, CP: 2}, stop_in=6),
            "packs dp4": job("packs", PACKS, stop_in=4),
            "chain cp4": job("chain", {CP: 4, SCHEDULE: "ring", "train.steps": 8}),
            "unsharded tp2 cp2": job("unsharded", {TP: 2, CP: 2, SCHEDULE: "ring", **unsharded, "train.steps": 6}),
        }),
        (1, {
            "chain single again": job("chain"),
            "chain complete": job("chain"),
            "tied single again": job("tied", tied),
            "packs single again": job("packs", PACKS),
            "packs other wait": job("packs", {**PACKS, "data.max_wait_steps": 3, "train.steps": 9}, fails=True),
            "unsharded longer": job("unsharded", unsharded | LONGER),
            "chain other optimizer": job("chain", {**unsharded, "train.steps": 12}, fails=True),
        }),
    ]  # fmt: skip


Runs = dict[str, Record]


@pytest.fixture(scope="module")
def runs(root: Path) -> Runs:
    tiny_corpus(root / "corpus")
    found: Runs = {}
    for world, jobs in _jobs(root):
        found |= recorded(world, jobs)
    return found


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("chain single", 0, 2),
        ("chain cp2", 2, 4),
        ("chain dp2", 4, 5),
        ("chain tp2", 5, 6),
        ("chain pp2 cp2", 6, 7),
        ("chain cp4", 7, 8),
        ("chain single again", 8, 10),
        ("unsharded single", 0, 3),
        ("unsharded tp2 cp2", 3, 6),
        ("crash after", 4, 10),
        ("tied single", 0, 2),
        ("tied pp2", 2, 4),
        ("tied single again", 4, 6),
        ("packs single", 0, 1),
        ("packs dp2", 1, 3),
        ("packs dp4", 3, 5),
        ("packs single again", 5, 6),
    ],
)
def test_the_curve_continues(runs: Runs, name: str, first: int, last: int) -> None:
    run, whole = runs[name], runs[{"tied": "whole tied", "packs": "whole packs"}.get(name.split()[0], "whole")]
    assert run.error is None
    assert (run.first_step, run.last_step) == (first, last)
    assert run.losses == pytest.approx(whole.losses[first:last], rel=1e-5, abs=0)
    assert run.grad_norms == pytest.approx(whole.grad_norms[first:last], rel=1e-5, abs=0)
    assert run.learning_rates == pytest.approx(whole.learning_rates[first:last], rel=1e-12, abs=0)


def test_the_steps_of_the_whole_run_differ(runs: Runs) -> None:
    whole = runs["whole"]
    assert whole.losses[-1] < whole.losses[0] - 0.2
    # Otherwise a repeated or skipped batch, or a lost moment, would not show.
    for values in (whole.losses, whole.grad_norms, whole.learning_rates):
        assert all(abs(a / b - 1) > 1e-4 for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("name", ["chain", "crash"])
def test_metrics_have_every_step_once(root: Path, runs: Runs, name: str) -> None:
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["train/loss"] for line in lines] == pytest.approx(runs["whole"].losses, rel=1e-5)
    assert [line["train/tokens"] for line in lines] == [800 * step for step in range(1, STEPS + 1)]


def test_the_predicted_imbalance_of_replicas_is_recorded(root: Path, runs: Runs) -> None:
    config, lines = tiny_config(root, "packs", RUN | PACKS), (root / "packs/metrics.jsonl").read_text().splitlines()
    tokenizer = build_tokenizer("byte-level")
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    dealer = TrainingData(config, tokenizer, vocab_size).dealer(config, deal_rule(config, vocab_size))
    assert dealer is not None
    works = [dealer.step(step)[1] for step in range(6)]
    shares = [deal(work, count) for work, count in zip(works, (1, 2, 2, 4, 4, 1), strict=True)]
    totals = [[work[share].sum() for share in each] for work, each in zip(works, shares, strict=True)]
    recorded = [json.loads(line)["perf/imbalance_dp"] for line in lines]
    assert recorded == pytest.approx([max(each) / fmean(each) - 1 for each in totals])
    assert recorded[3] > recorded[0] == recorded[5] == 0
    assert "data.max_wait_steps=3: expected 2, with which" in (runs["packs other wait"].error or "")


def test_a_crash_leaves_the_last_checkpoint(root: Path, runs: Runs) -> None:
    assert runs["crash before"].error == "ArithmeticError: broken in the sixth step"
    assert len(runs["crash before"].losses) == 5
    # Steps 5 and 6, lost in the crash, are trained again: in the same layout, bit for bit.
    assert runs["crash after"].losses == runs["whole"].losses[4:]
    assert checkpoint.latest(root / "crash" / "checkpoints") == STEPS


def test_a_complete_run_changes_nothing(runs: Runs) -> None:
    run = runs["chain complete"]
    assert (run.error, run.losses, run.first_step, run.last_step) == (None, [], STEPS, STEPS)


def test_a_run_with_other_data_resumes_if_allowed(runs: Runs) -> None:
    run = runs["unsharded longer"]
    assert (run.error, run.first_step, run.last_step) == (None, 6, 8)
    assert run.losses[-1] < runs["whole"].losses[2]


def test_another_optimizer_is_refused(root: Path, runs: Runs) -> None:
    """Other models, batches and data are refused before ranks start: `test_job_start`."""
    assert "'distributed', expected 'fp32'" in (runs["chain other optimizer"].error or "")
    assert checkpoint.latest(root / "chain" / "checkpoints") == STEPS


def test_refused_before_any_rank_starts(root: Path, runs: Runs) -> None:
    config = tiny_config(root, "chain", RUN)
    assert preflight.check(config, 1)[0] == STEPS
    assert preflight.check(changed(config, {"run.name": "new"}), 1)[0] is None
    with pytest.raises(ValueError, match=r"attention\.transport=peer: expected auto or p2p on CPUs"):
        preflight.check(changed(config, {"attention.transport": "peer"}), 1)
