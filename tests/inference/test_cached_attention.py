"""Attention over a cache with a history equals dense attention over each whole sequence."""

import random
import sys
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.comm import PeerMemoryError, PeerTransport
from megatron_longctx.core.kernels import KernelRequest, choose_kernel, dense_call
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.inference import cached_attention
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import assert_as_good_as
from megatron_longctx.testing.verify import verify
from tests.shared.threads import ThreadedRanks

CPU = torch.device("cpu")
LAYERS = 2
# (query heads, KV heads): grouped, one for all, one each.
HEADS = ((4, 2), (4, 1), (2, 2))


def history(seed: int, prompts: int = 5) -> list[list[int]]:
    """Per round, the new tokens of three sequences: long and short prompts between single tokens; 0 skips a round."""
    source = random.Random(seed)
    rounds = [[23, 1, 2]]
    while len(rounds) < 2 * prompts:
        rounds.append([1, 1, 1])
        rounds.append([source.choice((0, 1, 3, 17)) for _ in range(3)])
    return [counts for counts in rounds if any(counts)]


@dataclass(frozen=True)
class Case:
    """heads: the number of query heads and of KV heads."""

    heads: tuple[int, int]
    dtype: torch.dtype = torch.float32
    head_dim: int = 8
    device: str = "cpu"

    @property
    def request(self) -> KernelRequest:
        return KernelRequest(self.device, self.dtype, self.head_dim, *self.heads)

    @property
    def shape(self) -> CacheShape:
        return CacheShape(LAYERS, *self.heads, self.head_dim, self.dtype)

    def tensors(self, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return random_qkv(length, 1, *self.heads, self.head_dim, self.dtype, self.device, seed)


def manager_for(n: int) -> CacheManager:
    return CacheManager(n, 80 // n + 6, 4, max_contiguous=3)  # some chunks are contiguous, some zigzag


def attention_of(case: Case, group: dist.ProcessGroup | None, transport: str) -> CachedAttention:
    n = 1 if group is None else dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else CPU
    return CachedAttention(group, case.shape, manager_for(n).slots[0], device, transport=transport)


def in_threads(ranks: ThreadedRanks, rank: int, case: Case) -> CachedAttention:
    attention = CachedAttention(None, case.shape, manager_for(ranks.n).slots[0], CPU)
    attention.rank, attention.world = rank, ranks.n
    attention._runtime = replace(attention._runtime, transport=ranks.transport(rank))
    return attention


def chat(attention: CachedAttention, mode: str, case: Case) -> None:
    """Compare every layer's output on one rank, in every round, with dense attention over whole sequences."""
    n, rank = attention.world, attention.rank
    rounds = history(n)
    manager = manager_for(n)
    sessions = [manager.open() for _ in range(3)]
    lengths = [sum(counts[i] for counts in rounds) for i in range(3)]
    # Keyed by sequence and layer, over the whole length.
    tensors = {
        (i, layer): case.tensors(length, 10 * i + layer) for i, length in enumerate(lengths) for layer in range(LAYERS)
    }
    exact = {key: dense_attention(*qkv, causal=True)["out"] for key, qkv in tensors.items()}
    kernel, scale = choose_kernel("auto", case.request), case.head_dim**-0.5
    single = {
        key: kernel.forward(*qkv[:3], dense_call(len(qkv[0]), len(qkv[0]), True), scale=scale)[0]
        for key, qkv in tensors.items()
    }
    seen: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], []) for _ in range(LAYERS)]
    for counts in rounds:
        active = [i for i, count in enumerate(counts) if count]
        chunks = manager.append({sessions[i]: counts[i] for i in active})
        batch = Batch(n, manager.slots[0], chunks)
        verify(batch.plan(mode))
        attention.begin(batch, mode)
        places = [
            (i, [position for span in chunk.new_positions(rank) for position in span])
            for i, chunk in zip(active, chunks, strict=True)
        ]
        for layer in range(LAYERS):
            q, k, v = (torch.cat([tensors[i, layer][x][at] for i, at in places]) for x in range(3))
            found, own, truth = seen[layer]
            found.append(attention(layer, q, k, v))
            truth += [exact[i, layer][at] for i, at in places]
            own += [single[i, layer][at] for i, at in places]
            close = 1e-5 if case.dtype == torch.float32 else 0.05
            assert torch.allclose(found[-1].double(), torch.cat(truth[-len(places) :]), atol=close), (mode, counts)
    for found, own, truth in seen:  # over all rounds: the rounding of a single token says little
        whole = [{"out": torch.cat(x)} for x in (found, own, truth)]
        assert_as_good_as(*whole, (mode, case))
    assert [manager.length(session) for session in sessions] == lengths


