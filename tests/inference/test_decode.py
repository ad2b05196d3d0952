"""Replicated decode: the same tokens and logits as plans, few step sizes, refused settings, graphs on GPUs."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config, InferenceConfig
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.inference import decode
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.decode import Decoder
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.warm_up import warm_up
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import converse, engine_of, parallel
from tests.inference.histories import slots_of
from tests.shared.training import changed, tiny_config


class Recorder(Decoder):
    """Counts the steps by their number of rows after padding, separately for single tokens and for prompts."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.sizes: Counter[int] = Counter()
        self.prompt_steps: Counter[int] = Counter()

    def _compute(self, size: int, tile: int, ends: int) -> tuple[torch.Tensor, torch.Tensor]:
        (self.sizes if tile == 1 else self.prompt_steps)[size] += 1
        return super()._compute(size, tile, ends)

    _replay = _compute  # nothing is captured on CPUs


def recorded(engine: LongContextEngine, how: str) -> Recorder:
    """Replace the engine's decoder."""
    engine._decoder = decoder = Recorder(engine.model, engine.cache_manager, InferenceConfig(decode=how), "auto")
    return decoder


def tokens_of(engine: LongContextEngine, prompts: list[list[int]], counts: list[int]) -> list[tuple[int, ...]]:
    """Return greedy and drawn continuations of one batch, which end at different times."""
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


def replicated_equals_planned(engine: LongContextEngine, prompts: list[list[int]]) -> None:
    counts = [6, 2, 5, 5, 1, 8]
    steps = recorded(engine, "replicated")
    found = tokens_of(engine, prompts, counts)
    # Every first token comes from a prompt, so at most 5 sequences are decoded together.
    assert set(steps.sizes) == {8, 4, 2, 1} and steps.sizes.total() == max(counts) - 1
    assert steps.prompt_steps == {128: 1}, "16 + 32 + 16 + 32 + 16 + 16 rows"
    steps = recorded(engine, "plan")
    assert tokens_of(engine, prompts, counts) == found and not steps.sizes and not steps.prompt_steps

    # The page table of a row may have named other pages before.
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

    # Chunks of one token, all placed before the first is computed, and more rows than a step takes.
    prompts, counts, found = ([*each[:1], *each[2:3]] for each in (prompts, counts, found))
    own = engine.settings
    engine.settings = replace(own, prefill_chunk=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MAX_ROWS", 2)
        steps = recorded(engine, "replicated")
        assert tokens_of(engine, prompts, counts) == found
        assert set(steps.sizes) == {2, 1} and not steps.prompt_steps
    engine.settings = own


def prompts_are_replicated_unless_a_mode_is_set(engine: LongContextEngine, prompts: list[list[int]]) -> None:
    """Prompts after cached tokens, alone and beside single tokens."""
    logits = []
    for how, mode in (("replicated", "auto"), ("plan", "auto"), ("replicated", "pass_q")):
        steps = recorded(engine, how)
        sessions = first, second = engine.open(), engine.open()
        with engine._chooser.forcing(mode):
            first.append(prompts[1][:13])
            engine.append({first: prompts[3], second: [7]})
            engine.append({first: [8, 9], second: prompts[1][:20]})
            logits.append(engine.next_logits(sessions))
            if engine.model.attention.rank == 0 and steps.prompt_steps:
                kept = [session.next_token.logits.untyped_storage().nbytes() for session in sessions]
                assert kept == [2 * 4 * engine.model.vocab_size] * 2, "only the rows of next tokens are kept"
        assert steps.prompt_steps == ({16: 1, 48: 2} if (how, mode) == ("replicated", "auto") else {})
        for session in sessions:
            session.close()
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=2e-5, atol=2e-5)


