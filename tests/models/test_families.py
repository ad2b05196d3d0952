"""Every field of a `config.json` is converted or refused, and weights convert to Megatron's and back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from megatron_longctx.config import ModelConfig, RopeScaling
from megatron_longctx.models import FAMILIES, Dims, Family, family_of_model, family_of_source, in_file_order
from megatron_longctx.models.fields import HARMLESS
from megatron_longctx.models.weights import GATE_UP, QKV, VOCAB, Weight

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    rope_base=1e4,
)
DELTA_NETS: dict[str, Any] = {
    "qk_norm": True, "zero_centered_norms": True, "attention_output_gate": True, "rotary_percent": 0.5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
SHARED_EXPERT: dict[str, Any] = {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 12}
# Keys that a model of the family must have, keyed by family.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"window": 7},
    "gemma3_text": {
        "activation": "geglu", "zero_centered_norms": True, "qk_norm": True, "post_norms": True,
        "scale_embedding": True, "attention_scale": 48**-0.5, "window": 7, "window_pattern": 2, "window_rope_base": 1e3,
        "rope_scaling": RopeScaling("linear", 8.0),
    },
    "mixtral": {"num_moe_experts": 3},
    "qwen3_moe": {
        "qk_norm": True, "num_moe_experts": 3, "moe_ffn_hidden_size": 20, "moe_aux_loss_coeff": 0.1,
        "moe_layer_freq": "[1,0,1]",
    },
    "qwen3_next": {
        **DELTA_NETS, **SHARED_EXPERT, "num_moe_experts": 3, "moe_ffn_hidden_size": 20, "moe_layer_freq": "[1,0,1]",
        "pattern": "GE*-GE",
    },
    "qwen3_5_text": {**DELTA_NETS, "pattern": "G-*-G-"},
    "qwen3_5_moe_text": {
        **DELTA_NETS, **SHARED_EXPERT, "num_moe_experts": 3, "moe_ffn_hidden_size": 24, "pattern": "GEGE*E",
    },
    "bamba": {
        "pattern": "M-*-M-", "rotary_percent": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
        "linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
    },
    "gpt_oss": {
        "activation": "swiglu_oai", "bias": True, "sinks": "learnable", "num_moe_experts": 3, "moe_router_topk": 3,
        "window": 7, "window_pattern": 2,
    },
}  # fmt: skip
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tie_embeddings": True, "rope_base": 5e5, "norm_epsilon": 1e-6},
    {"num_kv_heads": 1, "head_dim": 16, "init_std": 0.01},
)
BY_NAME = {family.name: family for family in FAMILIES}
by_name = pytest.mark.parametrize("family", FAMILIES, ids=BY_NAME)


def model_of(family: Family, **changes: Any) -> ModelConfig:
    return replace(MODEL, name=family.name, **OF_FAMILY[family.name], **changes)


def config_of(family: Family, **fields: Any) -> dict[str, Any]:
    return family.config_of(model_of(family), 50, 64) | fields


@by_name
@pytest.mark.parametrize("changes", CHANGES)
def test_a_model_converts_to_fields_and_back(family: Family, changes: dict[str, Any]) -> None:
    model = model_of(family, **changes)
    config = family.config_of(model, 50, 4096)
    assert family.model_of(config) == (model, 4096)
    assert family_of_source(config) is family is family_of_model(model)


@by_name
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu2"}, r"hidden_act=relu2: expected silu"),
        ({"logit_scale": 0.5}, r"logit_scale=0\.5: expected fields that this family is known to have"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}: expected fields"),
        ({"hidden_size": None}, r"hidden_size=None: expected an integer"),
        ({"hidden_size": "32"}, r"hidden_size=32: expected an integer"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings=no: expected true or false"),
        ({"rms_norm_eps": 2}, r"model\.norm_epsilon=2: expected at least"),
        ({"vocab_size": 0}, r"model\.vocab_size=0: expected null or at least 1"),
        ({"max_position_embeddings": -1}, r"data\.seq_length=-1: expected at least 1"),
    ],
)
def test_fields_that_would_change_results_are_refused(family: Family, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.model_of(config_of(family, **fields))


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each.name != "gemma3_text"], ids=lambda each: each.name
)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "wavy", "factor": 2.0}}, r"config\.json: rope_scaling=\{'rope_type': 'wavy'"),
        ({"rope_parameters": {"rope_type": "wavy", "rope_theta": 1e4}}, r"config\.json: rope_parameters=\{'rope_type'"),
        ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}, r"rope_theta=10000\.0: expected 20000\.0"),
        ({"rope_scaling": "linear"}, r"rope_scaling=linear: expected an object"),
    ],
)
def test_unsupported_rope_is_refused(family: Family, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.model_of(config_of(family, **fields))


@by_name
def test_harmless_fields_and_nulls_are_ignored(family: Family) -> None:
    more = {"torch_dtype": "bfloat16", "bos_token_id": 1, "use_cache": False, "a_later_field": None}
    assert family.model_of(config_of(family, **more)) == family.model_of(config_of(family))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True: expected False, as mlp_bias"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2: expected 1"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1: expected 0.0"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True: expected False"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* expected .*full"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: expected 1\.0"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True: expected False"),
        ("qwen3", {"head_dim": None}, "head_dim=None: expected an integer"),
        ("mistral", {"sliding_window": 0}, r"model\.window=-1: expected null or at least 1"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: expected None. Soft-capping"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: expected None. Soft-capping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: expected False"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: expected a number above 0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window=None: expected a number with layers of sliding"),
        ("gemma3_text", {"sliding_window_pattern": 2, "_sliding_window_pattern": 3},
         "_sliding_window_pattern=3: expected 2. Set both to the same value"),
        ("gemma3_text", {"rope_theta": 1e4, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
         "rope_theta=10000.0: expected 1000000.0. Set both to the same value"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
                         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
         "rope_scaling=.*: expected the values of rope_parameters, .*8.0.* Set both to the same value"),
        ("gemma3_text", {"layer_types": ["wide"] * 3}, "layer_types=wide: expected full_attention and sliding"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types=.*: expected 3, as num_hidden_layers"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "layer_types=.*: expected sliding_attention in all layers, or in all but every k-th"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta=10000.0: .*full_atten"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "rope_parameters.full_attention=5: expected obj"),
        ("llama", {"rope_scaling": {"rope_type": ["linear"]}}, r"rope_scaling=.*: expected rope_type default or"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "wavy"}}, "rope_parameters.full_attention=.*wavy"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "rope_parameters.sliding_attention=.*: expected rope_type default"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts=None: expected an integer"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers=\[0, 1, 2\]: expected one that leaves a"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, r"mlp_only_layers=\['0'\]: expected numbers of layers"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step=4: expected one that leaves a layer of experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: expected at least 1"),
        ("qwen3_next", {"layer_types": ["mamba"] * 3}, "layer_types=.*: expected 3 of linear_attention and full_att"),
        ("qwen3_next", {"layer_types": [["full_attention"]] * 3}, "layer_types=.*: expected 3 of linear_attention and"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types=full_attention: expected a layer of"),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0: expected at"),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.5: expected 0.2"),
        ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim=None: expected an integer"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False: expected True"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type=sigmoid: expected swish"),
        ("qwen3_5_text", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: expected \[\]"),
        ("qwen3_5_text", {"text_config": {"num_hidden_layers": 9}}, "text_config.num_hidden_layers=9: expected 3, as"),
        ("qwen3_5_text", {"audio_config": {}}, "audio_config={}: expected fields that this family is known to have"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False: expected True"),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: expected 1"),
        ("qwen3_5_moe_text", {"moe_intermediate_size": None}, "moe_intermediate_size=None: expected an integer"),
        ("bamba", {"mamba_d_head": 16}, "mamba_d_head=16: expected mamba_expand x hidden_size / mamba_n_heads = 64"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices=.3.: expected numbers below num_hidden_layers=3"),
        ("bamba", {"attn_layer_indices": [0, 1, 2]}, "attn_layer_indices=.*, but not all of them"),
        ("bamba", {"time_step_limit": [0.1, 1.0]}, "time_step_limit=.*: expected .0.0, inf."),
        ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor=1.0: expected 0.5"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0: expected 7.0"),
        ("gpt_oss", {"layer_types": None}, "layer_types=None: expected 3, as num_hidden_layers"),
    ],
)  # fmt: skip
def test_fields_of_single_families_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BY_NAME[name].model_of(config_of(BY_NAME[name], **fields))


# Classes of `transformers`, and the fields that have no effect beside the others of a default configuration.
PUBLISHED: dict[str, tuple[Any, set[str]]] = {
    "llama": (LlamaConfig, set()),
    "qwen2": (Qwen2Config, {"max_window_layers", "sliding_window"}),
    "qwen3": (Qwen3Config, {"max_window_layers", "sliding_window"}),
    "mistral": (MistralConfig, set()),
    "gemma3_text": (Gemma3TextConfig, {"_sliding_window_pattern"}),
    "mixtral": (MixtralConfig, {"output_router_logits"}),
    "qwen3_moe": (Qwen3MoeConfig, {"output_router_logits", "max_window_layers", "sliding_window"}),
    "qwen3_next": (Qwen3NextConfig, {"output_router_logits", "full_attention_interval"}),
    "qwen3_5_text": (Qwen3_5TextConfig, set()),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, {"output_router_logits"}),
    "gpt_oss": (GptOssConfig, {"output_router_logits"}),
    "bamba": (BambaConfig, {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
}


@by_name
def test_every_field_of_transformers_is_converted_harmless_or_refused(family: Family) -> None:
    """Another value of a field that is not harmless changes the model, or is refused by the field's name."""
    published, without_effect = PUBLISHED[family.name]
    default = published().to_dict() | {"architectures": [family.architectures[0]]}
    model = family.model_of(default)
    for name in default.keys() - HARMLESS - without_effect:
        try:
            other = family.model_of(default | {name: _other_value(default[name])})
        except ValueError as error:
            assert name in str(error) or "model." in str(error), (name, error)
        else:
            assert other != model, name


