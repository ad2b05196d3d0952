"""Recurrent layers compute what the published layers in `transformers` do with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from megatron_longctx.mcore.kimi_delta import KimiDeltaAttention
from megatron_longctx.mcore.mamba import Mamba2
from megatron_longctx.mcore.model import transformer_config
from megatron_longctx.mcore.recurrent import RecurrentMixer
from megatron_longctx.mcore.sequence import ShardedSequence, build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.models import delta_rule
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import tiny_config

KEY_HEADS, SHARED, KEY, VALUE, HIDDEN, TAPS = 2, 2, 6, 8, 32, 4
HEADS = KEY_HEADS * SHARED
LENGTH = 90
HELPER = {"parallelism.schedule": "helper"}
SIZES = {
    "model.pattern": "G-*-",
    "model.linear_num_key_heads": KEY_HEADS,
    "model.linear_num_value_heads": HEADS,
    "model.linear_key_head_dim": KEY,
    "model.linear_value_head_dim": VALUE,
    "model.hidden_size": HIDDEN,
    "model.norm_epsilon": 1e-6,
    "data.seq_length": LENGTH,
}
KIMI = {"model.pattern": "K-*-", "model.linear_num_value_heads": KEY_HEADS, "model.linear_key_head_dim": VALUE}
OF_KIND: dict[str, dict[str, Any]] = {"G": {}, "M": {"model.pattern": "M-*-"}, "K": KIMI}


def _by_key_head(*parts: Tensor) -> Tensor:
    """Join rows that are grouped by key head each."""
    return torch.cat([part.reshape(KEY_HEADS, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _check_initial_values(layer: RecurrentMixer, config: Any) -> None:
    """Check the ranges of Megatron's own layers, and that any number of ranks draws the same values."""
    (lowest, highest), bound = layer.conv_weight.aminmax(), TAPS**-0.5
    assert -bound <= lowest < -0.8 * bound and 0.8 * bound < highest <= bound
    assert layer.decay_log.exp().min() >= 1 and 4 < layer.decay_log.exp().max() <= 16
    assert layer.norm_weight.eq(1).all()
    if not isinstance(layer, Mamba2 | KimiDeltaAttention):
        assert layer.decay_bias.eq(1).all()
    else:
        steps = torch.nn.functional.softplus(layer.decay_bias)
        assert 0.001 <= steps.min() < steps.max() <= 0.1
    if isinstance(layer, KimiDeltaAttention):
        ups = [each.std().item() for each in (layer.gates_up, layer.decay_up)]
        assert ups == pytest.approx([layer.linear_qkv.weight.std().item()] * 2, rel=0.2)
    if isinstance(layer, Mamba2):
        assert layer.skip.eq(1).all()
        assert -bound <= layer.conv_bias.min() < 0 < layer.conv_bias.max() <= bound
    spread = [each.weight.std().item() for each in (layer.linear_proj, layer.linear_qkv)]
    assert spread[0] == pytest.approx(spread[1] / 2, rel=0.1), "there are two layers"
    group, whole = layer.tp_group, dict[str, Tensor]()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(3)
        layer.tp_group = SimpleNamespace(size=partial(int, size), rank=partial(int, rank))
        layer._add_parameters(config)
        for name in layer._sharded:
            own = getattr(layer, name)
            assert torch.equal(own, whole.setdefault(name, own).chunk(size)[rank]) and own.tensor_model_parallel
    layer.tp_group = group
    layer._add_parameters(config)


def _built(root: Path, name: str, settings: dict[str, Any]) -> tuple[RecurrentMixer, ShardedSequence]:
    config = tiny_config(root, name, {**SIZES, **settings})
    collection = groups.from_config(config.parallelism)
    sequence, megatron = build_sequence(config, collection.cp), transformer_config(config)
    spec = block_spec(megatron, sequence, transformer_engine=False).layer_specs[0].submodules.self_attention
    return build_module(spec, config=megatron, layer_number=1, pg_collection=collection), sequence


def _published(kind: str) -> torch.nn.Module:
    sys.modules["fla"] = None  # type: ignore[assignment]  # then they compute in torch, also where fla-core is installed
    from transformers import BambaConfig, KimiLinearConfig, Qwen3NextConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    common: dict[str, Any] = {"hidden_size": HIDDEN, "rms_norm_eps": 1e-6}
    if kind == "M":
        of_groups = {"mamba_n_groups": KEY_HEADS, "mamba_d_state": KEY, "mamba_d_conv": TAPS}
        settings = BambaConfig(mamba_n_heads=HEADS, mamba_d_head=VALUE, mamba_expand=1, **of_groups, **common)
        return BambaMixer(settings, 0)
    if kind == "K":
        heads = {"linear_num_heads": KEY_HEADS, "linear_head_dim": VALUE, "linear_conv_kernel_dim": TAPS}
        layer = KimiLinearDeltaAttention(KimiLinearConfig(**heads, **common), 0)
        torch.nn.init.uniform_(layer.forget_gate.A_log, 0, 1)
        torch.nn.init.uniform_(layer.forget_gate.dt_bias, -1, 1)
        return layer
    sizes = {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS, "linear_key_head_dim": KEY}
    taps = {"linear_value_head_dim": VALUE, "linear_conv_kernel_dim": TAPS}
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes, **taps, **common), 0)


