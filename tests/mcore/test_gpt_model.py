"""Our GPT against Megatron's own, on one rank; and what identifies a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.config import ModelConfig
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, fingerprint, padded_vocab_size, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.training import relative_error, tiny_config

VOCABULARY = 96
LLAMA: dict[str, Any] = {"data.seq_length": 37}
GPT2: dict[str, Any] = {
    **LLAMA,
    "model.num_kv_heads": 4,
    "model.normalization": "layernorm",
    "model.activation": "gelu",
    "model.position_embedding": "learned",
    "model.bias": True,
    "model.tie_embeddings": True,
}


def _against_megatron(rank: int, root: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the losses and of every gradient, against Megatron's layers, RoPE and dense attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = tiny_config(root, "model", settings)
    collection = groups.initialize(seed=3)
    megatron = transformer_config(config)
    ours = build_model(config, megatron, collection, build_sequence(config, collection.cp), VOCABULARY)
    theirs = GPTModel(
        config=copy.deepcopy(megatron),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=megatron.normalization),
        vocab_size=VOCABULARY,
        max_sequence_length=config.data.seq_length,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        position_embedding_type={"rope": "rope", "learned": "learned_absolute"}[config.model.position_embedding],
        rotary_base=config.model.rope_base,
        pg_collection=collection,
    )
    theirs.load_state_dict(ours.state_dict())
    length = config.data.seq_length
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(2, -1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    losses = {}
    for name, gpt, mask in (("ours", ours, None), ("theirs", theirs, hidden)):
        losses[name] = gpt(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        losses[name].sum().backward()
    reference = dict(theirs.named_parameters())
    errors = {name: relative_error(p.grad, reference[name].grad) for name, p in ours.named_parameters()}
    return {"loss": relative_error(losses["ours"], losses["theirs"]), **errors}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("settings", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_one_rank_is_megatrons_own_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    [errors] = run_distributed(_against_megatron, 1, tmp_path, settings)
    assert len(errors) > 10
    assert max(errors.values()) < 1e-5, errors


def test_padded_vocab_size() -> None:
    assert padded_vocab_size(ModelConfig(vocab_multiple=128), 257) == 384
    assert padded_vocab_size(ModelConfig(vocab_multiple=128), 256) == 256
    assert padded_vocab_size(ModelConfig(vocab_multiple=1), 257) == 257
    assert padded_vocab_size(ModelConfig(vocab_size=300), 257) == 300
    assert padded_vocab_size(ModelConfig(vocab_size=257), 257) == 257
    with pytest.raises(ValueError, match=r"model.vocab_size=256: expected at least the tokenizer's 257"):
        padded_vocab_size(ModelConfig(vocab_size=256), 257)


def test_the_fingerprint_is_of_the_model_alone(tmp_path: Path) -> None:
    one = tiny_config(tmp_path, "one")
    parallel = {"parallelism.tensor_parallel_size": 2, "parallelism.context_parallel_size": 4, "train.steps": 7}
    assert fingerprint(one, 384) == fingerprint(tiny_config(tmp_path, "two", parallel), 384)
    # Left to itself, the head size is known all the same.
    assert fingerprint(one, 384) == fingerprint(tiny_config(tmp_path, "one", {"model.head_dim": 8}), 384)
    for change in ({"model.tie_embeddings": True}, {"model.head_dim": 16}, {"model.rope_base": 2.0}):
        assert fingerprint(one, 384) != fingerprint(tiny_config(tmp_path, "one", change), 384)
    assert fingerprint(one, 384) != fingerprint(one, 512)
