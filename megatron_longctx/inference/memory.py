"""The memory that inference needs on a rank: weights, and the pages of the cache."""

import logging
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from ..config import Config
from ..config.cluster import GIB
from ..config.gpus import ranks_per_gpu
from ..core.errors import refuse
from ..planner.memory import shapes
from .cached_attention import CacheShape
from .decode import MAX_ROWS
from .engine import MAX_RANK_TOKENS
from .states import StateShape
from .window_pages import UNBOUNDED, Windows

logger = logging.getLogger(__name__)

_DEVICE_SHARE = 0.9
"""The rest is for messages, CUDA graphs and what other processes take later."""
_HOST_SHARE, _SEQUENCES = 1 / 8, 4
"""On CPUs: the share of the host's memory, and the longest sequences that the cache has at most."""
_PASS_TOKENS = 8192
"""The most new tokens of a rank in a pass of a model with windows, whose layers with windows must hold all of them."""


def with_shared_weights(config: Config) -> Config:
    """Return the configuration of the model: with `inference.shard_weights` all ranks are tensor-parallel ones."""
    par = config.parallelism
    if not config.inference.shard_weights or par.context_parallel_size == 1:
        return config
    size = par.context_parallel_size * par.tensor_parallel_size
    return replace(config, parallelism=replace(par, context_parallel_size=1, tensor_parallel_size=size))


def weight_bytes(config: Config, vocab_size: int) -> int:
    """Return the bytes of a rank's weights, with those of two whole layers if prompts gather them.

    Args:
        vocab_size: rows of the embedding.
    """
    own, whole = (shapes.Job(each, vocab_size) for each in (with_shared_weights(config), config))
    count = shapes.stage_parameters(own, 0)
    if own.config is not config:
        count += 2 * shapes.layer_parameters(whole) + shapes.mlp_weights(whole)[1]
    return count * own.element_bytes


def check_cache(config: Config, vocab_size: int, capacity: int) -> None:
    """Refuse a cache whose part on a rank does not fit beside weights and states into the rank's `capacity` bytes.

    Raises:
        ValueError: with the tokens of the cache and how many would fit.
    """
    inference, weights = config.inference, weight_bytes(config, vocab_size) + _state_bytes(config)
    pages = 1 if inference.cache_tokens is None else pages_per_rank(config)
    if weights + cache_bytes(config, pages) > capacity:
        tokens = inference.cache_tokens
        most = fitting_pages(config, max(0, capacity - weights)) * inference.page_tokens
        expected = (
            f"at most {most * config.parallelism.context_parallel_size} tokens, which fit beside {weights / GIB:.1f} "
            f"GiB of weights{' and recurrent states' * config.model.recurrent} into the {capacity / GIB:.1f} GiB that "
            "each rank has"
        )
        remedy = "Lower it, inference.max_new_tokens or inference.page_tokens, or use more context-parallel ranks"
        shared = ", which can share the weights (inference.shard_weights)" * (not inference.shard_weights)
        raise refuse("inference.cache_tokens", tokens, expected, f"{remedy}{shared}.")


