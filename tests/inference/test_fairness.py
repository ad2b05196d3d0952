"""A long prompt delays running answers and short prompts by no more than the stated time."""

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import Drawn, LongContextEngine
from megatron_longctx.inference.pace import Pace, attention_tile, prefill_flops
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.inference.session import Generation, Session
from megatron_longctx.planner.flops import Work, training_flops
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import compose_config
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import tiny_config

LONG, DELAY_S, STEP_S = 100_000, 0.4, 0.02


class Clock:
    """The time of a machine on which cached tokens cost more than the model's FLOPs tell: a prompt of 100,000 tokens
    takes 8 s, and a step of decode 20 ms."""

    def __init__(self, engine: LongContextEngine) -> None:
        self.now = 0.0
        self._append, self._step = engine.append, engine.step
        engine.append, engine.step = self.append, self.step  # type: ignore[method-assign]

    def append(self, new: Mapping[Session, Sequence[int]]) -> None:
        self.now += 0.01 + sum(len(t) * 4e-5 * (1 + s.cached_tokens / 50_000) for s, t in new.items())
        self._append(new)

    def step(self, generations: Sequence[Generation]) -> Drawn:
        self.now += STEP_S
        return self._step(generations)


def beside_a_long_prompt(rank: int, config: Config) -> dict[str, float]:
    """Run a stream, a long prompt, and a short one in every 15th round; the clock tells the scheduler its times."""
    with engine_of(config) as engine:
        clock, pace = Clock(engine), Pace.timed(config.model, engine.cache_manager.n, DELAY_S)
        scheduler = Scheduler(engine, max_active=8, pace=pace)
        source = random.Random(1)
        scheduler.submit(Request(0, (1, 2, 3), Sampling(max_new_tokens=10**4)))
        scheduler.advance()
        scheduler.observe(clock.now)
        arrived, came = {1: clock.now}, defaultdict(list)
        scheduler.submit(Request(1, tuple(source.choices(range(256), k=LONG)), Sampling(max_new_tokens=1)))
        begun, real, longest = clock.now, time.monotonic(), 0.0
        rounds = 0
        while 1 not in came:
            before, rounds = clock.now, rounds + 1
            for event in scheduler.advance():
                came[event.number].append(clock.now)
            scheduler.observe(clock.now - before)
            if rounds % 15 == 0:  # it came when this round had begun
                arrived[rounds] = before
                scheduler.submit(Request(rounds, tuple(source.choices(range(256), k=40)), Sampling(max_new_tokens=2)))
            longest, real = max(longest, time.monotonic() - real), time.monotonic()
        scheduler.close()
        gaps = [later - one for one, later in zip(came[0], came[0][1:], strict=False)]
        delays = [came[number][0] - at for number, at in arrived.items() if number > 1 and number in came]
        assert len(delays) > 5
        return {
            "gap": max(gaps), "delay": max(delays), "real gap": longest, "rounds": rounds,
            "share": len(came[0]) * STEP_S / (clock.now - begun),
        }  # fmt: skip


def test_a_prompt_of_100_000_tokens_delays_nothing_for_long(tmp_path: Path) -> None:
    settings = {"data.seq_length": 128, "model.window": 16, "model.num_layers": 1}
    config = parallel(tiny_config(tmp_path, "fresh", settings), 1, cache_tokens=LONG + 20_000, page_tokens=64)
    (found,) = run_distributed(beside_a_long_prompt, 1, config)
    assert found["gap"] <= DELAY_S / 2 and found["delay"] <= DELAY_S
    assert found["share"] > 0.2 and found["rounds"] < 400


def test_a_million_tokens_take_few_rounds_that_are_equally_long() -> None:
    """On a machine whose attention has half the speed of its other products, from the first round on."""
    model = compose_config(["model=llama3_8b"]).model
    pace, cached, times = Pace.timed(model, 2, 2.0), 0, []
    linear = prefill_flops(model)(0, 1)
    while cached < 2**20:
        new = pace.fitting(cached, 2**20 - cached, pace.room)
        work = pace.work(cached, new)
        times.append(0.02 + (2 * work - linear * new) / 1.3e15)
        pace.observe(times[-1], work)
        cached += new
    assert max(times) < 1.0 and min(times[10:-1]) > 0.7
    assert len(times) < 1.02 * sum(times) / 0.75


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=5),
    st.integers(1, 500),
    st.sampled_from((1, 32)),
    st.sampled_from((None, 16)),
)
def test_a_round_has_room_for_its_shares(
    prompts: list[tuple[int, int]], room: int, tile: int, whole: int | None
) -> None:
    """And for nothing more, but for the least of one prompt."""
    sizes, work = Pace(room, tile=tile, least=tile).shares(prompts, whole)
    assert all(0 <= size <= left for size, (_, left) in zip(sizes, prompts, strict=True)) and work == sum(sizes) > 0
    assert work - max(sizes) <= room and (work <= room or max(sizes) <= (whole or tile))
    if whole is None and tile == 1 and sum(left for _, left in prompts) > room:
        assert work == room, "none of it is left"


