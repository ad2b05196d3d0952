"""One call of attention as an autograd function: its forward and backward passes, sinks, and compilation ahead of time.

A sink is a logit per head that takes part in every softmax and has no value. It is the partial result (0, sink) over no
key, merged once at the end, so plans do not contain it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, product, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import AttentionKernel, CallKind
from ..kernels.no_grad import first_order
from ..plans import Kind, Plan, Recorder, Target, Workload, backward_plan, record
from ..plans.slices import FAR
from .execute import Pass, Runtime
from .kv_format import Fields, KVFormat, Shapes, plain_kv


class AttentionResult(NamedTuple):
    """The result of a rank's call: out `[s, b, h, e]` in q's dtype, lse `[s, b, h]` in fp32 (fp64 for fp64 inputs)."""

    out: Tensor
    lse: Tensor


@dataclass
class Passes:
    """The forward and backward pass of one kind of call, each made on first use."""

    plan: Plan
    target: Target
    rank: int
    shapes: Shapes
    runtime: Runtime

    @cached_property
    def forward(self) -> Pass:
        return self._pass(self.plan)

    @cached_property
    def backward(self) -> Pass:
        return self._pass(backward_plan(self.plan))

    def _pass(self, plan: Plan) -> Pass:
        packed = self.shapes.kv != self.shapes.kv_grad
        return Pass(Recorder(plan, self.target), self.rank, self.shapes, self.runtime, packed)

    @cached_property
    def kept_heads(self) -> list[range | None]:
        """For each kept entry the heads of its queries; None for keys."""
        entries = self.forward.recording.kept
        return [self.shapes.heads(Kind.OUT, each[1].heads) if len(each) == 2 else None for each in entries]


def shapes_of(q: Tensor, k: Tensor, v: Tensor, kv: KVFormat | None = None) -> Shapes:
    """Return the shapes for inputs like these. kv: the format of keys and values; None to leave them unconverted."""
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


def forward_pass(
    passes: Passes, q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor, list[Fields]]:
    """Return out, lse, and the entries that the pass keeps for backward."""
    own: Fields = (k, v)
    if passes.shapes.kv != passes.shapes.kv_grad:  # converted once, so that every rank attends to the same numbers
        packed = passes.shapes.kv.spec(k.shape[0], k.shape[1], k.shape[2], k.device).empty()
        for into, source in passes.shapes.kv.pairs(packed, k, v):
            into.copy_(source)
        own = (packed,)
    run = passes.forward.run({Kind.Q: (q,), Kind.KV: own}, scale)
    (out, lse), kept = run.result(Kind.OUT), run.kept
    if sink is None:
        return out, lse, kept
    with_sinks = [
        entry if heads is None else (entry[0], *merge_sink(entry[1], entry[2], sink, heads))
        for entry, heads in zip(kept, passes.kept_heads, strict=True)
    ]
    return *merge_sink(out, lse, sink, range(q.shape[2])), with_sinks


class AttentionFunction(torch.autograd.Function):
    """The forward and backward passes of a rank.

    Of q, k, v, out and lse, it saves what backward reads. Backward fetches other ranks' blocks again unless the
    pass keeps them.
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
        out, lse, kept = forward_pass(passes, q, k, v, scale, sink) if result is None else (*result, [])
        out = out.detach()
        ctx.passes, ctx.scale = passes, scale
        if any(ctx.needs_input_grad):
            reads = passes.backward.recording.reads_own
            v = _without_others(v, q, k) if Kind.KV in reads else v
            queries = Kind.Q_GRAD in reads or sink is not None
            own = (*((q, out, lse) if queries else ()), *((k, v) if Kind.KV in reads else ()))
            ctx.save_for_backward(sink, *own, *chain.from_iterable(kept))
            ctx.saved = queries, Kind.KV in reads, [len(entry) for entry in kept]
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        sink, *saved = ctx.saved_tensors
        queries, keys, kept_sizes = ctx.saved
        own: dict[Kind, Fields] = {Kind.GRAD: (grad_out,)}
        if queries:
            q, out, lse, *saved = saved
            own[Kind.Q_GRAD] = q, out, grad_out, lse
        if keys:
            k, v, *saved = saved
            own[Kind.KV] = k, v
        tensors = iter(saved)
        kept = [tuple(islice(tensors, size)) for size in kept_sizes]
        run = ctx.passes.backward.run(own, ctx.scale, kept)
        grad_sink = None if sink is None else sink_gradient(sink, out, lse, grad_out)
        return *run.result(Kind.DQ), *run.result(Kind.DKV), grad_sink, None, None, None


