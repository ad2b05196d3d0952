"""Start Megatron-LM's `pretrain_gpt.py` for `analysis.doors`: `torchrun … -m analysis.doors.start pretrain_gpt.py …`.

Megatron-LM 0.16.1 does not start on every GPU machine, and its packs (`--sft`) do not reach attention:

- It asks nvcc for its version, to compile kernels that no longer exist.
- `SFTDataset` reads conversations with the package `datasets`, and `SFTTokenizer` fails with transformers 5.
- `pretrain_gpt.py` gives attention `cu_seqlens` of the shape `[1, n]`, and with several context-parallel ranks
  `thd_get_partitioned_indices` gets None. `pretrain_mamba.py` of the same release drops the dimension.

With `DOORS_PACKS=1`, the last two are replaced here: by JSON lines and a tokenizer of characters, and by one dimension
less. Packs, slices, RoPE, loss masks and the training loop are Megatron-LM's own.
"""

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch
from torch.utils import cpp_extension

from analysis.doors.slices import share
from megatron_longctx.integrations import cpu

EOD, PAD, VOCABULARY = 126, 125, 127


class Conversations:
    """Conversations of a file of JSON lines, with the interface of Megatron-LM's `SFTLowLevelDataset`."""

    def __init__(self, path: str) -> None:
        with open(path) as file:
            self.lines = [json.loads(line)["messages"] for line in file]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.lines[number]
        return found


class Characters:
    """A token for each character of ASCII below `PAD`, with what Megatron-LM's data sets ask of a tokenizer."""

    eod, pad, vocab_size = EOD, PAD, VOCABULARY
    unique_identifiers: ClassVar = {"class": "Characters"}

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[Any, Any]:
        """Return tokens, and as targets those of answers; the others are ignored."""
        assert return_target and not add_generation_prompt
        parts = [numpy.frombuffer(turn["content"].encode(), dtype=numpy.uint8) for turn in conversation]
        said = [turn["role"] == "assistant" for turn in conversation]
        tokens = numpy.concatenate(parts).astype(numpy.int64)
        learned = numpy.concatenate([numpy.full(len(part), each) for part, each in zip(parts, said, strict=True)])
        return tokens, numpy.where(learned, tokens, -100)


def repair_packs() -> None:
    """Replace what keeps 0.16.1's packs from attention."""
    sft = importlib.import_module("megatron.training.datasets.sft_dataset")
    tokenizers = importlib.import_module("megatron.core.tokenizers.text.utils.build_tokenizer")
    utils = importlib.import_module("megatron.core.utils")
    sft.SFTLowLevelDataset = Conversations  # type: ignore[attr-defined]
    tokenizers.build_tokenizer = lambda args: Characters()  # type: ignore[attr-defined]
    slices: Any = utils.get_thd_batch_on_this_cp_rank

    if not torch.cuda.is_available():  # nor is there TransformerEngine: here is the definition of its function
        utils.is_te_min_version = lambda *version: True  # type: ignore[attr-defined]
        utils.tex = SimpleNamespace(  # type: ignore[attr-defined]
            thd_get_partitioned_indices=lambda stops, _, world, rank: share(stops.diff().tolist(), rank, world)
        )

    def of_one_pack(batch: Any, stops: Any, padded: Any, longest: Any, *rest: Any) -> Any:
        return slices(batch, stops[0], stops[0] if padded is None else padded[0], longest, *rest)

    utils.get_thd_batch_on_this_cp_rank = of_one_pack  # type: ignore[attr-defined]


def main() -> None:
    """Replace what does not run, then start the script."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[1])))
    if cpp_extension.CUDA_HOME is None:
        fused: Any = importlib.import_module("megatron.legacy.fused_kernels")
        fused.load = lambda args: None
    if os.environ.get("DOORS_PACKS") == "1":
        repair_packs()
    cpu.main()


if __name__ == "__main__":
    main()