def test_chunks_of_a_long_prompt_end_at_tiles() -> None:
    """A million tokens on 2 GPUs."""
    model = compose_config(["model=llama3_8b"]).model
    pace, cached = Pace.timed(model, 2, 2.0, tile=512), 0
    while cached < 10**6:
        (size,), work = pace.shares([(cached, 10**6 - cached)])
        assert work == pace.work(cached, size)
        pace.observe(0.02 + work / 1.275e15, work)
        cached += size
        assert cached % 1024 == 0 or cached == 10**6


composed = lru_cache(lambda name: compose_config([f"model={name}"]).model)


@settings(deadline=None)
@given(
    st.sampled_from(("llama3_8b", "gpt_oss_20b", "qwen3_next_80b_a3b")), st.integers(0, 2**21), st.integers(1, 2**17)
)
def test_work_is_that_of_a_forward_pass(name: str, cached: int, new: int) -> None:
    """Of dense layers, of windows and experts, and of recurrent layers."""
    model, mean = composed(name), cached + (new + 1) / 2
    windows = model.layer_windows.items()
    pairs = sum(count * new * (mean if left is None else min(mean, left)) for (left, _), count in windows)
    assert prefill_flops(model)(cached, new) == training_flops(model, 0, Work(new, round(pairs), 0)).causal / 3


def test_half_of_a_round_is_for_the_shortest_prompts() -> None:
    assert Pace(100).shares([(0, 500), (0, 30), (0, 90)]) == ([50, 30, 20], 100)
    assert Pace(4, least=8).shares([(0, 500), (0, 3)]) == ([8, 2], 10), "the first gets its least"
    whole = Pace(100)
    assert [whole.shares([(0, 300), (0, 64)], 64)[0] for _ in range(2)] == [[0, 64], [64, 0]], "they take turns"


def test_chunks_fill_a_gpu() -> None:
    """They end at multiples of a tile, if there is room for that; the first prompt gets a tile in any case."""
    pace = Pace(100, tile=32, least=32)
    assert [pace.shares([prompt])[0] for prompt in ((0, 500), (10, 500), (0, 90))] == [[96], [86], [90]]
    assert [Pace(20, tile=32, least=32).shares([prompt])[0] for prompt in ((0, 500), (40, 500))] == [[32], [24]]
    assert Pace(20, tile=32, least=32).shares([(40, 500), (7, 60)])[0] == [24, 10], "others are not held back"
    timed = Pace.timed(compose_config(["model=llama3_8b"]).model, 2, 2.0, tile=512)
    assert (timed.tile, timed.least) == (1024, 1024)


def test_a_tile_has_as_many_blocks_of_queries_as_the_gpu_has_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    model = compose_config(["model=llama3_8b"]).model  # 32 query and 8 key/value heads of 128 dims
    assert [attention_tile(model, tp, torch.device("cuda")) for tp in (1, 2, 16)] == [16 * 32, 33 * 32, 132 * 64]
    assert attention_tile(replace(model, head_dim=64), 1, torch.device("cuda")) == 16 * 48
    assert attention_tile(model, 1, torch.device("cpu")) == 1


def test_running_answers_are_owed_a_quarter_of_the_time() -> None:
    pace = Pace(100, delay_s=2.0)
    pace.observe(0.125, 0)
    assert not pace.owes_decode
    pace.observe(1.0, 60)
    assert pace.room == 60 * 0.75, "a round took longer than 3/8 of the stated time"
    owed = []
    for _ in range(3):
        owed.append(pace.owes_decode)
        pace.observe(0.125, 0)
    assert owed == [True, True, False], "(1/4 - 1/8) / (3/4) s"
