"""Converts a GGUF file, the format of llama.cpp, for `import`: `python -m analysis.gguf_file FILE FOLDER`.

The folder has `config.json`, dequantized weights in fp32 as safetensors, and the tokenizer.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from analysis.gguf_tokenizer import write_tokenizer
from megatron_longctx.cli.conversion import new_folder
from megatron_longctx.core.errors import refuse
from megatron_longctx.models.huggingface import ShardWriter, TensorInfo

# Fields of config.json, keyed by the metadata's keys without the architecture's name.
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
_EQUAL_TO_HEAD_DIM = ("attention.value_length", "rope.dimension_count")


@dataclass(frozen=True)
class _Architecture:
    """How llama.cpp's converter changes a model of Hugging Face.

    Attributes:
        published: the class of the model.
        model_type: the name of its family.
        pairs: whether rows of queries and keys are in the order of rotated pairs.
        norm_shift: the number that is added to the weights of norms.
        fields: more of `_FIELDS`. A dot separates the name of an object from the field inside it.
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
_SHARD_BYTES = 5 * 10**9
_SAFETENSORS = "Take the model's safetensors instead."
# The names of the families above, among all those that `gguf` knows for a tensor.
_PUBLISHED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj"
    r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm)|model\.(embed_tokens|norm)|lm_head"
)


class GgufFile:
    """A published model. Tensors have the names and the order of rows of Hugging Face.

    Raises:
        ValueError: the file has an architecture or a key that is not supported, or is no GGUF file.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        name = str(self._metadata.get("general.architecture"))
        if name not in _ARCHITECTURES:
            raise refuse("general.architecture", name, f"one of {', '.join(_ARCHITECTURES)}", _SAFETENSORS)
        if self._metadata.get("split.count", 1) > 1:
            raise refuse("split.count", self._metadata["split.count"], "one file", "Merge them with llama-gguf-split.")
        self._architecture = _ARCHITECTURES[name]
        config = self._read_config(name)
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
        published_names = {
            own: published
            for published, (_, own) in gguf.get_tensor_name_map(arch, config["num_hidden_layers"]).mapping.items()
            if _PUBLISHED.fullmatch(published)
        }
        self._by_name = {}
        for tensor in self._reader.tensors:
            stem, _, kind = tensor.name.rpartition(".")
            # A tensor without a published name keeps its own, by which it is refused as no weight of the family.
            self._by_name[f"{published_names[stem]}.{kind}" if stem in published_names else tensor.name] = tensor
        self.config: Mapping[str, Any] = config | {"tie_word_embeddings": "lm_head.weight" not in self._by_name}
        self.tensors = {
            name: TensorInfo(tuple(int(size) for size in tensor.shape[::-1]), torch.float32)
            for name, tensor in self._by_name.items()
        }

    def read(self, name: str) -> Tensor:
        import gguf

        tensor = self._by_name[name]
        # Values that need no dequantizing are part of the mapped file: a copy, so that nothing keeps it mapped.
        values = numpy.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        weight = torch.from_numpy(values).view(self.tensors[name].shape)
        if name.endswith("norm.weight"):
            weight -= self._architecture.norm_shift
        if self._architecture.pairs and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            # RoPE rotates neighbouring rows here, but the two halves of a head's rows in Hugging Face's models.
            pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        return weight

    def _read_group(self, name: str) -> dict[str, Tensor]:
        return {name: self.read(name)}

    def write(self, folder: Path) -> None:
        """Write the folder of Hugging Face, one tensor at a time."""
        groups = [{name: info} for name, info in self.tensors.items()]
        ShardWriter(folder, groups, _SHARD_BYTES).write(partial(self._read_group, name) for name in self.tensors)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        if "tokenizer.ggml.model" in self._metadata:
            write_tokenizer(folder, self._metadata)

    def _read_config(self, name: str) -> dict[str, Any]:
        """Return the fields of a `config.json` except `tie_word_embeddings`, which tensors decide."""
        fields = {**_FIELDS, **self._architecture.fields}
        config: dict[str, Any] = {
            "architectures": [self._architecture.published],
            "model_type": self._architecture.model_type,
        }
        for key, value in self._metadata.items():
            own = key.removeprefix(f"{name}.")
            if own == key:
                if not key.startswith(_HARMLESS):
                    raise refuse(key, value, "keys that are known here", _SAFETENSORS)
            elif own in fields:
                section, _, inner = fields[own].rpartition(".")
                # Floats have 32 bits: the shortest decimal with this value is the original one.
                exact = float(str(numpy.float32(value))) if isinstance(value, float) else value
                (config.setdefault(section, {}) if section else config)[inner] = exact
            elif own not in _EQUAL_TO_HEAD_DIM:
                remedy = "Its effect is not known here; take the model's safetensors instead."
                raise refuse(key, value, "keys that are known here", remedy)
        config.setdefault("vocab_size", len(self._metadata.get("tokenizer.ggml.tokens", [])))
        for token in ("bos", "eos"):
            if (token_id := self._metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
                config[f"{token}_token_id"] = token_id
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        head = config.get("head_dim") or (hidden // heads if heads and hidden else None)
        for own in _EQUAL_TO_HEAD_DIM:
            value = self._metadata.get(f"{name}.{own}", head)
            if value != head:
                raise refuse(f"{name}.{own}", value, f"{head}, the head's size", _SAFETENSORS)
        if name == "gemma3" and heads and hidden and head:
            # Fields that files do not have, as in llama.cpp (`src/llama-model.cpp`). Only the 27B model has 62 layers.
            config["query_pre_attn_scalar"] = hidden // heads if config.get("num_hidden_layers") == 62 else head
            config.setdefault("sliding_window_pattern", 6 if config.get("sliding_window") else 1)
        return config


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", help="a new one")
    arguments = parser.parse_args(words)
    with new_folder(arguments.folder) as (folder, _):
        GgufFile(arguments.file).write(folder)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
