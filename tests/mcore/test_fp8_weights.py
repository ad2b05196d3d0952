"""Models with FP8 weights: what they compute, on how many ranks, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.fp8 import stored_bytes
from megatron_longctx.mcore.inference import CachedGPT, build_engine, inference_config
from megatron_longctx.mcore.losses import losses_config
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import GPT2, LATENTS, tiny_config

BF16 = {"train.precision": "bf16"}
FP8 = {**BF16, "inference.weights": "fp8"}
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_ffn_hidden_size": 32,
    "model.qkv_bias": True,
}
NARROW = {"model.num_attention_heads": 8, "model.num_kv_heads": 2, "model.head_dim": 4}


def parallel(tensor: int, context: int) -> dict[str, Any]:
    return {"parallelism.tensor_parallel_size": tensor, "parallelism.context_parallel_size": context}


def logits_of(rank: int, configs: list[Config]) -> list[tuple[Tensor, int, bool]]:
    """Return the logits of a prompt and of further tokens, the bytes of the layers' weights, and whether layers run
    directly."""
    found = []
    for config in configs:
        collection = groups.from_config(config.parallelism, seed=5)
        engine, _ = build_engine(inference_config(config), collection, None)
        model = engine.model
        assert isinstance(model, CachedGPT)
        layers = model._gpt.decoder.layers
        for name, parameter in layers.named_parameters():
            if name.endswith("bias"):  # Megatron's are 0 at first
                parameter.data.fill_(0.5)
        session = engine.open()
        logits = []
        for tokens in (range(40, 69), range(5, 6), range(90, 92)):
            session.append(list(tokens))
            logits.append(engine.next_logits([session]))
        found.append((torch.cat(logits), stored_bytes(layers), model._layers is not None))
        engine.release()
        groups.destroy()
    return found


@pytest.mark.parametrize("variant", [{}, GPT2, EXPERTS], ids=["llama", "gpt2", "experts"])
def test_logits_are_close_to_bf16_and_equal_at_every_size(variant: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2's layers have biases and another activation; experts run as Megatron's own layers."""
    both = [tiny_config(tmp_path, "x", {**variant, **settings}) for settings in (BF16, FP8)]
    (exact, of_exact, _), (alone, of_fp8, direct) = run_distributed(logits_of, 1, both)[0]
    assert 0.5 <= of_fp8 / of_exact < 0.7, "a scale of 4 bytes stands beside as few as 16 weights here"
    assert direct == (variant is not EXPERTS)
    off = (alone - exact).norm() / exact.norm()
    assert 0.002 < off < 0.1
    for tensor, context in ((2, 1), (1, 2)):
        config = tiny_config(tmp_path, "x", {**variant, **FP8, **parallel(tensor, context)})
        for ((logits, *_),) in run_distributed(logits_of, 2, [config]):
            assert (logits - alone).norm() / alone.norm() < 0.05


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**FP8, "model.ffn_hidden_size": 48, **parallel(2, 1)}, "a rank's share of model.ffn_hidden_size is 24"),
        ({**FP8, "model.head_dim": 6}, "a rank's share of attention's output is 24"),
        ({**FP8, "model.head_dim": 12, **parallel(2, 1)}, "a rank's share of attention's output is 24"),
        ({**FP8, **NARROW, **parallel(2, 1)}, "a rank's share of queries, keys and values is 24"),
        ({**FP8, **EXPERTS, "model.moe_ffn_hidden_size": 24}, "a rank's share of an expert is 24"),
        ({**FP8, "model.implementation": "transformer_engine"}, "expected local with inference.weights=fp8"),
    ],
)
def test_layers_without_fp8_are_refused(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "x", settings)
    for adapted in (inference_config, losses_config):
        with pytest.raises(ValueError, match=expected):
            adapted(config)


@pytest.mark.parametrize("settings", [{"train.precision": "fp32"}, {**LATENTS, **BF16}])
def test_models_without_fp8_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inference.weights=fp8: expected exact with"):
        tiny_config(tmp_path, "x", {**settings, "inference.weights": "fp8"})
