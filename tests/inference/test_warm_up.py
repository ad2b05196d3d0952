"""Kernels compiled and steps timed before the first prompt: afterwards no prompt and no decode waits for Triton."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config, InferenceConfig
from megatron_longctx.core.attention.execute import Pass, Runtime
from megatron_longctx.core.attention.kv_format import Shapes
from megatron_longctx.core.comm import BufferPool
from megatron_longctx.core.kernels import AttentionKernel, partials
from megatron_longctx.core.kernels.interface import BlockInputs
from megatron_longctx.core.plans import KernelSupport, Kind, Recorder, Target
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.core.plans.recording import MAX_PARTIALS
from megatron_longctx.inference import decode, paged
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.decode import Decoder
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.paged import PackedPartials, Pages, compile_decode
from megatron_longctx.inference.warm_up import compile_kernels, compile_merges, warm_up
from megatron_longctx.testing.distributed import run_distributed
from tests.core.kernels.test_variants import Launches, needs_compiler
from tests.inference.conversations import engine_of, parallel
from tests.shared.threads import ThreadedRanks
from tests.shared.training import tiny_config

CPU = torch.device("cpu")
BF16 = torch.bfloat16
HEADS, KV_HEADS, D = 8, 2, 128


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Record the variants of merges that a GPU would compile; nothing runs."""
    from megatron_longctx.core.kernels import partials_triton

    launches = Launches(partials_triton._combine_kernel)
    monkeypatch.setattr(partials_triton, "_combine_kernel", launches)
    monkeypatch.setattr(partials, "_fusable", lambda *_: True)
    monkeypatch.setattr(partials, "_fused", lambda: partials_triton)
    return launches