@by_name
def test_absent_fields_have_the_defaults_of_transformers(family: Family) -> None:
    published, _ = PUBLISHED[family.name]
    default = published().to_dict() | {"architectures": [family.architectures[0]]}
    for name in default.keys() - HARMLESS:
        fields = {key: value for key, value in default.items() if key != name}
        try:
            model = family.model_of(fields)
        except ValueError as error:
            assert "=None: expected" in str(error), (name, error)
        else:
            assert model == family.model_of(published.from_dict(fields).to_dict()), name


def test_both_names_of_a_field_may_have_the_same_value() -> None:
    """`transformers` 5 reads the first files of Gemma 3, and writes them with both names."""
    old = {"num_hidden_layers": 6, "sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "architectures": ["Gemma3ForCausalLM"]}  # fmt: skip
    written = Gemma3TextConfig.from_dict(old).to_dict()
    assert written["sliding_window_pattern"] == written["_sliding_window_pattern"] == 3
    model, _ = BY_NAME["gemma3_text"].model_of(written)
    assert (model.window_pattern, model.rope_base, model.window_rope_base) == (3, 2e6, 3e4)
    assert model.rope_scaling.factor == 8.0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_fields_of_a_text_model_are_taken_out_of_those_of_one_for_images(name: str, tied: bool) -> None:
    """The fields are those of published files, also those that `transformers` does not know."""
    family, (config, _) = BY_NAME[name], PUBLISHED[name]
    text = config(num_hidden_layers=8, partial_rotary_factor=0.25).to_dict()
    published = text | {
        "attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": [], "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "full_attention_interval": 4,
        "intermediate_size": text.get("intermediate_size", 512), "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 1e7, "rope_type": "default"},
    }  # fmt: skip
    del published["tie_word_embeddings"]
    whole = {
        "architectures": [family.architectures[1]], "model_type": name.removesuffix("_text"), "text_config": published,
        "vision_config": {"depth": 27}, "image_token_id": 1, "tie_word_embeddings": tied, "language_model_only": False,
    }  # fmt: skip
    assert family_of_source(whole) is family
    model, length = family.model_of(whole)
    assert (model, length) == family.model_of(published | {"tie_word_embeddings": tied})
    assert model.pattern == ("GEGEGE*E" if "moe" in name else "G-G-G-*-") and model.tie_embeddings is tied
    assert (model.rope_base, model.rotary_percent, model.rope_scaling.kind) == (1e7, 0.25, "none")


def _other_value(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value is not True
    if isinstance(value, dict):
        return {name: _other_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_other_value(value[0]), *value[1:]] if value else [0]
    return value + "x" if isinstance(value, str) else 2 * value + 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["FooForCausalLM"]}, "Models of other architectures"),
        ({"model_type": "foo"}, "Models of other architectures"),
        ({}, "Models of other architectures"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "They cap logits"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Its images are not supported"),
        ({"architectures": ["NemotronHForCausalLM"]}, "Its layers have a mixer or an MLP alone"),
        ({"model_type": "kimi_linear"}, "It has latents .MLA. beside its recurrent layers"),
        ({"architectures": ["OlmoHybridForCausalLM"]}, "Its layers of attention have norms of whole queries and keys"),
    ],
)
def test_unknown_architectures_are_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    message = rf"architectures=.*: expected one of BambaForCausalLM, Gemma3.*, GptOssFor.*LlamaForCausalLM, .* {reason}"
    with pytest.raises(ValueError, match=message):
        family_of_source(config)


