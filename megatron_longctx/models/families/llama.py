"""Llama 2, 3 and what has their form: SmolLM2, TinyLlama, Yi and others."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ...errors import refuse
from ..experts import MLP
from ..family import Family, Weight
from ..fields import Fields
from ..forms import GATE_UP, QKV, VOCAB
from ..rope import read_rope, write_rope

ATTENTION = "decoder.layers.{layer}.self_attention."
THEIR_ATTENTION, THEIR_MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}


def read_common(given: Fields, hidden_act: str = "silu", norm_epsilon: float = 1e-6) -> dict[str, Any]:
    """Keys of `ModelConfig` that decoders of Llama's form share: all but biases and RoPE.

    Args:
        hidden_act: the family's.
        norm_epsilon: where the file does not say.
    """
    hidden, heads = given.need("hidden_size"), given.need("num_attention_heads")
    given.only("hidden_act", hidden_act)
    given.only("pretraining_tp", 1)
    given.only("attention_dropout", 0.0)
    head_dim = given.take("head_dim", None, int)
    return {
        "num_layers": given.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": given.take("num_key_value_heads", heads),
        "head_dim": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "ffn_hidden_size": given.need("intermediate_size"),
        "normalization": "rmsnorm",
        "norm_epsilon": given.take("rms_norm_eps", norm_epsilon),
        "activation": _GATED[hidden_act],
        "tie_embeddings": given.take("tie_word_embeddings", False),
    }


def write_common(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_common` takes."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.kv_channels,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": next((name for name, ours in _GATED.items() if ours == model.activation), "silu"),
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
    }


def common_weights(model: ModelConfig) -> list[Weight]:
    """Of decoders of Llama's form, without biases."""
    qkv = tuple(f"{THEIR_ATTENTION}{name}_proj.weight" for name in "qkv")
    gate_up = (f"{THEIR_MLP}gate_proj.weight", f"{THEIR_MLP}up_proj.weight")
    weights = [
        Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("padded_vocab", "hidden"), VOCAB),
        Weight(
            f"{ATTENTION}linear_qkv.layer_norm_weight", ("model.layers.{layer}.input_layernorm.weight",), ("hidden",)
        ),
        Weight(f"{ATTENTION}linear_qkv.weight", qkv, ("qkv", "hidden"), QKV),
        Weight(f"{ATTENTION}linear_proj.weight", (f"{THEIR_ATTENTION}o_proj.weight",), ("hidden", "query")),
        Weight(
            f"{MLP}linear_fc1.layer_norm_weight",
            ("model.layers.{layer}.post_attention_layernorm.weight",),
            ("hidden",),
        ),
        Weight(f"{MLP}linear_fc1.weight", gate_up, ("gate_up", "hidden"), GATE_UP),
        Weight(f"{MLP}linear_fc2.weight", (f"{THEIR_MLP}down_proj.weight",), ("hidden", "ffn")),
        Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),
    ]
    if not model.tie_embeddings:
        weights.append(Weight("output_layer.weight", ("lm_head.weight",), ("padded_vocab", "hidden"), VOCAB))
    return weights


def qkv_bias() -> Weight:
    return Weight(
        f"{ATTENTION}linear_qkv.bias", tuple(f"{THEIR_ATTENTION}{name}_proj.bias" for name in "qkv"), ("qkv",), QKV
    )


def _read(given: Fields) -> dict[str, Any]:
    biases = given.take("attention_bias", False), given.take("mlp_bias", False)
    if biases[0] != biases[1]:
        raise refuse(
            "config.json: attention_bias", biases[0], f"{biases[1]}, as mlp_bias", "Only both, or neither, are served."
        )
    return {**read_common(given), **read_rope(given), "bias": biases[0]}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common(model),
        **write_rope(model),
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "pretraining_tp": 1,
    }


def _weights(model: ModelConfig) -> list[Weight]:
    weights = common_weights(model)
    if model.bias:
        weights += [
            qkv_bias(),
            Weight(f"{ATTENTION}linear_proj.bias", (f"{THEIR_ATTENTION}o_proj.bias",), ("hidden",)),
            Weight(
                f"{MLP}linear_fc1.bias",
                (f"{THEIR_MLP}gate_proj.bias", f"{THEIR_MLP}up_proj.bias"),
                ("gate_up",),
                GATE_UP,
            ),
            Weight(f"{MLP}linear_fc2.bias", (f"{THEIR_MLP}down_proj.bias",), ("hidden",)),
        ]
    return weights


FAMILY = Family("llama", ("LlamaForCausalLM",), _read, _write, _weights)
