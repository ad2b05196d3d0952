"""Decode steps that every rank computes: the plans' tokens and logits, few sizes, refusals, graphs on GPUs."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config, InferenceConfig
from megatron_longctx.gpus import gpu_ranks
from megatron_longctx.inference import decode
from megatron_longctx.inference.cache_manager import CacheManager, slots_of
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.decode import Decoder
from megatron_longctx.inference.engine import EngineSettings, LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import converse, engine_of, parallel
from tests.shared.training import changed, tiny_config


class Recorder(Decoder):
    """Counts the steps, by the number of rows they are padded to; those of prompts apart."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.sizes: dict[int, int] = {}
        self.of_prompts: dict[int, int] = {}

    def _compute(self, size: int, together: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.sizes if together == 1 else self.of_prompts
        sizes[size] = sizes.get(size, 0) + 1
        return super()._compute(size, together)

    _replay = _compute  # of CPUs nothing is captured


def recorded(engine: LongContextEngine, how: str) -> Recorder:
    """The engine's decoder from now on."""
    engine._decoder = decoder = Recorder(engine.model, engine.cache_manager, EngineSettings(decode=how), "auto")
    return decoder


def tokens_of(engine: LongContextEngine, prompts: list[list[int]], counts: list[int]) -> list[tuple[int, ...]]:
    """Greedy and drawn continuations beside each other, that end at different times."""
    sessions = [engine.open() for _ in prompts]
    engine.append(dict(zip(sessions, prompts, strict=True)))
    active = [
        engine.start(session, Sampling(max_new_tokens=count, temperature=0.8 * (i % 4 == 3)), i)
        for i, (session, count) in enumerate(zip(sessions, counts, strict=True))
    ]
    generations = list(active)
    while active:
        engine.step(active)
        active = [generation for generation in active if generation.finish_reason is None]
    for session in sessions:
        session.close()
    return [tuple(generation.tokens) for generation in generations]


def both_ways(rank: int, engine: LongContextEngine, config: Config) -> None:
    assert engine.decoding == "replicated"
    source = random.Random(2)
    prompts = [[source.randrange(256) for _ in range(size)] for size in (1, 30, 2, 17, 5, 1)]
    counts = [6, 2, 5, 5, 1, 8]
    steps = recorded(engine, "replicated")
    found = tokens_of(engine, prompts, counts)
    # The first token of all comes from their prompts, so 5 sequences are the most that are decoded together.
    assert set(steps.sizes) == {8, 4, 2, 1} and sum(steps.sizes.values()) == max(counts) - 1
    assert steps.of_prompts == {128: 1}, "16 + 32 + 16 + 32 + 16 + 16 rows"
    steps = recorded(engine, "plan")
    assert tokens_of(engine, prompts, counts) == found and not steps.sizes and not steps.of_prompts

    # Logits, over a session whose older pages came and went: what a row of the table named before does not matter.
    for how in ("replicated", "plan", "replicated"):
        recorded(engine, how)
        for length in (13, 3):
            session, fresh = engine.open(), engine.open()
            session.append(prompts[1][:length])
            session.append([7])
            fresh.append([*prompts[1][:length], 7])
            torch.testing.assert_close(*engine.next_logits([session, fresh]), rtol=2e-5, atol=2e-5)
            session.close()
            fresh.close()

    # Turns over what is cached, prompts alone and beside single tokens. A mode that is named is for prompts.
    logits = []
    for how, mode in (("replicated", "auto"), ("plan", "auto"), ("replicated", "pass_q")):
        steps = recorded(engine, how)
        sessions = first, second = engine.open(), engine.open()
        with engine._chooser.taking(mode):
            first.append(prompts[1][:13])
            engine.append({first: prompts[3], second: [7]})
            engine.append({first: [8, 9], second: prompts[1][:20]})
            logits.append(engine.next_logits(sessions))
            if rank == 0 and steps.of_prompts:
                kept = [session.next_token.logits.untyped_storage().nbytes() for session in sessions]
                assert kept == [2 * 4 * engine.model.vocab_size] * 2, "of the rows whose next tokens are asked for"
        assert steps.of_prompts == ({16: 1, 48: 2} if (how, mode) == ("replicated", "auto") else {})
        for session in sessions:
            session.close()
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=2e-5, atol=2e-5)

    # Sizes are met before the first prompt, but where prompts are computed apart.
    met = engine.settings, dataclasses.replace(engine.settings, exact=True, prefill_chunk=16)
    for engine.settings in met[::-1]:
        steps = recorded(engine, "replicated")
        engine.warm_up()
        learned = config.model.position_embedding == "learned"  # at most 128 tokens
        sizes = {*range(16, 129, 16)} | (set() if learned else {160, 192, 224, 256, 320, 384, 448, 512})
        assert set(steps.of_prompts) == (set() if engine.settings.exact else sizes)
        assert engine.cache_manager.used_pages() == 0

    # So are the graphs of batches, where there are any, as far as there are pages.
    for how, sequences, expected in (("graphs", 12, {1, 2, 4, 8, 16}), ("graphs", 1, {1}), ("none", 12, {1})):
        steps = recorded(engine, "replicated")
        steps._graphs = how == "graphs"
        engine.warm_up(sequences=sequences)
        assert set(steps.sizes) == expected and engine.cache_manager.used_pages() == 0
    manager, steps = engine.cache_manager, recorded(engine, "replicated")
    steps._graphs, other = True, manager.open()
    manager.append({other: (min(map(manager.free_pages, range(manager.n))) - 3) * manager.n * manager.page_tokens})
    engine.warm_up(sequences=12)
    assert max(steps.sizes) == 2, "3 pages are free on every rank"
    assert set(steps.of_prompts.values()) == {1}, "no size twice, however many do not fit"
    manager.close(other)

    bad_values_stay_with_their_sequence(engine, prompts[1])

    # However many queries lie together: alone, where many query heads share keys, prompts and decode share their steps.
    recorded(engine, "plan")
    expected = in_chunks(engine, prompts)
    for beside, steps_of in ((1, {16: 7, 8: 1, 4: 2}), (2, {16: 10}), (16, {48: 2, 16: 8})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "max_queries_per_tile", lambda *_, beside=beside: beside)
            steps = recorded(engine, "replicated")
        torch.testing.assert_close(in_chunks(engine, prompts), expected, rtol=2e-5, atol=2e-5)
        assert (steps.sizes, steps.of_prompts) == ((steps_of, {}) if beside == 1 else ({}, steps_of))

    # Prompts in chunks of one token, all placed before the first is computed, and more rows than a step takes.
    prompts, counts, found = ([*each[:1], *each[2:3]] for each in (prompts, counts, found))
    engine.settings = dataclasses.replace(engine.settings, prefill_chunk=1)
    most, decode.MOST_ROWS = decode.MOST_ROWS, 2
    try:
        steps = recorded(engine, "replicated")
        assert tokens_of(engine, prompts, counts) == found
        assert set(steps.sizes) == {2, 1} and not steps.of_prompts
    finally:
        decode.MOST_ROWS = most