def test_architectures_that_are_no_list_are_refused() -> None:
    with pytest.raises(ValueError, match="architectures=LlamaForCausalLM: expected a list"):
        family_of_source({"architectures": "LlamaForCausalLM"})


def test_a_model_that_no_family_can_describe_is_refused_by_the_key() -> None:
    gpt2 = replace(MODEL, name="x", normalization="layernorm", activation="gelu", position_embedding="learned")
    with pytest.raises(ValueError, match=r"model=x: expected one that a family .*model\.normalization=layernorm"):
        family_of_model(gpt2)
    for key, value in (("window", 7), ("sinks", "learnable"), ("bias", True)):
        with pytest.raises(ValueError, match=rf"model\.{key}={value}: expected"):
            BY_NAME["qwen2"].config_of(replace(model_of(BY_NAME["qwen2"]), **{key: value}), 50, 64)
    mixed = replace(model_of(BY_NAME["mixtral"]), moe_first_dense_layers=1)
    with pytest.raises(ValueError, match=r"model\.moe_layer_freq=\[0,1,1\]: expected \[1,1,1\] in a published model"):
        BY_NAME["mixtral"].config_of(mixed, 50, 64)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dense", [[], [1], [4, 0, 9]])
def test_layers_of_experts_are_those_of_transformers(step: int, dense: list[int]) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    config = Qwen3MoeConfig(
        num_hidden_layers=6, decoder_sparse_step=step, mlp_only_layers=dense, vocab_size=50, num_experts=2,
        num_experts_per_tok=2, moe_intermediate_size=4, architectures=["Qwen3MoeForCausalLM"], **sizes,
    )  # fmt: skip
    with torch.device("meta"):
        published = Qwen3MoeForCausalLM(config)
    family = BY_NAME["qwen3_moe"]
    model, length = family.model_of(config.to_dict())
    assert list(model.expert_layers) == [hasattr(layer.mlp, "experts") for layer in published.model.layers]
    assert family.model_of(family.config_of(model, 50, length)) == (model, length)