class NoAttention(AttentionKernel):
    """Returns uninitialized results."""

    takes = KernelSupport(packed=True)

    def why_not(self, request: Any) -> None:
        return None

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        return torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3])

    def _backward(self, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("forward alone")


def prompts(cases: int) -> None:
    """Run one layer's attention of random prompts over random histories, on every rank."""
    source = random.Random(0)
    shape = CacheShape(1, HEADS, KV_HEADS, D, BF16)
    shapes = Shapes(shape.workload, BF16, CPU, shape.kv, shape.kv)
    for case in range(cases):
        n = source.randint(2, 4)
        manager = CacheManager(n, 400, 8)
        sessions = [manager.open() for _ in range(source.randint(1, 2))]
        for _ in range(source.randint(0, 3)):
            manager.append({session: source.randint(1, 300) for session in sessions})
        chunks = manager.append({session: source.choice((1, 2, source.randint(3, 300))) for session in sessions})
        batch = Batch(n, manager.slots[0], chunks)
        cache = torch.empty(manager.slots[0], 2, 1, KV_HEADS, D, dtype=BF16)
        recorder = Recorder(batch.plan(list(CACHE_MODES)[case % 3]), Target(shape.workload, NoAttention.takes))
        ranks = ThreadedRanks(n)

        def attend(rank: int, batch=batch, cache=cache, recorder=recorder, ranks=ranks) -> None:  # type: ignore[no-untyped-def]
            runtime = Runtime(NoAttention(), ranks.transport(rank), BufferPool(CPU))
            q = torch.empty(batch.num_rows(rank), 1, HEADS, D, dtype=BF16)
            Pass(recorder, rank, shapes, runtime, packed=True).run({Kind.Q: (q,), Kind.KV: (cache,)}, 1.0)

        ranks.run(attend)


@needs_compiler
def test_prompts_need_no_merge_that_was_not_compiled(merges: Launches) -> None:
    prompts(60)
    needed = set(merges.variants)
    assert len(needed) >= 4, "these prompts need too few variants"
    merges.variants.clear()
    compile_merges(HEADS, D, BF16, CPU)
    assert len(merges.variants) == 16 and needed <= set(merges.variants)


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "int8", "windows"),
    [(2, False, (False,)), (4, False, (True,)), (8, False, (False, True)), (32, False, (False,)), (8, True, (True,))],
)
def test_decode_needs_no_kernel_that_was_not_compiled(
    heads: int, int8: bool, windows: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_longctx.inference import paged_triton

    kernels = {name: Launches(getattr(paged_triton, name)) for name in ("_attend_kernel", "_merge_kernel")}
    for name, launches in kernels.items():
        monkeypatch.setattr(paged_triton, name, launches)
    monkeypatch.setattr(paged_triton, "_processors", lambda _: 132)  # an H100's
    monkeypatch.setattr(paged, "attend_torch", paged_triton.attend_triton)
    monkeypatch.setattr(paged, "merge_ranks_torch", paged_triton.merge_ranks_triton)
    cache = torch.zeros(256, 2, 2, D, dtype=BF16) if not int8 else torch.zeros(256, 2, 2, D + 4, dtype=torch.uint8)
    compile_decode(torch.empty(0, heads, D, dtype=BF16), cache, 64, windows)
    compiled = {name: set(launches.variants) for name, launches in kernels.items()}
    tables, counts = torch.zeros(2048, 5, dtype=torch.int32), torch.ones(4097, dtype=torch.int64)
    together = paged.max_queries_per_tile(heads, 2)
    for rows, beside in [(2**i, 1) for i in range(8)] + [(2**i, together) for i in range(13) if 2**i >= together]:
        for ranks in (2, 3, 8):
            q = torch.empty(rows, heads, D, dtype=BF16)
            for window in windows:
                skipped = counts[1 : rows + 1] if window else None  # a field of a step's inputs
                pages = Pages(tables[: rows // beside], counts[:rows], 64, beside, skipped)
                found = paged.attend_pages(q, cache, pages, 0.1)
            gathered = torch.empty(ranks, found.flat.numel())
            paged.merge_ranks(PackedPartials(gathered, *q.shape), torch.empty_like(q))
    assert all(compiled.values()) and {name: set(found.variants) for name, found in kernels.items()} == compiled


def test_nothing_is_compiled_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("called")

    for name in ("compile_merges", "compile_decode"):
        monkeypatch.setattr(f"megatron_longctx.inference.warm_up.{name}", fails)
    compile_kernels(CachedAttention(None, CacheShape(1, HEADS, KV_HEADS, D, BF16), 64, CPU), 16)


@pytest.mark.gpu
@needs_compiler
def test_a_gpu_compiles_no_merge_twice() -> None:
    from megatron_longctx.core.kernels.partials_triton import _combine_kernel

    device = torch.device("cuda")
    attention = CachedAttention(None, CacheShape(1, HEADS, KV_HEADS, D, BF16), 256, device)
    compile_kernels(attention, 64)
    compiled = _combine_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    merge: Callable[..., None] = partials.merge_partials
    for tokens in (1, 7, 48):
        value = torch.zeros(tokens, 1, HEADS, D, dtype=BF16, device=device)
        lse = torch.zeros(1, HEADS, tokens, device=device).permute(2, 0, 1)
        for count in range(1, MAX_PARTIALS + 1):
            for out in (torch.empty_like(value), torch.empty_like(value, dtype=torch.float32)):
                merge([partials.Partial(0, 0, value, lse)] * count, out, torch.empty_like(lse))
    assert len(compiled) == before >= 16


class Clock:
    """The time of a rank, which passes only where it is added."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def perf_counter(self) -> float:
        self.reads += 1
        return self.now


class TimedDecoder(Decoder):
    """Steps for prompts that take some time per row, more if they are captured, and compute nothing."""

    def __init__(self, engine: LongContextEngine, clock: Clock, row_s: float) -> None:
        super().__init__(engine.model, engine.cache_manager, InferenceConfig(decode="replicated"), "auto")
        self._clock, self._row_s, self._vocab = clock, row_s, engine.model.vocab_size
        self.captured: list[int] = []

    def _compute(self, size: int, tile: int, ends: int) -> tuple[Tensor, Tensor]:
        assert ends <= 128, "there are no more rows of logits"
        if tile > 1:
            self._clock.now += size * self._row_s + 10 * (size not in self.captured)
            self.captured += [size] * (size not in self.captured)
        return torch.zeros(ends, self._vocab), torch.zeros(ends, dtype=torch.int64)

    _replay = _compute


def limits(rank: int, config: Config) -> list[tuple[int, int, int, bool]]:
    """Return the limit, the number of captured sizes, the largest of them and whether a clock was read, by case.

    A row takes 10 µs on rank 0 and 20 on rank 1, plans some ms and 5 less on rank 1 once they have run."""
    found = []
    with engine_of(config) as engine, pytest.MonkeyPatch.context() as patch:
        attention = engine.model.attention
        begin = attention.begin
        for plan_ms, graphs, mode, chunk in CASES:
            clock, begun = Clock(), set()
            patch.setattr("megatron_longctx.core.comm.device.time", clock)
            patch.setattr(decode, "_use_graphs", lambda *_, graphs=graphs: graphs)
            timed = engine._decoder = TimedDecoder(engine, clock, (1 + rank) * 1e-5)
            engine.settings, engine._chooser.mode = InferenceConfig(prefill_chunk=chunk), mode

            def slow(batch: Batch, mode: str, **how: bool) -> None:
                key = mode, batch.new
                clock.now += (plan_ms - 5 * rank) * 1e-3 + 10 * (key not in begun)  # noqa: B023
                begun.add(key)  # noqa: B023
                begin(batch, mode, **how)

            patch.setattr(attention, "begin", slow)
            assert timed.max_prompt == 1024
            warm_up(engine)
            most = timed.max_prompt
            assert mode != "auto" or (engine.replicates(most) and not engine.replicates(most + 1))
            found.append((most, len(timed.captured), max(timed.captured, default=0), clock.reads > 0))
    return found


# ms of a plan, graphs, `inference.mode`, `inference.prefill_chunk`; limit, captured sizes, the largest, measured
CASES = {
    (30.0, True, "auto", None): (1280, 22, 1536, True),
    (200.0, True, "auto", None): (4096, 28, 4096, True),
    (8.0, True, "auto", 700): (384, 15, 448, True),
    (5.1, True, "auto", None): (224, 12, 256, True),
    (0.1, True, "auto", None): (16, 2, 32, True),
    (30.0, False, "auto", None): (1024, 20, 1024, False),
    (30.0, True, "pass_q", None): (1024, 0, 0, False),
}


@pytest.mark.parametrize(("context", "tensor"), [(2, 1), (1, 2)])
def test_prompts_are_replicated_up_to_the_size_that_takes_as_long_as_a_plan(
    context: int, tensor: int, tmp_path: Path
) -> None:
    """On the slowest rank, so that all ranks agree; nothing is measured without graphs, or where plans were chosen."""
    config = parallel(tiny_config(tmp_path, "x", {"data.seq_length": 128}), context, tensor, cache_tokens=4400)
    for found in run_distributed(limits, 2, config, timeout=120):
        assert dict(zip(CASES, found, strict=True)) == CASES
