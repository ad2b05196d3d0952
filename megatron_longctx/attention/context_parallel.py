"""Attention over a sequence sharded among the ranks of a process group, as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import BufferPool, MixedTransport, PeerTransport, Transport, WaitClock, choose_transport
from ..config import KEEP_RECEIVED, refuse
from ..kernels import KernelRequest, choose
from ..kernels.no_grad import first_order
from ..layout import Layout
from ..schedules import (
    DEFAULT_OPTIONS,
    Kind,
    Plan,
    PlanOptions,
    build_plan,
    check_heads,
    keeping,
    keeps_received,
)
from .engine import Engine
from .executor import BackwardPass, ForwardPass
from .int8 import Int8ForwardPass
from .pace import SETTLED
from .program import Program, programs
from .replay import Replay, Tensors

_MOST_REPLAYS = 16
"""Kinds of passes that may be replayed from graphs, each of which holds memory then; others run as they are."""


class AttentionResult(NamedTuple):
    """What a rank's call gave: out `[s, b, h, d]` in q's dtype and lse `[s, b, h]` in fp32 (fp64 for fp64 inputs)."""

    out: Tensor
    lse: Tensor


class ContextParallelAttention:
    """Exact softmax attention; each rank gives and gets the tokens that the schedule's layout assigns to it.

    One object serves every layer: they share its buffers and its stream.

    Args:
        group: the context-parallel process group, or None for one rank.
        schedule: a name in `schedules.SCHEDULES`.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.
        options: what the schedule may be told besides.
        deterministic: ask for kernels whose results are bit-identical from run to run.
        transport: auto, peer or p2p (see `comm.choose_transport`).
        graph_tokens: over peer memory, calls with at most so many tokens on every rank are tried as they are and
            replayed from CUDA graphs, and the faster way stays (see `pace`).
        kv_int8: in calls with `inference`, keys and values travel, and are attended, as 8-bit integers with a scale for
            every token and head. One rank alone sends nothing and stays exact.
        keep_received: auto, true or false: whether calls that will be differentiated keep what they have received, so
            that backward does not exchange it again (see `schedules.keep`).

    Raises:
        ValueError: an unknown schedule or keep_received, or options that are refused (a kernel that cannot serve is
            refused by the first call, which knows shapes).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        schedule: str = "zigzag",
        kernel: str = "auto",
        options: PlanOptions = DEFAULT_OPTIONS,
        deterministic: bool = False,
        transport: str = "auto",
        graph_tokens: int = 4096,
        kv_int8: bool = False,
        keep_received: str = "auto",
    ) -> None:
        if keep_received not in KEEP_RECEIVED:
            expected = "one of " + ", ".join(KEEP_RECEIVED)
            raise refuse("attention.keep_received", keep_received, expected, "Choose one of these.")
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self._schedule = schedule
        self._kernel = kernel
        self._options = options
        self.deterministic = deterministic
        self._transport = transport
        self._graph_tokens = graph_tokens
        self._clocks: dict[torch.device, WaitClock] = {}
        self._measures_waiting = False
        self._kv_int8 = kv_int8
        self._keep_received = keep_received
        self._programs: dict[tuple[int, bool, bool], tuple[Program, Program]] = {}
        self._engines: dict[KernelRequest, Engine] = {}
        self._links: dict[torch.device, tuple[Transport | None, BufferPool]] = {}
        self.plan(0)

    def measure_waiting(self) -> None:
        """From now on, measure how long this rank's computation waits for messages."""
        self._measures_waiting = True
        for clock in self._clocks.values():
            clock.running = True

    def waited_seconds(self) -> float:
        """What was measured since the last time this was asked.

        Of passes that are replayed from a graph, each counts with what the last replay of its graph has waited: the
        times of the others are overwritten before they could be read without the host waiting.

        Raises:
            RuntimeError: `measure_waiting` was not called.
        """
        if not self._measures_waiting:
            raise RuntimeError("waiting was not measured: call measure_waiting() first")
        return sum(clock.take() for clock in self._clocks.values())

    def plan(self, length: int, causal: bool = True) -> Plan:
        """The forward plan for sequences of `length` tokens."""
        return build_plan(self._schedule, self.world, length, causal, self._options)

    def layout(self, length: int) -> Layout:
        """Which rank holds which of `length` tokens."""
        return self.plan(length).layout

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        length: int,
        causal: bool = True,
        scale: float | None = None,
        result: AttentionResult | None = None,
        inference: bool = False,
    ) -> Tensor:
        """Attend, differentiably in q, k and v.

        Args:
            q: this rank's queries `[s, b, h, d]`, `s = layout(length).num_tokens(rank)`.
            k, v: this rank's keys and values `[s, b, g, d]`; `g` divides `h`.
            length: tokens of the whole sequence, over all ranks.
            causal: token i sees tokens 0..i; otherwise every token sees every token.
            scale: factor of the scores; default `d ** -0.5`.
            result: what `forward` gave for these very inputs; it is returned as it is, differentiably, and nothing is
                computed or sent before backward.
            inference: nothing will be differentiated; only then `kv_int8` has an effect.

        Returns:
            `[s, b, h, d]` in q's dtype.

        Raises:
            ValueError: shapes that do not fit each other or the layout, no kernel that can serve them, or gradients
                asked of 8-bit keys and values.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        # A result that is given was computed without a graph: nothing was kept with it.
        keep = differentiated and result is None and self.keeps_received(length, q.shape[1])
        prepared = self._prepare(q, k, v, length, causal, keep)
        if inference and self._kv_int8 and self.world > 1:
            if differentiated:
                raise ValueError(
                    "attention.kv_int8=True: expected an inference call without gradients. Call under torch.no_grad(), "
                    "or set attention.kv_int8=false."
                )
            (program, _), engine = prepared
            return _forward(program, engine, (q, k, v), scale, Int8ForwardPass)[0]
        out: Tensor = Attend.apply(q, k, v, *prepared, scale, result)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, length: int, causal: bool = True, scale: float | None = None
    ) -> AttentionResult:
        """What a call computes, without a graph: for a later call that is given the result.

        Args and errors as for a call.
        """
        (program, _), engine = self._prepare(q, k, v, length, causal)
        out, lse = _forward(program, engine, (q, k, v), q.shape[-1] ** -0.5 if scale is None else scale)
        return AttentionResult(out, lse)

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Refuse heads (of one tensor-parallel rank) that the schedule cannot share among the ranks.

        Raises:
            ValueError: names what would fit.
        """
        check_heads(self._schedule, self.world, num_heads, num_kv_heads, self._options)

    def keeps_received(self, length: int, batch: int = 1) -> bool:
        """Whether calls over `batch` sequences that will be differentiated keep what they receive."""
        return keeps_received(self._keep_received, self._schedule, self.world, length, batch)

    def warm_up_calls(self, length: int) -> int:
        """Of calls over `length` tokens, forward and backward, how many come before they run as from then on.

        Once the device has done these, one more call takes the way of all that follow, and lets go of what the other
        way held. Asked after the first call, which knows how messages go.
        """
        layout = self.layout(length)
        short = _are_few([layout.num_tokens(rank) for rank in range(self.world)], self._graph_tokens)
        peers = any(isinstance(transport, PeerTransport) for transport, _ in self._links.values())
        return SETTLED if peers and short else 2

    def _prepare(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, causal: bool, keep: bool = False
    ) -> tuple[tuple[Program, Program], Engine]:
        layout = self.layout(length)
        expected = layout.num_tokens(self.rank)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[0] != expected:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{expected}, b, heads, d], since rank {self.rank} of "
                    f"{self.world} holds {expected} of {length} tokens in the {layout.name} layout. Shard the "
                    f"sequence by this layout and give its global length."
                )
        if k.shape != v.shape or k.shape[1] != q.shape[1] or k.shape[3] != q.shape[3] or q.shape[2] % k.shape[2]:
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected equal batch and head dimension, "
                "k and v alike, and query heads a multiple of key/value heads."
            )
        self.check_heads(q.shape[2], k.shape[2])
        engine = self._engine(q, k)
        key = length, causal, keep
        if key not in self._programs:
            plan = self.plan(length, causal)
            self._programs[key] = programs(keeping(plan) if keep else plan, self.rank)
        return self._programs[key], engine

    def _engine(self, q: Tensor, k: Tensor) -> Engine:
        request = KernelRequest(
            device_type=q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[3],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            deterministic=self.deterministic,
        )
        if request not in self._engines:
            kernel = choose(self._kernel, request)
            if q.device not in self._links:
                group = self._group if self.world > 1 else None
                links = None if group is None else choose_transport(self._transport, group, q.device)
                self._links[q.device] = (links, BufferPool(q.device))
            clock = self._clocks.setdefault(q.device, WaitClock(q.device))
            clock.running = self._measures_waiting
            self._engines[request] = Engine(kernel, *self._links[q.device], self._graph_tokens, clock)
        return self._engines[request]