@by_name
def test_weights_use_every_published_tensor_once_and_convert_back(family: Family) -> None:
    for changes in CHANGES:
        dims = Dims(replace(model_of(family, **changes), vocab_size=64), vocab=50)
        weights = in_file_order(family.weights(dims.model), dims.model)
        names = [name for weight, layer in weights for name in weight.published_names(layer)]
        assert len(names) == len(set(names))
        for weight, _ in weights:
            assert all(("{layer}" in name) == weight.per_layer for name in weight.published)
            # any bits: also negative zeros, infinities and NaNs
            bits = [torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for shape in weight.published_shapes(dims)]
            assert len(bits) == len(weight.published)
            whole = weight.joined([part.view(torch.float32) for part in bits], dims)
            assert tuple(whole.shape) == weight.full_shape(dims) and whole.is_contiguous()
            again = [part.contiguous().view(torch.int32) for part in weight.form(whole, dims)]
            assert all(torch.equal(a, b) for a, b in zip(again, bits, strict=True)), weight.name


def test_forms_arrange_rows_as_megatron_does() -> None:
    dims = Dims(replace(MODEL, hidden_size=8, vocab_size=4), vocab=3)  # 4 query and 2 KV heads of 2 elements
    q, k, v = (torch.arange(*rows).float() for rows in ((8,), (8, 12), (12, 16)))
    qkv = Weight("x", ("q", "k", "v"), ("qkv",), QKV).joined([q, k, v], dims)
    assert qkv.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    table = Weight("x", ("x",), ("padded_vocab", "one"), VOCAB).joined([torch.ones(3, 1)], dims)
    assert table.tolist() == [[1], [1], [1], [0]]
    assert [part.tolist() for part in GATE_UP(torch.arange(4), dims)] == [[0, 1], [2, 3]]