@pytest.mark.parametrize(("n", "peers"), [(1, False), (2, True), (3, False), (3, True), (4, False)])
def test_every_round_equals_dense_attention(n: int, peers: bool) -> None:
    cases = [Case(heads) for heads in HEADS[: None if n == 3 else 1]]
    if n == 3:
        cases.append(Case(HEADS[0], torch.bfloat16))
    for mode, case in product(CACHE_MODES, cases):
        ranks = ThreadedRanks(n, peers)
        ranks.run(lambda rank, mode=mode, case=case, ranks=ranks: chat(in_threads(ranks, rank, case), mode, case))


def on_gpus(rank: int, transport: str) -> None:
    for mode, heads in product(CACHE_MODES, HEADS):
        case = Case(heads, torch.bfloat16, 64, "cuda")
        chat(attention_of(case, dist.group.WORLD, transport), mode, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "transport"), [(1, "p2p"), *((n, way) for n in (2, 4) for way in ("p2p", "peer"))])
def test_every_round_equals_dense_attention_on_gpus(n: int, transport: str) -> None:
    if max_gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices")
    run_distributed(on_gpus, n, transport, backend="nccl")


def test_shapes_that_do_not_fit_the_plan_are_refused() -> None:
    manager = CacheManager(1, 4, 4)
    attention = CachedAttention(None, CacheShape(1, 2, 1, 8, torch.float32), manager.slots[0], CPU)
    attention.begin(Batch(1, manager.slots[0], manager.append({manager.open(): 3})), "pass_kv")
    with pytest.raises(ValueError, match=r"q has shape \(2, 1, 2, 8\): expected \[3, 1, 2, 8\]"):
        attention(0, torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8))
    with pytest.raises(ValueError, match="batch=of 2 ranks: expected one of 1"):
        other = CacheManager(2, 4, 4)
        attention.begin(Batch(2, other.slots[0], other.append({other.open(): 3})), "pass_kv")


def test_the_caches_size_is_what_its_shape_says() -> None:
    shape = CacheShape(3, 8, 2, 16, torch.bfloat16)
    attention = CachedAttention(None, shape, 10, CPU)
    assert sum(layer.nbytes for layer in attention.layers) == 10 * shape.token_bytes == 10 * 3 * 2 * 2 * 16 * 2


def fall_back(rank: int) -> list[str]:
    """Return the warnings of this rank when memory for merges cannot be allocated."""
    warnings: list[str] = []
    attention = CachedAttention(dist.group.WORLD, CacheShape(1, 2, 1, 8, torch.float32), 16, CPU)
    attention.allocate_merge(8)  # point to point: nothing to allocate
    object.__setattr__(attention._runtime, "transport", PeerTransport.__new__(PeerTransport))

    def fails(*_: object) -> None:
        raise PeerMemoryError("no room on rank 1")

    peers = SimpleNamespace(PeerMerge=SimpleNamespace(of=fails))
    sys.modules["megatron_longctx.inference.peer_merge"] = peers  # type: ignore[assignment]
    cached_attention.has_fused_kernels = lambda: True  # type: ignore[assignment]
    cached_attention.logger.warning = lambda text, error: warnings.append(text % error)  # type: ignore[assignment, method-assign]
    attention.allocate_merge(8)
    assert attention._merge is None
    cached_attention.has_fused_kernels = lambda: rank == 0  # type: ignore[assignment]
    peers.PeerMerge.of = lambda *_: 1 / 0
    attention.allocate_merge(8)  # not allocated, as some rank has no kernels
    return warnings


def test_without_memory_for_merges_results_are_gathered() -> None:
    found = run_distributed(fall_back, 2)
    assert found[1] == []
    assert found[0] == ["decode's partial results are gathered, not merged over peer memory: no room on rank 1"]
