"""A step's loss and gradients count what the loss mask sums to, at any context-parallel size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.batch import Batch
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import Job, RecordingTrainer, tiny_config, tiny_corpus

pytestmark = pytest.mark.usefixtures("on_cpu")

LENGTH, BATCH = 31, 2  # odd, so that ranks hold unequal numbers of tokens
MASKS = {
    "0.3 everywhere": torch.full((BATCH, LENGTH), 0.3),
    "as many as tokens": torch.ones(BATCH, LENGTH),
    "half a token": torch.zeros(BATCH, LENGTH).index_put((torch.tensor(0), torch.tensor(7)), torch.tensor(0.5)),
}


MICRO_BATCHES = 4  # of all data-parallel ranks together


def _steps(rank: int, root: Path) -> dict[int, dict[str, tuple[float, float, float]]]:
    """By context-parallel size, the others being data parallel: each mask's sum, the mean loss, the gradient's norm."""
    return {context: _steps_at(root, context) for context in (1, 2, 4)}


def _steps_at(root: Path, context: int) -> dict[str, tuple[float, float, float]]:
    settings = {
        "data.seq_length": LENGTH,
        "train.global_batch_size": MICRO_BATCHES * BATCH,
        "train.micro_batch_size": BATCH,
        "parallelism.context_parallel_size": context,
    }
    trainer = RecordingTrainer(Job(tiny_config(root, f"cp{context}", settings)))
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    found = {}
    for name, mask in MASKS.items():
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, positions)
        for model in trainer.models:
            model.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        loss = trainer.train_step.run(itertools.repeat(batch))
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0  # every mask meets the same weights
        _, norm, _ = trainer.optimizer.step()
        found[name] = (loss.num_tokens, loss.mean, float(norm))
    groups.destroy()
    return found


def test_masks_are_summed_as_they_are(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    for of_rank in run_distributed(_steps, 4, tmp_path):
        whole = of_rank[1]
        for name, mask in MASKS.items():
            assert whole[name][0] == pytest.approx(MICRO_BATCHES * float(mask.double().sum()), rel=1e-6), name
            for context in (2, 4):
                assert of_rank[context][name] == pytest.approx(whole[name], rel=1e-5), (context, name)
        # A mask that is equal everywhere changes nothing.
        assert whole["0.3 everywhere"][1:] == pytest.approx(whole["as many as tokens"][1:], rel=1e-5)
