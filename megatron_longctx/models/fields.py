"""The fields of a published `config.json`. None may be left unread."""

from collections.abc import Mapping
from typing import Any

from ..config import TYPE_NAMES, has_type
from ..core.errors import refuse

# Fields that change no number of a forward pass: how a model was made, is saved, or is to be sampled from.
HARMLESS = frozenset((
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "id2label", "label2id", "problem_type"),
    *("_attn_implementation", "_attn_implementation_autoset", "output_attentions", "output_hidden_states"),
    *("return_dict", "torchscript", "chunk_size_feed_forward", "task_specific_params", "is_llama_config"),
    *("transformers.js_config",),
    *("do_sample", "temperature", "top_p", "top_k", "max_length"),
))  # fmt: skip
# Fields of models with images beside the text model's own.
_OF_IMAGES = ("text_config", "vision_config", "language_model_only", "image_token_id", "video_token_id",
              "vision_start_token_id", "vision_end_token_id")  # fmt: skip
RESTORE = "Take the config.json that was published with the model."


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model; one for images has them in `text_config`. Refuse a field with two values."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {name: value for name, value in config.items() if name not in _OF_IMAGES and value is not None}
    for name in outer.keys() & text.keys() - HARMLESS:
        if text[name] not in (None, outer[name]):
            expected = f"{outer[name]}, as beside text_config"
            raise refuse_field(f"text_config.{name}", text[name], expected, RESTORE)
    return {**text, **outer}


class Fields:
    """The content of a `config.json`, read field by field; `refuse_unread` refuses the rest."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any, kind: type | None = None) -> Any:
        """Return the value of a field, or `default`, that of `transformers`, if it is absent or null.

        Refuse a value of another type than `kind`; None: the type of `default`.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        kind = type(default) if kind is None else kind
        if kind is not type(None) and not has_type(value, kind):
            raise refuse_field(name, value, TYPE_NAMES[kind], RESTORE)
        return value

    def require(self, name: str) -> int:
        """Return the value of a field. Refuse one that is absent, or not an integer."""
        value = self.get(name, None, int)
        if value is None:
            raise refuse_field(name, None, "an integer", RESTORE)
        return int(value)

    def expect(self, name: str, *supported: Any, remedy: str = "Models with another value are not supported.") -> None:
        """Refuse a field with a value other than null and `supported`, whose first is the default."""
        value = self._values.get(name, supported[0])
        self._read.add(name)
        if value is not None and value not in supported:
            raise refuse_field(name, value, " or ".join(map(str, supported)), remedy)

    def ignore(self, *names: str) -> None:
        """Mark fields that change no number of a forward pass in this family as read."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse the first field that was not read: ignoring it could change results."""
        for name, value in self._values.items():
            if name == "is_encoder_decoder" and value is False:
                continue
            if name not in self._read and name not in HARMLESS and value is not None:
                remedy = "Its effect is not known here; delete it from the file if it has none."
                raise refuse_field(name, value, "fields that this family is known to have", remedy)


def refuse_field(name: str, value: object, expected: str, remedy: str) -> ValueError:
    """Return the error of a field of `config.json`, as `errors.refuse`."""
    return refuse(f"config.json: {name}", value, expected, remedy)
