"""Attention over the cache: one layer's new queries, keys and values in, its attention out, on any ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.executor import Engine, ForwardPass
from ..attention.program import Program, compile_program
from ..comm import BufferPool, P2PTransport
from ..config import refuse
from ..kernels import KernelRequest, choose
from ..schedules import Kind
from .ledger import slots_of
from .plan import CachePlan

GIB = 2**30


@dataclass(frozen=True)
class CacheShape:
    """What a rank keeps per token: keys and values of `num_kv_heads` heads of `head_dim`, in `num_layers` layers.

    Heads are those of one tensor-parallel rank.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of one cached token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class CachedAttention:
    """The tensors of one rank's cache, and the executor that attends over all ranks' caches.

    `begin` takes the plan of a batch; then every layer is called once, in order.

    Args:
        group: the context-parallel process group, or None for one rank.
        slots: tokens that fit into this rank's cache.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.

    Raises:
        ValueError: no kernel for this shape, or a cache that does not fit into the device's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shape: CacheShape,
        slots: int,
        device: torch.device,
        kernel: str = "auto",
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.shape = shape
        self.device = device
        request = KernelRequest(device.type, shape.dtype, shape.head_dim, shape.num_heads, shape.num_kv_heads)
        transport = P2PTransport(group, device) if group is not None and self.world > 1 else None
        self._engine = Engine(choose(kernel, request), transport, BufferPool(device))
        self._program: Program | None = None
        self._new_slots = torch.empty(0, dtype=torch.int64, device=device)
        try:
            self._layers = [
                torch.zeros(slots, 2, 1, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
                for _ in range(shape.num_layers)
            ]
        except (RuntimeError, MemoryError) as error:  # out of memory has no type of its own on CPU
            size = slots * shape.token_bytes / GIB
            raise refuse(
                "inference.cache_tokens",
                slots * self.world,
                f"a cache that fits into memory; this one takes {size:.2f} GiB a rank ({error})",
                "Lower it, or use more context-parallel ranks.",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Of this rank's cache, and of the buffers for other ranks' blocks."""
        return sum(layer.numel() * layer.element_size() for layer in self._layers) + self._engine.pool.num_bytes

    def copy(self, source: range, target: range) -> None:
        """Copy cached keys and values of all layers from this rank's slots to others of its own."""
        for layer in self._layers:
            layer[target.start : target.stop] = layer[source.start : source.stop]

    def begin(self, plan: CachePlan) -> None:
        """Follow `plan` in the calls that come; its new tokens' keys and values are stored where it says."""
        if plan.n != self.world:
            raise refuse("plan", f"{plan.name} of {plan.n} ranks", f"a plan of {self.world}", "Plan for this group.")
        self._program = compile_program(plan, self.rank)
        slots = list(chain.from_iterable(slots_of(turn.new_runs[self.rank]) for turn in plan.batch.turns))
        self._new_slots = torch.tensor(slots, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Store this rank's new keys and values, and attend over everything its queries see.

        Args:
            layer: counted from 0.
            q: the new tokens of this rank, `[s, 1, h, d]`, in the order of the plan's rows.
            k, v: `[s, 1, g, d]`.
            scale: factor of the scores; default `d ** -0.5`.

        Returns:
            `[s, 1, h, d]` in q's dtype.

        Raises:
            ValueError: shapes that do not fit the plan or the cache.
        """
        assert self._program is not None, "begin() comes before the layers"
        rows, shape = self._new_slots.numel(), self.shape
        for name, x, heads in (("q", q, shape.num_heads), ("k", k, shape.num_kv_heads), ("v", v, shape.num_kv_heads)):
            if x.shape != (rows, 1, heads, shape.head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{rows}, 1, {heads}, {shape.head_dim}], the new "
                    f"tokens of rank {self.rank} in the plan that was begun."
                )
        cache = self._layers[layer]
        cache[self._new_slots] = torch.stack((k, v), dim=1).to(cache.dtype)
        scale = shape.head_dim**-0.5 if scale is None else scale
        run = ForwardPass(self._program, self._engine, {Kind.Q: (q,), Kind.KV: (cache,)}, scale)
        run.run()
        out, _ = run.output.finish()
        return out
