"""RoPE's frequencies: those of `transformers`, to the last bit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_longctx.config import Config, ModelConfig, RopeScaling, validate
from megatron_longctx.models import Fields, read_rope, write_rope
from megatron_longctx.models.rope import frequencies, frequencies_of
from tests.shared.training import changed

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "linear", "factor": 3.3},
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    {**LLAMA3, "factor": 5.5, "original_max_position_embeddings": 100, "high_freq_factor": 7.5},
    {**YARN, "factor": 4.0, "original_max_position_embeddings": 32768},
    {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {**YARN, "factor": 16.0, "original_max_position_embeddings": 2048, "beta_fast": 64.0, "beta_slow": 2.0},
    {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707},
    {**YARN, "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    {**YARN, "factor": 1.0, "original_max_position_embeddings": 4096, "beta_fast": None},
    {**YARN, "factor": 2.0, "original_max_position_embeddings": 8},
]


BARE = {"max_position_embeddings": 2048}


def read(parameters: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**read_rope(Fields({**BARE, "rope_parameters": parameters})))


def theirs(parameters: dict[str, Any], dim: int, **settings: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_parameters=dict(parameters), **settings)
    rope = LlamaRotaryEmbedding(config)
    return rope.inv_freq, rope.attention_scaling


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    for base in (10_000.0, 500_000.0, 150_000.0):
        for dim in (2, 16, 64, 128, 256):
            said = {**parameters, "rope_theta": base}
            expected, stretch = theirs(said, dim)
            model = read(said)
            found = frequencies(model.rope_scaling, model.rope_base, dim)
            assert found.inverse.dtype == torch.float32 and torch.equal(found.inverse, expected)
            assert found.stretch == stretch
            assert ModelConfig(**read_rope(Fields(BARE | write_rope(model)))) == model, "there and back"


@pytest.mark.parametrize(("factor", "times"), [(2.0, 2), (2.0, 4), (8.0, 8), (1.5, 3)])
def test_ntk_is_theirs_where_the_length_is_fixed(factor: float, times: int) -> None:
    for base, dim in ((10_000.0, 64), (500_000.0, 128)):
        said = {"rope_type": "dynamic", "factor": factor, "rope_theta": base}
        config = LlamaConfig(hidden_size=dim, num_attention_heads=1, max_position_embeddings=4096, rope_parameters=said)
        expected, stretch = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=times * 4096)
        alike = RopeScaling("ntk", factor=factor * times - (factor - 1))
        found = frequencies(alike, base, dim)
        assert torch.equal(found.inverse, expected) and found.stretch == stretch == 1
        assert not torch.equal(found.inverse, frequencies(RopeScaling(), base, dim).inverse)
    with pytest.raises(ValueError, match=r"model\.rope_scaling\.kind=ntk: expected none, linear, llama3 or yarn"):
        write_rope(ModelConfig(rope_scaling=alike))


def test_layers_with_a_window_keep_their_own_base() -> None:
    model = ModelConfig(window=4, rope_base=1e6, window_rope_base=1e4, rope_scaling=RopeScaling("linear", 8.0))
    everywhere, windowed = frequencies_of(model)
    assert everywhere.equals(frequencies(RopeScaling("linear", 8.0), 1e6, 32))
    assert windowed.equals(frequencies(RopeScaling(), 1e4, 32))
    everywhere, windowed = frequencies_of(ModelConfig(window=4, rope_scaling=RopeScaling("linear", 8.0)))
    assert windowed is everywhere


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"rope_parameters=\{'rope_type': 'dynamic'.*expected rope_type def",
        ),
        ({"rope_type": "longrope"}, r"rope_parameters=\{'rope_type': 'longrope'"),
        ({"rope_type": "default", "factor": 2.0}, r"rope_parameters\.factor=2\.0: expected no such parameter with"),
        ({"partial_rotary_factor": 0.5}, r"rope_parameters\.partial_rotary_factor=0\.5: expected no such parameter"),
        ({"rope_type": "linear"}, r"rope_parameters\.factor=None: expected a number with rope_type linear"),
        ({"rope_type": "linear", "factor": "2"}, r"rope_parameters\.factor=2: expected a number"),
    ],
)
def test_what_is_not_served_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read({"rope_theta": 1e4, **said})


def test_the_original_length_is_where_transformers_looks_for_it() -> None:
    """In the file itself, else in the parameters, else the longest sequence."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    for said, top, length in (
        (yarn, {}, 2048),
        ({**yarn, "original_max_position_embeddings": 512}, {}, 512),
        ({**yarn, "original_max_position_embeddings": 512}, {"original_max_position_embeddings": 256}, 256),
    ):
        found = read_rope(Fields({**BARE, **top, "rope_parameters": said}))["rope_scaling"]
        assert found.original_length == length
        config = LlamaConfig(max_position_embeddings=2048, rope_parameters=dict(said))
        for key, value in top.items():
            setattr(config, key, value)
        config.standardize_rope_params()
        assert config.rope_parameters["original_max_position_embeddings"] == length


KIND, LENGTH = "model.rope_scaling.kind", "model.rope_scaling.original_length"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.rope_scaling.factor": 2.0}, r"factor=2.0: expected 1.0, its default, with .*kind=none. Only linear"),
        ({KIND: "linear", LENGTH: 64}, r"original_length=64: expected null, its .*kind=linear. Only llama3 or yarn"),
        ({KIND: "llama3"}, r"original_length=None: expected a number with model.rope_scaling.kind=llama3"),
        (
            {KIND: "llama3", LENGTH: 8, "model.rope_scaling.high_freq_factor": 1.0},
            r"high_freq_factor=1.0: expected more",
        ),
        ({KIND: "yarn", LENGTH: 8, "model.rope_scaling.beta_slow": 32.0}, r"beta_fast=32.0: expected more than"),
        ({KIND: "yarn", LENGTH: 8, "model.rope_base": 1.0}, r"model.rope_base=1.0: expected more than 1 with"),
        ({KIND: "ntk", "model.head_dim": 2}, r"model.head_dim=2: expected at least 4 with"),
        ({KIND: "linear", "model.position_embedding": "learned"}, r"kind=linear: expected none with model.position_em"),
        ({"model.window_rope_base": 1e4}, r"window_rope_base=10000.0: expected null with model.window=null"),
    ],
)
def test_settings_that_say_nothing_or_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        changed(Config(), settings)
    validate(Config())
