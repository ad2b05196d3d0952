"""Keys and values that are stored and sent as 8-bit integers: the same numbers in every mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from analysis.benchmarks.inference_ranks import randomize
from megatron_longctx.config import Config
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.core.plans import Kind, Workload
from megatron_longctx.core.plans.cache_modes import CACHE_MODES as MODES
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.choose_cache_mode import kv_per_q
from megatron_longctx.inference.paged import Pages
from megatron_longctx.inference.quantize_kv import Int8KV, pack_kv, packed_shape, unpack_kv
from megatron_longctx.inference.warm_up import warm_up
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import relative_error
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import tiny_config

CPU, LAYERS = torch.device("cpu"), 2
HEADS, KV_HEADS, DIM = 4, 2, 8
Sent = list[int]


@contextmanager
def watched() -> Iterator[Sent]:
    """Collect the bytes of every point-to-point message that this rank sends."""
    sent: Sent = []
    original = P2PTransport.start

    def start(self, sends, receives, after=()):  # type: ignore[no-untyped-def]
        sent.extend(tensor.nbytes for tensor, _ in sends)
        return original(self, sends, receives, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PTransport, "start", start)
        yield sent


def over_the_cache(rank: int) -> dict[str, list[tuple[float, float]]]:
    """Per mode, the errors of every call against attention over rounded and over exact keys and values."""
    n, length, counts = dist.get_world_size(), 42, (23, 1, 17, 1)
    qkv = [random_qkv(length, 1, HEADS, KV_HEADS, DIM, torch.float32, seed=layer)[:3] for layer in range(LAYERS)]
    rounded = [unpack_kv(pack_kv(k, v), torch.float32) for _, k, v in qkv]
    truths = [
        [dense_attention(q, *kv, torch.zeros_like(q), causal=True)["out"] for kv in (near, (k, v))]
        for (q, k, v), near in zip(qkv, rounded, strict=True)
    ]
    found: dict[str, list[tuple[float, float]]] = {}
    shape = CacheShape(LAYERS, HEADS, KV_HEADS, DIM, torch.float32, int8=True)
    for mode in (*MODES, "replicated"):
        manager = CacheManager(n, 80 // n + 6, 4, max_contiguous=3)
        attention = CachedAttention(dist.group.WORLD, shape, manager.slots[0], CPU)
        assert sum(layer.nbytes for layer in attention.layers) == manager.slots[0] * shape.token_bytes
        session = manager.open()
        for count in counts:
            (chunk,) = manager.append({session: count})
            batch, planned = Batch(n, manager.slots[0], (chunk,)), mode if mode in MODES else "pass_kv"
            with watched() as sent:
                if mode == "replicated" and count == 1:
                    shard = manager.shards(session)[rank]
                    mine, table = [chunk.cached], torch.tensor([shard.pages], dtype=torch.int32)
                    slots = [*chain.from_iterable(chunk.new_slots[rank])] or [attention.unused_slots[0]]
                    pages = Pages(table, torch.tensor([shard.tokens]), 4)
                    attention.begin_replicated({None: pages}, [torch.tensor(slots)] * 2)
                else:
                    mine = [*chain.from_iterable(chunk.new_positions(rank))]
                    attention.begin(batch, planned)
                for layer, truth in enumerate(truths):
                    out = attention(layer, *(x[mine] for x in qkv[layer]))
                    errors = tuple(relative_error(out, exact[mine]) for exact in truth) if mine else (0.0, 1.0)
                    found.setdefault(mode, []).append(errors)  # type: ignore[arg-type]
            if mode != "replicated" or count > 1:  # single tokens use a collective
                moves = [m.block for step in batch.plan(planned).steps for m in step.moves if m.source == rank]
                row = {Kind.KV: KV_HEADS * 2 * (DIM + 4), Kind.Q: HEADS * DIM * 4, Kind.OUT: HEADS * (DIM + 1) * 4}
                assert sum(sent) == LAYERS * sum(block.tokens * row[block.kind] for block in moves)
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_every_mode_attends_to_the_8_bit_values_and_sends_their_bytes(n: int) -> None:
    for found in run_distributed(over_the_cache, n):
        assert set(found) == {*MODES, "replicated"}
        for mode, errors in found.items():
            for off, from_exact in errors:
                assert off < 1e-5, f"{mode}: differs by {off} from attention over 8-bit values"
                assert from_exact > 1e-4, f"{mode}: exact"


def through_the_engine(rank: int, configs: list[Config]) -> list[torch.Tensor]:
    """Return the logits of each model after a prompt, another prompt and single tokens."""
    found = []
    for config in configs:
        with watched() as sent, engine_of(config) as engine:
            session = engine.open()
            session.append(list(range(40, 70)))
            session.append(list(range(90, 103)))
            for token in (7, 8):
                session.append([token])
            found.append(engine.next_logits([session])[0])
            assert bool(sent) == (config.parallelism.context_parallel_size > 1)
            warm_up(engine)
            randomize(engine.model.attention)
            assert engine.next_logits([session]).isfinite().all()
    return found


def test_the_engine_stores_and_sends_8_bit_values(tmp_path: Path) -> None:
    """The logits are alike in every mode and in decode; a single rank stays exact."""
    config = tiny_config(tmp_path, "x", {"attention.kv_int8": True})
    ways = [{"mode": mode} for mode in MODES] + [{"mode": "pass_q", "decode": "replicated"}]
    exact = [parallel(tiny_config(tmp_path, "x"), n, mode="pass_kv") for n in (1, 2)]
    alone = run_distributed(through_the_engine, 1, [exact[0], parallel(config, 1, mode="pass_kv")])[0]
    assert torch.equal(*alone)
    configs = [exact[1], *(parallel(config, 2, **way) for way in ways)]
    for plain, *rounded in run_distributed(through_the_engine, 2, configs):
        torch.testing.assert_close(plain, alone[0], rtol=2e-5, atol=2e-5)
        for other in rounded:
            torch.testing.assert_close(other, rounded[0], rtol=2e-5, atol=2e-5)
            assert 1e-5 < relative_error(other, plain) < 0.02


def test_choices_count_the_bytes_that_are_sent() -> None:
    plain, int8 = Workload(8, 8, 64), Workload(8, 8, 64, kv_row_bytes=Int8KV(64, torch.bfloat16).row_bytes)
    k = torch.zeros(1, 1, 8, 64)
    assert int8.token_bytes(Kind.KV) == torch.Size(packed_shape(k)).numel()
    assert int8.token_bytes(Kind.Q) == plain.token_bytes(Kind.Q)
    assert [kv_per_q(each) for each in (plain, int8)] == [2.0, 2 * 68 / 128]
