"""Attention over a sequence sharded among the ranks of a process group, as one autograd function."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from .. import comm
from ..comm import AttentionTimes, BufferPool, StreamClock
from ..comm.collectives import not_owned
from ..comm.symmetric import on_one_machine
from ..errors import refuse
from ..kernels import KernelRequest, choose_kernel
from ..kernels.interface import check_tensors
from ..layout import Layout
from ..plans import Mask, Mode, ModeOptions, Plan, Target, backward, build_plan, find_mode
from .execute import Runtime
from .function import AttentionFunction, AttentionResult, Passes, compile_kinds, forward_pass, shapes_of
from .kv_format import MakeFormat, Shapes
from .sharding import gather, group_of, shard, token_numbers

logger = logging.getLogger(__name__)

_MAX_BOUND = 64
"""The number of kinds of calls that stay prepared, least recently used first out. Each packed batch is a new kind."""

_Kind = tuple[Shapes, bool]
"""A kind of call, with any mask: its shapes, and whether it keeps received blocks."""


class ContextParallelAttention:
    """Exact softmax attention; each rank passes and returns the tokens that the schedule's layout assigns to it.

    One object serves every layer: they share its buffers and its stream.

    `torch.compile` does not look into a call: the graph ends before it and another one begins after it. So all ranks
    exchange messages in the order of the pass, which no compiler changes. `fullgraph=True` is not possible.

    Args:
        group: the context-parallel process group, a device mesh of one dimension, or None for one rank.
        schedule: a mode, or its name in `schedules.MODES`.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.
        options: the `schedules.ModeOptions` of a schedule given by name.
        unit: the number of tokens of every rank is a multiple of this.
        layout: a name in `layout.LAYOUTS`, or auto for the one that balances the schedule.
        deterministic: whether to use only kernels whose results are bit-identical from run to run.
        transport: auto, peer or p2p (see `comm.choose_transport`).
        kv_format: makes the format in which keys and values are sent and attended in calls with `inference`, from
            their head dims and dtype (`inference.quantize_kv.int8_kv`, or a class); None to leave them unconverted. One
            rank alone sends nothing and stays exact.
        keep_received: whether calls that will be differentiated keep received blocks, so that backward does not
            exchange them again. None for whether it pays (see `core.plans.backward`).
        sum_in_node: whether partial gradients are summed within a node of `options.cluster` before they are sent to
            another one. None for whether it pays, if the ranks of a node really are on one machine.
        overlap: False waits for each step's messages before it computes anything beside them, for ablations.

    Raises:
        ValueError: an unknown schedule, keep_received or sum_in_node, or options or a layout that the schedule refuses.
            The first call, which knows shapes, refuses a kernel that does not support them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        schedule: str | Mode = "zigzag",
        kernel: str = "auto",
        options: ModeOptions | None = None,
        unit: int = 1,
        layout: str = "auto",
        deterministic: bool = False,
        transport: str = "auto",
        kv_format: MakeFormat | None = None,
        keep_received: bool | None = None,
        sum_in_node: bool | None = None,
        overlap: bool = True,
    ) -> None:
        for name, value in (("keep_received", keep_received), ("sum_in_node", sum_in_node)):
            if value not in (None, True, False):
                raise refuse(name, value, "True, False or None", "None chooses what is faster.")
        group = group_of(group)
        self._group = None if group is None else not_owned(group)
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        options = options or ModeOptions()
        self.mode: Mode = find_mode(schedule, self.world, options) if isinstance(schedule, str) else schedule
        self.deterministic = deterministic
        self._kernel, self._unit, self._layout, self._transport = kernel, unit, layout, transport
        self._kv_format, self._keep_received = kv_format, keep_received
        self._overlap = overlap
        self._sum_in_node = sum_in_node
        self._summed = backward.node_size_to_sum(sum_in_node, options.cluster, self.world)
        self._measures_times = False
        self._devices: dict[torch.device, Runtime] = {}  # with the kernel of the first call on each
        self._clocks: list[tuple[StreamClock, StreamClock]] = []  # the `waits` and `passes` of these
        self._runtimes: dict[KernelRequest, Runtime] = {}
        self._bound: OrderedDict[tuple[Mask, _Kind], Passes] = OrderedDict()
        self._checked: dict[Any, Passes] = {}  # of calls since passes were bound, by all that was checked
        self._kinds: set[_Kind] = set()  # of all calls so far
        self._expected: tuple[Sequence[Mask], bool] = (), False
        self._compiled: set[_Kind] = set()
        self._lock = threading.Lock()
        self.plan(0)

    def measure_times(self) -> None:
        """From now on, measure how long this rank waits for messages and computes."""
        self._measures_times = True
        for clock in chain.from_iterable(self._clocks):
            clock.running = True

    def times(self) -> AttentionTimes | None:
        """Return the times measured since the last call, after the device has finished its work.

        None before `measure_times`, and from attention that cannot measure.
        """
        if not self._measures_times:
            return None
        waited = sum(waits.take() for waits, _ in self._clocks)
        return AttentionTimes(waited, sum(passes.take() for _, passes in self._clocks) - waited)

    def plan(self, mask: Mask | int) -> Plan:
        """Return the forward plan of a mask, or of a causal sequence of `mask` tokens.

        Raises ValueError: numbers of ranks or tokens that the schedule does not support.
        """
        return build_plan(self.mode, self.world, mask, unit=self._unit, layout=self._layout)

    def prepare(self, mask: Mask) -> None:
        """Plan and record a mask ahead of its use, for all kinds of calls so far (heads, batch, dtype).

        May be called from any thread; nothing is exchanged.
        """
        self.plan(mask)
        for kind in tuple(self._kinds):
            passes = self._bind(mask, kind)
            _ = passes.forward, passes.backward  # made on first use

    def announce(self, masks: Sequence[Mask], varied: bool) -> None:
        """Announce the masks of later calls, so that the first call compiles all their kernels.

        varied: whether there will also be masks like these, with other documents.
        """
        self._expected = masks, varied
        self._checked.clear()

    def layout(self, mask: Mask | int) -> Layout:
        """Return which rank holds which token."""
        return self.plan(mask).queries

    def tokens(self, mask: Mask | int, device: torch.device | str | None = None) -> Tensor:
        """Return the numbers in the sequence of this rank's tokens, int64 `[s]`, in the order of its local tensors."""
        return token_numbers(self.layout(mask), self.rank, device)

    def shard(self, x: Tensor, mask: Mask | int, dim: int = 0) -> Tensor:
        """Return this rank's tokens of `x`, which has the tokens of the whole sequence in `dim`. Differentiable.

        Raises ValueError: `x` has another number of tokens than the mask.
        """
        return shard(x, self.layout(mask), self.rank, dim)

    def gather(self, x: Tensor, mask: Mask | int, dim: int = 0) -> Tensor:
        """Return the tokens of the whole sequence, in its order. `x` has this rank's tokens in `dim`.

        It is the inverse of `shard`. All ranks call it together, and each gets the whole. It is not differentiable.

        Raises ValueError: `x` requires gradients, or has another number of tokens than this rank.
        """
        return gather(x, self.layout(mask), self._group_to_send(), self.rank, dim)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | int,
        scale: float | None = None,
        sink: Tensor | None = None,
        result: AttentionResult | None = None,
        inference: bool = False,
    ) -> Tensor:
        """Attend, differentiably in q, k, v and sink.

        Args:
            q: this rank's queries `[s, b, h, d]`, `s = layout(mask).num_tokens(rank)`.
            k: this rank's keys `[s, b, g, d]`; `g` divides `h`.
            v: this rank's values `[s, b, g, e]`.
            mask: what the tokens of the whole sequence see (`core.plans.mask`); a number of tokens for a causal mask.
            scale: factor of the scores; default `d ** -0.5`.
            sink: `[h]`, a logit per head that takes part in every softmax and has no value; None for none. Its gradient
                has its dtype and is this rank's part: in fp32, the sum over ranks is not a sum of rounded parts.
            result: the result of `forward` for these inputs; it is returned unchanged, differentiably, and nothing is
                computed or sent before backward.
            inference: whether nothing will be differentiated; only then `kv_format` has an effect.

        Returns:
            `[s, b, h, e]` in q's dtype.

        Raises:
            ValueError: shapes that do not fit each other or the layout, no kernel that supports them, or a `kv_format`
                in a call with gradients.
        """
        if torch.compiler.is_compiling():
            options = {"mask": mask, "scale": scale, "sink": sink, "result": result, "inference": inference}
            return _uncompiled(self, q, k, v, **options)
        differentiated = torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, sink) if x is not None])
        kv_format = self._kv_format if inference and self.world > 1 else None
        if kv_format is not None and differentiated:
            remedy = "Call under torch.no_grad(), or leave the format out."
            raise refuse("kv_format", "given", "none in a call with gradients", remedy)
        # A given result was computed without a graph, and kept nothing.
        passes = self._passes(q, k, v, mask, sink, may_keep=differentiated and result is None, kv_format=kv_format)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if kv_format is not None:
            return forward_pass(passes, q, k, v, scale, sink)[0]
        out: Tensor = AttentionFunction.apply(q, k, v, sink, passes, scale, result)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | int,
        scale: float | None = None,
        sink: Tensor | None = None,
    ) -> AttentionResult:
        """Compute a call without a graph, for a later call with its `result`. Arguments and errors as for a call."""
        passes = self._passes(q, k, v, mask, sink)
        out, lse, *_ = forward_pass(passes, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, sink)
        return AttentionResult(out, lse)

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raise ValueError if the schedule cannot share the heads of one tensor-parallel rank among the ranks."""
        self.mode.check_heads(self.world, num_heads, num_kv_heads)

    def keeps_received(self, length: int, batch: int = 1) -> bool:
        """Whether differentiated calls over `batch` sequences keep received blocks."""
        return backward.keeps_received(self._keep_received, self.mode.name, self.world, length, batch)

    def _passes(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | int,
        sink: Tensor | None,
        *,
        may_keep: bool = False,
        kv_format: MakeFormat | None = None,
    ) -> Passes:
        mask, tensors = Mask.of(mask), (q, k, v, sink)
        call = mask, may_keep, kv_format is None, *[(x.shape, x.dtype, x.device) for x in tensors if x is not None]
        if (known := self._checked.get(call)) is not None:
            return known
        self._check(q, k, v, mask)
        _check_sink(sink, q)
        keep = may_keep and self.keeps_received(mask.length, q.shape[1])
        shapes = shapes_of(q, k, v, kv_format and kv_format(q.shape[3], v.shape[3], q.dtype))
        kind, (expected, varied) = (shapes, keep), self._expected
        if expected and kind not in self._compiled:
            self._compiled.add(kind)
            compile_kinds((self._bind(each, kind) for each in expected), varied)
        return self._checked.setdefault(call, self._bind(mask, kind))

    def _bind(self, mask: Mask, kind: _Kind) -> Passes:
        key = mask, kind
        with self._lock:
            known = self._bound.get(key)
            if known is not None:
                self._bound.move_to_end(key)
                return known
        shapes, keep = kind
        runtime = self._runtime(mask, shapes)
        what = self.mode, self.world, mask, None, self._unit, self._layout
        plan = build_plan(*what, keep_received=keep, sum_in_node=self._summed)
        target = Target(shapes.workload, runtime.kernel.takes, runtime.over_peers)
        passes = Passes(plan, target, self.rank, shapes, runtime)
        with self._lock:
            self._kinds.add(kind)
            self._checked.clear()  # so that the next call of each kind is the last used one again
            passes = self._bound.setdefault(key, passes)  # another thread may have been faster
            if len(self._bound) > _MAX_BOUND:
                self._bound.popitem(last=False)
            return passes

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        layout = self.layout(mask)
        expected = layout.num_tokens(self.rank)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[0] != expected:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{expected}, b, heads, d], because rank {self.rank} "
                    f"of {self.world} holds {expected} of {mask.length} tokens in the {layout.name} layout. Shard the "
                    "sequence by this layout and give the mask of all of it."
                )
        check_tensors(q, k, v)
        self.check_heads(q.shape[2], k.shape[2])

    def _runtime(self, mask: Mask, shapes: Shapes) -> Runtime:
        work, device = shapes.workload, shapes.device
        request = KernelRequest(
            device.type, shapes.dtype, work.head_dim, work.num_heads, work.num_kv_heads, self.deterministic,
            work.v_head_dim, windows=mask.has_windows, packed=len(mask.slices) > 1,
        )  # fmt: skip
        if request not in self._runtimes:
            kernel = choose_kernel(self._kernel, request)
            if device not in self._devices:
                group = self._group_to_send()
                transport = None if group is None else comm.choose_transport(self._transport, group, device)
                waits, passes = StreamClock(device), StreamClock(device)
                waits.running = passes.running = self._measures_times
                self._clocks.append((waits, passes))
                self._summed = self._ranks_to_sum()
                self._devices[device] = Runtime(kernel, transport, BufferPool(device), waits, passes, self._overlap)
            self._runtimes[request] = replace(self._devices[device], kernel=kernel)
        return self._runtimes[request]

    def _group_to_send(self) -> dist.ProcessGroup | None:
        """Return the group; None for one rank alone, which sends nothing."""
        return self._group() if self._group is not None and self.world > 1 else None

    def _ranks_to_sum(self) -> int:
        """Return how many ranks of a node sum their gradients. All ranks call this together; the first one logs it.

        None uses the cluster's description if the ranks of a node really are on one machine.
        """
        group = self._group_to_send()
        if not self._summed or group is None:
            return 0
        sums = self._sum_in_node or on_one_machine(group, self._summed)
        if self.rank == 0:
            which = f"every {self._summed} neighbouring ranks (sum_in_node={self._sum_in_node})"
            if sums:
                logger.info("partial gradients for other nodes are summed by %s", which)
            else:
                reason = "some of these, of a node by the described cluster, are on several machines"
                logger.warning("partial gradients for other nodes are not summed by %s: %s", which, reason)
        return self._summed if sums else 0


@_disable_dynamo
def _uncompiled(attention: ContextParallelAttention, *tensors: Tensor, **options: Any) -> Tensor:
    """Attend, where a compiler may not look. (`torch.compiler.disable` would load the compiler with this module.)"""
    return attention(*tensors, **options)


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is not None and (sink.shape != q.shape[2:3] or sink.device != q.device or not sink.dtype.is_floating_point):
        raise refuse(
            "sink",
            f"{sink.dtype} {list(sink.shape)} on {sink.device}",
            f"floating-point numbers, [{q.shape[2]}] on {q.device}, a logit for every query head",
            "Give this rank's share of the heads.",
        )
