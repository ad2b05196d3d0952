"""transformers' models on this attention: every family, Trainer, fully_shard and torch.compile beside eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from megatron_longctx import ContextParallelAttention
from megatron_longctx.integrations.transformers import IGNORED, compare, register, shard
from megatron_longctx.testing.distributed import run_distributed

DOCUMENTS = (13, 5, 22, 1, 9)
SMALL = {
    **dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
}
HALF_WINDOWS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=7),
    "gpt_oss": GptOssConfig(**SMALL, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=5, layer_types=HALF_WINDOWS),
}


def model_of(family: str, implementation: str = "longctx", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def batch_of(rows: int = 2) -> dict[str, Tensor]:
    words = torch.randint(1, 96, (rows, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[:, 3:6] = IGNORED
    return {"input_ids": words, "labels": labels}


def group_of(n: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if n > 1 else None


def _differences(rank: int, n: int) -> dict[str, tuple[float, float]]:
    register(ContextParallelAttention(group_of(n)))
    found = {family: tuple(compare(model_of(family), batch_of(), DOCUMENTS)) for family in FAMILIES}
    if n == 2:
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
        register(ContextParallelAttention(mesh["cp"], schedule="all_gather"))
        model = model_of("gpt_oss")
        for each in (*model.model.layers, model):
            fully_shard(each, mesh=mesh)
        found["fully_shard"] = tuple(compare(model, batch_of(), DOCUMENTS))
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_families_equal_eager_document_by_document(n: int) -> None:
    found = run_distributed(_differences, n, n)[0]
    assert len(found) == len(FAMILIES) + (n == 2)
    for family, (loss, gradients) in found.items():
        assert loss < 1e-6 and gradients < 5e-6, family


def _compiled(rank: int, n: int) -> tuple[float, float]:
    register(ContextParallelAttention(group_of(n)))
    batch, results = batch_of(), []
    for each in (model_of("mistral"), torch.compile(model_of("mistral"), backend="aot_eager")):
        loss = each(**shard(batch, DOCUMENTS)).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
    loss, gradients = (max(float((a - b).norm() / b.norm()) for a, b in zip(*part, strict=True)) for part in split(results))
    return loss, gradients
