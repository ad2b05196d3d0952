"""A gated delta net computes what the published layer in `transformers` does with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.delta_net import GatedDeltaNet
from megatron_longctx.mcore.model import transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import tiny_config

KEY_HEADS, SHARED, KEY, VALUE, HIDDEN, TAPS = 2, 2, 8, 6, 32, 4
LENGTH = 90
SIZES = {
    "model.pattern": "G-*-",
    "model.linear_num_key_heads": KEY_HEADS,
    "model.linear_num_value_heads": KEY_HEADS * SHARED,
    "model.linear_key_head_dim": KEY,
    "model.linear_value_head_dim": VALUE,
    "model.hidden_size": HIDDEN,
    "model.norm_epsilon": 1e-6,
    "data.seq_length": LENGTH,
}


def _by_key_head(*parts: Tensor) -> Tensor:
    """Join rows that are grouped by key head each."""
    return torch.cat([part.reshape(KEY_HEADS, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _compare(rank: int, root: Path) -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    settings = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=KEY_HEADS * SHARED,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=TAPS,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    published = Qwen3NextGatedDeltaNet(settings, 0)
    config = tiny_config(root, "layer", SIZES)
    collection = groups.from_config(config.parallelism)
    sequence, megatron = build_sequence(config, collection.cp), transformer_config(config)
    spec = block_spec(megatron, sequence, transformer_engine=False).layer_specs[0].submodules.self_attention
    own = build_module(spec, config=megatron, layer_number=1, pg_collection=collection)
    assert type(own) is GatedDeltaNet
    keys = KEY_HEADS * KEY
    with torch.no_grad():
        published.norm.weight.uniform_(0.5, 1.5)
        own.linear_qkv.weight.copy_(_by_key_head(published.in_proj_qkvz.weight, published.in_proj_ba.weight))
        own.linear_proj.weight.copy_(published.out_proj.weight)
        own.conv_weight.copy_(
            _by_key_head(*published.conv1d.weight[:, 0].split((keys, keys, KEY_HEADS * SHARED * VALUE)))
        )
        for name, other in (("decay_log", "A_log"), ("decay_bias", "dt_bias")):
            getattr(own, name).copy_(getattr(published, other))
        own.norm_weight.copy_(published.norm.weight)
    lengths = (50, 1, LENGTH - 51)
    x = torch.randn(LENGTH, 1, HIDDEN, requires_grad=True)
    found = own(x, packed_seq_params=sequence.pack(lengths))[0]
    expected = torch.cat([published(part.transpose(0, 1)).transpose(0, 1) for part in x.split(lengths)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(found)
    gradients = [torch.autograd.grad(each, x, grad)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    groups.destroy()


def test_it_is_the_published_layer(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.qwen3_next")
    run_distributed(_compare, 1, tmp_path)
