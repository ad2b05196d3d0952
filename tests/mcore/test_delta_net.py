"""A gated delta net computes what the published layer in `transformers` does with the same weights."""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_longctx.mcore import delta_kernels, groups
from megatron_longctx.mcore.delta_net import GatedDeltaNet, _normalized
from megatron_longctx.mcore.model import transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.models import delta_rule
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import tiny_config

KEY_HEADS, SHARED, KEY, VALUE, HIDDEN, TAPS = 2, 2, 8, 6, 32, 4
LENGTH = 90
HELPER = {"parallelism.schedule": "helper"}
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


def _check_initial_values(layer: GatedDeltaNet, config: Any) -> None:
    """Check the ranges of Megatron's own `GatedDeltaNet`, and that any number of ranks draws the same values."""
    (lowest, highest), bound = layer.conv_weight.aminmax(), TAPS**-0.5
    assert -bound <= lowest < -0.8 * bound and 0.8 * bound < highest <= bound
    assert layer.decay_log.exp().min() >= 1 and 4 < layer.decay_log.exp().max() <= 16
    assert layer.decay_bias.eq(1).all() and layer.norm_weight.eq(1).all()
    spread = [each.weight.std().item() for each in (layer.linear_proj, layer.linear_qkv)]
    assert spread[0] == pytest.approx(spread[1] / 2, rel=0.1), "there are two layers"
    group, whole = layer.tp_group, dict[str, Tensor]()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(3)
        layer.tp_group = SimpleNamespace(size=partial(int, size), rank=partial(int, rank))
        layer._add_parameters(config)
        for name in ("conv_weight", "decay_log"):
            own = getattr(layer, name)
            assert torch.equal(own, whole.setdefault(name, own).chunk(size)[rank]) and own.tensor_model_parallel
    layer.tp_group = group
    layer._add_parameters(config)


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
    _check_initial_values(own, megatron)
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


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """The documented interface of fla-core's function, by the reference recurrence."""
    assert use_qk_l2norm_in_kernel and len(q) == 1 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    q, k = (_normalized(x).repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    return delta_rule.section(cu_seqlens.diff().tolist(), False, delta_rule.chunked, q, k, v, g, beta).out, None


def _shared_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, place: Any, stops: Any, group: Any
) -> Tensor:  # fmt: skip
    """`SharedRule`, which tests/mcore/test_delta_ranks.py compares, by the reference recurrence."""
    q, k = (_normalized(x).repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    assert len(q) == 1 and stops[1].diff().tolist() == place.lengths
    own = delta_rule.section(place.lengths, place.continues, delta_rule.chunked, q, k, v, g, beta)
    lasts = tensor_parallel.gather_from_sequence_parallel_region(own.last.unsqueeze(0), group=group)
    out = delta_rule.finish(own, lasts, place.first_rank, place.rank)
    return out + 0 * lasts.sum().to(out.dtype)  # its gradient is a collective on every rank


def _convolution(
    x: Tensor, weight: Tensor, *, initial_state: Tensor | None, activation: str, cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    assert activation == "silu" and len(x) == 1 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    taps, parts = weight.shape[1], []
    for number, (first, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        before = x.new_zeros(x.shape[2], taps) if initial_state is None else initial_state[number]
        whole = torch.cat([before[:, 1:], x[0, first:stop].T], dim=1)
        parts.append(torch.nn.functional.conv1d(whole, weight.unsqueeze(1), groups=len(weight)).T)
    return torch.nn.functional.silu(torch.cat(parts)).unsqueeze(0), None


def _gated_norm(x: Tensor, gates: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * torch.nn.functional.silu(gates)


def _by_stand_ins(rank: int, root: Path) -> None:
    for name, contents in {
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _rule},
        "fla.modules.causal_conv1d": {"causal_conv1d": _convolution},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": _gated_norm},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    delta_kernels.SharedRule = SimpleNamespace(apply=_shared_rule)  # type: ignore[assignment,misc]
    config = tiny_config(root, "kernels", {**SIZES, "parallelism.context_parallel_size": 3, **HELPER})
    collection = groups.from_config(config.parallelism)
    sequence, megatron = build_sequence(config, collection.cp), transformer_config(config)
    spec = block_spec(megatron, sequence, transformer_engine=False).layer_specs[0].submodules.self_attention
    layer = build_module(spec, config=megatron, layer_number=1, pg_collection=collection)
    with pytest.raises(ValueError, match=r"layout=contiguous: expected .*, in which Megatron slices batches"):
        layer(torch.zeros(LENGTH // 3, 1, HIDDEN))
    packs: Sequence[Sequence[int]] = ((LENGTH,), (29, 1, 1, 32, 27), (30, 30, 30), (1,) * 31 + (4, 55))
    for documents in packs:
        pack = sequence.pack(documents)
        x = torch.randn(pack.num_local_tokens, 2, HIDDEN, requires_grad=True)
        found = []
        for compute in (layer._by_kernels, layer._by_torch):
            layer._by_torch = compute
            out = layer(x, packed_seq_params=pack)[0]
            found.append([out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))])
            del layer._by_torch
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    groups.destroy()


def test_the_kernels_get_what_they_need_on_unequal_ranks(tmp_path: Path) -> None:
    run_distributed(_by_stand_ins, 3, tmp_path)
