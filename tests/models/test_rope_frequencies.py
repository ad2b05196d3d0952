"""RoPE's frequencies equal those of `transformers` to the last bit; unsupported scaling is refused."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_longctx.config import Config, ModelConfig, RopeScaling
from megatron_longctx.models import Fields, read_rope, write_rope
from megatron_longctx.models.rope_frequencies import frequencies, frequencies_of
from tests.shared.training import changed

LENGTH = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "linear", "factor": 3.3},
    {**LLAMA3, "factor": 8.0, LENGTH: 8192},
    {**LLAMA3, "factor": 32.0, LENGTH: 8192},
    {**LLAMA3, "factor": 5.5, LENGTH: 100, "high_freq_factor": 7.5},
    {**YARN, "factor": 4.0, LENGTH: 32768},
    {**YARN, "factor": 32.0, LENGTH: 4096, "truncate": False},
    {**YARN, "factor": 16.0, LENGTH: 2048, "beta_fast": 64.0, "beta_slow": 2.0},
    {**YARN, "factor": 40.0, LENGTH: 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "factor": 40.0, LENGTH: 4096, "mscale": 0.707},
    {**YARN, "factor": 4.0, LENGTH: 4096, "attention_factor": 1.25},
    {**YARN, "factor": 1.0, LENGTH: 4096, "beta_fast": None},
    {**YARN, "factor": 2.0, LENGTH: 8},
]
BARE = {"max_position_embeddings": 2048}


def read(parameters: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**read_rope(Fields({**BARE, "rope_parameters": parameters})))


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    for base in (10_000.0, 500_000.0, 150_000.0):
        for dim in (2, 16, 64, 128, 256):
            given = {**parameters, "rope_theta": base}
            config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_parameters=dict(given))
            expected = LlamaRotaryEmbedding(config)
            model = read(given)
            actual = frequencies(model.rope_scaling, model.rope_base, dim)
            assert actual.inverse.dtype == torch.float32 and torch.equal(actual.inverse, expected.inv_freq)
            assert actual.attention_factor == expected.attention_scaling
            assert ModelConfig(**read_rope(Fields(BARE | write_rope(model)))) == model, "there and back"


@pytest.mark.parametrize(("factor", "times"), [(2.0, 2), (2.0, 4), (8.0, 8), (1.5, 3)])
def test_ntk_is_dynamic_scaling_at_a_fixed_length(factor: float, times: int) -> None:
    for base, dim in ((10_000.0, 64), (500_000.0, 128)):
        given = {"rope_type": "dynamic", "factor": factor, "rope_theta": base}
        config = LlamaConfig(
            hidden_size=dim, num_attention_heads=1, max_position_embeddings=4096, rope_parameters=given
        )
        expected, stretch = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=times * 4096)
        ntk = RopeScaling("ntk", factor=factor * times - (factor - 1))
        actual = frequencies(ntk, base, dim)
        assert torch.equal(actual.inverse, expected) and actual.attention_factor == stretch == 1
        assert not torch.equal(actual.inverse, frequencies(RopeScaling(), base, dim).inverse)
    with pytest.raises(ValueError, match=r"model\.rope_scaling\.kind=ntk: expected none, linear, llama3 or yarn"):
        write_rope(ModelConfig(rope_scaling=ntk))


def test_layers_with_a_window_keep_their_own_base() -> None:
    model = ModelConfig(window=4, rope_base=1e6, window_rope_base=1e4, rope_scaling=RopeScaling("linear", 8.0))
    everywhere, windowed = frequencies_of(model)
    assert everywhere.equals(frequencies(RopeScaling("linear", 8.0), 1e6, 32))
    assert windowed.equals(frequencies(RopeScaling(), 1e4, 32))
    everywhere, windowed = frequencies_of(ModelConfig(window=4, rope_scaling=RopeScaling("linear", 8.0)))
    assert windowed is everywhere


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope_parameters=\{'rope_type': 'dynamic'.*expected rope_type def"),
        ({"rope_type": "longrope"}, r"rope_parameters=\{'rope_type': 'longrope'"),
        ({"rope_type": "default", "factor": 2.0}, r"rope_parameters\.factor=2\.0: expected no such parameter with"),
        ({"partial_rotary_factor": 0.5}, r"rope_parameters\.partial_rotary_factor=0\.5: expected no such parameter"),
        ({"rope_type": "linear"}, r"rope_parameters\.factor=None: expected a number with rope_type linear"),
        ({"rope_type": "linear", "factor": "2"}, r"rope_parameters\.factor=2: expected a number"),
    ],
)
def test_unsupported_scaling_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({"rope_theta": 1e4, **parameters})


def test_the_original_length_is_where_transformers_looks_for_it() -> None:
    """In the file itself, else in the parameters, else the longest sequence."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    for parameters, top, length in (
        (yarn, {}, 2048),
        ({**yarn, LENGTH: 512}, {}, 512),
        ({**yarn, LENGTH: 512}, {LENGTH: 256}, 256),
    ):
        scaling = read_rope(Fields({**BARE, **top, "rope_parameters": parameters}))["rope_scaling"]
        assert scaling.original_length == length
        config = LlamaConfig(max_position_embeddings=2048, rope_parameters=dict(parameters))
        for key, value in top.items():
            setattr(config, key, value)
        config.standardize_rope_params()
        assert config.rope_parameters[LENGTH] == length


@pytest.mark.parametrize(
    ("scaling", "model", "message"),
    [
        ({"factor": 2.0}, {}, r"factor=2.0: expected 1.0 with .*kind=none. Only linear"),
        ({"kind": "linear", "original_length": 64}, {}, r"_length=64: expected null with .*linear. Only llama3 and"),
        ({"kind": "ntk", "low_freq_factor": 2.0}, {}, r"low_freq_factor=2.0: expected 1.0 with .*kind=ntk. Only lla"),
        ({"kind": "linear", "truncate": False}, {}, r"truncate=False: expected true with .*kind=linear. Only yarn"),
        ({"kind": "llama3"}, {}, r"original_length=None: expected a number with model.rope_scaling.kind=llama3"),
        ({"kind": "llama3", "original_length": 8, "high_freq_factor": 1.0}, {}, r"high_freq_factor=1.0: expected more"),
        ({"kind": "yarn", "original_length": 8, "beta_slow": 32.0}, {}, r"beta_fast=32.0: expected more than"),
        ({"kind": "yarn", "original_length": 8}, {"rope_base": 1.0}, r"model.rope_base=1.0: expected more than 1 with"),
        ({"kind": "ntk"}, {"head_dim": 2}, r"model.head_dim=2: expected at least 4 with"),
        ({"kind": "linear"}, {"position_embedding": "learned"}, r"kind=linear: expected none with model.position_em"),
        ({}, {"window_rope_base": 1e4}, r"window_rope_base=10000.0: expected null with model.window=null"),
    ],
)
def test_wrong_settings_are_refused(scaling: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(
            Config(), {"model.rope_scaling": RopeScaling(**scaling)} | {f"model.{key}": model[key] for key in model}
        )
