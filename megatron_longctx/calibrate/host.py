"""Measuring what the host takes to issue an attention pass, by passes that ask next to nothing of the device."""

from __future__ import annotations

import statistics

import torch

from ..attention.bind import Engine, Shapes, bind
from ..attention.run import Run
from ..comm import BufferPool
from ..inference.batch import Batch
from ..inference.cache_manager import CacheManager
from ..inference.cached_attention import CacheShape
from ..schedules import Costs, Kind, Lowering, Target
from ..schedules.cache_modes import CACHE_MODES
from ..schedules.simulate import simulate
from ..topology import Cluster
from .kernels import Place
from .timing import agreed, row_seconds

_CACHED, _NEW = 64, 16
"""Tokens a rank: kernel calls are as short as they get."""
_REPEATS = 30


def host_operation_seconds(place: Place, cluster: Cluster, costs: Costs) -> float:
    """Seconds of one operation (`Simulation.operations`) of the median rank's host, in the median mode of inference.

    All ranks call this at once, and get the same answer. What the host does besides for the rest of a layer is not in
    it, nor what it does for a prompt as a whole.
    """
    assert place.links is not None
    n, work = place.n, place.workload
    manager = CacheManager(n, 2, _CACHED)
    session = manager.open()
    manager.append({session: n * _CACHED})
    batch = Batch(n, manager.slots_per_rank, manager.append({session: n * _NEW}))
    shape = CacheShape(1, work.num_heads, work.num_kv_heads, work.head_dim, place.dtype)
    engine = Engine(place.choose(packed=True), place.links, BufferPool(place.device))
    target = Target(shape.workload, engine.kernel.takes, place.links.hosts)

    def measure() -> list[float]:
        found = []
        for mode in CACHE_MODES:
            lowering = Lowering(batch.plan(mode), target)
            operations = simulate(lowering.plan, cluster, target, costs).operations
            found.append(_pass_seconds(place, batch, lowering, shape, engine) / operations)
        return [statistics.median(found)]

    return agreed(place.group, measure)[0]


@torch.inference_mode()
def _pass_seconds(place: Place, batch: Batch, lowering: Lowering, shape: CacheShape, engine: Engine) -> float:
    """Of one of many in a row."""
    rank = torch.distributed.get_rank(place.group)
    shapes = Shapes(shape.workload, shape.dtype, place.device, shape.kv, shape.kv)
    bound = bind(lowering, rank, shapes, engine)
    q = place.random(batch.num_rows(rank), shape.num_heads)
    cache = shape.kv.spec(batch.slots, 1, shape.num_kv_heads, place.device).empty().normal_()

    def once() -> None:
        Run(bound, {Kind.Q: (q,), Kind.KV: (cache,)}, shape.head_dim**-0.5)()

    row_seconds(once, place.device, 3)
    return statistics.median(row_seconds(once, place.device, _REPEATS) for _ in range(3))
