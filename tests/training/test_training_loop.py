"""The loop besides training: metrics and their means, profiles, stop signals, and dumps of non-finite steps."""

import gzip
import json
import logging
import math
import time
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_longctx.config import Config, names
from megatron_longctx.core.plans import build_plan
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.mcore import checkpoint, model
from megatron_longctx.mcore.data import TrainingData
from megatron_longctx.mcore.step import LossSum
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.planner.describe import imbalance_pct
from megatron_longctx.planner.flops import Work
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.loop import Trainer
from megatron_longctx.training.monitoring import Interval
from tests.shared.training import Job, Record, RecordingTrainer, run_jobs, tiny_config, tiny_corpus

SAVED = {"train.steps": 6, "train.save": True, "train.save_interval": 2}
CP2 = {"parallelism.context_parallel_size": 2}
PACKED = {**CP2, "data.packing": "best_fit", "data.max_wait_steps": None, "parallelism.layout": "zigzag",
          "optim.decay_steps": 4, "train.global_batch_size": 2, "train.save": True}  # fmt: skip
WSD = {"optim.decay_style": "WSD", "optim.wsd_decay_steps": 2, "optim.wsd_decay_style": "linear"}
PACKED_RUNS = (("packed", 2), ("packed, resumed", 4))
POISONED = "decoder.layers.1.mlp.linear_fc2.weight"
BETWEEN_STEPS_S = 0.3


def _poison_parameter(trainer: Trainer) -> None:
    """Poison a weight of the last rank, which Adam keeps as NaN. The other rank sees the loss and must also stop."""
    if trainer.step == 4 and dist.get_rank() == 1:
        with torch.no_grad():
            dict(trainer.models[0].module.named_parameters())[POISONED][0, :3] = math.nan


def _poison_gradient(trainer: Trainer) -> None:
    if trainer.step == 2:
        dict(trainer.models[0].module.named_parameters())[POISONED].main_grad[0, 0] = math.inf


def _log_to_file(trainer: Trainer) -> None:
    if trainer.step == 0 and dist.get_rank() == 0:
        logging.getLogger("megatron_longctx").addHandler(logging.FileHandler(trainer.folder.log))
        logging.getLogger("megatron_longctx").setLevel(logging.INFO)


def _jobs(root: Path) -> dict[str, Job]:
    return {
        "metrics": Job(tiny_config(root, "metrics", {**CP2, "train.steps": 3, "logging.peak_tflops": 0.5,
                                                     "logging.profile_step": 2, "data.workers": 2})),
        "interval": Job(tiny_config(root, "interval", {**CP2, "train.steps": 5, "train.log_interval": 2, **WSD,
                                                       "logging.tensorboard": True})),
        "no clipping": Job(tiny_config(root, "no-clipping", {**CP2, "train.steps": 3, "optim.clip_grad": 0.0})),
        # The second resumes the first.
        **{name: Job(tiny_config(root, "packed", {**PACKED, "train.steps": steps})) for name, steps in PACKED_RUNS},
        # The distributed optimizer would give every rank the owner's values.
        "parameter": Job(tiny_config(root, "parameter", {**CP2, **SAVED, "optim.distributed": False}),
                         before_optimizer=_poison_parameter, fails=True),
        "gradient": Job(tiny_config(root, "gradient", {**SAVED, "train.global_batch_size": 2}),
                        before_optimizer=_poison_gradient, fails=True),
        "stopped": Job(tiny_config(root, "stopped", {**CP2, **SAVED}), stop_in=2),
        "stopped unsaved": Job(tiny_config(root, "unsaved", {**CP2, "train.steps": 6}), stop_in=2,
                               before_optimizer=_log_to_file),
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, list[Record]]:
    """The record of each rank, keyed by run."""
    tiny_corpus(root / "corpus")
    jobs = _jobs(root)
    ranks = run_distributed(run_jobs, 2, list(jobs.values()))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(jobs)}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_every_key(root: Path, runs: dict[str, list[Record]]) -> None:
    run = runs["metrics"][0]
    lines = _metrics(root / "metrics")
    keys = {value for name, value in vars(names).items() if name.isupper() and "/" in str(value)}
    assert len(keys) > 10
    for number, line in enumerate(lines, start=1):
        assert line.keys() == keys
        assert (line[names.STEP], line[names.TOKENS]) == (number, 96 * number)
        assert line[names.LOSS] == run.losses[number - 1]
        assert line[names.GRAD_NORM] == run.grad_norms[number - 1]
        assert line[names.LEARNING_RATE] == run.learning_rates[number - 1]
        # CPUs have no device memory, and the run no validation.
        unknown = {key for key, value in line.items() if value is None}
        assert unknown == {names.PEAK_ACTIVE_GIB, names.PEAK_RESERVED_GIB, names.VALIDATION_LOSS, names.MFU_FP8_PCT}
        seconds = line[names.STEP_S]
        assert line[names.TOKENS_PER_S] == pytest.approx(96 / seconds)
        assert line[names.TOKENS_PER_S_PER_GPU] == pytest.approx(48 / seconds)
        assert 0 < line[names.MFU_CAUSAL_PCT] < line[names.MFU_DENSE_PCT]
        assert 0 < line[names.DATA_WAIT_S] < seconds
        assert line[names.MFU_CAUSAL_PCT] == pytest.approx(100 * line[names.TFLOPS_PER_GPU] / 0.5)
        assert line[names.IMBALANCE_PCT] == pytest.approx(0.0), "zigzag is balanced if the length divides"
        assert line[names.MEASURED_IMBALANCE_PCT] >= 0
    assert len(lines) == 3
    assert not (root / "metrics" / "checkpoints" / checkpoint.TRACKER).exists(), "train.save=false"


