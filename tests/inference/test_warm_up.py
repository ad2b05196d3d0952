"""What is compiled before the first prompt: afterwards no prompt and no decode waits for Triton."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.attention.executor import ForwardPass
from megatron_longctx.attention.program import compile_program
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.inference.plan import MODES, Batch, build
from megatron_longctx.inference.warm_up import meet_shapes
from megatron_longctx.kernels import paged, partials
from megatron_longctx.kernels.paged import PackedPartials, Pages
from megatron_longctx.kernels.planned import PlannedShapes
from megatron_longctx.kernels.warm_up import compile_decode, compile_merges
from megatron_longctx.schedules import Kind
from tests.attention.test_host_work import engine as over_nothing
from tests.kernels.test_variants import Launches, needs_compiler

CPU = torch.device("cpu")
BF16 = torch.bfloat16
HEADS, KV_HEADS, D = 8, 2, 128


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What merges would be compiled for on a GPU; nothing runs."""
    from megatron_longctx.kernels import partials_triton

    launches = Launches(partials_triton._combine_kernel)
    monkeypatch.setattr(partials_triton, "_combine_kernel", launches)
    monkeypatch.setattr(partials, "_fusable", lambda *_: True)
    monkeypatch.setattr(partials, "_fused", lambda: partials_triton.combine_triton)
    return launches


def prompts(cases: int) -> None:
    """One layer's attention of random prompts over random histories, on every rank."""
    engine = over_nothing()
    source = random.Random(0)
    for case in range(cases):
        n = source.randint(2, 4)
        ledger = CacheLedger(n, 400, 8)
        sessions = [ledger.open() for _ in range(source.randint(1, 2))]
        for _ in range(source.randint(0, 3)):
            ledger.append({session: source.randint(1, 300) for session in sessions})
        turns = ledger.append({session: source.choice((1, 2, source.randint(3, 300))) for session in sessions})
        batch = Batch(n, ledger.slots_per_rank, turns)
        cache = torch.empty(ledger.slots_per_rank, 2, 1, KV_HEADS, D, dtype=BF16)
        plan = build(list(MODES)[case % len(MODES)], batch)
        for rank in range(n):
            q = torch.empty(batch.num_rows(rank), 1, HEADS, D, dtype=BF16)
            run = ForwardPass(compile_program(plan, rank), engine, {Kind.Q: (q,), Kind.KV: (cache,)}, 1.0)
            run.run()
            run.output.finish()


@needs_compiler
def test_no_merge_of_a_prompt_is_compiled_after_the_warm_up(merges: Launches) -> None:
    prompts(60)
    needed = set(merges.variants)
    assert len(needed) > 6, "these prompts show nothing"
    merges.variants.clear()
    compile_merges(HEADS, D, BF16, CPU)
    assert len(merges.variants) == 16 and needed <= set(merges.variants)


@needs_compiler
@pytest.mark.parametrize(("heads", "int8"), [(2, False), (4, False), (8, False), (32, False), (8, True)])
def test_nor_anything_of_decode(heads: int, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_longctx.kernels import paged_triton

    kernels = {name: Launches(getattr(paged_triton, name)) for name in ("_attend_kernel", "_merge_kernel")}
    for name, launches in kernels.items():
        monkeypatch.setattr(paged_triton, name, launches)
    monkeypatch.setattr(paged_triton, "_processors", lambda _: 132)  # an H100's
    monkeypatch.setattr(paged, "attend_pages_torch", paged_triton.attend_pages_triton)
    monkeypatch.setattr(paged, "merge_ranks_torch", paged_triton.merge_ranks_triton)
    cache = torch.zeros(256, 2, 2, D, dtype=BF16) if not int8 else torch.zeros(256, 2, 2, D + 4, dtype=torch.uint8)
    compile_decode(torch.empty(0, heads, D, dtype=BF16), cache, 64)
    compiled = {name: set(launches.variants) for name, launches in kernels.items()}
    tables, counts = torch.zeros(128, 5, dtype=torch.int32), torch.ones(512, dtype=torch.int64)
    together = paged.most_together(heads, 2)
    for rows, beside in [(2**i, 1) for i in range(8)] + [(2**i, together) for i in range(10) if 2**i >= together]:
        for ranks in (2, 3, 8):
            q = torch.empty(rows, heads, D, dtype=BF16)
            pages = Pages(tables[: rows // beside], counts[:rows], 64, beside)
            found = paged.attend_pages(q, cache, pages, 0.1)
            gathered = torch.empty(ranks, found.flat.numel())
            paged.merge_ranks(PackedPartials(gathered, *q.shape), torch.empty_like(q))
    assert all(compiled.values()) and {name: set(found.variants) for name, found in kernels.items()} == compiled


def test_nothing_is_compiled_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("called")

    for name in ("compile_merges", "compile_decode"):
        monkeypatch.setattr(f"megatron_longctx.inference.cached_attention.{name}", fails)
    CachedAttention(None, CacheShape(1, HEADS, KV_HEADS, D, BF16), 64, CPU).compile_kernels(16)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_compiles_no_merge_twice() -> None:
    from megatron_longctx.kernels.partials_triton import _combine_kernel

    device = torch.device("cuda")
    attention = CachedAttention(None, CacheShape(1, HEADS, KV_HEADS, D, BF16), 256, device)
    attention.compile_kernels(64)
    compiled = _combine_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    merge: Callable[..., None] = partials.merge_partials
    for tokens in (1, 7, 48):
        value = torch.zeros(tokens, 1, HEADS, D, dtype=BF16, device=device)
        lse = torch.zeros(1, HEADS, tokens, device=device).permute(2, 0, 1)
        for count in range(1, partials.MOST + 1):
            for out in (torch.empty_like(value), torch.empty_like(value, dtype=torch.float32)):
                merge([partials.Partial(0, 0, value, lse)] * count, out, torch.empty_like(lse))
    assert len(compiled) == before >= 16


@settings(max_examples=150, deadline=None)
@given(
    pages=st.integers(1, 12), page=st.integers(1, 9), chunk=st.integers(1, 90), positions=st.integers(1, 200),
    cached=st.integers(0, 3),
)  # fmt: skip
def test_what_is_computed_beforehand_fits(pages: int, page: int, chunk: int, positions: int, cached: int) -> None:
    """Chunks larger than the cache or the model's positions, and caches of any size; nothing stays."""
    ledger = CacheLedger(1, pages, page)
    shapes = PlannedShapes(least_queries=2, least_keys=2 << cached, least_pairs=8, most=32)
    attention = SimpleNamespace(shapes=shapes, group=None, device=CPU)
    most, met = min(positions, ledger.slots_per_rank), []

    class Conversation:
        def __init__(self) -> None:
            self.number, self.tokens = ledger.open(), list[int]()

        def append(self, tokens: list[int]) -> None:
            assert ledger.length(self.number) == len(self.tokens) and 0 < len(tokens) <= chunk
            assert len(self.tokens) + len(tokens) <= most
            (turn,) = ledger.append({self.number: len(tokens)})
            met.append((turn.new, turn.cached))

        def close(self) -> None:
            ledger.close(self.number)

    engine: Any = SimpleNamespace(ledger=ledger, model=SimpleNamespace(attention=attention), open=Conversation)
    meet_shapes(engine, chunk, most)
    assert bool(met) == (min(chunk, most) >= 2) and not ledger.sessions