def in_chunks(engine: LongContextEngine, prompts: list[list[int]]) -> torch.Tensor:
    """Logits of sessions that share pages, one of them evicted: all chunks are placed before the first is computed."""
    own = engine.settings
    engine.settings = dataclasses.replace(own, prefill_chunk=9)
    sessions = [engine.open() for _ in range(3)]
    engine.append(dict(zip(sessions, prompts[:3], strict=True)))
    sessions += [sessions[1].fork(11), sessions[1].fork()]
    engine.append({sessions[0]: prompts[3], sessions[3]: [1, 2, 3], sessions[4]: [4]})
    engine.cache_manager.evict(sessions[1].number)
    found = engine.next_logits(sessions)
    for session in sessions:
        session.close()
    engine.settings = own
    return found


def bad_values_stay_with_their_sequence(engine: LongContextEngine, text: list[int]) -> None:
    """Every rank hears of them, whether tokens are drawn or the likeliest; what free slots hold is never read."""
    attention, manager = engine.model.attention, engine.cache_manager
    for temperature in (0.0, 1.0):
        steps = recorded(engine, "replicated")
        bad, good, fresh = (engine.open() for _ in range(3))
        bad.append(text[:10])
        slots = slots_of(manager.slots(bad.number, attention.rank))
        for layer in attention._layers:
            layer[slots] = torch.nan
        engine.append({bad: [1, 2, 3], good: text})
        with pytest.raises(ValueError, match="logits=not finite"):
            bad.generate(Sampling(max_new_tokens=2, temperature=temperature))
        expected = engine.next_logits([good])
        assert expected.isfinite().all()
        bad.close()
        free = torch.ones(attention.nowhere + 1, dtype=torch.bool)
        free[slots_of(manager.slots(good.number, attention.rank))] = False
        for storage in attention._storage:
            storage[free] = torch.nan
        fresh.append(text)
        torch.testing.assert_close(engine.next_logits([fresh]), expected, rtol=2e-5, atol=2e-5)
        assert sum(steps.of_prompts.values()) == 3
        for session in (good, fresh):
            session.close()


def every_shape(rank: int, configs: list[Config]) -> None:
    for config in configs:
        with engine_of(config) as engine:
            both_ways(rank, engine, config)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_steps_of_every_rank_give_the_tokens_of_plans(n: int, tmp_path: Path) -> None:
    shapes = [(2, "rope"), (1, "learned"), (4, "rope")]
    config = tiny_config(tmp_path, "x", {"data.seq_length": 128})
    configs = [
        parallel(changed(config, {"model.num_kv_heads": heads, "model.position_embedding": positions}), n)
        for heads, positions in (shapes if n == 3 else shapes[:1])
    ]
    run_distributed(every_shape, n, configs)


