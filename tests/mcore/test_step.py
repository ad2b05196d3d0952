"""A step's loss and gradients are divided by the sum of the loss mask over all ranks, at any parallel sizes."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm import AttentionTimes
from megatron_longctx.mcore import groups, step
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.step import LossSum, _reduce
from megatron_longctx.planner.flops import Work
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import Job, RecordingTrainer, tiny_config, tiny_corpus

LENGTH, BATCH = 31, 2  # odd, so that ranks hold unequal numbers of tokens
MASKS = {
    "0.3 everywhere": torch.full((BATCH, LENGTH), 0.3),
    "as many as tokens": torch.ones(BATCH, LENGTH),
    "half a token": torch.zeros(BATCH, LENGTH).index_put((torch.tensor(0), torch.tensor(7)), torch.tensor(0.5)),
}
MICRO_BATCHES = 4  # over all data-parallel ranks


def _steps(rank: int, root: Path) -> dict[int, dict[str, tuple[float, float, float]]]:
    """Return each mask's sum, mean loss and gradient norm, keyed by context-parallel size and mask."""
    return {context: _steps_at(root, context) for context in (1, 2)}


def _steps_at(root: Path, context: int) -> dict[str, tuple[float, float, float]]:
    settings = {
        "data.seq_length": LENGTH,
        "train.global_batch_size": MICRO_BATCHES * BATCH,
        "train.micro_batch_size": BATCH,
        "parallelism.context_parallel_size": context,
    }
    trainer = RecordingTrainer(Job(tiny_config(root, f"cp{context}", settings)))
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    results = {}
    for name, mask in MASKS.items():
        batch = TrainingBatch(tokens[:, :-1], tokens[:, 1:], mask)
        for model in trainer.models:
            model.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        loss = trainer.train_step.run(itertools.repeat(batch))
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0  # the same weights for every mask
        _, norm, _ = trainer.optimizer.step()
        results[name] = (loss.num_tokens, loss.mean, float(norm))
    groups.destroy()
    return results


def _step_without_labels(rank: int, root: Path) -> tuple[LossSum, list[str], bool]:
    """Return the result of a step whose mask is 0, what was logged, and whether all gradients are 0."""
    settings = {"data.seq_length": LENGTH, "train.global_batch_size": BATCH, "train.micro_batch_size": BATCH}
    trainer = RecordingTrainer(Job(tiny_config(root, "nothing", settings)))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.logger, "warning", messages.append)
        loss = trainer.train_step.run(iter([TrainingBatch(tokens, tokens, torch.zeros(BATCH, LENGTH))]))
    return loss, messages, not any(gradient.any() for gradient in trainer.gradients().values())


def test_a_step_without_labels_warns(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    [(loss, [message], zero)] = run_distributed(_step_without_labels, 1, tmp_path)
    assert (loss.num_tokens, loss.mean, zero) == (0, 0, True)
    assert "no token of this step counts in the loss, which is therefore 0" in message


def test_masks_may_have_fractions(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    for of_rank in run_distributed(_steps, 4, tmp_path):
        whole = of_rank[1]
        for name, mask in MASKS.items():
            assert whole[name][0] == pytest.approx(MICRO_BATCHES * float(mask.double().sum()), rel=1e-6), name
            assert of_rank[2][name] == pytest.approx(whole[name], rel=1e-5), name
        # A mask that is equal everywhere does not change the mean.
        assert whole["0.3 everywhere"][1:] == pytest.approx(whole["as many as tokens"][1:], rel=1e-5)


def test_the_measured_imbalance_is_the_worst_groups() -> None:
    even, uneven = [2.0, 2.0], [1.0, 3.0]
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even, uneven]).imbalance_pct == pytest.approx(50)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even]).imbalance_pct == pytest.approx(0)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[[0.0, 0.0]]).imbalance_pct is None, "not measured"


def _sums(rank: int) -> list[LossSum]:
    """Reduce values that differ on all 4 ranks: with data x context parallelism, then with tensor x pipeline."""
    sums = []
    for sizes in ({"context": 2}, {"tensor": 2, "pipeline": 2}):
        mesh = groups.initialize(**sizes)
        # A tensor-parallel group has one loss, and a context-parallel group has one work.
        share = mesh.dp.rank() * mesh.cp.size() + mesh.cp.rank()
        losses = [torch.tensor([10.0**share, step], dtype=torch.float64) for step in (1, 2)]
        results = [{"loss": loss, "work": (7, 10 + mesh.dp.rank(), 100)} for loss in losses]
        sums.append(_reduce(results, mesh, AttentionTimes(0.5 + rank, 1.0 + rank)))
        sums.append(_reduce(results, mesh, None))
        groups.destroy()
        dist.barrier()
    return sums


def test_every_rank_counts_once() -> None:
    for rank, (spread, unmeasured, one, _) in enumerate(run_distributed(_sums, 4)):
        assert (spread.loss_sum, spread.num_tokens, spread.work) == (2 * 1111, 4 * 3, Work(28, 42, 400))
        assert spread.computed_s == [[1.0, 2.0], [3.0, 4.0]] and spread.waited_s == 0.5 + rank
        assert spread.imbalance_pct == pytest.approx(100 / 3), "the first group has 2 s and 1.5 s on average"
        assert unmeasured.waited_s is None and unmeasured.imbalance_pct is None
        assert (one.loss_sum, one.num_tokens, one.work) == (2, 3, Work(14, 20, 200)), "only the last stage counts"