def cache_shape(config: Config) -> CacheShape:
    """Return the cache of one rank."""
    model, par = config.model, config.parallelism
    pattern = model.window_pattern or model.num_layers + 1
    attends = (number for number, recurrent in enumerate(model.recurrent_layers, 1) if not recurrent)
    windows = tuple(model.window if number % pattern else None for number in attends)
    return CacheShape(
        num_layers=model.recurrent_layers.count(False),
        num_heads=model.num_attention_heads // par.tensor_parallel_size,
        num_kv_heads=max(1, model.num_kv_heads // par.tensor_parallel_size),
        head_dim=model.kv_channels,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        # A single rank sends nothing, and stays exact.
        int8=config.attention.kv_int8 and par.context_parallel_size > 1,
        windows=windows,
    )


def state_shape(config: Config) -> StateShape:
    """Return the states of one rank's recurrent layers, of which there may be none."""
    model, tp = config.model, config.parallelism.tensor_parallel_size
    return StateShape(
        layers=sum(model.recurrent_layers),
        heads=(model.linear_num_value_heads or 0) // tp,
        key=model.linear_key_head_dim or 0,
        value=model.linear_value_head_dim or 0,
        channels=model.recurrent_columns[0] // tp,
        taps=model.linear_conv_kernel_dim,
        dtype=cache_shape(config).dtype,
    )


def _state_bytes(config: Config) -> int:
    return config.inference.recurrent_states * state_shape(config).row_bytes


def windows_of(config: Config, pages: int) -> Windows | None:
    """Return the cache of layers with windows beside `pages` pages for the others; None without windows."""
    window, page_tokens = config.model.window, config.inference.page_tokens
    if window is None:
        return None
    return Windows.for_sequences(window, config.serve.max_active, _pass_tokens(config), page_tokens, pages)


def _pass_tokens(config: Config) -> int:
    """Return the most new tokens of a rank in a pass."""
    if config.model.window is None:
        return MAX_RANK_TOKENS
    if config.inference.prefill_chunk is None:
        return _PASS_TOKENS
    return max(MAX_ROWS, -(-config.inference.prefill_chunk // config.parallelism.context_parallel_size))


def cache_bytes(config: Config, pages: int) -> int:
    """Return the bytes of a rank's cache with `pages` pages for layers without windows."""
    (full, windowed), windows = cache_shape(config).group_bytes, windows_of(config, pages)
    return config.inference.page_tokens * (pages * full + (windowed * windows.pages if windows else 0))


def fitting_pages(config: Config, capacity: int) -> int:
    """Return the most pages whose `cache_bytes` are at most some capacity."""
    (full, windowed), windows = cache_shape(config).group_bytes, windows_of(config, UNBOUNDED)
    tokens = capacity // config.inference.page_tokens
    pages = tokens // (full + windowed)
    if windows is None or pages <= windows.pages:
        return pages
    return (tokens - windows.pages * windowed) // full if full else UNBOUNDED


def pages_per_rank(config: Config) -> int:
    """Return the pages per rank that hold `inference.cache_tokens` on all ranks together."""
    assert config.inference.cache_tokens is not None, "without a size, free_pages tells"
    return _pages(config, config.inference.cache_tokens)


def _pages(config: Config, tokens: int) -> int:
    n = config.parallelism.context_parallel_size
    # Ranks differ by at most one page of a session.
    return -(-(-(-tokens // config.inference.page_tokens) + n - 1) // n)


def free_pages(config: Config, length: int, device: torch.device) -> int:
    """Return the pages per rank of a cache that was given no size, and log it. Collective over the world.

    Args:
        length: of the longest sequence.

    Raises:
        ValueError: no memory is left beside the weights, which are on the device already.
    """
    pages = UNBOUNDED
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0] // ranks_per_gpu() - _activation_bytes(config) - _state_bytes(config)
        share, what = _DEVICE_SHARE, "memory that is free beside activations"
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()
        share, what, pages = _HOST_SHARE, "host memory of each rank", _pages(config, _SEQUENCES * length)
    if not cache_shape(config).group_bytes[0]:  # no layer needs memory for more tokens
        pages = min(pages, _pages(config, max(_SEQUENCES, config.serve.max_active) * length))
    fitting = torch.tensor(min(pages, fitting_pages(config, int(share * free))), device=device)
    dist.all_reduce(fitting, op=dist.ReduceOp.MIN)
    pages = int(fitting)
    if pages < 1:
        raise refuse("inference.cache_tokens", None, f"some {what}; none is left", "Use more ranks, or shard_weights.")
    if dist.get_rank() == 0:
        page_tokens, windows = config.inference.page_tokens, windows_of(config, pages)
        tokens = pages * page_tokens * config.parallelism.context_parallel_size
        size = f"{cache_bytes(config, pages) / GIB:.2f} GiB on each rank, of {free / GIB:.2f} GiB of {what}"
        if windows is not None:
            windowed = windows.pages * page_tokens * cache_shape(config).group_bytes[1]
            size += f"; {windowed / GIB:.2f} GiB of it are for layers with windows"
        logger.info("cache: %s tokens, %s", f"{tokens:,}", size)
    return pages


def _activation_bytes(config: Config) -> int:
    """Return an upper bound of what a pass of the most tokens needs: the MLP's columns, six rows of hidden states, and
    queries with three outputs of attention, of which two in fp32."""
    model, par = config.model, config.parallelism
    width = model.ffn_hidden_size
    if model.num_moe_experts is not None:
        width = model.moe_router_topk * model.expert_width + (model.moe_shared_expert_intermediate_size or 0)
    shape = cache_shape(config)
    columns = (model.fc1_columns + 1) * width // par.tensor_parallel_size + 6 * model.hidden_size
    mixer = shape.num_heads * shape.head_dim * (2 * shape.dtype.itemsize + 8)
    if model.recurrent:  # tokens before and after the convolution, in fp32 inside; queries, keys, values and outputs
        states = state_shape(config)
        rule = states.heads * ((3 + 6 * ("K" in model.mixers)) * states.key + 4 * states.value)  # K: decays in fp32
        mixer = max(mixer, 2 * states.channels * (shape.dtype.itemsize + 4) + rule * shape.dtype.itemsize)
    return _pass_tokens(config) * (columns * shape.dtype.itemsize + mixer)
