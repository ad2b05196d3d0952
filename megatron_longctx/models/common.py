"""Fields and weights that several families share. "read" converts fields to keys of `ModelConfig`, "write" back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from .fields import RESTORE, Fields, refuse_field
from .rope_frequencies import read_rope, write_rope
from .weights import EXPERTS, EXPERTS_GATE_UP, GATE_UP, QKV, VOCAB, Form, Weight

ATTENTION, MLP = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."
PUBLISHED_ATTENTION, PUBLISHED_MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
SLIDING, FULL = "sliding_attention", "full_attention"
_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_DENSE, _EXPERTS = f"{MLP}linear_fc", f"{MLP}experts.experts.linear_fc"


def read(
    fields: Fields,
    hidden_act: str = "silu",
    norm_epsilon: float = 1e-6,
    rope_base: float = 10_000.0,
    partial_rotary: float | None = None,
    width: str = "intermediate_size",
) -> dict[str, Any]:
    """Read the fields that all decoders of Llama's form share: all but biases.

    Args:
        hidden_act: of the family.
        norm_epsilon, rope_base: the defaults.
        partial_rotary: see `read_rope`.
        width: the field with the width of MLPs.
    """
    return {**read_shape(fields, hidden_act, norm_epsilon, width), **read_rope(fields, rope_base, partial_rotary)}


def read_shape(
    fields: Fields, hidden_act: str = "silu", norm_epsilon: float = 1e-6, width: str = "intermediate_size"
) -> dict[str, Any]:
    """Read the same without RoPE."""
    hidden, heads = fields.require("hidden_size"), fields.require("num_attention_heads")
    fields.expect("hidden_act", hidden_act)
    fields.expect("pretraining_tp", 1)
    fields.expect("attention_dropout", 0.0)
    head_dim = fields.get("head_dim", None, int)
    return {
        "num_layers": fields.require("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", heads),
        "head_dim": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "ffn_hidden_size": fields.require(width),
        "normalization": "rmsnorm",
        "norm_epsilon": fields.get("rms_norm_eps", norm_epsilon),
        "activation": _GATED[hidden_act],
        "tie_embeddings": fields.get("tie_word_embeddings", False),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read` reads."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.kv_channels,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": next((name for name, activation in _GATED.items() if activation == model.activation), "silu"),
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(model),
    }


def decoder_weights(model: ModelConfig) -> list[Weight]:
    """Return the weights of a decoder of Llama's form without biases."""
    layer = "model.layers.{layer}."
    qkv = tuple(f"{PUBLISHED_ATTENTION}{name}_proj.weight" for name in "qkv")
    gate_up = (f"{PUBLISHED_MLP}gate_proj.weight", f"{PUBLISHED_MLP}up_proj.weight")
    table = ("padded_vocab", "hidden")
    weights = [
        Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), table, VOCAB),
        Weight(f"{ATTENTION}linear_qkv.layer_norm_weight", (f"{layer}input_layernorm.weight",), ("hidden",)),
        Weight(f"{ATTENTION}linear_qkv.weight", qkv, ("qkv", "hidden"), QKV),
        Weight(f"{ATTENTION}linear_proj.weight", (f"{PUBLISHED_ATTENTION}o_proj.weight",), ("hidden", "query")),
        Weight(f"{_DENSE}1.layer_norm_weight", (f"{layer}post_attention_layernorm.weight",), ("hidden",)),
        Weight(f"{_DENSE}1.weight", gate_up, ("gate_up", "hidden"), GATE_UP),
        Weight(f"{_DENSE}2.weight", (f"{PUBLISHED_MLP}down_proj.weight",), ("hidden", "ffn")),
        Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),
    ]
    if not model.tie_embeddings:
        weights.append(Weight("output_layer.weight", ("lm_head.weight",), table, VOCAB))
    return weights


