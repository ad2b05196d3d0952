"""Log-probabilities of rollouts: in trees, apart, and as the inference engine's layers compute them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.cli.evaluate import branches
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.integrations.trees import to_tree
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.inference import CachedGPT
from megatron_longctx.mcore.losses import label_logprobs
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import tiny_config

VOCABULARY = 64
PROMPT = list(range(3, 20))
SEQUENCES = [[*PROMPT, 7, 9, 2], [*PROMPT, 7, 9, 4, 5, 5, 1], [*PROMPT, 30], [*PROMPT, 40, 41, 42, 43, 44, 45, 46]]


def batch_of(sequences: list[list[int]]) -> TrainingBatch:
    tree = to_tree(sequences, prompt_lengths=[len(PROMPT)] * len(sequences))
    return TrainingBatch(tree.tokens, tree.labels, tree.loss_mask, tree.documents, tree.parents)


def _compute(rank: int, root: Path, world: int) -> tuple[Any, ...]:
    """Return tokens and log-probabilities of branches, and for each sequence those of the engine's layers."""
    config = tiny_config(root, "logprobs", {
        "data.seq_length": 64, "model.window": 8, "model.window_pattern": 2, "recompute.head_chunk_tokens": 5,
        "parallelism.context_parallel_size": world,
    })  # fmt: skip
    collection = groups.from_config(config.parallelism, seed=3)
    sequence = build_sequence(config, collection.cp)
    gpt = build_model(config, transformer_config(config), collection, sequence, VOCABULARY).eval()

    found, *apart = (
        [
            (each["tokens"], each["logprobs"], each["entropy"])
            for each in branches(batch, label_logprobs(gpt, sequence, batch, entropy=True)[:, 0].tolist())
        ]
        for batch in map(batch_of, (SEQUENCES, *([tokens] for tokens in SEQUENCES)))
    )
    whole = batch_of(SEQUENCES)
    both = label_logprobs(gpt, sequence, whole, entropy=True)
    assert torch.equal(both[0], label_logprobs(gpt, sequence, whole)), "entropies change nothing"
    manager, shape = CacheManager(world, 16, 8), CacheShape(2, 4, 2, 8, torch.float32, windows=(8, None))
    attention = CachedAttention(collection.cp, shape, manager.slots[0], torch.device("cpu"))
    cached, engines = CachedGPT(gpt, attention, VOCABULARY, None), []
    for tokens in SEQUENCES:
        turns = manager.append({manager.open(): len(tokens)})
        attention.begin(Batch(world, manager.slots[0], turns), "pass_kv")
        mine = torch.tensor([position for span in turns[0].new_spans[rank] for position in span])
        logits: Tensor = cached.logits(torch.tensor(tokens)[mine], mine, torch.arange(len(mine)))
        engines.append({int(at): row for at, row in zip(mine, logits.log_softmax(-1).tolist(), strict=True)})
    groups.destroy()
    return found, [values for ((_, *values),) in apart], engines


@pytest.mark.parametrize("world", [1, 2])
def test_trees_have_the_values_of_separate_sequences_and_of_the_engine(world: int, tmp_path: Path) -> None:
    ranks = run_distributed(_compute, world, tmp_path, world)
    for found, apart, _ in ranks:
        assert sorted(tokens for tokens, *_ in found) == sorted(SEQUENCES)
        for tokens, *values in found:
            number = SEQUENCES.index(tokens)
            rows = {at: row for _, _, engines in ranks for at, row in engines[number].items()}
            learned = range(len(PROMPT), len(tokens))
            logprobs = [rows[at - 1][tokens[at]] for at in learned]
            entropies = [-sum(math.exp(each) * each for each in rows[at - 1]) for at in learned]
            for of_tree, of_one, expected in zip(values, apart[number], (logprobs, entropies), strict=True):
                assert of_tree[: len(PROMPT)] == of_one[: len(PROMPT)] == [None] * len(PROMPT)
                assert of_tree[len(PROMPT) :] == pytest.approx(of_one[len(PROMPT) :], abs=1e-5)
                assert of_tree[len(PROMPT) :] == pytest.approx(expected, abs=1e-5)
