"""Ranks that share a cache and the weights answer as in one dense forward pass."""

import math
import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from megatron_longctx.config import Config, ParallelismConfig
from megatron_longctx.core.comm import all_gather_rows
from megatron_longctx.inference.memory import check_cache, weight_bytes
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import PromptScores
from megatron_longctx.inference.weight_gathers import GroupWeights, PeerWeights
from megatron_longctx.mcore import inference
from megatron_longctx.mcore.direct import LayerWeights, SharedWeights
from megatron_longctx.mcore.inference import CachedGPT, inference_config
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import override_config
from tests.inference.conversations import Model, Truth, converse_in, engine_of, parallel, truths
from tests.inference.test_engine import check
from tests.shared.training import changed, tiny_config

# 12 heads, which 2, 3, 4 and 6 ranks can share.
WIDE = {"model.hidden_size": 48, "model.num_attention_heads": 12, "model.head_dim": 12, "model.ffn_hidden_size": 96}
WIDE["model.vocab_multiple"] = 24
ROWS = 528  # of the embedding, which has the 512 entries of the tokenizer
SHAPES = (
    {"model.num_kv_heads": 12, "model.qkv_bias": True},
    {"model.num_kv_heads": 1, "model.tie_embeddings": True, "model.window": 5},
    {"model.num_kv_heads": 2, "model.sinks": "learnable", "model.window": 5, "model.window_pattern": 2},
    {"model.num_kv_heads": 12, "model.position_embedding": "learned", "model.bias": True, "model.activation": "gelu"},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    config = tiny_config(tmp_path_factory.mktemp("runs"), "x", {"data.seq_length": 128, **WIDE})
    return [changed(config, shape) for shape in SHAPES]


@pytest.fixture(scope="module")
def truth(models: list[Config]) -> list[Truth]:
    return run_distributed(truths, 1, [Model(parallel(config, 1)) for config in models])[0]


@pytest.mark.parametrize(("context", "tensor", "of"), [(2, 1, (1, 2)), (3, 1, (0, 1)), (2, 2, (1, 3)), (3, 2, (0,))])
def test_every_turn_equals_the_dense_model(
    models: list[Config], truth: list[Truth], context: int, tensor: int, of: tuple[int, ...]
) -> None:
    sizes = ParallelismConfig(context_parallel_size=context, tensor_parallel_size=tensor)  # training has fewer choices
    jobs = [Model(replace(parallel(models[i], 1, shard_weights=True), parallelism=sizes)) for i in of]
    for records in run_distributed(converse_in, context * tensor, jobs):
        for i, found in zip(of, records, strict=True):
            check(found, truth[i])


Answers = tuple[int, list[float], list[list[int]], torch.Tensor]


def read_from_peers(shares: SharedWeights | None) -> None:
    """Give every rank the weights of all, as peer memory does on GPUs."""
    assert shares is not None
    group = shares._groups.megatron.tp
    found: list[PeerWeights | GroupWeights] = []
    for layer in shares._layers:
        own = {name: x.detach() for name, x in vars(LayerWeights.of(layer)).items() if x is not None}
        every = {name: list(all_gather_rows(group, x.flatten()).view(-1, *x.shape)) for name, x in own.items()}
        found.append(PeerWeights(every, group.rank()))
    shares._gathers, shares.collective = found, False


def answers(rank: int, configs: list[Config], from_peers: bool = False) -> list[Answers]:
    """Return the bytes of weights, the scores of a prompt, tokens of sessions and forks, and logits after them."""
    found = []
    inference._HEAD_ROWS = inference._EMBEDDED_ROWS = 16  # prompts take several blocks
    for config in configs:
        with engine_of(config) as engine:
            model = engine.model
            assert isinstance(model, CachedGPT)
            if from_peers:
                read_from_peers(model._shares)
            source = random.Random(3)
            prompts = [[source.randrange(256) for _ in range(size)] for size in (90, 2, 30)]
            sessions = [engine.open() for _ in prompts]
            sessions[0].scores = scores = PromptScores(prompts[0], 1)
            engine.append(dict(zip(sessions, prompts, strict=True)))
            sessions[0].scores = None  # so that all ranks compute its next tokens
            sessions += [sessions[0].fork(41), sessions[2].fork()]
            sessions[3].append([5, 6, 7])
            tokens = engine.continue_all(sessions, Sampling(max_new_tokens=4))
            engine.append({session: [9] for session in sessions})
            logits = engine.next_logits(sessions)
            for each in model._shares._gathers if from_peers and model._shares else ():
                assert isinstance(each, PeerWeights) and len(each._copies) <= len(each._matrices) * 4, "prepared once"
            held = sum(p.numel() * p.element_size() for p in model._gpt.parameters())
            found.append((held, [score.logprob for score in scores.found], tokens, logits))
    return found


def test_ranks_hold_a_part_of_the_weights_and_answer_alike(models: list[Config]) -> None:
    """Also prompts' scores, forks, and ranks that have no tokens of a prompt."""
    exact = {"reduction.down_projection": "int8", "reduction.min_kib": 2**20}  # a policy whose sums are all exact
    config = changed(models[0], {"model.num_layers": 4, **exact})
    whole, shared = parallel(config, 3), parallel(config, 3, shard_weights=True)
    coarse = changed(shared, {"reduction.min_kib": 0})
    for expected, found, quantized in run_distributed(answers, 3, [whole, shared, coarse]):
        assert expected[0] == weight_bytes(whole, ROWS)
        assert found[0] < 0.35 * expected[0] and found[0] < weight_bytes(shared, ROWS), (
            "which counts gathered layers too"
        )
        assert len(found[1]) == 89 and found[1] == pytest.approx(expected[1], abs=1e-5)
        assert found[2] == expected[2]
        torch.testing.assert_close(found[3], expected[3], rtol=2e-5, atol=2e-5)
        assert 0 < (quantized[3] - found[3]).abs().max() < 0.02, "sums of 8 bits"


@pytest.mark.parametrize(("context", "tensor", "of"), [(3, 1, (0,)), (2, 2, (1, 3))])
def test_weights_that_are_read_from_peers_give_the_same_numbers(
    models: list[Config], context: int, tensor: int, of: tuple[int, ...]
) -> None:
    """Also with biases, with ranks that have the same keys and values, and with ranks that have no tokens."""
    sizes = ParallelismConfig(context_parallel_size=context, tensor_parallel_size=tensor)
    configs = [replace(parallel(models[i], 1, shard_weights=True), parallelism=sizes) for i in of]
    ways = [run_distributed(answers, context * tensor, configs, from_peers) for from_peers in (False, True)]
    for expected, found in zip(*map(chain.from_iterable, ways), strict=True):
        assert found[:3] == expected[:3] and torch.equal(found[3], expected[3])


def test_what_cannot_share_is_refused(models: list[Config]) -> None:
    key = "inference.shard_weights=true"
    shared = parallel(models[0], 2, shard_weights=True)
    assert inference_config(shared).inference.shard_weights
    for settings, message in (
        ({"inference.decode": "plan"}, "shard_weights=True: expected false with inference.decode=plan"),
        ({"inference.mode": "pass_q"}, "expected false with inference.decode=auto and inference.mode=pass_q"),
        ({"inference.weights": "fp8", "train.precision": "bf16"}, "shard_weights=True: expected false with"),
        ({"model.num_moe_experts": 4}, r"shard_weights=True: expected false with experts \(model.num_moe_experts\)"),
    ):
        with pytest.raises(ValueError, match=message):
            inference_config(changed(shared, settings))
    for sizes, message in (
        ((5, 1), r"context_parallel_size x tensor_parallel_size with shard_weights=5: expected one of 1, 2, 3, 4, 6"),
        ((2, 4), r"context_parallel_size x tensor_parallel_size with shard_weights=8: expected one of 1, 2, 3, 4, 6"),
    ):
        names = [
            f"parallelism.{name}_parallel_size={size}" for name, size in zip(("context", "tensor"), sizes, strict=True)
        ]
        assert override_config(models[0], names, training=False)
        with pytest.raises(ValueError, match=message):
            override_config(models[0], [*names, key], training=False)


def test_a_cache_fits_beside_the_weights(models: list[Config]) -> None:
    """Shared weights leave room for a cache that would not fit otherwise."""
    config = changed(models[0], {"model.num_layers": 8})
    whole, shared = (parallel(config, 4, cache_tokens=200, shard_weights=shares) for shares in (False, True))
    assert math.isclose(weight_bytes(shared, ROWS) / weight_bytes(whole, ROWS), 1 / 4 + 2 / 8, rel_tol=0.1)
    check_cache(shared, ROWS, weight_bytes(whole, ROWS))
    with pytest.raises(ValueError, match=r"cache_tokens=200: expected at most 0 tokens, which fit beside .* can share"):
        check_cache(whole, ROWS, weight_bytes(whole, ROWS))
