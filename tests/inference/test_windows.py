"""Windows and sinks over the cache: logits equal those of the training forward pass over the whole text."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.core.comm import all_gather_rows
from megatron_longctx.inference import cached_attention
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.paged import PackedPartials, Pages, attend_pages, merge_ranks
from megatron_longctx.mcore.inference import CachedGPT
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import dense, engine_of, parallel
from tests.shared.training import changed, tiny_config

SHAPES: dict[str, dict[str, Any]] = {
    "a window of one in every other layer, and sinks": {
        "model.window": 1, "model.window_pattern": 2, "model.sinks": "learnable", "model.num_layers": 3,
    },
    "odd windows, and off by one": {"model.window": 7, "model.sinks": "off_by_one"},
    "windows longer than the text": {"model.window": 1000, "model.sinks": "learnable"},
}  # fmt: skip
TURNS = ((23, 1, 2), (1, 1, 1), (1, 1, 1), (0, 9, 1), (14, 1, 5), (1, 1, 1), (1, 1, 1))
"""The new tokens of three sessions. After the fourth turn a fork of the first at `CUT` replaces the third."""
CUT = 19
WAYS: dict[str, dict[str, Any]] = {
    "pass_kv": {"mode": "pass_kv"},
    "pass_q": {"mode": "pass_q"},
    "one_hop": {"mode": "one_hop"},
    "replicated": {"decode": "replicated"},
    "replicated, merged by peers": {"decode": "replicated"},
    "chunks": {"decode": "replicated", "prefill_chunk": 5},
    "exact": {"mode": "pass_kv", "prefill_chunk": 4, "exact_reuse": True},
}
Logits = dict[tuple[int, int], Tensor]
"""Keyed by session and number of tokens before."""


def texts() -> list[list[int]]:
    source = random.Random(1)
    found = [[source.randrange(97, 105) for _ in range(sum(turn[i] for turn in TURNS))] for i in range(3)]
    return [*found, found[0][:CUT] + found[2][: sum(turn[2] for turn in TURNS[4:])]]


def with_large_sinks(gpt: GPTModel, tensor: int = 1, rank: int = 0) -> None:
    """Set a different sink for every head and layer: some take almost none, some almost all of the softmax."""
    for number, layer in enumerate(gpt.decoder.layers):
        sinks = layer.self_attention.core_attention.softmax_offset
        if isinstance(sinks, torch.nn.Parameter):
            values = torch.tensor((-3.0, 9.0, 1.0, 4.0)).roll(number)
            sinks.data.copy_(values.chunk(tensor)[rank])


class MergeByCollective:
    """Does the work of `PeerMerge` with a collective of every rank's partial results."""

    def fits(self, *_: int) -> bool:
        return True

    def __call__(self, shares: PackedPartials, out: Tensor) -> Tensor:
        assert len(shares.out) == 2
        gathered = all_gather_rows(dist.group.WORLD, shares.flat.flatten()).view(-1, shares.flat.shape[1])
        return merge_ranks(PackedPartials(gathered, *out.shape), out)


def two_shares(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    first = torch.zeros_like(pages.counts) if pages.window_starts is None else pages.window_starts
    middle = (first + pages.counts) // 2
    parts = replace(pages, counts=middle), replace(pages, window_starts=middle)
    return PackedPartials(torch.stack([attend_pages(q, cache, part, scale).flat for part in parts]), *q.shape)


def logits_of(rank: int, cases: list[tuple[str, Config]]) -> list[Logits]:
    """Return the logits after every turn, for every case."""
    found = []
    for way, config in cases:
        with engine_of(config) as engine, pytest.MonkeyPatch.context() as patch:
            assert isinstance(engine.model, CachedGPT)
            tensor = config.parallelism.tensor_parallel_size
            with_large_sinks(engine.model._gpt, tensor, rank % tensor)
            if way == "replicated, merged by peers":
                engine.model.attention._merge = MergeByCollective()  # type: ignore[assignment]
                patch.setattr(cached_attention, "attend_splits", two_shares)
            found.append(logits_in(engine))
    return found


def logits_in(engine: LongContextEngine) -> Logits:
    sessions = [engine.open() for _ in range(3)]
    found: Logits = {}
    for number, turn in enumerate(TURNS):
        if number == 4:
            sessions[2].close()
            sessions[2] = sessions[0].fork(CUT)
        all_texts = texts()[:3] if number < 4 else [*texts()[:2], texts()[3]]
        new = {
            session: text[len(session.tokens) : len(session.tokens) + count]
            for session, text, count in zip(sessions, all_texts, turn, strict=True)
            if count
        }
        engine.append(new)
        for session, logits in zip(new, engine.next_logits(list(new)), strict=True):
            index = sessions.index(session)
            found[3 if number > 3 and index == 2 else index, len(session.tokens)] = logits.clone()
    for session in sessions:
        session.close()
    assert engine.cache_manager.used_pages() == 0
    return found


def truths(rank: int, configs: list[Config]) -> list[list[Tensor]]:
    return [dense(config, None, texts(), fp64=True, change=with_large_sinks) for config in configs]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    path = tmp_path_factory.mktemp("windows")
    return {name: tiny_config(path, "x", settings) for name, settings in SHAPES.items()}


@pytest.fixture(scope="module")
def truth(configs: dict[str, Config]) -> dict[str, list[Tensor]]:
    found = run_distributed(truths, 1, list(configs.values()))[0]
    return dict(zip(configs, found, strict=True))


def check(found: Logits, truth: list[Tensor]) -> None:
    exact = torch.stack([truth[session][length - 1] for session, length in found])
    torch.testing.assert_close(torch.stack(list(found.values())).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tensor", "n"), [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_every_way_equals_the_training_forward_pass(
    tensor: int, n: int, configs: dict[str, Config], truth: dict[str, list[Tensor]]
) -> None:
    ways = WAYS if n > 1 and tensor == 1 else {way: WAYS[way] for way in ("pass_q", "replicated")}
    cases = [
        (name, way, parallel(config, n, tensor, **WAYS[way]))
        for i, (name, config) in enumerate(configs.items())
        for j, way in enumerate(ways)
        if (i + j + n) % 2 == 0  # 2 ranks have the ways of a shape that 3 ranks do not
    ]
    for found in run_distributed(logits_of, n * tensor, [(way, config) for _, way, config in cases]):
        for (name, _, _), logits in zip(cases, found, strict=True):
            check(logits, truth[name])


def test_windows_and_sinks_have_an_effect(configs: dict[str, Config], truth: dict[str, list[Tensor]]) -> None:
    """Models without them have other logits, so the test above can fail."""
    plain = {"model.window": None, "model.window_pattern": None, "model.sinks": "none"}
    without = [changed(config, plain) for config in configs.values()]
    without += [changed(config, {"model.sinks": "none"}) for config in configs.values()]
    others = run_distributed(truths, 1, without)[0]
    for number, other in enumerate(others):
        exact = list(truth.values())[number % len(configs)]
        assert (other[0][-1] - exact[0][-1]).abs().max() > 1e-2


def with_int8(rank: int, configs: list[Config]) -> list[Logits]:
    return logits_of(rank, [("", config) for config in configs])


def test_8_bit_keys_and_values_have_windows_and_sinks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "x", {**next(iter(SHAPES.values())), "attention.kv_int8": True})
    cases = [parallel(config, 3, **WAYS[way]) for way in ("pass_kv", "replicated")]
    for planned, rows in run_distributed(with_int8, 3, cases):
        torch.testing.assert_close(planned, rows, rtol=2e-5, atol=2e-5)
