"""The core attention that Megatron's layer gets: dense attention's result, and a clear no to what it cannot do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.nn import functional

from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.testing.sequences import sequence_of

LENGTH, BATCH, HEADS, GROUPS, DIM = 13, 2, 4, 2, 8


def _core(sequence: Any = None, config: dict[str, Any] | None = None, **arguments: Any) -> ContextParallelCoreAttention:
    settings = dict(num_layers=1, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS)
    settings |= {"attention_dropout": 0.0, "context_parallel_size": 1}
    return ContextParallelCoreAttention(
        sequence=sequence or sequence_of(length=LENGTH),
        config=TransformerConfig(**(settings | (config or {}))),
        **({"layer_number": 1, "attn_mask_type": AttnMaskType.causal} | arguments),
    )


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("at_call", [False, True])
def test_it_is_dense_attention(mask: AttnMaskType, scale: float | None, at_call: bool) -> None:
    q, k, v = _inputs()
    if at_call:
        other = AttnMaskType.no_mask if mask is AttnMaskType.causal else AttnMaskType.causal
        out = _core(attn_mask_type=other, softmax_scale=scale)(q, k, v, None, attn_mask_type=mask)
    else:
        out = _core(attn_mask_type=mask, softmax_scale=scale)(q, k, v, None)
    causal = mask is AttnMaskType.causal
    heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    dense = functional.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale, enable_gqa=True)
    assert out.shape == (LENGTH, BATCH, HEADS * DIM)
    torch.testing.assert_close(out, dense.permute(2, 0, 1, 3).flatten(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1: expected 0"),
        ({}, {"attention_dropout": 0.2}, "attention_dropout=0.2: expected 0"),
        ({}, {"attention_type": "cross"}, "attention_type=cross: expected self"),
        ({}, {"k_channels": 8, "v_channels": 4}, "v_channels=4: expected k_channels=8"),
        (
            {},
            {"pg_collection": SimpleNamespace(cp=SimpleNamespace(size=lambda: 4))},
            "context-parallel size=4: expected the sequence's 1",
        ),
    ],
)
def test_settings_it_cannot_serve(config: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core(config=config, **arguments)


def test_settings_it_can_serve() -> None:
    # An argument counts more than the configuration; equal head sizes and TransformerEngine's mode are fine.
    _core(config={"attention_dropout": 0.1}, attention_dropout=0.0)
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    _core(k_channels=8, v_channels=8, cp_comm_type="p2p", pg_collection=groups)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)}, "attention_mask=Tensor: expected"),
        ({"attention_bias": torch.zeros(1, 1, LENGTH, LENGTH)}, "attention_bias=Tensor: expected None"),
        ({"packed_seq_params": PackedSeqParams()}, "packed_seq_params.qkv_format=None: expected thd"),
        ({"attn_mask_type": AttnMaskType.padding}, "expected causal or no_mask"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "expected causal or no_mask"),
        ({"attn_mask_type": AttnMaskType.padding_causal}, "expected causal or no_mask"),
    ],
)
def test_calls_it_cannot_serve(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core()(*_inputs(), **({"attention_mask": None} | arguments))


@pytest.mark.parametrize("rows", [5, LENGTH])
def test_tokens_that_are_not_this_ranks_are_refused_before_they_are_turned(rows: int) -> None:
    """Those of another layout, or the whole sequence: `shard_batch` was forgotten."""
    sequence = sequence_of(rank=1, world=3, length=LENGTH)
    sequence.whole.rotation = lambda x: x[:0]  # of other tokens
    q, k, v = (x[:rows] for x in _inputs())
    words = rf"query has {rows} tokens: expected 4, what rank 1 of 3 holds of 13\. Give .*shard_batch"
    with pytest.raises(ValueError, match=words):
        _core(sequence)(q, k, v, None)


def test_heads_that_the_schedule_cannot_share_are_refused_when_the_layer_is_built() -> None:
    sequence = sequence_of(rank=0, world=3, length=LENGTH, schedule="ulysses")
    with pytest.raises(ValueError, match=r"3 context-parallel ranks that share the heads.*4 query heads"):
        _core(sequence=sequence, config={"context_parallel_size": 3})
