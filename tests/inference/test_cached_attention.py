"""Attention over a cache with a past equals dense attention over each whole sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.comm import MixedTransport, P2PTransport, PeerMemoryError, PeerTransport
from megatron_longctx.inference import cached_attention
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.inference.plan import MODES, Batch, build, verify_over_cache
from megatron_longctx.kernels import KernelRequest, choose
from megatron_longctx.kernels.cudnn import CudnnKernel
from megatron_longctx.kernels.interface import Block as KernelBlock
from megatron_longctx.kernels.planned import PlannedShapes
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import assert_as_good_as
from tests.attention.carrier import Carrier

CPU = torch.device("cpu")
LAYERS = 2
# (query heads, KV heads): grouped, one for all, one each.
HEADS = ((4, 2), (4, 1), (2, 2))


@dataclass
class Chat:
    """Sequences and how many of their tokens are cached. q, k, v of every layer are known for the whole length."""

    session: int
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    done: int = 0


def history(seed: int, turns: int = 5) -> list[list[int]]:
    """Per turn, the new tokens of three sequences: long and short prompts between single tokens; 0 skips a turn."""
    source = random.Random(seed)
    rounds = [[23, 1, 2]]
    while len(rounds) < 2 * turns:
        rounds.append([1, 1, 1])
        rounds.append([source.choice((0, 1, 3, 17)) for _ in range(3)])
    return [counts for counts in rounds if any(counts)]


@dataclass(frozen=True)
class Case:
    """heads: of queries, and of keys and values."""

    heads: tuple[int, int]
    dtype: torch.dtype = torch.float32
    head_dim: int = 8
    device: str = "cpu"

    @property
    def request(self) -> KernelRequest:
        return KernelRequest(self.device, self.dtype, self.head_dim, *self.heads)

    def tensors(self, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return random_qkv(length, 1, *self.heads, self.head_dim, self.dtype, self.device, seed)


def chat_over_ranks(rank: int, mode: str, case: Case, transport: str, shapes: PlannedShapes | None = None) -> None:
    """All turns on this process group, every layer's output compared with dense attention over whole sequences."""
    n = dist.get_world_size()
    rounds = history(n)
    lengths = [sum(counts[i] for counts in rounds) for i in range(3)]
    ledger = CacheLedger(n, 80 // n + 6, 4, few=3)  # some turns are contiguous, some zigzag
    shape = CacheShape(LAYERS, *case.heads, case.head_dim, case.dtype)
    device = torch.device(case.device, rank) if case.device == "cuda" else CPU
    attention = CachedAttention(
        dist.group.WORLD, shape, ledger.slots_per_rank, device, transport="p2p" if transport == "carried" else transport
    )
    if transport == "carried":
        carry(attention, rank)
    chats = [
        Chat(ledger.open(), [case.tensors(length, 10 * i + layer) for layer in range(LAYERS)])
        for i, length in enumerate(lengths)
    ]
    truths = [[dense_attention(*qkv, causal=True) for qkv in chat.layers] for chat in chats]
    kernel, scale = choose("auto", case.request), case.head_dim**-0.5
    owns = [[kernel.forward(*qkv[:3], causal=True, scale=scale)[0] for qkv in chat.layers] for chat in chats]
    seen: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], []) for _ in range(LAYERS)]
    for counts in rounds:
        active = [(i, count) for i, count in enumerate(counts) if count]
        turns = ledger.append({chats[i].session: count for i, count in active})
        plan = build(mode, Batch(n, ledger.slots_per_rank, turns, shapes=shapes))
        verify_over_cache(plan)
        attention.begin(plan)
        places = [
            (i, [turn.cached + p for span in turn.new_spans(rank) for p in span])
            for (i, _), turn in zip(active, turns, strict=True)
        ]
        for layer in range(LAYERS):
            q, k, v = (torch.cat([chats[i].layers[layer][x][at] for i, at in places]) for x in range(3))
            found, own, truth = seen[layer]
            found.append(attention(layer, q, k, v))
            truth += [truths[i][layer]["out"][at] for i, at in places]
            own += [owns[i][layer][at] for i, at in places]
            close = 1e-5 if case.dtype == torch.float32 else 0.05
            assert torch.allclose(found[-1].double(), torch.cat(truth[-len(places) :]), atol=close), (mode, counts)
        for i, count in active:
            chats[i].done += count
    for found, own, truth in seen:  # over all turns: a single token's rounding says little
        whole = [{"out": torch.cat(x)} for x in (found, own, truth)]
        assert_as_good_as(*whole, (mode, case))
    assert [chat.done for chat in chats] == lengths