def test_records_of_several_steps_have_their_means(root: Path, runs: dict[str, list[Record]]) -> None:
    run, lines = runs["interval"][0], _metrics(root / "interval")
    assert [(line[names.STEP], line[names.TOKENS]) for line in lines] == [(2, 192), (4, 384), (5, 480)]
    means = [fmean(run.losses[0:2]), fmean(run.losses[2:4]), run.losses[4]]
    assert [line[names.LOSS] for line in lines] == pytest.approx(means, rel=1e-12)
    assert [line[names.GRAD_NORM] for line in lines] == [run.grad_norms[step] for step in (1, 3, 4)]
    assert all(line[names.TOKENS_PER_S] == pytest.approx(96 / line[names.STEP_S]) for line in lines)
    # Two steps of warm-up, one at the full rate, and two of linear decay towards the minimum.
    assert run.learning_rates == pytest.approx([0, 1.5e-3, 3e-3, 3e-3, 1.65e-3])
    events = EventAccumulator(str(root / "interval/tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars(names.LOSS)]
    assert found == [(line[names.STEP], pytest.approx(line[names.LOSS], rel=1e-6)) for line in lines]


def test_packs_are_counted_with_their_own_lengths(root: Path, runs: dict[str, list[Record]]) -> None:
    config, tokenizer = tiny_config(root, "packed", PACKED), build_tokenizer("byte-level")
    data = TrainingData(config, tokenizer, model.padded_vocab_size(config.model, tokenizer.vocab_size))
    steps = [[data[[2 * step + row]].lengths for row in range(2)] for step in range(4)]
    tokens = [sum(map(sum, packs)) for packs in steps]
    assert all(sum(pack) < 96 for pack in steps[0]) and len(set(tokens)) > 1, "shorter than data.seq_length"
    lines = _metrics(root / "packed")
    assert [line[names.TOKENS] for line in lines] == [*accumulate(tokens)]
    expected = [[build_plan("zigzag", 2, documents(pack), layout="zigzag") for pack in packs] for packs in steps]
    means = [sum(imbalance_pct(plan) for plan in plans) / 2 for plans in expected]
    assert [line[names.IMBALANCE_PCT] for line in lines] == pytest.approx(means) and len(set(means)) > 1


def test_the_configured_step_is_profiled(root: Path, runs: dict[str, list[Record]]) -> None:
    folder = root / "metrics" / "profile"
    assert {path.name for path in folder.iterdir()} == {"step_2.txt", "step_2.trace.json.gz"}
    table = (folder / "step_2.txt").read_text()
    assert "aten::" in table and "Self CPU time total" in table  # the slowest rows alone
    with gzip.open(folder / "step_2.trace.json.gz") as trace:
        assert "aten::mm" in {event["name"] for event in json.load(trace)["traceEvents"]}


def test_the_norm_is_known_without_clipping(runs: dict[str, list[Record]]) -> None:
    clipped, unclipped = runs["metrics"][0], runs["no clipping"][0]
    assert unclipped.grad_norms[0] == pytest.approx(clipped.grad_norms[0], rel=1e-6)
    assert clipped.grad_norms[0] > 1.0 and unclipped.losses[2] != clipped.losses[2]


@pytest.mark.parametrize(("name", "what", "step"), [("parameter", "loss is nan", 6), ("gradient", "norm is inf", 3)])
def test_nonfinite_numbers_stop_every_rank(
    root: Path, runs: dict[str, list[Record]], name: str, what: str, step: int
) -> None:
    folder = root / name / "nonfinite" / f"step_{step}"
    for record in runs[name]:
        assert (record.error or "").startswith("NonFiniteError: ")
        assert what in (record.error or "") and f"in step {step}:" in (record.error or "")
        assert str(folder) in (record.error or "")
        assert len(record.losses) == step - 1
    files = [f"rank_{rank}{suffix}" for rank in (0, 1) for suffix in (".json", "_batches.pt")]
    assert sorted(path.name for path in folder.iterdir()) == files
    # The last checkpoint before the failure stays the latest one.
    assert checkpoint.latest(root / name / "checkpoints") == (step - 1) // 2 * 2
    assert [line[names.STEP] for line in _metrics(root / name)] == list(range(1, step))


def test_the_dump_names_the_bad_parameters(root: Path, runs: dict[str, list[Record]]) -> None:
    facts = [json.loads((root / f"parameter/nonfinite/step_6/rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert all(fact["step"] == 6 and fact["values"] == {"loss": "nan"} for fact in facts)
    nonfinite = [{name: n["parameter"] for name, n in fact["nonfinite_elements"].items()} for fact in facts]
    assert [{name: n for name, n in each.items() if n} for each in nonfinite] == [{}, {f"0.module.{POISONED}": 3}]
    batches = torch.load(root / "parameter/nonfinite/step_6/rank_1_batches.pt")
    assert len(batches) == 1 and batches[0]["tokens"].shape == (1, 96), "the whole sequence, before sharding"


def test_a_signal_to_any_rank_stops_all(root: Path, runs: dict[str, list[Record]]) -> None:
    for name in ("stopped", "stopped unsaved"):
        assert [(run.last_step, run.error) for run in runs[name]] == [(3, None)] * 2
    assert checkpoint.latest(root / "stopped" / "checkpoints") == 3
    assert checkpoint.latest(root / "unsaved" / "checkpoints") is None
    log = (root / "unsaved/log.txt").read_text()
    assert "stopped at step 3 of 6: the same command goes on from step 0 (train.save=false)" in log


def interval_record(waited: float | None) -> dict[str, float | None]:
    """Return the metrics of three steps; `waited` is the exposed communication of the last."""
    losses = [
        LossSum(30.0, 10, Work(10, 55, 100), 0.1, [[1.0, 1.0]]),
        LossSum(30.0, 10, Work(10, 55, 100), 0.2, [[1.0, 3.0]]),
        LossSum(60.0, 40, Work(40, 220, 400), waited, [[1.0, 1.0]]),
    ]
    return Interval(6.0, 0.9, 0.5, [1.0, 2.0, 6.0], losses).record(Config(), 512, 2, None)


def test_records_are_means_of_the_steps() -> None:
    found = interval_record(0.6)
    expected = {
        names.LOSS: 120 / 60,  # per token
        names.TOKENS_PER_S: 60 / 6,
        names.TOKENS_PER_S_PER_GPU: 60 / 6 / 2,
        names.STEP_S: 2.0,
        names.DATA_WAIT_S: 0.3,
        names.SAVE_STALL_S: 0.5,  # a sum
        names.IMBALANCE_PCT: 3.0,
        names.MEASURED_IMBALANCE_PCT: 50 / 3,
        names.EXPOSED_COMM_S: 0.3,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert interval_record(None)[names.EXPOSED_COMM_S] is None, "one step without a measurement"


class _SlowTrainer(RecordingTrainer):
    """A trainer whose device still has work of the optimizer when the host tests for stop signals."""

    def _stopped(self) -> bool:
        time.sleep(BETWEEN_STEPS_S)
        return super()._stopped()


def _train_slowly(rank: int, root: Path) -> None:
    _SlowTrainer(Job(tiny_config(root, "slow", {"train.steps": 3, "optim.warmup_steps": 1}))).run()


def test_a_step_lasts_until_the_next(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    run_distributed(_train_slowly, 1, tmp_path)
    steps = _metrics(tmp_path / "slow")
    assert len(steps) == 3
    assert all(step[names.STEP_S] >= BETWEEN_STEPS_S for step in steps[1:])


class _SignalledTrainer(RecordingTrainer):
    """One signal to save: the first rank has it when the ranks agree, and it reaches the others while they do."""

    def _stopped(self) -> bool:
        def agree(*args: Any, **words: Any) -> None:
            all_reduce(*args, **words)
            self.stop.save |= self.step == 1

        all_reduce, self.stop.save = dist.all_reduce, self.stop.save or (self.step == 1 and dist.get_rank() == 0)
        with mock.patch.object(dist, "all_reduce", agree):
            return super()._stopped()


def _train_signalled(rank: int, root: Path) -> None:
    settings = {"train.steps": 4, "train.save": True, "parallelism.context_parallel_size": 2}
    _SignalledTrainer(Job(tiny_config(root, "signalled", settings))).run()


def test_a_signal_saves_once_on_all_ranks(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    run_distributed(_train_signalled, 2, tmp_path)
    saved = sorted(path.name for path in (tmp_path / "signalled/checkpoints").glob("iter_*"))
    assert saved == ["iter_0000002", "iter_0000004"]
