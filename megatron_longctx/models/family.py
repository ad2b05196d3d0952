"""What a family says: its fields, and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from ..config import ModelConfig, check_model, check_value, layer_list
from ..errors import refuse
from .fields import Fields
from .forms import PLAIN, Form

# Keys of `ModelConfig` that are no part of the function that a model computes.
_NOT_OF_THE_FUNCTION = (
    *("name", "vocab_multiple", "init_std", "implementation", "head_dim", "vocab_size"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype"),
    *("moe_layer_freq", "moe_first_dense_layers"),  # but which layers they come to
)
_LAYER = "{layer}"


@dataclass(frozen=True)
class Dims:
    """Sizes of a model.

    Args:
        model: with its `vocab_size`: rows of the embedding that this project's model has.
        vocab: rows of the published embedding, at most as many.
    """

    model: ModelConfig
    vocab: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """By the names that `Weight.shape` uses."""
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
            "qkv": query + 2 * key_value,
            "ffn": model.ffn_hidden_size,
            "gate_up": 2 * model.ffn_hidden_size,
            "experts": model.num_moe_experts or 0,
            "expert_ffn": model.expert_width,
            "expert_gate_up": 2 * model.expert_width,
        }


@dataclass(frozen=True)
class Weight:
    """A parameter, or with `{layer}` in its names one of every layer, and the published tensors that it is made of.

    Args:
        ours: its name in Megatron's distributed checkpoints, which is the same for local and TransformerEngine layers:
            a layer's input norm is `…self_attention.linear_qkv.layer_norm_weight`, the norm before its MLP
            `…mlp.linear_fc1.layer_norm_weight`.
        theirs: names in safetensors files. A tensor belongs to one weight.
        shape: of ours, over all tensor-parallel ranks: names in `Dims.sizes`.
        form: how the one is made of the others.
        of_experts: whether it is of layers of experts alone, or of dense ones alone; None: of all layers.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[str, ...]
    form: Form = PLAIN
    of_experts: bool | None = None

    @property
    def of_layers(self) -> bool:
        return _LAYER in self.ours

    def place(self, layer: int, dims: Dims) -> tuple[str, int | None]:
        """Its name in a checkpoint, and the layer where the layers are slices of one tensor.

        With experts they are not: layers may differ, and Megatron saves each under its number.
        """
        if dims.model.num_moe_experts is not None:
            return self.ours.replace(_LAYER, str(layer)), None
        return self.ours, layer if self.of_layers else None

    def names(self, layer: int) -> tuple[str, ...]:
        """`theirs` of a layer, counted from 0."""
        return tuple(name.replace(_LAYER, str(layer)) for name in self.theirs)

    def our_shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims.sizes[name] for name in self.shape)

    def their_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        """Of `theirs`, in order."""
        parts = self.form.split(torch.empty(self.our_shape(dims), device="meta"), dims)
        return tuple(tuple(part.shape) for part in parts)


@dataclass(frozen=True)
class Family:
    """A family of published models.

    Args:
        name: `model_type` in `config.json`.
        architectures: classes of `transformers` that it serves; the first is what exports name.
        read: from fields to keys of `ModelConfig`. It takes every field it knows; `vocab_size`,
            `max_position_embeddings`, `initializer_range` and the harmless ones that all families share are read for
            it. What it leaves unread is refused.
        write: from a model to the fields that `read` takes, with every field that `transformers` would give another
            default. Keys that it cannot express may be ignored: the result is read back and compared.
        weights: of a model of this family.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    weights: Callable[[ModelConfig], Sequence[Weight]]

    def model_of(self, config: Mapping[str, Any]) -> tuple[ModelConfig, int]:
        """The model that a `config.json` describes, and the longest sequence that it was made for.

        Raises:
            ValueError: names the first field that is missing, that is not known, or whose value is not served.
        """
        given = Fields(config)
        vocab_size, seq_length = given.need("vocab_size"), given.need("max_position_embeddings")
        found = {"name": self.name, "vocab_size": vocab_size, "init_std": given.take("initializer_range", 0.02)}
        found |= self.read(given)
        given.finish()
        model = ModelConfig(**found)
        check_model(model)
        check_value("data.seq_length", seq_length)
        return model, seq_length

    def config_of(self, model: ModelConfig, vocab_size: int, seq_length: int) -> dict[str, Any]:
        """The `config.json` of a model. vocab_size: rows of the published embedding.

        Raises:
            ValueError: names a key of the model that this family has no field for.
        """
        written = {
            "architectures": [self.architectures[0]],
            "model_type": self.name,
            "vocab_size": vocab_size,
            "max_position_embeddings": seq_length,
            "initializer_range": model.init_std,
            **self.write(model),
        }
        back, _ = self.model_of(written)
        for key, value in _function(model).items():
            if _function(back)[key] != value:
                expected = f"{_function(back)[key]} in a published model of the family {self.name}"
                raise refuse(f"model.{key}", value, expected, "Its config.json has no field for it.")
        return written


def every(weights: Sequence[Weight], model: ModelConfig) -> list[tuple[Weight, int]]:
    """All weights of a model, each with its layer: what is outside of layers with 0, then layer by layer, as files
    mostly have them."""
    return [(weight, 0) for weight in weights if not weight.of_layers] + [
        (weight, layer)
        for layer, experts in enumerate(model.expert_layers)
        for weight in weights
        if weight.of_layers and weight.of_experts in (None, experts)
    ]


def require_same_function(model: ModelConfig, published: ModelConfig, whose: str) -> None:
    """Refuse settings by which weights would compute something else than they were published for.

    Raises:
        ValueError: names the key.
    """
    for key, value in _function(published).items():
        if (given := _function(model)[key]) != value:
            remedy = "Leave it out; training that starts from these weights may change RoPE."
            raise refuse(f"model.{key}", given, f"{value}, as {whose}", remedy)


def _function(model: ModelConfig) -> dict[str, Any]:
    """The keys by which a model computes."""
    plain = replace(model, head_dim=model.kv_channels)
    names = [field.name for field in fields(ModelConfig) if field.name not in _NOT_OF_THE_FUNCTION]
    return {name: getattr(plain, name) for name in names} | {
        "head_dim": plain.head_dim,
        "moe_layer_freq": layer_list(model.expert_layers),
    }