def carry(attention: CachedAttention, rank: int) -> None:
    """Let messages be read from where they would lie in peer memory."""
    group = dist.group.WORLD
    assert group is not None
    links = MixedTransport.__new__(MixedTransport)
    links.messages = P2PTransport(group, CPU)
    links.peers = Carrier(P2PTransport(group, CPU), tuple(range(dist.get_world_size())))  # type: ignore[assignment]
    attention._engine = replace(attention._engine, transport=links)


def every_mode(rank: int, cases: list[Case], transport: str, shapes: PlannedShapes | None = None) -> int:
    for mode in MODES:
        for case in cases:
            chat_over_ranks(rank, mode, case, transport, shapes)
    return len(MODES) * len(cases)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_turn_equals_dense_attention(n: int) -> None:
    cases = [Case(heads) for heads in HEADS]
    if n == 3:
        cases.append(Case(HEADS[0], torch.bfloat16))
    assert run_distributed(every_mode, n, cases, "p2p") == [len(MODES) * len(cases)] * n


@pytest.mark.parametrize(("n", "transport"), [(1, "p2p"), (2, "p2p"), (3, "carried"), (4, "p2p")])
def test_calls_in_pieces_equal_dense_attention(n: int, transport: str) -> None:
    shapes = PlannedShapes(least_queries=2, least_keys=2, least_pairs=8, most=8)
    cases = [Case(HEADS[0])]
    assert run_distributed(every_mode, n, cases, transport, shapes) == [len(MODES)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_of_the_cache_peers_find_what_is_sent(n: int) -> None:
    cases = [Case(heads) for heads in HEADS]
    assert run_distributed(every_mode, n, cases, "carried") == [len(MODES) * len(cases)] * n


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n", "transport"), [(1, "p2p"), *((n, way) for n in (2, 4) for way in ("p2p", "peer"))])
def test_every_turn_equals_dense_attention_on_gpus(n: int, transport: str) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} CUDA devices")
    cases = [Case(heads, torch.bfloat16, 64, "cuda") for heads in HEADS]
    assert run_distributed(every_mode, n, cases, transport, backend="nccl") == [len(MODES) * len(cases)] * n


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_calls_reach_cudnn_in_planned_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1,600 tokens over 9,000, in pieces and, on FlashAttention-2 alone, whole."""
    cached, new = 9000, 1600
    device, shape = torch.device("cuda", torch.cuda.current_device()), CacheShape(1, 32, 8, 128, torch.bfloat16)
    ledger = CacheLedger(1, 170, 64)
    attention = CachedAttention(None, shape, ledger.slots_per_rank, device, kernel="cudnn")
    attention.randomize()
    session = ledger.open()
    ledger.append({session: cached})
    turns = ledger.append({session: new})
    q, k, v = (torch.randn(new, 1, heads, 128, dtype=torch.bfloat16, device=device) for heads in (32, 8, 8))
    met: set[tuple[int, int, bool]] = set()
    original = CudnnKernel.goes_unplanned

    def watched(kernel: CudnnKernel, block: KernelBlock) -> bool:
        unplanned = original(kernel, block)
        if not unplanned:
            met.add((len(block.q), len(block.k), block.causal))
        return unplanned

    monkeypatch.setattr(CudnnKernel, "goes_unplanned", watched)
    found = []
    for shapes in (attention.shapes, None):
        attention.begin(build("pass_kv", Batch(1, ledger.slots_per_rank, turns, shapes=shapes)))
        found.append(attention(0, q, k, v).float())
        assert bool(met) == (shapes is not None)
        assert met <= {(1024, 8192, False), (512, 8192, False), (1024, 4096, False)}
        met.clear()
    assert torch.allclose(*found, atol=0.02)


def test_shapes_that_do_not_fit_the_plan_are_refused() -> None:
    ledger = CacheLedger(1, 4, 4)
    attention = CachedAttention(None, CacheShape(1, 2, 1, 8, torch.float32), ledger.slots_per_rank, CPU)
    attention.begin(build("pass_kv", Batch(1, ledger.slots_per_rank, ledger.append({ledger.open(): 3}))))
    with pytest.raises(ValueError, match=r"q has shape \(2, 1, 2, 8\): expected \[3, 1, 2, 8\]"):
        attention(0, torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8))
    with pytest.raises(ValueError, match="a plan of 1"):
        other = CacheLedger(2, 4, 4)
        attention.begin(build("pass_kv", Batch(2, other.slots_per_rank, other.append({other.open(): 3}))))


def test_the_caches_size_is_what_its_shape_says() -> None:
    shape = CacheShape(3, 8, 2, 16, torch.bfloat16)
    attention = CachedAttention(None, shape, 10, CPU)
    assert attention.num_bytes == 10 * shape.token_bytes == 10 * 3 * 2 * 2 * 16 * 2


def test_new_tokens_are_stored_side_by_side_or_apart() -> None:
    """Passes whose tokens fill one run of slots, and others, in turn."""
    ledger, case = CacheLedger(1, 12, 4), Case(HEADS[0])
    attention = CachedAttention(None, CacheShape(1, *case.heads, case.head_dim, case.dtype), ledger.slots_per_rank, CPU)
    sessions = [ledger.open(), ledger.open()]
    given = [case.tensors(16, seed) for seed in (1, 2)]
    truths = [dense_attention(*qkv, causal=True)["out"] for qkv in given]
    done, together = [0, 0], []
    for counts in ((5, 0), (3, 6), (0, 1), (4, 0), (1, 1)):
        turns = ledger.append({sessions[i]: count for i, count in enumerate(counts) if count})
        slots = [slot for turn in turns for run in turn.new_runs[0] for slot in run]
        together.append(slots == list(range(slots[0], slots[0] + len(slots))))
        attention.begin(build("pass_kv", Batch(1, ledger.slots_per_rank, turns)))
        at = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        q, k, v = (torch.cat([given[i][x][at[i]] for i in range(2)]) for x in range(3))
        wanted = torch.cat([truths[i][at[i]] for i in range(2)])
        assert torch.allclose(attention(0, q, k, v).double(), wanted, atol=1e-5), counts
        done = [start + count for start, count in zip(done, counts, strict=True)]
    assert set(together) == {True, False}, "both kinds were met"


def fall_back(rank: int) -> list[str]:
    """What is logged where memory for merges cannot be had, by one rank alone."""
    said: list[str] = []
    attention = CachedAttention(dist.group.WORLD, CacheShape(1, 2, 1, 8, torch.float32), 16, CPU)
    attention.expect_rows(8)  # point to point: nothing to make
    object.__setattr__(attention._engine, "transport", PeerTransport.__new__(PeerTransport))

    def fails(*_: object) -> None:
        raise PeerMemoryError("no room on rank 1")

    cached_attention.PeerMerge.of = fails  # type: ignore[assignment, method-assign]
    cached_attention.fused_kernels = lambda: True  # type: ignore[assignment]
    cached_attention.logger.warning = lambda text, error: said.append(text % error)  # type: ignore[assignment, method-assign]
    attention.expect_rows(8)
    assert attention._merge is None
    cached_attention.fused_kernels = lambda: rank == 0  # type: ignore[assignment]
    cached_attention.PeerMerge.of = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    attention.expect_rows(8)  # not asked for where some rank has no kernels
    return said


def test_without_memory_for_merges_results_are_gathered() -> None:
    found = run_distributed(fall_back, 2)
    assert found[1] == []
    assert found[0] == ["decode's partial results are gathered, not merged over peer memory: no room on rank 1"]
