"""A family of published models: the meaning of its `config.json`, and its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from ..config import ModelConfig, check_model, check_value, layer_list
from ..core.errors import refuse
from .fields import Fields, of_text
from .weights import Weight

# Keys of `ModelConfig` that do not change the function that a model computes.
_NO_EFFECT = (
    *("name", "vocab_multiple", "init_std", "implementation", "builder", "head_dim", "vocab_size"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype"),
    *("moe_layer_freq", "moe_first_dense_layers"),  # the layers that they select are compared instead
)


@dataclass(frozen=True)
class Family:
    """A family of published models."""

    name: str  # `model_type` in `config.json`
    architectures: tuple[str, ...]  # its classes in `transformers`; exports name the first
    # Converts fields to keys of `ModelConfig`. It reads every field that it supports, except `constants`, `vocab_size`,
    # `max_position_embeddings`, `initializer_range` and the harmless fields of all families, which are read for it.
    # Fields that stay unread are refused.
    read: Callable[[Fields], dict[str, Any]]
    # Converts a model to the fields that `read` reads, with every field whose default in `transformers` differs. It may
    # ignore keys that it cannot express: the result is read back and compared.
    write: Callable[[ModelConfig], dict[str, Any]]
    weights: Callable[[ModelConfig], Sequence[Weight]]  # of a model of this family
    # Fields with a single supported value, which is the default of `transformers`.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Keys of `ModelConfig` with the same value in all models of this family.
    keys: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # beginnings of names of published tensors that no model needs; imports omit them

    def model_of(self, config: Mapping[str, Any]) -> tuple[ModelConfig, int]:
        """Return the model that a `config.json` describes, and the longest sequence that it was made for.

        Refuse the first field that is missing or unknown, or whose value is not supported.
        """
        fields = Fields(of_text(config))
        vocab_size, seq_length = fields.require("vocab_size"), fields.require("max_position_embeddings")
        keys = {"name": self.name, "vocab_size": vocab_size, "init_std": fields.get("initializer_range", 0.02)}
        for name, value in self.constants.items():
            fields.expect(name, value)
        keys |= self.read(fields)
        fields.refuse_unread()
        model = ModelConfig(**{**keys, **self.keys})
        check_model(model)
        check_value("data.seq_length", seq_length)
        return model, seq_length

    def config_of(self, model: ModelConfig, vocab_size: int, seq_length: int) -> dict[str, Any]:
        """Return the `config.json` of a model. Refuse a key of the model that this family has no field for.

        vocab_size: rows of the published embedding.
        """
        config = {
            "architectures": [self.architectures[0]],
            "model_type": self.name,
            "vocab_size": vocab_size,
            "max_position_embeddings": seq_length,
            "initializer_range": model.init_std,
            **self.constants,
            **self.write(model),
        }
        read_back = _function(self.model_of(config)[0])
        for key, value in _function(model).items():
            if read_back[key] != value:
                expected = f"{read_back[key]} in a published model of the family {self.name}"
                raise refuse(f"model.{key}", value, expected, "Its config.json has no field for it.")
        return config


def check_same_function(model: ModelConfig, published: ModelConfig, source: str) -> None:
    """Refuse settings with which the weights would compute another function than the published model of `source`."""
    given = _function(model)
    for key, value in _function(published).items():
        if given[key] != value:
            remedy = "Leave it out; training that starts from these weights may change RoPE."
            raise refuse(f"model.{key}", given[key], f"{value}, as {source} has", remedy)


def _function(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that determine the function that a model computes."""
    names = [each.name for each in fields_of(ModelConfig) if each.name not in _NO_EFFECT]
    function = {name: getattr(model, name) for name in names}
    layers = {"moe_layer_freq": layer_list(model.expert_layers), "pattern": model.mixers}
    return function | {"head_dim": model.kv_channels} | layers
