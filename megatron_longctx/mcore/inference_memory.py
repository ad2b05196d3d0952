"""The memory that inference needs on a rank: weights, and the pages of the cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config import Config
from ..config.cluster import GIB
from ..core.errors import refuse
from ..inference.cached_attention import CacheShape
from ..planner.memory import shapes
from .model import padded_vocab_size
from .tokenizer import build_tokenizer


def with_shared_weights(config: Config) -> Config:
    """Return the configuration of the model: with `inference.shard_weights` all ranks are tensor-parallel ones."""
    par = config.parallelism
    if not config.inference.shard_weights or par.context_parallel_size == 1:
        return config
    size = par.context_parallel_size * par.tensor_parallel_size
    return replace(config, parallelism=replace(par, context_parallel_size=1, tensor_parallel_size=size))


def weight_bytes(config: Config) -> int:
    """Return the bytes of a rank's weights, with those of two whole layers if prompts gather them."""
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    own, whole = (shapes.Job(each, vocab_size) for each in (with_shared_weights(config), config))
    count = shapes.stage_parameters(own, 0)
    if own.config is not config:
        count += 2 * shapes.layer_parameters(whole) + shapes.mlp_weights(whole)[1]
    return count * own.element_bytes


def check_cache(config: Config, capacity: int) -> None:
    """Refuse a cache whose part on a rank does not fit beside the weights into the rank's `capacity` bytes.

    Raises:
        ValueError: with the tokens of the cache and how many would fit.
    """
    inference, token, weights = config.inference, cache_shape(config).token_bytes, weight_bytes(config)
    needed = pages_per_rank(config) * inference.page_tokens * token
    if weights + needed > capacity:
        tokens = inference.cache_tokens or config.data.seq_length + inference.max_new_tokens
        most = max(0, capacity - weights) // token * config.parallelism.context_parallel_size
        expected = (
            f"at most {most} tokens, which fit beside {weights / GIB:.1f} GiB of weights into the "
            f"{capacity / GIB:.1f} GiB that each rank has"
        )
        remedy = "Lower it, inference.max_new_tokens or inference.page_tokens, or use more context-parallel ranks"
        shared = ", which can share the weights (inference.shard_weights)" * (not inference.shard_weights)
        raise refuse("inference.cache_tokens", tokens, expected, f"{remedy}{shared}.")


def cache_shape(config: Config) -> CacheShape:
    """Return the cache of one rank, without its layers' windows."""
    model, par = config.model, config.parallelism
    return CacheShape(
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads // par.tensor_parallel_size,
        num_kv_heads=max(1, model.num_kv_heads // par.tensor_parallel_size),
        head_dim=model.kv_channels,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        # A single rank sends nothing, and stays exact.
        int8=config.attention.kv_int8 and par.context_parallel_size > 1,
    )


def pages_per_rank(config: Config) -> int:
    """Return the pages per rank that hold `inference.cache_tokens` on all ranks together.

    By default they hold one sequence of the trained length and its new tokens.
    """
    inference = config.inference
    tokens = inference.cache_tokens or config.data.seq_length + inference.max_new_tokens
    n = config.parallelism.context_parallel_size
    # Ranks differ by at most one page of a session.
    return -(-(-(-tokens // inference.page_tokens) + n - 1) // n)
