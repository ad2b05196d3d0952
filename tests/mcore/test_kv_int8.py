"""A GPT over two context-parallel ranks whose keys and values travel as 8-bit integers: in inference only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.recorded import relative_error
from tests.shared.training import tiny_config

VOCABULARY, LENGTH = 96, 37


def _gpt(rank: int, root: Path) -> dict[str, float]:
    """Relative errors of logits against those of exact attention: in training, in inference."""
    collection = groups.initialize(context=2, seed=3)
    models = {}
    for kv_int8 in (False, True):
        settings = {
            "parallelism.context_parallel_size": 2,
            "data.seq_length": LENGTH,
            "attention.kv_int8": kv_int8,
        }
        config = tiny_config(root, "gpt", settings)
        sequence = build_sequence(config, collection.cp)
        models[kv_int8] = build_model(config, transformer_config(config), collection, sequence, VOCABULARY)
    models[True].load_state_dict(models[False].state_dict())
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = sequence.shard_batch({"tokens": tokens, "position_ids": torch.arange(LENGTH).expand(2, -1)})
    errors = {}
    for train in (True, False):
        with torch.set_grad_enabled(train):
            exact, ours = (models[i].train(train)(batch["tokens"], batch["position_ids"], None) for i in (False, True))
        errors["training" if train else "inference"] = relative_error(ours, exact)
    groups.destroy()
    return errors


@pytest.mark.usefixtures("on_cpu")
def test_inference_is_rounded_and_training_is_not(tmp_path: Path) -> None:
    for errors in run_distributed(_gpt, 2, tmp_path):
        assert errors["training"] == 0
        assert 1e-6 < errors["inference"] < 0.01