def _as_ours(kind: str, of: Callable[[Tensor], Tensor], layer: Any) -> dict[str, Tensor]:
    """Return our parameters, or what `of` returns of them, from a published layer."""
    if kind == "K":
        first = ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
        return {
            "linear_qkv.weight": _by_key_head(*(of(layer.get_parameter(f"{name}.weight")) for name in first)),
            "conv_weight": _by_key_head(*of(layer.conv1d.weight)[:, 0].chunk(3)),
            "decay_log": of(layer.forget_gate.A_log).flatten(),
            "decay_bias": of(layer.forget_gate.dt_bias),
            "decay_up": of(layer.forget_gate.f_b_proj.weight),
            "gates_up": of(layer.g_b_proj.weight),
            "norm_weight": of(layer.o_norm.weight),
            "linear_proj.weight": of(layer.o_proj.weight),
        }
    keys, values = KEY_HEADS * KEY, HEADS * VALUE
    conv, taken = of(layer.conv1d.weight)[:, 0], {"decay_log": layer.A_log, "decay_bias": layer.dt_bias}
    taken |= {"norm_weight": layer.norm.weight, "linear_proj.weight": layer.out_proj.weight}
    named = {name: of(each) for name, each in taken.items()}
    if kind == "G":
        rows = _by_key_head(of(layer.in_proj_qkvz.weight), of(layer.in_proj_ba.weight))
        return {**named, "linear_qkv.weight": rows, "conv_weight": _by_key_head(*conv.split((keys, keys, values)))}

    def rows_of(whole: Tensor, *others: int) -> Tensor:
        """Reorder rows of x, B and C, after those of gates and before those of time steps."""
        gates, x, b, c, *steps = whole.split((*others[:1], values, keys, keys, *others[1:]))
        return _by_key_head(c, b, x, gates, *steps) if len(gates) else _by_key_head(c, b, x)

    return named | {
        "linear_qkv.weight": rows_of(of(layer.in_proj.weight), values, HEADS),
        "conv_weight": rows_of(conv, 0),
        "conv_bias": rows_of(of(layer.conv1d.bias), 0),
        "skip": of(layer.D),
    }


def _compare(rank: int, root: Path) -> None:
    for kind, mixer in (("G", GatedDeltaNet), ("M", Mamba2), ("K", KimiDeltaAttention)):
        torch.manual_seed(0)
        published = _published(kind)
        own, sequence = _built(root, kind, OF_KIND[kind])
        assert type(own) is mixer
        _check_initial_values(own, own.config)
        with torch.no_grad():
            for name in ("norm.weight", "o_norm.weight", "D", "dt_bias"):
                if hasattr(published, name.partition(".")[0]):
                    published.get_parameter(name).uniform_(0.5, 1.5)
        values = _as_ours(kind, Tensor.detach, published)
        assert own.load_state_dict(values, strict=False).missing_keys == []
        lengths = (50, 1, LENGTH - 51)
        x = torch.randn(LENGTH, 1, HIDDEN, requires_grad=True)
        found = own(x, packed_seq_params=sequence.pack(lengths))[0]
        expected = torch.cat([published(part.transpose(0, 1)).transpose(0, 1) for part in x.split(lengths)])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        grad = torch.randn_like(found)
        of_input = [torch.autograd.grad(each, x, grad, retain_graph=True)[0] for each in (found, expected)]
        torch.testing.assert_close(*of_input, rtol=1e-4, atol=1e-5)
        for each in (found, expected):
            each.backward(grad)
        of_weights = _as_ours(kind, lambda each: each.grad, published)
        for name, parameter in own.named_parameters():
            atol = 1e-4 if kind == "K" else 2e-5  # their chunks of K are fp32, also in backward
            torch.testing.assert_close(parameter.grad, of_weights[name], rtol=1e-4, atol=atol, msg=name)
        groups.destroy()


def test_they_are_the_published_layers(tmp_path: Path) -> None:
    run_distributed(_compare, 1, tmp_path)


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """The documented interface of fla-core's function, by the reference recurrence."""
    assert use_qk_l2norm_in_kernel and len(q) == 1 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    q, k = _repeated(q, k, v)
    return delta_rule.section(cu_seqlens.diff().tolist(), False, delta_rule.chunked, q, k, v, g, beta).out, None


