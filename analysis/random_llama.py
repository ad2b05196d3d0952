"""Write a Llama of random weights as a Hugging Face folder: `python -m analysis.random_llama FOLDER --layers 8`.

By default it has Llama 3 8B's shape, in bf16, with a longer context. Every token is a text of its own, the byte-level
tokenizer's bytes and words of letters, so that clients see every token of an answer, and equal texts are equal tokens.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

SPECIAL = ("<|begin|>", "<|end|>")


def write_tokenizer(folder: Path, tokens: int) -> None:
    """Write a tokenizer of bytes, two special tokens and ` aaaa`, ` aaab` and so on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("\u0120" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    names = [*alphabet, *SPECIAL]
    names += islice(words, tokens - len(names))
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[1]).save_pretrained(folder)


def write(folder: Path, fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Write model and tokenizer. fields: sizes of a `LlamaConfig`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    auto: Any = AutoModelForCausalLM

    begin = len(SPECIAL) + 256
    config = LlamaConfig(
        **fields, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, rms_norm_eps=1e-5,
        bos_token_id=begin - 2, eos_token_id=begin - 1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="5GB")
    write_tokenizer(folder, config.vocab_size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32, help=" ")
    parser.add_argument("--hidden", type=int, default=4096, help=" ")
    parser.add_argument("--ffn", type=int, default=14_336, help=" ")
    parser.add_argument("--heads", type=int, default=32, help=" ")
    parser.add_argument("--kv_heads", type=int, default=8, help=" ")
    parser.add_argument("--vocabulary", type=int, default=128_256, help=" ")
    parser.add_argument("--positions", type=int, default=2**20, help=" ")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help=" ")
    given = parser.parse_args(argv)
    fields = {
        "num_hidden_layers": given.layers, "hidden_size": given.hidden, "intermediate_size": given.ffn,
        "num_attention_heads": given.heads, "num_key_value_heads": given.kv_heads, "vocab_size": given.vocabulary,
        "max_position_embeddings": given.positions,
    }  # fmt: skip
    write(given.folder, fields, torch.bfloat16 if given.precision == "bf16" else torch.float32)
    return 0


if __name__ == "__main__":
    sys.exit(main())