def warm_up_runs_every_size(engine: LongContextEngine, learned: bool) -> None:
    own = engine.settings
    for settings in (replace(own, exact_reuse=True, prefill_chunk=16), own):
        engine.settings = settings
        steps = recorded(engine, "replicated")
        warm_up(engine)
        sizes = {*range(16, 129, 16)} | (set() if learned else {160, 192, 224, 256, 320, 384, 448, 512, 640})
        # At most as many tokens as the cache has room for, or the model has positions.
        assert set(steps.prompt_steps) == (set() if settings.exact_reuse else sizes)
        assert engine.cache_manager.used_pages() == 0 and steps.max_prompt == 1024

    # The graphs of batches, if there are any, as far as there are pages.
    manager, other = engine.cache_manager, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_longctx.inference.warm_up._seconds", lambda *_: 0.0)
        for graphs, sequences, expected in ((True, 12, {1, 2, 4, 8, 16}), (True, 1, {1}), (False, 12, {1})):
            steps = recorded(engine, "replicated")
            steps.has_graphs = graphs
            warm_up(engine, sequences)
            assert set(steps.sizes) == expected and manager.used_pages() == 0
            assert steps.max_prompt == (max(sizes) if graphs else 1024), "all sizes that it takes have graphs"
        steps, other = recorded(engine, "replicated"), manager.open()
        steps.has_graphs = True
        room = min(pool.available for pool in manager.groups[0].pools) - 3
        manager.append({other: room * manager.n * manager.page_tokens})
        warm_up(engine, 12)
    assert max(steps.sizes) == 2, "3 pages are free on every rank"
    assert set(steps.prompt_steps.values()) == {1}, "no size twice, however many do not fit"
    manager.close(other)


def tiles_do_not_matter(engine: LongContextEngine, prompts: list[list[int]]) -> None:
    """With tiles of one query, which models with many query heads per KV head have, prompts and decode share steps."""
    recorded(engine, "plan")
    expected = in_chunks(engine, prompts)
    for tile, steps_of in ((1, {32: 1, 16: 6, 8: 1, 4: 2}), (2, {32: 1, 16: 9}), (16, {48: 2, 16: 8})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "max_queries_per_tile", lambda *_, tile=tile: tile)
            steps = recorded(engine, "replicated")
        torch.testing.assert_close(in_chunks(engine, prompts), expected, rtol=2e-5, atol=2e-5)
        assert (steps.sizes, steps.prompt_steps) == ((steps_of, {}) if tile == 1 else ({}, steps_of))


def in_chunks(engine: LongContextEngine, prompts: list[list[int]]) -> torch.Tensor:
    """Return logits of sessions that share pages, one with nothing cached: all chunks are placed before the first runs.

    After their shared pages of 4 tokens, the forks compute 3 and 2 of their tokens again."""
    own = engine.settings
    engine.settings = replace(own, prefill_chunk=9)
    sessions = [engine.open() for _ in range(3)]
    engine.append(dict(zip(sessions, prompts[:3], strict=True)))
    sessions += [sessions[1].fork(11), sessions[1].fork()]
    engine.append({sessions[0]: prompts[3], sessions[3]: [1, 2, 3], sessions[4]: [4]})
    engine.cache_manager.truncate(sessions[1].number, 0)
    found = engine.next_logits(sessions)
    for session in sessions:
        session.close()
    engine.settings = own
    return found


def bad_values_stay_with_their_sequence(engine: LongContextEngine, text: list[int]) -> None:
    """Every rank raises for them, whether tokens are drawn or greedy; the contents of free slots are never read."""
    attention, manager = engine.model.attention, engine.cache_manager
    for temperature in (0.0, 1.0):
        steps = recorded(engine, "replicated")
        bad, good, fresh = (engine.open() for _ in range(3))
        bad.append(text[:10])
        for layer in attention.layers:
            layer[slots_of(manager, bad.number, attention.rank)] = torch.nan
        engine.append({bad: [1, 2, 3], good: text})
        with pytest.raises(ValueError, match="logits are not finite"):
            bad.generate(Sampling(max_new_tokens=2, temperature=temperature))
        expected = engine.next_logits([good])
        assert expected.isfinite().all()
        bad.close()
        free = torch.ones(attention.unused_slots[0] + 1, dtype=torch.bool)
        free[slots_of(manager, good.number, attention.rank)] = False
        for storage in attention._storage:
            storage[free] = torch.nan
        fresh.append(text)
        torch.testing.assert_close(engine.next_logits([fresh]), expected, rtol=2e-5, atol=2e-5)
        assert steps.prompt_steps.total() == 3
        for session in (good, fresh):
            session.close()


