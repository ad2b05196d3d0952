"""The choice of a mode by the sizes of messages, and transports that inference refuses."""

import logging

import pytest

from megatron_longctx.config import Config
from megatron_longctx.core.plans import Workload
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.inference.choose_cache_mode import Chooser
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.training.compose import compose_config
from tests.inference.histories import batch_with_past

# Llama 3 405B's heads on one of 8 tensor-parallel ranks.
HEADS = Workload(num_heads=16, num_kv_heads=1, head_dim=128)


@pytest.mark.parametrize(
    ("heads", "taken", "threshold"),
    [((16, 1), "pass_kv", "0.125"), ((8, 8), "pass_q", "2"), ((32, 8), "pass_kv", "0.5")],
)
def test_the_smaller_messages_travel_and_the_log_says_why(
    heads: tuple[int, int], taken: str, threshold: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Chooser(Workload(*heads, 64)).choose(batch_with_past(2, [(50,)], [50])) == taken
    assert [record.message for record in caplog.records] == [
        f"attention over the cache: 50 new and 50 cached tokens of 1 sequences on 2 ranks: {taken} by bytes: "
        f"0.5 of all tokens are new, keys and values {threshold} times the size of a query"
    ]


def test_fresh_prompts_pass_keys_and_few_tokens_over_a_large_cache_queries() -> None:
    chooser = Chooser(HEADS)
    assert chooser.choose(batch_with_past(4, [()], [32768], page=4096)) == "pass_kv"
    assert chooser.choose(batch_with_past(4, [(120000,)], [256], page=4096)) == "pass_q"
    assert chooser.choose(batch_with_past(4, [(1000,), (900,)], [1, 1], page=64, pages=400)) == "one_hop"
    assert chooser.choose(batch_with_past(1, [(40,)], [1])) == "pass_kv", "a single rank passes nothing"


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_a_forced_mode_is_taken(mode: str) -> None:
    chooser = Chooser(HEADS, mode)
    assert chooser.choose(batch_with_past(2, [(4,)], [3])) == mode and chooser.candidates == (mode,)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inference\.mode=ring: expected one of auto, one_hop"):
        Chooser(HEADS, "ring")


def test_a_mode_that_is_forced_in_a_context_has_no_effect_outside() -> None:
    chooser, batch = Chooser(HEADS), batch_with_past(4, [(400,)], [1])
    assert chooser.candidates == tuple(CACHE_MODES)
    with chooser.forcing("pass_kv"):
        assert chooser.choose(batch) == "pass_kv"
    assert chooser.choose(batch) == "one_hop"
    with chooser.forcing("pass_q"):
        assert chooser.choose(batch) == "pass_q"
    assert chooser.choose(batch) == "one_hop" and chooser.mode == "auto"


def config_of(*words: str) -> Config:
    return compose_config(["parallelism=cp2", "train.device=cpu", *words])


def test_peer_memory_is_refused_on_cpus_before_ranks_start() -> None:
    with pytest.raises(ValueError, match=r"inference\.transport=peer: expected auto or p2p on CPUs"):
        inference_config(config_of("inference.transport=peer"))
    assert inference_config(config_of("inference.transport=auto")).inference.transport == "auto"