def repeated(pairs: Sequence[str]) -> str:
    """Return the shortest `ModelConfig.pattern` of layers with these pairs of symbols."""
    count = len(pairs)
    period = next(n for n in range(1, count + 1) if count % n == 0 and [*pairs[:n]] * (count // n) == [*pairs])
    return "".join(pairs[:period])


def beside_recurrent(plain: Sequence[Weight], recurrent: Sequence[Weight]) -> list[Weight]:
    """Return the weights of a model in which some layers are recurrent.

    `plain` are those of the same model with attention in all layers. `recurrent` take the place of attention's in some,
    but for the norm before it.
    """
    norm = f"{ATTENTION}linear_qkv.layer_norm_weight"
    kept = [
        replace(each, in_recurrent_layers=False) if each.name.startswith(ATTENTION) and each.name != norm else each
        for each in plain
    ]
    return [*kept, *(replace(each, in_recurrent_layers=True) for each in recurrent)]


def qkv_bias() -> Weight:
    published = tuple(f"{PUBLISHED_ATTENTION}{name}_proj.bias" for name in "qkv")
    return Weight(f"{ATTENTION}linear_qkv.bias", published, ("qkv",), QKV)


def output_bias() -> Weight:
    return Weight(f"{ATTENTION}linear_proj.bias", (f"{PUBLISHED_ATTENTION}o_proj.bias",), ("hidden",))


def qk_norms() -> list[Weight]:
    return [
        Weight(f"{ATTENTION}{name}_layernorm.weight", (f"{PUBLISHED_ATTENTION}{name}_norm.weight",), ("head",))
        for name in "qk"
    ]


def read_experts(fields: Fields, experts: int) -> dict[str, Any]:
    """Read the fields that models with `experts` experts share."""
    fields.ignore("output_router_logits")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": fields.require("num_experts_per_tok"),
        "moe_aux_loss_coeff": fields.get("router_aux_loss_coef", 0.001),
    }


def write_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_experts` reads."""
    return {"num_experts_per_tok": model.moe_router_topk, "router_aux_loss_coef": model.moe_aux_loss_coeff}


def with_experts(
    weights: list[Weight], router: str, first: tuple[tuple[str, ...], Form], second: tuple[tuple[str, ...], Form]
) -> list[Weight]:
    """Return the weights of a dense model, and for layers of experts those that replace its MLPs.

    Args:
        weights: of the dense model.
        router: the prefix of the published names of the router's tensors.
        first, second: the published names of the experts' two matrices, and their forms.
    """
    norm = next(weight for weight in weights if weight.name == f"{_DENSE}1.layer_norm_weight")
    published, shape = (f"{router}weight",), ("experts", "expert_gate_up", "hidden")
    return [
        *(replace(each, in_expert_layers=False) if each.name.startswith(_DENSE) else each for each in weights),
        replace(norm, name="decoder.layers.{layer}.pre_mlp_layernorm.weight", in_expert_layers=True),
        Weight(f"{MLP}router.weight", published, ("experts", "hidden"), in_expert_layers=True),
        Weight(f"{_EXPERTS}1.weight", first[0], shape, first[1], in_expert_layers=True),
        Weight(f"{_EXPERTS}2.weight", second[0], ("experts", "hidden", "expert_ffn"), second[1], in_expert_layers=True),
    ]


def with_separate_experts(model: ModelConfig, router: str, gate: str, up: str, down: str) -> list[Weight]:
    """Return the weights of a decoder whose experts have separate published tensors, with `{expert}` in their names.

    Later versions of `transformers` also write one tensor for all experts; both forms are read.
    """

    def of_each(*names: str) -> tuple[str, ...]:
        return tuple(name.replace("{expert}", str(i)) for i in range(model.num_moe_experts or 0) for name in names)

    forms = (of_each(gate, up), EXPERTS_GATE_UP), (of_each(down), EXPERTS)
    block = gate.partition("{expert}")[0]
    stacked = {f"{_EXPERTS}1.weight": f"{block}gate_up_proj", f"{_EXPERTS}2.weight": f"{block}down_proj"}
    weights = with_experts(decoder_weights(model), router, *forms)
    return [replace(each, stacked=stacked.get(each.name)) for each in weights]


def require_head_sizes(fields: Fields) -> None:
    """Refuse files without sizes whose defaults in `transformers` belong to one model."""
    fields.require("head_dim")
    fields.require("num_key_value_heads")


def full_attention_only(fields: Fields) -> None:
    """Refuse windows, which `layer_types` may request. `use_sliding_window` is expected to be false."""
    fields.ignore("sliding_window", "max_window_layers")  # without use_sliding_window
    fields.expect("layer_types", [FULL] * len(fields.get("layer_types", [])))


def read_windows(width: int | None, types: Sequence[Any] | None, num_layers: int) -> dict[str, Any]:
    """Convert windows of layers. A published window counts the token itself, ours only the tokens before it.

    `width` is `sliding_window`, None without windows; `types` is `layer_types`. Refuse types that are not known or not
    one per layer, windows without a width, and layers without a window that are not every k-th.
    """
    if types is None or len(types) != num_layers:
        raise refuse_field("layer_types", types, f"{num_layers}, as num_hidden_layers", RESTORE)
    for name in types:
        if name not in (SLIDING, FULL):
            raise refuse_field("layer_types", name, f"{FULL} and {SLIDING}", "Layers of other types are not supported.")
    windowed = [name == SLIDING for name in types]
    if not any(windowed):
        return {"window": None, "window_pattern": None}
    if width is None:
        raise refuse_field("sliding_window", None, f"a number with layers of {SLIDING}", RESTORE)
    pattern = None if all(windowed) else windowed.index(False) + 1
    if pattern is not None and windowed != [bool(number % pattern) for number in range(1, num_layers + 1)]:
        expected = f"{SLIDING} in all layers, or in all but every k-th"
        raise refuse_field("layer_types", list(types), expected, "Other patterns are not supported.")
    return {"window": width - 1, "window_pattern": pattern}


def read_one_window(width: int | None, num_layers: int) -> dict[str, Any]:
    """Convert a window that all layers have, or None."""
    return read_windows(width, [FULL if width is None else SLIDING] * num_layers, num_layers)


def layer_types(model: ModelConfig) -> list[str]:
    """Return `layer_types` as `read_windows` takes it."""
    pattern = model.window_pattern
    return [
        FULL if model.window is None or (pattern is not None and number % pattern == 0) else SLIDING
        for number in range(1, model.num_layers + 1)
    ]


def sliding_window(model: ModelConfig) -> int | None:
    """Return `sliding_window` as `read_windows` takes it."""
    return None if model.window is None else model.window + 1