def every_shape(rank: int, configs: list[Config]) -> None:
    source = random.Random(2)
    prompts = [[source.randrange(256) for _ in range(size)] for size in (1, 30, 2, 17, 5, 1)]
    for config in configs:
        with engine_of(config) as engine:
            assert engine.decoding == "replicated"
            replicated_equals_planned(engine, prompts)
            prompts_are_replicated_unless_a_mode_is_set(engine, prompts)
            learned = config.model.position_embedding == "learned"
            if engine.cache_manager.n == 2 or learned:
                warm_up_runs_every_size(engine, learned)
            bad_values_stay_with_their_sequence(engine, prompts[1])
            tiles_do_not_matter(engine, prompts)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_replicated_decode_equals_plans(n: int, tmp_path: Path) -> None:
    shapes = {1: [(2, "rope")], 2: [(4, "rope")], 3: [(2, "rope"), (1, "learned")]}
    config = tiny_config(tmp_path, "x", {"data.seq_length": 128})
    configs = [
        parallel(changed(config, {"model.num_kv_heads": heads, "model.position_embedding": positions}), n)
        for heads, positions in shapes[n]
    ]
    run_distributed(every_shape, n, configs)


class NoModel:
    vocab_size, max_positions = 8, None

    def __init__(self, attention: CachedAttention) -> None:
        self.attention = attention


def decoder(how: InferenceConfig, mode: str = "auto") -> Decoder:
    manager = CacheManager(1, 4, 4)
    attention = CachedAttention(None, CacheShape(1, 2, 1, 8, torch.float32), 16, torch.device("cpu"))
    return Decoder(NoModel(attention), manager, how, mode)  # type: ignore[arg-type]


