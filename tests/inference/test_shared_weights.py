"""Ranks that share a cache and the weights answer as in one dense forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_longctx.config import Config, ParallelismConfig
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import Model, Truth, converse_in, parallel, truths
from tests.inference.test_engine import check
from tests.shared.training import changed, tiny_config

# 12 heads, which 2, 3, 4 and 6 ranks can share.
WIDE = {"model.hidden_size": 48, "model.num_attention_heads": 12, "model.head_dim": 12, "model.ffn_hidden_size": 96}
WIDE["model.vocab_multiple"] = 24
SHAPES = (
    {"model.num_kv_heads": 12, "model.qkv_bias": True},
    {"model.num_kv_heads": 1, "model.tie_embeddings": True, "model.window": 5},
    {"model.num_kv_heads": 2, "model.sinks": "learnable", "model.window": 5, "model.window_pattern": 2},
    {"model.num_kv_heads": 12, "model.position_embedding": "learned", "model.bias": True, "model.activation": "gelu"},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    config = tiny_config(tmp_path_factory.mktemp("runs"), "x", {"data.seq_length": 128, **WIDE})
    return [changed(config, shape) for shape in SHAPES]


@pytest.fixture(scope="module")
def truth(models: list[Config]) -> list[Truth]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run_distributed(truths, 1, [Model(parallel(config, 1)) for config in models])[0]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("context", "tensor", "of"),
    [(2, 1, (0, 1, 2, 3)), (3, 1, (0, 1)), (2, 2, (0, 1, 3)), (4, 1, (2, 3)), (3, 2, (0, 1)), (2, 3, (1, 3))],
)
def test_every_turn_equals_the_dense_model(
    models: list[Config], truth: list[Truth], context: int, tensor: int, of: tuple[int, ...]
) -> None:
    sizes = ParallelismConfig(context_parallel_size=context, tensor_parallel_size=tensor)  # training has fewer choices
    jobs = [Model(replace(parallel(models[i], 1, shard_weights=True), parallelism=sizes)) for i in of]
    for records in run_distributed(converse_in, context * tensor, jobs):
        for i, found in zip(of, records, strict=True):
            check(found, truth[i])
