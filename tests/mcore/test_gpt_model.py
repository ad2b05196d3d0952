"""Our GPT against Megatron's own on one rank; fingerprints of models; and 8-bit keys and values."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.config import Config, ModelConfig
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, fingerprint, padded_vocab_size, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.shared.training import GPT2, Job, RecordingTrainer, changed, tiny_config, tiny_corpus

VOCABULARY = 96
LLAMA: dict[str, Any] = {"data.seq_length": 37}
GATED: dict[str, Any] = {**LLAMA, "model.attention_output_gate": True, "model.rotary_percent": 0.5}


def _against_megatron(rank: int, root: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Return relative errors of losses and gradients, against Megatron's layers, RoPE and dense attention."""
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
        rotary_percent=config.model.rotary_percent,
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


@pytest.mark.parametrize("settings", [LLAMA, {**LLAMA, **GPT2}, GATED], ids=["llama", "gpt2", "gated"])
def test_one_rank_computes_what_megatrons_own_model_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    [errors] = run_distributed(_against_megatron, 1, tmp_path, settings)
    assert len(errors) > 10
    assert max(errors.values()) < 1e-5, errors


def _step_by_hand(rank: int, root: Path) -> dict[str, float]:
    """Return relative errors of a step's loss and gradients, against plain autograd on the whole batch."""
    settings = {"data.mask_eod_loss": True, "train.global_batch_size": 6, "train.micro_batch_size": 2}
    trainer = RecordingTrainer(Job(tiny_config(root, "step", settings), gradients_at=(0,)))
    megatron = transformer_config(trainer.config)
    gpt = build_model(trainer.config, megatron, trainer.groups, trainer.sequence, trainer.vocab_size)
    gpt.load_state_dict(trainer.models[0].module.state_dict())
    batch = trainer.data[range(6)].tensors
    assert 0 < batch["loss_mask"].mean() < 1
    positions = torch.arange(batch["tokens"].shape[1]).expand(6, -1)
    losses = gpt(batch["tokens"], positions, None, labels=batch["labels"])
    mean = losses[batch["loss_mask"] == 1].mean()
    mean.backward()
    result = trainer._one_step()
    gradients = trainer.record.gradients[0]
    assert result.loss.num_tokens == batch["loss_mask"].sum()
    assert result.grad_norm is not None
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    errors = {name: relative_error(gradients[name], p.grad) for name, p in gpt.named_parameters()}
    return {
        "loss": abs(result.loss.mean / mean.item() - 1),
        "grad norm": abs(result.grad_norm / norm.item() - 1),
        **errors,
    }