def test_the_settings_decide_which_batches_are_replicated() -> None:
    manager = CacheManager(1, 20_000, 4)
    sessions = [manager.open() for _ in range(129)]
    one, two = manager.append({sessions[0]: 1}), manager.append({sessions[1]: 2})
    most, more = manager.append(dict.fromkeys(sessions[1:], 1)), manager.append(dict.fromkeys(sessions, 1))
    automatic = decoder(InferenceConfig())
    assert automatic.takes(one) and not automatic.takes((*one, *two))
    assert automatic.takes(most) and not automatic.takes(more)
    assert decoder(InferenceConfig(decode="replicated"), "pass_q").takes(more)
    # Prompts are taken if their rows, in tiles of 16, fit into a step; without graphs only with decode=replicated.
    prompts = {count: manager.append({sessions[2]: count}) for count in (2, 1024, 1025)}
    replicated, plan = decoder(InferenceConfig(decode="replicated")), decoder(InferenceConfig(decode="plan"))
    assert [replicated.takes(prompts[count]) for count in prompts] == [True, True, False]
    assert replicated.takes((*prompts[2], *one)) and not replicated.takes((*prompts[1024], *one))
    # Their pairs with the tokens that they see are few enough, too.
    manager.append({sessions[3]: 512 * 128 - 1024 - 2})
    seen = [manager.append({sessions[3]: count}) for count in (1024, 1024, 512)]
    assert [replicated.takes(each) for each in seen] == [True, False, True]
    # So are the rows of logits.
    replicated.max_prompt = 4096
    many = [manager.append(dict.fromkeys(sessions[:count], 2)) for count in (128, 129)]
    assert [replicated.takes(each) for each in many] == [True, False]
    replicated.max_prompt = 1024
    assert not any(each.takes(prompts[2]) for each in (automatic, plan))
    assert replicated.takes(most, mode_is_set=True) and not replicated.takes(prompts[2], mode_is_set=True)
    assert plan.prompt_sizes == ()
    sizes = (*range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
    assert replicated.prompt_sizes == sizes
    assert not decoder(InferenceConfig(), "pass_q").takes(one) and not decoder(InferenceConfig(decode="plan")).takes(
        one
    )


def agree(rank: int) -> list[str]:
    """Only one rank can capture steps."""
    decode.why_no_graphs = lambda _: None if rank else "triton cannot be imported"
    shape, device = CacheShape(1, 2, 1, 8, torch.float32), torch.device("cpu")
    model = NoModel(CachedAttention(torch.distributed.group.WORLD, shape, 16, device))
    found = []
    for graphs in ("auto", "true"):
        try:
            how = Decoder(model, CacheManager(2, 4, 4), InferenceConfig(cuda_graphs=graphs), "auto")  # type: ignore[arg-type]
            found.append(f"{how.name}, prompts of {how.max_prompt}")
        except ValueError as error:
            found.append(str(error))
    return found


def test_all_ranks_replay_steps_or_none() -> None:
    """Otherwise some ranks would replicate prompts for which others wait in a plan's attention."""
    first, second = run_distributed(agree, 2)
    assert first == second and first[0] == "replicated, prompts of 0"
    assert "cuda_graphs=true: expected auto or false, because triton cannot be imported" in first[1]


def test_invalid_settings_are_refused() -> None:
    for settings, message in (
        (InferenceConfig(decode="ring"), r"inference\.decode=ring: expected one of auto, replicated, plan"),
        (InferenceConfig(cuda_graphs="1"), r"inference\.cuda_graphs=1: expected one of auto, true, false"),
        (InferenceConfig(prefill_chunk=0), r"inference\.prefill_chunk=0: expected null or at least 1"),
        (InferenceConfig(exact_reuse=True), r"inference\.prefill_chunk=None: expected a number with inference\.exact"),
    ):
        with pytest.raises(ValueError, match=message):
            LongContextEngine(None, None, None, settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cuda_graphs=true: expected auto or false, because the model is on cpu"):
        decoder(InferenceConfig(cuda_graphs="true"))
    assert decoder(InferenceConfig(decode="plan", cuda_graphs="true")).name == "by plans"
    assert InferenceConfig(cuda_graphs="True").cuda_graphs == "true"


def converse_with(rank: int, configs: list[Config]) -> list[list[tuple[list[int], torch.Tensor]]]:
    """Return tokens and logits of the same conversations with each configuration."""
    found = []
    for config in configs:
        records = converse(rank, config, None)
        found.append([(r.tokens, torch.stack([x.cpu() for x in r.logits.values()])) for r in records])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_replayed_steps_equal_plans_on_gpus(context: int, tensor: int, tmp_path: Path) -> None:
    if max_gpu_ranks() < context * tensor:
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


def long_prompts(rank: int, config: Config) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits after prompts by steps and by plans: up to the limit, which captures nothing, and above it."""
    source, found = random.Random(3), []
    with engine_of(config) as engine:
        warm_up(engine)
        steps = engine._decoder
        captured, most = set(steps._captured), steps.max_prompt
        for counts in ([most], [most // 2, 1], [decode.MAX_PROMPT_ROWS], [31] * decode.MAX_ROWS):
            steps.max_prompt = most if sum(counts) <= most else decode.MAX_PROMPT_ROWS
            prompts = [source.choices(range(256), k=count) for count in counts]
            logits = []
            for mode in ("auto", "pass_kv"):
                before = engine.mode_counts["replicated"]
                with engine._chooser.forcing(mode), engine._appended(prompts) as sessions:
                    logits.append(engine.next_logits(sessions).cpu())
                assert engine.mode_counts["replicated"] == before + (mode == "auto")
            assert steps.max_prompt > most or set(steps._captured) == captured, "a prompt waited"
            found.append((logits[0], logits[1]))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("context", [1, 2])
def test_long_prompts_are_replayed_on_gpus(context: int, tmp_path: Path) -> None:
    if max_gpu_ranks() < context:
        pytest.skip(f"needs {context} CUDA devices")
    settings = {"train.device": "cuda", "data.seq_length": 128, "model.hidden_size": 64}
    config = parallel(tiny_config(tmp_path, "x", settings), context, cuda_graphs="true", cache_tokens=10_000)
    for found in run_distributed(long_prompts, context, config, backend="nccl"):
        for replayed, planned in found:
            torch.testing.assert_close(replayed, planned, rtol=1e-4, atol=1e-4)
