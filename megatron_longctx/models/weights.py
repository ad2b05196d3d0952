"""Parameters of Megatron, the published tensors they consist of, and lossless conversion both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..config import ModelConfig

_LAYER = "{layer}"


@dataclass(frozen=True)
class Dims:
    """Sizes of a model."""

    model: ModelConfig  # `vocab_size` is the number of rows of Megatron's embedding
    vocab: int  # the number of rows of the published embedding, which has no padding

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes, keyed by the names that `Weight.shape` uses."""
        model = self.model
        assert model.vocab_size is not None
        query, key_value = model.num_attention_heads * model.kv_channels, model.num_kv_heads * model.kv_channels
        return {
            "padded_vocab": model.vocab_size,
            "hidden": model.hidden_size,
            "heads": model.num_attention_heads,
            "head": model.kv_channels,
            "query": query,
            "key_value": key_value,
            "queries_and_gates": 2 * query,
            "qkv": query * (2 if model.attention_output_gate else 1) + 2 * key_value,
            "ffn": model.ffn_hidden_size,
            "gate_up": 2 * model.ffn_hidden_size,
            "experts": model.num_moe_experts or 0,
            "expert_ffn": model.expert_width,
            "expert_gate_up": 2 * model.expert_width,
            "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
            "shared_gate_up": 2 * (model.moe_shared_expert_intermediate_size or 0),
            "one": 1,
            **self._delta_sizes,
        }

    @property
    def _delta_sizes(self) -> dict[str, int]:
        """The same of recurrent layers."""
        mixed, values = self.model.recurrent_columns
        heads, numbers = self.model.linear_num_value_heads or 0, self.model.recurrent_numbers
        return {
            "delta_keys": (mixed - values) // 2,
            "delta_values": values,
            "delta_mixed": mixed,
            "delta_qkvz": mixed + values,
            "delta_gates": numbers,
            "delta_rows": self.model.recurrent_rows,
            "delta_heads": heads,
            "delta_taps": self.model.linear_conv_kernel_dim,
            "delta_value": self.model.linear_value_head_dim or 0,
        }


Form = Callable[[Tensor, Dims], Sequence[Tensor]]
"""Returns the published tensors of a parameter, in the order of `Weight.published`.

They have every value of the parameter once, except for padding, so `Weight.joined` needs no function of its own. Shapes
are computed with tensors on the meta device. Rows are the first dimension of weights and biases."""