def _without_others(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Copy `v` if saving it would keep more alive: after RoPE, it alone is still a view of the whole projection."""
    storage = v.untyped_storage()
    shared = any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in (q, k))
    return v if shared or storage.nbytes() == v.nbytes else v.contiguous()


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor, heads: range) -> tuple[Tensor, Tensor]:
    """Merge `out` `[s, b, h, e]` and `lse` `[s, b, h]` of some heads with their sinks `[all heads]`, as new tensors."""
    logits = sink[heads.start : heads.stop].to(lse.dtype)
    total = torch.logaddexp(lse, logits)
    share = torch.exp(lse - total).unsqueeze(-1)
    return (out * share).to(out.dtype), total.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    """Return the gradient of the sinks from this rank's queries.

    A sink's share of the softmax, `exp(sink - lse)`, is missing from every output. Its gradient is minus the sum over
    queries of this share times `rowsum(grad_out * out)`.
    """
    share = torch.exp(sink.to(lse.dtype) - lse)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 1)).to(sink.dtype)


class KernelKind(NamedTuple):
    """The key for which a kernel is compiled. heads: of queries and of keys."""

    backward: bool
    kind: CallKind
    heads: tuple[int, int]


def compile_kinds(every: Iterable[Passes], varied: bool) -> None:
    """Make a small call of every kind that the passes contain. varied: see `ContextParallelAttention.announce`."""
    examples: dict[KernelKind, Passes] = {}
    for passes in every:
        for each in call_kinds(passes, varied) if passes.runtime.kernel.compiles else ():
            examples.setdefault(each, passes)
    for kind, passes in examples.items():
        shapes, workload = passes.shapes, passes.shapes.workload
        dims = workload.head_dim, workload.value_dim
        call_example(passes.runtime.kernel, kind, dims, shapes.dtype, shapes.device)


def call_example(
    kernel: AttentionKernel, of: KernelKind, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Make a small call of a kind. dims: of keys and of values."""
    (h, g), (d, e), call = of.heads, dims, of.kind.example
    q, k, v, out = (
        torch.zeros(call.q_span[1], 1, heads, size, dtype=dtype, device=device)
        for heads, size in ((h, d), (g, d), (g, e), (h, e))
    )
    if of.backward:
        lse = torch.zeros(*q.shape[:3], device=device)
        kernel.backward(out, q, k, v, out, lse, call, scale=d**-0.5)
    else:
        kernel.forward(q, k, v, call, scale=d**-0.5)


def call_kinds(passes: Passes, varied: bool) -> set[KernelKind]:
    """Return the kinds of a rank's calls; if varied, also the kinds of other documents, with or without windows."""
    workload, kinds = passes.shapes.workload, set()
    # One rank alone has no whole blocks, unless long causal segments are cut.
    whole = passes.plan.n > 1 or passes.target.takes.longest_causal != FAR
    windows, rights = passes.plan.mask.has_windows, {True, not whole}
    others = list(starmap(CallKind, product((False, True), {False, windows}, rights))) if varied else []
    for plan in (passes.plan, backward_plan(passes.plan)):
        for op in record(plan, passes.rank, passes.target).calls:
            heads = [len(workload.head_range(rows.kind, rows.heads)) for rows in (op.queries, op.keys)]
            own = CallKind.of(op.call, (op.queries.tokens, op.keys.tokens))
            kinds |= {KernelKind(plan.backward, kind, (heads[0], heads[1])) for kind in (own, *others)}
    return kinds
