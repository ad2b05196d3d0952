"""Every family computes the logits of `transformers` and generates its tokens, at every parallel size."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.cli.conversion import import_model
from megatron_longctx.config import Config
from megatron_longctx.mcore import checkpoint, groups
from megatron_longctx.mcore.model import build_model, fingerprint, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.models import FAMILIES
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import RESOLVED, load_config
from tests.shared.published import ours, theirs, write_model
from tests.shared.training import changed

LENGTH = 98
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LINEAR = ["linear_attention"]
# Sequences are longer than windows, and than the original contexts of scaled RoPE.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}, "head_dim": 32,
              "tie_word_embeddings": True},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {
        "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 16, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_local_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 3,
                  "norm_topk_prob": False, "head_dim": 32, "num_hidden_layers": 5, "mlp_only_layers": [0, 3]},
    "qwen3_next": {"num_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "head_dim": 32,
                   "shared_expert_intermediate_size": 24, "mlp_only_layers": [2], "linear_num_key_heads": 2,
                   "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "qwen3_5_text": {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 12, "layer_types": [*LINEAR, "full_attention", *LINEAR],
                     "rope_parameters": YARN | {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}},
    "qwen3_5_moe_text": {"num_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "head_dim": 32,
                         "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                         "linear_key_head_dim": 8, "linear_value_head_dim": 12,
                         "num_hidden_layers": 2, "layer_types": ["full_attention", *LINEAR]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
              "mamba_d_head": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 32,
                "rope_parameters": YARN | {"truncate": False}},
}  # fmt: skip
# Parallel sizes and the number of generated tokens, keyed by the number of ranks.
CASES: dict[int, tuple[dict[str, int], int]] = {
    1: ({}, 40),
    3: ({"context": 3}, 8),
    4: ({"tensor": 2, "context": 2}, 8),
}
# On an odd number of ranks: families with layers that depend on the context-parallel ranks in a way of their own.
ODD = ("llama", "gemma3_text", "qwen3_next", "bamba", "gpt_oss")
# Layers with windows free pages, and have few.
FREEING = {
    "inference.page_tokens": 1,
    "inference.cache_tokens": 1000,
    "inference.prefill_chunk": 32,
    "serve.max_active": 1,
}
TOKENS = torch.randint(5, 290, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Config, Any]]:
    """The imported run's configuration and the model of `transformers`, keyed by family."""
    root, models = tmp_path_factory.mktemp("published"), {}
    for family, fields in MODELS.items():
        model = write_model(root / family, family, torch.float32, **SIZES | fields)
        import_model(str(root / family), [f"out={root / 'runs' / family}"])
        models[family] = load_config(root / "runs" / family / RESOLVED), model
    return models


def whole_logits(config: Config, sizes: dict[str, int]) -> Tensor:
    """Return the training model's logits of this rank's tokens, after a column of their positions: `[s, 1 + vocab]`."""
    experts = config.model.num_moe_experts is not None  # with tensor parallelism, they require sequence parallelism
    parallel = {f"parallelism.{axis}_parallel_size": size for axis, size in sizes.items()}
    config = changed(
        config, {**parallel, "data.seq_length": LENGTH, "parallelism.sequence_parallel": experts and "tensor" in sizes}
    )
    collection = groups.from_config(config.parallelism)
    sequence = build_sequence(config, collection.cp)
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    gpt = build_model(config, transformer_config(config), collection, sequence, vocab_size).eval()
    state = checkpoint.TrainingState([gpt], fingerprint=fingerprint(config, vocab_size))
    checkpoint.load(Path(config.run.root, config.run.name, "checkpoints"), state)
    shard = sequence.shard_batch({"tokens": TOKENS, "positions": torch.arange(LENGTH)[None]})
    with torch.no_grad():
        logits = gpt(shard["tokens"], shard["positions"], None)[0]
    shards = [torch.empty_like(logits) for _ in range(collection.tp.size())]
    dist.all_gather(shards, logits.contiguous(), group=collection.tp)
    groups.destroy()
    return torch.cat([shard["positions"][0, :, None].float(), *shards], dim=1)


def sizes_of(family: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a case for a family: experts with biases cannot be sharded."""
    return sizes | ({"expert_model": 2, "expert_tensor": 1} if family == "gpt_oss" and "tensor" in sizes else {})


def run_all(rank: int, runs: dict[str, Config], world: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for family, run in runs.items():
        sizes, count = sizes_of(family, CASES[world][0]), CASES[world][1]
        results[family] = whole_logits(run, sizes)
        others = FREEING if "sliding_window" in MODELS[family] else {}
        results[f"{family} generates"] = ours(rank, run, TOKENS[0].tolist(), count, sizes, others)
        if world == 4 and family in ("qwen3", "gemma3_text"):
            shared = {"inference.shard_weights": True}
            results[f"{family} shares"] = ours(rank, run, TOKENS[0].tolist(), count, sizes, shared)
    return results


@cache
def likeliest(model: Any, vocabulary: int) -> list[int]:
    """Return the tokens that `transformers` generates after `TOKENS`, as many as any number of ranks generates."""
    return theirs(model, TOKENS[0].tolist(), max(count for _, count in CASES.values()), vocabulary)[1]


def test_all_families_are_tested() -> None:
    assert {family.name for family in FAMILIES} == MODELS.keys()


@pytest.mark.parametrize("world", CASES)
def test_logits_and_tokens_are_those_of_transformers(world: int, published: dict[str, tuple[Config, Any]]) -> None:
    runs = {family: run for family, (run, _) in published.items() if world != 3 or family in ODD}
    ranks = run_distributed(run_all, world, runs, world)
    for family in runs:
        model = published[family][1]
        with torch.no_grad():
            expected = model(TOKENS).logits[0]
        rows = torch.cat([rank[family] for rank in ranks])
        whole = torch.full_like(expected, torch.nan)
        whole[rows[:, 0].long()] = rows[:, 1 : 1 + expected.shape[1]]
        assert (whole - expected).norm() < 1e-4 * expected.norm(), family
        vocabulary = len(ranks[0][f"{family} generates"][0])
        tokens = likeliest(model, vocabulary)[: CASES[world][1]]
        for rank in ranks:
            assert rank[f"{family} generates"][1] == tokens and len(set(tokens)) > 4, family
            assert rank.get(f"{family} shares", (None, tokens))[1] == tokens, family
