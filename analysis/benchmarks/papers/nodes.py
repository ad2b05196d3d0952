"""Llama 3 405B on nodes of 8 GPUs, as in "Context Parallelism for Scalable Million-Token Inference".

Plans are those of the GPUs that share a key/value head, one per node, simulated with the paper's own rates.
"""

from __future__ import annotations

from functools import cache

from megatron_longctx.config.cluster import Cluster, Network
from megatron_longctx.core.plans import Workload
from megatron_longctx.core.plans.plan import ALL_HEADS
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.planner.cost import Costs, attention_flops
from megatron_longctx.planner.simulate import simulate

TP = 8
LAYERS, HIDDEN, WEIGHTS = 126, 16384, 405e9
HEADS = Workload(16, 1, 128)
"""The heads of one GPU of a node."""
ATTENTION_TFLOPS = 540.0
"""The paper's measurement of its kernel (appendix A)."""
ONE_NODE_S = 42.01
"""The paper's time to the first token after 128K tokens on one node, which determines the time of all but attention."""
RDMA, TCP = 24.3, 2.8
"""GiB/s per GPU that the paper reached: a hop of pass-KV in table 5 (627 µs), and 3 GB/s over TCP (section 4.2.1)."""


def cluster(n: int, gibps: float) -> Cluster:
    """Return one GPU of each of `n` nodes: those that share key/value heads."""
    return Cluster(f"{n} nodes", n, 1, network=Network(1, gibps, 3e-5))


def costs() -> Costs:
    return Costs(ATTENTION_TFLOPS, ATTENTION_TFLOPS)


def batch(n: int, new: int, cached: int, sequences: int = 1) -> Batch:
    """Return a batch of sequences with `new` tokens after `cached` tokens."""
    manager = CacheManager(n, sequences * ((new + cached) // n // 64 + 8), 64)
    sessions = [manager.open() for _ in range(sequences)]
    if cached:
        manager.append(dict.fromkeys(sessions, cached))
    return Batch(n, manager.slots_per_rank, manager.append(dict.fromkeys(sessions, new)))


@cache
def attention(n: int, new: int, cached: int, mode: str, gibps: float) -> float:
    """Return the seconds of a layer's attention."""
    if n == 1:
        return attention_flops(HEADS, new * (new / 2 + cached), ALL_HEADS, False) / (ATTENTION_TFLOPS * 1e12)
    return simulate(batch(n, new, cached).plan(mode), cluster(n, gibps), HEADS, costs()).seconds


def first_token(n: int, new: int, cached: int = 0, mode: str = "pass_kv", gibps: float = RDMA) -> float:
    """Return the seconds to the first token. All but attention is in proportion to the new tokens per node."""
    rest = (ONE_NODE_S - LAYERS * attention(1, 128 * 1000, 0, "pass_kv", RDMA)) / 128000
    return LAYERS * attention(n, new, cached, mode, gibps) + rest * new / n
