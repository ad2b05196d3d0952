"""GGUF files, llama.cpp's format: weights dequantized, and metadata in the words of a `config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import refuse
from .gguf_tokenizer import write_tokenizer
from .source import Stored, need_package

# GGUF's key after the architecture's name, and that of config.json.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_CHECKED = ("attention.value_length", "rope.dimension_count")  # equal to the head's


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's converter makes of a model of Hugging Face's.

    Args:
        published: its class.
        model_type: its family.
        pairs: rows of queries and keys are in the order of rotated pairs.
        norm_shift: is added to the weights of norms.
        fields: more of `_FIELDS`; those of an object have its name in front.
    """

    published: str
    model_type: str
    pairs: bool = False
    norm_shift: float = 0.0
    fields: Mapping[str, str] = field(default_factory=dict)


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", pairs=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_shift=1.0,
        fields={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "rope.scaling.type": "rope_scaling.rope_type",
            "rope.scaling.factor": "rope_scaling.factor",
        },
    ),
}
_HARMLESS = ("general.", "tokenizer.", "GGUF.", "quantize.", "split.")
_TIED = "lm_head.weight"
# Of the names that `gguf` knows for a tensor, those of the families above.
_PUBLISHED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj"
    r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm)|model\.(embed_tokens|norm)|lm_head"
)


class GgufFile:
    """A `models.source.Source`. Tensors have the names and the order of rows of Hugging Face's.

    Raises:
        ValueError: a file that is damaged, of an architecture or with a key that is not served.
    """

    def __init__(self, path: Path) -> None:
        need_package("gguf", str(path))
        import gguf

        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as error:  # what a damaged file makes of the reader
            raise ValueError(f"{path}: damaged, or no GGUF file ({error}). Fetch it again.") from None
        name = str(self._metadata.get("general.architecture"))
        if name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise refuse("general.architecture", name, f"one of {known}", "Take the model's safetensors instead.")
        if self._metadata.get("split.count", 1) > 1:
            raise refuse("split.count", self._metadata["split.count"], "one file", "Merge them with llama-gguf-split.")
        self.config: Mapping[str, Any] = self._config(name)
        self._made = _ARCHITECTURES[name]
        self._by_name = self._named(gguf.MODEL_ARCH_NAMES, name)
        if _TIED not in self._by_name:
            self.config = {**self.config, "tie_word_embeddings": True}
        self.tensors = {
            each: Stored(tuple(int(size) for size in tensor.shape[::-1]), torch.float32)
            for each, tensor in self._by_name.items()
        }

    def read(self, name: str) -> Tensor:
        import gguf

        tensor = self._by_name[name]
        # Values that need no dequantizing are the mapped file's own: a copy, so that nothing holds it.
        values = numpy.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        found = torch.from_numpy(values).view(self.tensors[name].shape)
        if name.endswith("norm.weight"):
            found -= self._made.norm_shift
        if self._made.pairs and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            found = _halves(found, heads)
        return found

    def write_tokenizer(self, folder: Path) -> None:
        if "tokenizer.ggml.model" in self._metadata:
            folder.mkdir()
            write_tokenizer(folder, self._metadata, self._path)
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _config(self, name: str) -> dict[str, Any]:
        made = _ARCHITECTURES[name]
        fields = {**_FIELDS, **made.fields}
        config: dict[str, Any] = {
            "architectures": [made.published],
            "model_type": made.model_type,
            "tie_word_embeddings": False,
        }
        for key, value in self._metadata.items():
            own = key.removeprefix(f"{name}.")
            if own == key:
                if not key.startswith(_HARMLESS):
                    raise refuse(key, value, "keys that are known here", "Take the model's safetensors instead.")
            elif own in fields:
                of, _, inner = fields[own].rpartition(".")
                # A float is of 32 bits: the shortest decimal that gives it is what was meant.
                exact = float(str(numpy.float32(value))) if isinstance(value, float) else value
                (config.setdefault(of, {}) if of else config)[inner] = exact
            elif own not in _CHECKED:
                remedy = "What it changes is not known here; take the model's safetensors instead."
                raise refuse(key, value, "keys that are known here", remedy)
        config.setdefault("vocab_size", len(self._metadata.get("tokenizer.ggml.tokens", [])))
        for name_of_id in ("bos", "eos"):
            if (token := self._metadata.get(f"tokenizer.ggml.{name_of_id}_token_id")) is not None:
                config[f"{name_of_id}_token_id"] = token
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        head = config.get("head_dim") or (hidden // heads if heads and hidden else None)
        for own in _CHECKED:
            value = self._metadata.get(f"{name}.{own}", head)
            if value != head:
                raise refuse(f"{name}.{own}", value, f"{head}, the head's size", "Take the safetensors instead.")
        if name == "gemma3" and heads and hidden and head:
            config |= _known_of_gemma3(config, head, hidden // heads)
        return config

    def _named(self, architectures: Mapping[Any, str], name: str) -> dict[str, Any]:
        """The file's tensors by Hugging Face's names."""
        import gguf

        arch = next(key for key, value in architectures.items() if value == name)
        names = gguf.get_tensor_name_map(arch, self.config["num_hidden_layers"]).mapping
        theirs: dict[str, str] = {}
        for published, (_, ours) in names.items():
            if _PUBLISHED.fullmatch(published):
                theirs[ours] = published
        found = {}
        for tensor in self._reader.tensors:
            stem, _, kind = tensor.name.rpartition(".")
            # What has no published name is refused by that name, as no weight of the family.
            found[f"{theirs[stem]}.{kind}" if stem in theirs else tensor.name] = tensor
        return found


def _known_of_gemma3(config: Mapping[str, Any], head: int, share: int) -> dict[str, Any]:
    """Fields that files do not have, as llama.cpp has them (`src/llama-model.cpp`). share: hidden size by heads."""
    return {
        "query_pre_attn_scalar": share if config.get("num_hidden_layers") == 62 else head,  # layers of the 27B model
        "sliding_window_pattern": config.get("sliding_window_pattern", 6 if config.get("sliding_window") else 1),
    }


def _halves(rows: Tensor, heads: int) -> Tensor:
    """A head's rows as two halves that are rotated together, of neighbouring pairs of them."""
    return rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
