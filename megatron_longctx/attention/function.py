"""One call of attention as an autograd function: a forward pass, and the backward pass that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.no_grad import first_order
from ..schedules import Kind, Lowering, Plan, Target, Workload, backward_plan
from .bind import Bound, Engine, bind
from .kv_format import KVFormat, plain_kv
from .run import Run
from .shapes import Shapes
from .sinks import merge_sink, sink_gradient, with_sinks


class AttentionResult(NamedTuple):
    """What a rank's call gave: out `[s, b, h, e]` in q's dtype and lse `[s, b, h]` in fp32 (fp64 for fp64 inputs)."""

    out: Tensor
    lse: Tensor


@dataclass
class Passes:
    """Forward and backward of one kind of call."""

    plan: Plan
    target: Target
    rank: int
    shapes: Shapes
    engine: Engine

    @cached_property
    def forward(self) -> Bound:
        return bind(Lowering(self.plan, self.target), self.rank, self.shapes, self.engine)

    @cached_property
    def backward(self) -> Bound:
        return bind(Lowering(backward_plan(self.plan), self.target), self.rank, self.shapes, self.engine)

    @cached_property
    def kept_heads(self) -> list[range | None]:
        """By kept entry, the heads of queries, None for keys."""
        entries = self.forward.program.kept
        return [self.shapes.heads(Kind.OUT, each[1].heads) if len(each) == 2 else None for each in entries]


def shapes_of(q: Tensor, k: Tensor, v: Tensor, kv: KVFormat | None = None) -> Shapes:
    """Of inputs like these. kv: how keys and values travel; None for as they are."""
    plain = plain_kv(k.shape[3], v.shape[3], q.dtype)
    workload = Workload(
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        batch=q.shape[1],
        element_bytes=q.dtype.itemsize,
        v_head_dim=v.shape[3],
        kv_row_bytes=None if kv is None else kv.row_bytes,
    )
    return Shapes(workload, q.dtype, q.device, kv or plain, plain)


def forward_pass(passes: Passes, q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None) -> list[Tensor]:
    """out, lse, and what the program keeps for backward."""
    own: tuple[Tensor, ...] = (k, v)
    if passes.shapes.kv != passes.shapes.kv_grad:  # packed once, so that every rank attends the same numbers
        packed = passes.shapes.kv.like(k.shape[0], k.shape[1], k.shape[2], k.device).empty()
        for into, source in passes.shapes.kv.pairs(packed, k, v):
            into.copy_(source)
        own = (packed,)
    run = Run(passes.forward, {Kind.Q: (q,), Kind.KV: own}, scale)
    run()
    out, lse = run.result(Kind.OUT)
    if sink is None:
        return [out, lse, *chain.from_iterable(run.kept)]
    return [*merge_sink(out, lse, sink, range(q.shape[2])), *with_sinks(run.kept, passes.kept_heads, sink)]


class AttentionFunction(torch.autograd.Function):
    """Runs a rank's forward and backward passes.

    Keeps q, k, v, out and lse; other ranks' blocks are fetched again in backward, unless the programs keep them. Then
    of this rank's own tensors only those stay that backward reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        passes: Passes,
        scale: float,
        result: AttentionResult | None = None,
    ) -> Tensor:
        with torch.no_grad():
            out, lse, *kept = forward_pass(passes, q, k, v, scale, sink) if result is None else result
        out = out.detach()
        ctx.passes, ctx.scale = passes, scale
        ctx.like = tuple((x.shape, x.dtype) for x in (q, k, v, out, lse))
        if any(ctx.needs_input_grad):
            reads = passes.backward.program.reads_own
            v = _alone(v, q, k) if Kind.KV in reads else v
            queries = Kind.Q_GRAD in reads or sink is not None
            ctx.save_for_backward(
                sink, *((q, out, lse) if queries else ()), *((k, v) if Kind.KV in reads else ()), *kept
            )
            ctx.saved = queries, Kind.KV in reads
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        sink, *left = ctx.saved_tensors
        # What backward does not read has a shape only.
        q, k, v, out, lse = (grad_out.new_empty((), dtype=dtype).expand(shape) for shape, dtype in ctx.like)
        if ctx.saved[0]:
            q, out, lse, *left = left
        if ctx.saved[1]:
            k, v, *left = left
        own = {Kind.Q_GRAD: (q, out, grad_out, lse), Kind.GRAD: (grad_out,), Kind.KV: (k, v)}
        run = Run(ctx.passes.backward, own, ctx.scale, left)
        run()
        grad_sink = None if sink is None else sink_gradient(sink, out, lse, grad_out)
        return *run.result(Kind.DQ), *run.result(Kind.DKV), grad_sink, None, None, None


def _alone(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`v`, copied where it would keep more than itself: after RoPE it alone is still a view of the whole projection."""
    storage = v.untyped_storage()
    shared = any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in (q, k))
    return v if shared or storage.nbytes() == v.nbytes else v.contiguous()