def _shared_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, place: Any, stops: Any, group: Any
) -> Tensor:  # fmt: skip
    """`SharedRule`, which tests/mcore/test_delta_ranks.py compares, by the reference recurrence."""
    assert len(q) == 1 and stops[1].diff().tolist() == place.lengths
    own = delta_rule.section(place.lengths, place.continues, delta_rule.chunked, *_repeated(q, k, v), v, g, beta)
    lasts = tensor_parallel.gather_from_sequence_parallel_region(own.last.unsqueeze(0), group=group)
    out = delta_rule.finish(own, lasts, place.first_rank, place.rank)
    return out + 0 * lasts.sum().to(out.dtype)  # its gradient is a collective on every rank


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _normalized(q, q.shape[-1] ** -0.5), _normalized(k)
    return q.repeat_interleave(v.shape[2] // q.shape[2], 2), k.repeat_interleave(v.shape[2] // k.shape[2], 2)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, initial_state: Tensor | None, activation: str,
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    assert activation == "silu" and len(x) == 1 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    taps, parts = weight.shape[1], []
    for number, (first, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        before = x.new_zeros(x.shape[2], taps) if initial_state is None else initial_state[number]
        whole = torch.cat([before[:, 1:], x[0, first:stop].T], dim=1)
        parts.append(torch.nn.functional.conv1d(whole, weight.unsqueeze(1), bias=bias, groups=len(weight)).T)
    return torch.nn.functional.silu(torch.cat(parts)).unsqueeze(0), None


def _kimi_rule(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, beta: Tensor, *, A_log: Tensor, dt_bias: Tensor,
    use_gate_in_kernel: bool, use_qk_l2norm_in_kernel: bool, cp_context: Any = None, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """`chunk_kda`, whose context parallelism tests/mcore/test_delta_ranks.py compares, by the reference recurrence."""
    assert use_gate_in_kernel and use_qk_l2norm_in_kernel and len(q) == 1
    g = -A_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(rates + dt_bias.view(rates.shape[2:]))
    inputs = *_repeated(q, k, v), v, g, beta
    if cp_context is None:
        return delta_rule.section(cu_seqlens.diff().tolist(), False, delta_rule.chunked, *inputs).out, None
    where, rank = cp_context, torch.distributed.get_rank(cp_context.group)
    assert where.is_first_rank == (where.pre_num_ranks == 0) and where.is_last_rank == (where.post_num_ranks == 0)
    own = delta_rule.section(where.cu_seqlens.diff().tolist(), where.pre_num_ranks > 0, delta_rule.chunked, *inputs)
    lasts = tensor_parallel.gather_from_sequence_parallel_region(own.last.unsqueeze(0), group=where.group)
    out = delta_rule.finish(own, lasts, rank - where.pre_num_ranks, rank)
    return out + 0 * lasts.sum().to(out.dtype), None


def _gated_norm(x: Tensor, gates: Tensor, weight: Tensor, bias: None, activation: str, *, eps: float) -> Tensor:
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation]
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * act(gates)


def _state_space(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial_state: Tensor, output_final_state: bool,
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert scale == 1 and output_final_state and torch.equal(cu_seqlens, cu_seqlens_cpu) and len(q) == 1
    bounds, parts = pairwise(cu_seqlens.tolist()), []
    for state, (first, stop) in zip(initial_state, bounds, strict=True):
        part = (x[:, first:stop] for x in (q, k, v, g))
        parts.append(delta_rule.chunked([stop - first], state.unsqueeze(0), *part))
    outs, lasts = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lasts)


def _by_stand_ins(rank: int, root: Path, kind: str) -> None:
    for name, contents in {
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _rule},
        "fla.ops.simple_gla": {"chunk_simple_gla": _state_space},
        "fla.ops.kda": {"chunk_kda": _kimi_rule},
        "fla.ops.cp": {"FLACPContext": lambda group, **where: SimpleNamespace(group=group, **where)},
        "fla.modules.causal_conv1d": {"causal_conv1d": _convolution},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": _gated_norm},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    delta_kernels.SharedRule = SimpleNamespace(apply=_shared_rule)  # type: ignore[assignment,misc]
    settings = {**OF_KIND[kind], "parallelism.context_parallel_size": 3, **HELPER}
    layer, sequence = _built(root, "kernels", settings)
    with pytest.raises(ValueError, match=r"layout=contiguous: expected .*, in which Megatron slices batches"):
        layer(torch.zeros(LENGTH // 3, 1, HIDDEN))
    packs: Sequence[Sequence[int]] = ((LENGTH,), (29, 1, 1, 32, 27), (30, 30, 30), (1,) * 31 + (4, 55))
    for documents in packs:
        pack = sequence.pack(documents)
        x = torch.randn(pack.num_local_tokens, 2, HIDDEN, requires_grad=True)
        found = []
        for by_kernels in (True, False):
            layer._uses_kernels = lambda x, by_kernels=by_kernels: by_kernels
            out = layer(x, packed_seq_params=pack)[0]
            found.append([out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))])
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    groups.destroy()


@pytest.mark.parametrize("kind", OF_KIND)
def test_the_kernels_get_what_they_need_on_unequal_ranks(tmp_path: Path, kind: str) -> None:
    run_distributed(_by_stand_ins, 3, tmp_path, kind)