def _grouped(heads: str, *rows: str) -> Form:
    """Parts of these numbers of rows, grouped by head: the rows of the first head of every part, then of the second.

    Args:
        heads: the key of `ModelConfig` that says their number.
    """

    def split(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        count = getattr(dims.model, heads)
        sizes = [dims.sizes[each] // count for each in rows]
        by_head = whole.view(count, -1, *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(by_head, sizes, dim=1)]

    return split


def _gated_qkv(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    """As `QKV`, with gates: published after each query head's rows, in Megatron after all of a KV head's queries."""
    rows, *others = _GATED_ROWS(whole, dims)
    by_head = rows.view(dims.model.num_kv_heads, 2, -1, dims.model.kv_channels, *rows.shape[1:])
    return [by_head.transpose(1, 2).flatten(0, 3), *others]


def _delta(*others: str) -> Form:
    """One tensor with the rows of queries, of keys and of values, then `others`, grouped by key head."""
    grouped = _grouped("linear_num_key_heads", "delta_keys", "delta_keys", "delta_values", *others)

    def split(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        parts = grouped(whole, dims)
        return [torch.cat(list(parts[:3])), *parts[3:]]

    return split


def _mamba(*rows: str, order: Sequence[int]) -> Form:
    """One tensor with these numbers of rows one after another. In Megatron they have another order in every group."""
    grouped = _grouped("linear_num_key_heads", *(rows[i] for i in order))

    def split(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        found = dict(zip(order, grouped(whole, dims), strict=True))
        return [torch.cat([found[i] for i in range(len(rows))])]

    return split


def _taps(rows: Form) -> Form:
    """The taps of a convolution's channels, published as `[c, 1, taps]`."""
    return lambda whole, dims: [rows(whole, dims)[0].unsqueeze(1)]


def _transposed_experts(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    """A published tensor with the transposed weights of all experts, `[E, in, out]`, or their biases, `[E, out]`."""
    return (whole.transpose(1, 2) if whole.ndim == 3 else whole,)


def _interleaved_experts(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    """The same with columns of the gate and of the up projection that alternate along `out`."""
    (part,) = _transposed_experts(whole, dims)
    return (torch.stack(part.chunk(2, dim=-1), dim=-1).flatten(-2),)


def _experts(form: Form) -> Form:
    """A parameter of all experts, `[E, ...]`. Each expert has the published tensors of `form`."""
    return lambda whole, dims: [part for expert in whole for part in form(expert, dims)]


def _unchanged(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    return (whole,)


def _gate_up(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    """The rows of a gated MLP's gate, then its up projection's."""
    return whole.chunk(2)


def _vocab(whole: Tensor, dims: Dims) -> Sequence[Tensor]:
    """A row for every token, padded with zeros to the rows of Megatron's embedding."""
    return (whole[: dims.vocab],)


UNCHANGED, GATE_UP, VOCAB, GATED_QKV = _unchanged, _gate_up, _vocab, _gated_qkv
# Megatron groups rows by KV head: its queries, its key, its value.
QKV = _grouped("num_kv_heads", "query", "key_value", "key_value")
_GATED_ROWS = _grouped("num_kv_heads", "queries_and_gates", "key_value", "key_value")
# Of gated delta nets: published as one projection with the rows of each key head together, and one of gates.
DELTA = _grouped("linear_num_key_heads", "delta_qkvz", "delta_gates")
# The same published as four projections: queries, keys and values; output gates; each of the two gates of the rule.
SEPARATE_DELTA = _delta("delta_values", "delta_heads", "delta_heads")
DELTA_CONVOLUTION = _taps(_delta())
# Of Mamba-2: one tensor with gates, x, B, C and time steps; the convolution's has x, B and C.
MAMBA = _mamba("delta_values", "delta_values", "delta_keys", "delta_keys", "delta_heads", order=(3, 2, 1, 0, 4))
MAMBA_BIAS = _mamba("delta_values", "delta_keys", "delta_keys", order=(2, 1, 0))
MAMBA_CONVOLUTION = _taps(MAMBA_BIAS)
EXPERTS, EXPERTS_GATE_UP = _experts(UNCHANGED), _experts(GATE_UP)
TRANSPOSED_EXPERTS, TRANSPOSED_EXPERTS_GATE_UP = _transposed_experts, _interleaved_experts


@dataclass(frozen=True)
class Weight:
    """A parameter, or with `{layer}` in its name one of every layer, and the published tensors that it consists of.

    `name` is that in Megatron's distributed checkpoints, the same for local and TransformerEngine layers: a layer's
    input norm is `…self_attention.linear_qkv.layer_norm_weight`, the norm before its MLP
    `…mlp.linear_fc1.layer_norm_weight`.
    """

    name: str
    published: tuple[str, ...]  # names in safetensors files; a tensor belongs to one weight
    shape: tuple[str, ...]  # of the parameter, over all tensor-parallel ranks, as names in `Dims.sizes`
    form: Form = UNCHANGED  # how the parameter consists of the published tensors
    in_expert_layers: bool | None = None  # True: only layers of experts have it; False: only dense layers; None: all
    in_recurrent_layers: bool | None = None  # the same of recurrent layers, and of layers with attention
    stacked: str | None = None  # the published name of the parameter as it is, in files that do not divide it by expert

    def found_in(self, names: Iterable[str]) -> Weight:
        """Return this weight as files with tensors of these names have it."""
        if self.stacked is None or not any(name.endswith(self.stacked.partition(_LAYER)[2]) for name in names):
            return self
        return replace(self, published=(self.stacked,), form=UNCHANGED)

    @property
    def per_layer(self) -> bool:
        return _LAYER in self.name

    def place(self, layer: int, dims: Dims) -> tuple[str, int | None]:
        """Return the name in a checkpoint, and the layer if the layers are slices of one tensor.

        With experts or recurrent layers they are not: layers may differ, and Megatron saves each under its number.
        """
        if dims.model.num_moe_experts is not None or dims.model.recurrent:
            return self.name.replace(_LAYER, str(layer)), None
        return self.name, layer if self.per_layer else None

    def published_names(self, layer: int) -> tuple[str, ...]:
        """Return the published names for a layer, counted from 0."""
        return tuple(name.replace(_LAYER, str(layer)) for name in self.published)

    def full_shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims.sizes[name] for name in self.shape)

    def published_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        parts = self.form(torch.empty(self.full_shape(dims), device="meta"), dims)
        return tuple(tuple(part.shape) for part in parts)

    def joined(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """Return the parameter that published tensors make up: `form` transposed, which moves values unchanged."""
        whole = torch.empty(self.full_shape(dims), dtype=parts[0].dtype, requires_grad=True)
        with torch.enable_grad():
            return torch.autograd.grad(self.form(whole, dims), whole, parts)[0].contiguous()


def in_file_order(weights: Sequence[Weight], model: ModelConfig) -> list[tuple[Weight, int]]:
    """Return all weights of a model with their layers, in the usual order of files: first those outside of layers,
    with layer 0, then layer by layer."""
    return [(weight, 0) for weight in weights if not weight.per_layer] + [
        (weight, layer)
        for layer, (experts, recurrent) in enumerate(zip(model.expert_layers, model.recurrent_layers, strict=True))
        for weight in weights
        if weight.per_layer
        and weight.in_expert_layers in (None, experts)
        and weight.in_recurrent_layers in (None, recurrent)
    ]
