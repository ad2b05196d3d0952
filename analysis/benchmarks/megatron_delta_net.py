"""Megatron-Core 0.19's own gated delta net in our layers, to compare: zigzag with an all-to-all around every layer.

Import this only where fla-core is installed: Megatron's layer needs it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.transformer import ModuleSpec
from torch import Tensor
from torch.nn import functional

from megatron_longctx.mcore.delta_net import GatedDeltaNet
from megatron_longctx.mcore.norms import RMSNorm
from megatron_longctx.mcore.pack import Pack
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.version import copy_spec
from megatron_longctx.models import delta_rule


def with_megatrons(layer: ModuleSpec, mixer: type, sequence: ShardedSequence) -> ModuleSpec:
    """Return a copy of a layer's spec with Megatron's gated delta net, as `mcore.recurrent.with_mixer` does."""
    del mixer, sequence
    layer, inner = copy_spec(layer), layer.submodules.self_attention.submodules
    parts = gated_delta_net.GatedDeltaNetSubmodules(inner.linear_qkv, RMSNorm, inner.linear_proj)
    layer.submodules.self_attention = ModuleSpec(MegatronsDeltaNet, submodules=parts)
    return layer


class MegatronsDeltaNet(gated_delta_net.GatedDeltaNet):  # type: ignore[misc]
    """Megatron's layer, called with our packs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            super().__init__(*args, **kwargs)
            return
        with patch.object(torch.cuda, "current_device", lambda: "cpu"):
            super().__init__(*args, **kwargs)
        self.gated_delta_rule = _reference_rule

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Pack, **_: Any
    ) -> tuple[Tensor, Any]:
        params = None
        if len(packed_seq_params.documents) > 1:
            stops = torch.tensor([0, *accumulate(packed_seq_params.documents)], dtype=torch.int32)
            names = ("cu_seqlens_q", "cu_seqlens_kv")
            params = PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, stops.to(hidden_states.device)))
        if hidden_states.is_cuda:
            return super().forward(hidden_states, attention_mask, packed_seq_params=params)  # type: ignore[no-any-return]
        with (
            patch.object(gdn, "causal_conv1d", _reference_convolution),
            patch.object(common, "l2norm", _reference_norm),
            patch.object(torch.cuda, "current_device", lambda: "cpu"),
        ):
            return super().forward(hidden_states, attention_mask, packed_seq_params=params)  # type: ignore[no-any-return]


def load_from_ours(theirs: MegatronsDeltaNet, ours: GatedDeltaNet) -> None:
    """Copy the weights of our layer, whose rows are grouped by key head, into Megatron's, with rows by kind."""
    heads, key, shared, value = ours._heads, ours._key, ours._shared, ours._value
    mixed = [key, key, shared * value]

    def by_kind(x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([part.flatten(0, 1) for part in torch.split(x.view(heads, -1, *x.shape[1:]), sizes, dim=1)])

    with torch.no_grad():
        theirs.in_proj.weight.copy_(by_kind(ours.linear_qkv.weight, [*mixed, shared * value, shared, shared]))
        theirs.conv1d.weight.copy_(by_kind(ours.conv_weight, mixed).unsqueeze(1))
        theirs.out_proj.weight.copy_(ours.linear_proj.weight)
        theirs.A_log.copy_(ours.decay_log)
        theirs.dt_bias.copy_(ours.decay_bias)
        theirs.out_norm.weight.copy_(ours.norm_weight)


# fla-core's kernels run on GPUs alone. On CPUs, where this file is tested, torch computes their parts.
def _lengths(cu_seqlens: Tensor | None, x: Tensor) -> list[int]:
    return [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()


def _reference_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
    return delta_rule.chunked(_lengths(cu_seqlens, q), state, q * q.shape[-1] ** -0.5, k, v, g, beta.float())[0], None


def _reference_convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    positions = torch.cat([torch.arange(length) for length in _lengths(cu_seqlens, x)])
    before = x.new_zeros(weight.shape[1] - 1, len(x), x.shape[2])
    return functional.silu(delta_rule.convolved(x.transpose(0, 1), before, weight, positions)).transpose(0, 1), None


def _reference_norm(x: Tensor) -> Tensor:
    return x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