class Attend(torch.autograd.Function):
    """Runs a rank's (forward, backward) programs.

    Keeps q, k, v, out and lse; other ranks' blocks are fetched again in backward, unless the programs keep them. Then
    of this rank's own tensors only those stay that backward reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pair: tuple[Program, Program],
        engine: Engine,
        scale: float,
        result: AttentionResult | None = None,
    ) -> Tensor:
        program, ctx.program = pair
        reads = ctx.program.reads_home
        v = _alone(v, q, k) if Kind.KV in reads else v
        out, lse, *kept = _forward(program, engine, (q, k, v), scale) if result is None else result
        out = out.detach()
        ctx.engine, ctx.scale = engine, scale
        ctx.like = tuple((x.shape, x.dtype) for x in (q, k, lse))
        own = (q, out, lse) if Kind.Q_GRAD in reads else ()
        ctx.save_for_backward(*own, *((k, v) if Kind.KV in reads else ()), *kept)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        program, engine, scale = ctx.program, ctx.engine, ctx.scale
        reads, shapes = program.reads_home, ctx.like

        def make(inputs: Tensors) -> BackwardPass:
            grad_out, *left = inputs
            # What backward does not read has a shape only.
            q, k, lse = (grad_out.new_empty((), dtype=dtype).expand(shape) for shape, dtype in shapes)
            out, v = q, k
            if Kind.Q_GRAD in reads:
                q, out, lse, *left = left
            if Kind.KV in reads:
                k, v, *left = left
            return BackwardPass(
                program, engine, {Kind.Q_GRAD: (q, out, grad_out, lse), Kind.KV: (k, v)}, scale, tuple(left)
            )

        inputs = (grad_out, *ctx.saved_tensors)
        how = (scale, shapes)
        return *_run(program, engine, how, inputs, make, BackwardPass.gradients), None, None, None, None


def _alone(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`v`, copied where it would keep more than itself: after RoPE it alone is still a view of the whole projection."""
    storage = v.untyped_storage()
    shared = any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in (q, k))
    return v if shared or storage.nbytes() == v.nbytes else v.contiguous()


