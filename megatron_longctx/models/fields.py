"""The fields of a published `config.json`, of which none may go unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import refuse

# What changes no number of a forward pass: how a model was made, saved or is to be sampled from.
HARMLESS = frozenset((
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "id2label", "label2id", "problem_type"),
    *("_attn_implementation", "_attn_implementation_autoset", "output_attentions", "output_hidden_states"),
    *("return_dict", "torchscript", "chunk_size_feed_forward", "task_specific_params", "is_llama_config"),
    *("transformers.js_config",),
    *("do_sample", "temperature", "top_p", "top_k", "max_length"),
))  # fmt: skip
_KINDS = {int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list", str: "text"}


class Fields:
    """A `config.json` that is read field by field; `finish` refuses what nobody has read.

    Args:
        values: the file's content.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def take(self, name: str, default: Any, kind: type | None = None) -> Any:
        """The value of a field; `default`, that of `transformers`, where it is absent or null.

        Args:
            kind: of the value; None: that of `default`.

        Raises:
            ValueError: it is of another kind.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        kind = type(default) if kind is None else kind
        right = (int, float) if kind is float else kind
        if kind is not type(None) and (not isinstance(value, right) or isinstance(value, bool) is not (kind is bool)):
            raise refused(name, value, _KINDS[kind], "Take the config.json that was published with the model.")
        return value

    def has(self, name: str) -> bool:
        """Whether a field is there, be it null."""
        return name in self._values

    def need(self, name: str) -> int:
        """The value of a field without which there is no model.

        Raises:
            ValueError: it is absent, or no integer.
        """
        value = self.take(name, None, int)
        if value is None:
            raise refused(name, None, "an integer", "Take the config.json that was published with the model.")
        return int(value)

    def only(self, name: str, *served: Any, remedy: str = "Models with another value are not served yet.") -> None:
        """Refuse a field that is there and none of `served`, of which the first is the default of `transformers`.

        Raises:
            ValueError: names the field.
        """
        value = self._values.get(name, served[0])
        self._read.add(name)
        if value is not None and value not in served:
            raise refused(name, value, " or ".join(map(str, served)), remedy)

    def harmless(self, *names: str) -> None:
        """Fields of this family that change no number of a forward pass."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuse fields that were not read.

        Raises:
            ValueError: names one; what it does is not known here, and to ignore it could give other numbers.
        """
        for name, value in self._values.items():
            if name == "is_encoder_decoder" and value is False:
                continue
            if name not in self._read and name not in HARMLESS and value is not None:
                remedy = "What it changes is not known here; delete it from the file if that is nothing."
                raise refused(name, value, "fields that this family is known to have", remedy)


def refused(name: str, value: object, expected: str, remedy: str) -> ValueError:
    """The form of all refusals of fields."""
    return refuse(f"config.json: {name}", value, expected, remedy)
