"""Llama 3 405B on nodes of 8 GPUs, as in "Context Parallelism for Scalable Million-Token Inference".

Plans are those of the GPUs that share a key/value head, one per node, simulated with the paper's own rates.
"""

from dataclasses import dataclass, replace
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


MERGE_GIBPS = 1720.0
"""77% of the 2.4 TB/s of the paper's H100s, the share that merging reached on an H200."""


@dataclass(frozen=True)
class Times:
    """Factors of what is assumed or taken from the paper."""

    kernel: float = 1.0
    network: float = 1.0
    one_node: float = 1.0
    overhead: float = 1.0


def cluster(n: int, gibps: float, times: Times = Times()) -> Cluster:
    """Return one GPU of each of `n` nodes: those that share key/value heads."""
    return Cluster(f"{n} nodes", n, 1, network=Network(1, times.network * gibps, times.overhead * 3e-5))


def costs(times: Times = Times()) -> Costs:
    tflops = times.kernel * ATTENTION_TFLOPS
    plain = Costs(tflops, tflops, merge_gibps=MERGE_GIBPS)
    each = {name: times.overhead * getattr(plain, name) for name in ("call_s", "step_s", "message_s")}
    return replace(plain, **each)


def batch(n: int, new: int, cached: int, sequences: int = 1) -> Batch:
    """Return a batch of sequences with `new` tokens after `cached` tokens."""
    manager = CacheManager(n, sequences * ((new + cached) // n // 64 + 8), 64)
    sessions = [manager.open() for _ in range(sequences)]
    if cached:
        manager.append(dict.fromkeys(sessions, cached))
    return Batch(n, manager.slots[0], manager.append(dict.fromkeys(sessions, new)))


@cache
def attention(n: int, new: int, cached: int, mode: str, gibps: float, times: Times = Times()) -> float:
    """Return the seconds of a layer's attention."""
    if n == 1:
        return attention_flops(HEADS, new * (new / 2 + cached), ALL_HEADS, False) / (
            times.kernel * ATTENTION_TFLOPS * 1e12
        )
    return simulate(batch(n, new, cached).plan(mode), cluster(n, gibps, times), HEADS, costs(times)).seconds


def first_token(
    n: int, new: int, cached: int = 0, mode: str = "pass_kv", gibps: float = RDMA, times: Times = Times()
) -> float:
    """Return the seconds to the first token. All but attention is in proportion to the new tokens per node."""
    rest = (times.one_node * ONE_NODE_S - LAYERS * attention(1, 128 * 1000, 0, "pass_kv", RDMA, times)) / 128000
    return LAYERS * attention(n, new, cached, mode, gibps, times) + rest * new / n