def _forward(
    program: Program,
    engine: Engine,
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    kind: type[ForwardPass] = ForwardPass,
) -> Tensors:
    """(out, lse), and what the program keeps for backward."""

    def make(inputs: Tensors) -> ForwardPass:
        q, k, v = inputs
        return kind(program, engine, {Kind.Q: (q,), Kind.KV: (k, v)}, scale)

    return _run(program, engine, (kind, scale), qkv, make, lambda run: (*run.output.finish(), *run.kept))


def _run(
    program: Program,
    engine: Engine,
    how: Hashable,
    inputs: Tensors,
    make: Callable[[Tensors], Any],
    results: Callable[[Any], Tensors],
) -> Tensors:
    """Run a pass, from a graph where it is short; `how`: what tells it from others of its program and shapes."""
    transport = engine.transport
    if not isinstance(transport, PeerTransport | MixedTransport):
        return _eager(inputs, make, results)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention over peer memory was captured into a CUDA graph, which cannot be replayed: its memories take "
            "turns. Leave attention out of the graph (it has graphs of its own), or choose attention.transport=p2p."
        )
    try:
        key = (id(program), how, tuple((x.shape, x.dtype) for x in inputs))
        known = key in engine.replays
        short = _are_few(program.tokens, engine.graph_tokens) and (known or len(engine.replays) < _MOST_REPLAYS)
        if not short or isinstance(transport, MixedTransport):
            return _eager(inputs, make, results)
        if not known:
            # Together: an id is only good for what is alive.
            engine.replays[key] = (
                program,
                Replay(make, results, inputs[0].device, transport.group, engine.clock),
            )
        found: Tensors = engine.replays[key][1](inputs)
        return found
    except BaseException as error:
        transport.break_off(error)
        raise


def _are_few(tokens: Sequence[int], most: int) -> bool:
    """Whether passes over so many tokens of each rank may be replayed: all ranks find the same, since they take one way
    together."""
    return min(tokens) > 0 and max(tokens) <= most


def _eager(inputs: Tensors, make: Callable[[Tensors], Any], results: Callable[[Any], Tensors]) -> Tensors:
    run = make(inputs)
    run.run()
    found: Tensors = results(run)
    return found