def test_a_step_is_the_mean_over_unmasked_tokens(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    [errors] = run_distributed(_step_by_hand, 1, tmp_path)
    assert len(errors) > 10
    assert max(errors.values()) < 1e-5, errors


def test_settings_reach_megatron(tmp_path: Path) -> None:
    settings = {"model.norm_epsilon": 0.25, "model.init_std": 0.5, "recompute.mode": "layer", "model.head_dim": 6}
    config = transformer_config(tiny_config(tmp_path, "run", {**settings, "train.precision": "bf16"}))
    assert (config.layernorm_epsilon, config.init_method_std, config.kv_channels) == (0.25, 0.5, 6)
    recompute = config.recompute_granularity, config.recompute_method, config.recompute_num_layers
    assert recompute == ("full", "uniform", 1)
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16 and config.bf16
    plain = transformer_config(tiny_config(tmp_path, "run"))
    assert plain.recompute_granularity is None and not plain.bf16 and plain.params_dtype == torch.float32
    sizes = {"tensor": 2, "context": 4, "pipeline": 2}
    parallel = {f"parallelism.{axis}_parallel_size": size for axis, size in sizes.items()}
    for sequence_parallel in (True, False):
        off = {"parallelism.sequence_parallel": sequence_parallel}
        config = transformer_config(tiny_config(tmp_path, "run", {**parallel, **off}))
        assert (config.tensor_model_parallel_size, config.context_parallel_size) == (2, 4)
        assert config.pipeline_model_parallel_size == 2 and config.sequence_parallel is sequence_parallel


def test_padded_vocab_size() -> None:
    assert padded_vocab_size(ModelConfig(vocab_multiple=128), 257) == 384
    assert padded_vocab_size(ModelConfig(vocab_multiple=128), 256) == 256
    assert padded_vocab_size(ModelConfig(vocab_multiple=1), 257) == 257
    assert padded_vocab_size(ModelConfig(vocab_size=300), 257) == 300
    assert padded_vocab_size(ModelConfig(vocab_size=257), 257) == 257
    with pytest.raises(ValueError, match=r"model.vocab_size=256: expected at least the tokenizer's 257"):
        padded_vocab_size(ModelConfig(vocab_size=256), 257)


SCALED = {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 2.0}


def test_the_fingerprint_depends_on_the_model_only(tmp_path: Path) -> None:
    one = tiny_config(tmp_path, "one")
    parallel = {"parallelism.tensor_parallel_size": 2, "parallelism.context_parallel_size": 4, "train.steps": 7}
    assert fingerprint(one, 384) == fingerprint(tiny_config(tmp_path, "two", parallel), 384)
    # The fingerprint has the default head size, too.
    assert fingerprint(one, 384) == fingerprint(tiny_config(tmp_path, "one", {"model.head_dim": 8}), 384)
    flags = ("zero_centered_norms", "qk_norm", "post_norms", "scale_embedding", "tie_embeddings", "qkv_bias")
    for change in (
        {"model.head_dim": 16},
        {"model.rope_base": 2.0},
        SCALED,
        {"model.attention_scale": 0.3},
        *({f"model.{flag}": True} for flag in flags),
    ):
        assert fingerprint(one, 384) != fingerprint(tiny_config(tmp_path, "one", change), 384)
    assert fingerprint(one, 384) != fingerprint(one, 512)


def test_windows_and_sinks_are_in_the_fingerprint_if_set() -> None:
    """Checkpoints from before these keys existed are of models without them."""
    plain = fingerprint(Config(), 512)
    assert not {"window", "window_pattern", "sinks"} & plain.keys()
    settings = {"model.window": 9, "model.window_pattern": 2, "model.sinks": "learnable"}
    special = fingerprint(changed(Config(), settings), 512)
    assert special == {**plain, "window": 9, "window_pattern": 2, "sinks": "learnable"}


def _rounding_errors(rank: int, root: Path) -> dict[str, float]:
    """Return relative errors of logits against those of exact attention, in training and in inference."""
    collection = groups.initialize(context=2, seed=3)
    models = {}
    for kv_int8 in (False, True):
        settings = {"parallelism.context_parallel_size": 2, **LLAMA, "attention.kv_int8": kv_int8}
        config = tiny_config(root, "gpt", settings)
        sequence = build_sequence(config, collection.cp)
        models[kv_int8] = build_model(config, transformer_config(config), collection, sequence, VOCABULARY)
    models[True].load_state_dict(models[False].state_dict())
    tokens = torch.randint(VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(1))
    batch = sequence.shard_batch({"tokens": tokens, "position_ids": torch.arange(37).expand(2, -1)})
    errors = {}
    for train in (True, False):
        with torch.set_grad_enabled(train):
            exact, ours = (models[i].train(train)(batch["tokens"], batch["position_ids"], None) for i in (False, True))
        errors["training" if train else "inference"] = relative_error(ours, exact)
    groups.destroy()
    return errors


def test_8_bit_keys_and_values_affect_inference_only(tmp_path: Path) -> None:
    for errors in run_distributed(_rounding_errors, 2, tmp_path):
        assert errors["training"] == 0
        assert 1e-6 < errors["inference"] < 0.01