class NoModel:
    vocab_size, max_positions = 8, None

    def __init__(self, attention: CachedAttention) -> None:
        self.attention = attention


def decoder(how: EngineSettings, mode: str = "auto") -> Decoder:
    manager = CacheManager(1, 4, 4)
    attention = CachedAttention(None, CacheShape(1, 2, 1, 8, torch.float32), 16, torch.device("cpu"))
    return Decoder(NoModel(attention), manager, how, mode)  # type: ignore[arg-type]


def test_what_is_taken_is_what_the_settings_say() -> None:
    manager = CacheManager(1, 800, 4)
    sessions = [manager.open() for _ in range(129)]
    one, two = manager.append({sessions[0]: 1}), manager.append({sessions[1]: 2})
    most, more = manager.append(dict.fromkeys(sessions[1:], 1)), manager.append(dict.fromkeys(sessions, 1))
    automatic = decoder(EngineSettings())
    assert automatic.takes(one) and not automatic.takes((*one, *two))
    assert automatic.takes(most) and not automatic.takes(more)
    assert decoder(EngineSettings(decode="replicated"), "pass_q").takes(more)
    # Prompts are taken where their rows, in sixteens, fit into a step. Without graphs only if that is asked for.
    prompts = {count: manager.append({sessions[2]: count}) for count in (2, 512, 513)}
    replicated, plan = decoder(EngineSettings(decode="replicated")), decoder(EngineSettings(decode="plan"))
    assert [replicated.takes(prompts[count]) for count in prompts] == [True, True, False]
    assert replicated.takes((*prompts[2], *one)) and not replicated.takes((*prompts[512], *one))
    assert not any(each.takes(prompts[2]) for each in (automatic, plan))
    assert replicated.takes(most, named=True) and not replicated.takes(prompts[2], named=True)
    assert plan.prompt_sizes == ()
    sizes = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    assert replicated.prompt_sizes == sizes
    assert not decoder(EngineSettings(), "pass_q").takes(one) and not decoder(EngineSettings(decode="plan")).takes(one)


def agree(rank: int) -> list[str]:
    """One of the ranks alone can capture steps."""
    decode.why_no_graphs = lambda _: None if rank else "triton cannot be imported"
    shape, device = CacheShape(1, 2, 1, 8, torch.float32), torch.device("cpu")
    model = NoModel(CachedAttention(torch.distributed.group.WORLD, shape, 16, device))
    found = []
    for graphs in ("auto", "true"):
        try:
            how = Decoder(model, CacheManager(2, 4, 4), EngineSettings(cuda_graphs=graphs), "auto")  # type: ignore[arg-type]
            found.append(f"{how.name}, prompts of {how.most_prompt}")
        except ValueError as error:
            found.append(str(error))
    return found


def test_all_ranks_replay_steps_or_none() -> None:
    """Some would replicate prompts that others wait for in a plan's attention."""
    first, second = run_distributed(agree, 2)
    assert first == second and first[0] == "replicated, prompts of 0"
    assert "cuda_graphs=true: expected auto or false, since triton cannot be imported" in first[1]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inference.decode=ring: expected one of auto, replicated, plan"):
        EngineSettings(decode="ring")
    with pytest.raises(ValueError, match=r"inference.cuda_graphs=1: expected one of auto, true, false"):
        EngineSettings(cuda_graphs="1")
    with pytest.raises(ValueError, match=r"cuda_graphs=true: expected auto or false, since the model is on cpu"):
        decoder(EngineSettings(cuda_graphs="true"))
    assert decoder(EngineSettings(decode="plan", cuda_graphs="true")).name == "by plans"
    assert InferenceConfig(cuda_graphs="True").cuda_graphs == "true"


def converse_with(rank: int, configs: list[Config]) -> list[list[tuple[list[int], torch.Tensor]]]:
    """Tokens and logits of the same conversations, by the settings of each."""
    found = []
    for config in configs:
        records = converse(rank, config, None)
        found.append([(r.tokens, torch.stack([x.cpu() for x in r.logits.values()])) for r in records])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_replayed_steps_give_the_tokens_of_plans_on_gpus(context: int, tensor: int, tmp_path: Path) -> None:
    if gpu_ranks() < context * tensor:
        pytest.skip(f"needs {context * tensor} CUDA devices")
    settings = {"train.device": "cuda", "data.seq_length": 128, "model.hidden_size": 64}
    config = tiny_config(tmp_path, "x", settings)
    ways = [{"cuda_graphs": "true"}, {"cuda_graphs": "false"}, {"decode": "plan"}]
    configs = [parallel(config, context, tensor, **way) for way in ways]
    for found in run_distributed(converse_with, context * tensor, configs, backend="nccl"):
        for (tokens, replayed), (eager_tokens, eager), (plan_tokens, planned) in zip(*found, strict=True):
            assert tokens == eager_tokens == plan_tokens
            torch.testing.assert_close(replayed, eager, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(replayed, planned, rtol=1e-4, atol=1e-4)
