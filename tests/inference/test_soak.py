"""Thousands of random operations leak no page, change no other session, and answer as the dense model does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import parallel
from tests.inference.soak import Found, dense_texts, soak
from tests.shared.training import tiny_config

SETTINGS = (
    {},
    {"evict": True, "prefill_chunk": 8},
    {"exact_reuse": True, "prefill_chunk": 16},
    {"decode": "replicated", "evict": True, "prefill_chunk": 24},
)


def check(config: Config, found: list[Found]) -> None:
    """Every sample's logits, and every greedy token: as likely as any by the dense model."""
    samples = [sample for each in found for sample in each.samples]
    served = [one for each in found for one in each.served][-40:]
    texts = [sample.tokens for sample in samples] + [[*one.prompt, *one.answer] for one in served]
    truth = run_distributed(dense_texts, 1, config, texts)[0]
    for sample, logits in zip(samples, truth, strict=False):
        assert torch.allclose(sample.logits, logits[-1], atol=1e-5)
    for one, logits in zip(served, truth[len(samples) :], strict=True):
        for at, token in enumerate(one.answer, len(one.prompt)):
            assert logits[at - 1].max() - logits[at - 1, token] < 1e-5


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("n", "which"), [(1, (0, 1, 2, 3)), (2, (0, 3)), (3, (1, 3))])
def test_a_soak_leaks_nothing_and_corrupts_nothing(tmp_path: Path, n: int, which: tuple[int, ...]) -> None:
    steps, requests = (700, 60) if n == 1 else (30, 6)
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    configs = [parallel(config, n, cache_tokens=350, **settings) for settings in (SETTINGS[i] for i in which)]
    first, *others = run_distributed(soak, n, configs, steps, requests)
    check(configs[0], first)
    for other in others:
        for mine, same in zip(first, other, strict=True):
            assert [sample.tokens for sample in mine.samples] == [sample.tokens for sample in same.samples]
            assert mine.served == same.served
    if n == 1:
        for each in first:
            for what in ("fork", "generate", "stop", "evict", "close", "refused", "watched"):
                assert each.seen[what] > 20, (what, each.seen)
            assert each.seen["reused"] > 10 and each.seen["cancelled"] and each.seen["error"]
        assert first[0].seen["full"] > 20
