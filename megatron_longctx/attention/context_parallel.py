"""Attention over a sequence sharded among the ranks of a process group, as one autograd function."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import AttentionTimes, BufferPool, StreamClock, Transport, choose_transport
from ..comm.symmetric import on_one_machine
from ..config import check_value
from ..errors import refuse
from ..kernels import KernelRequest, choose
from ..kernels.interface import check_tensors
from ..layout import Layout
from ..schedules import (
    Mask,
    Mode,
    ModeOptions,
    Plan,
    Target,
    build_plan,
    find_mode,
    keeping,
    keeps_received,
    ranks_to_sum,
    summing_in_nodes,
)
from ..schedules import mask as masks
from .bind import Engine
from .function import AttentionFunction, AttentionResult, Passes, forward_pass, shapes_of
from .kv_format import MakeFormat
from .shapes import Shapes
from .warm_up import compile_kinds

logger = logging.getLogger(__name__)

_MOST_BOUND = 64
"""Kinds of calls that are kept ready; those used last stay. With packed documents every batch is a new one."""


class ContextParallelAttention:
    """Exact softmax attention; each rank gives and gets the tokens that the schedule's layout assigns to it.

    One object serves every layer: they share its buffers and its stream.

    Args:
        group: the context-parallel process group, or None for one rank.
        schedule: a mode, or its name in `schedules.MODES`.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.
        options: what a schedule that is given by its name may be told besides. unit, layout: see `build_plan`.
        deterministic: ask for kernels whose results are bit-identical from run to run.
        transport: auto, peer or p2p (see `comm.choose_transport`).
        kv_format: from head dimensions of keys and of values and a dtype to the format in which keys and values travel,
            and are attended, in calls with `inference` (`kv_format.int8_kv`; a class); None for as they are. One rank
            alone sends nothing and stays exact.
        keep_received: auto, true or false: whether calls that will be differentiated keep what they have received, so
            that backward does not exchange it again (see `schedules.save_remote`).
        sum_in_node: auto, true or false: whether partial gradients are summed within a node of `options.cluster` before
            they cross to another one (see `schedules.relay`).
        overlap: False waits for each step's messages before anything is computed beside them, for ablations.

    Raises:
        ValueError: an unknown schedule, keep_received or sum_in_node, or options or a layout that are refused (a kernel
            that cannot serve is refused by the first call, which knows shapes).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        schedule: str | Mode = "zigzag",
        kernel: str = "auto",
        options: ModeOptions | None = None,
        unit: int = 1,
        layout: str = "auto",
        deterministic: bool = False,
        transport: str = "auto",
        kv_format: MakeFormat | None = None,
        keep_received: str = "auto",
        sum_in_node: str = "auto",
        overlap: bool = True,
    ) -> None:
        check_value("attention.keep_received", keep_received)
        check_value("attention.sum_in_node", sum_in_node)
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        options = options or ModeOptions()
        self.mode: Mode = find_mode(schedule, self.world, options) if isinstance(schedule, str) else schedule
        self.deterministic = deterministic
        self._kernel, self._unit, self._layout, self._transport = kernel, unit, layout, transport
        self._kv_format, self._keep_received = kv_format, keep_received
        self._overlap = overlap
        self._sum_in_node, self._summed = sum_in_node, ranks_to_sum(sum_in_node, options.cluster, self.world)
        self._measures_times = False
        self._links: dict[torch.device, _Links] = {}
        self._engines: dict[KernelRequest, Engine] = {}
        self._bound: OrderedDict[tuple[Mask, KernelRequest, Shapes, bool], Passes] = OrderedDict()
        self._kinds: set[tuple[KernelRequest, Shapes, bool]] = set()  # of calls so far, whatever their masks
        self._expected: tuple[Sequence[Mask], bool] = (), False
        self._warm: set[tuple[KernelRequest, Shapes, bool]] = set()
        self._lock = threading.Lock()
        self.plan(0)

    def measure_times(self) -> None:
        """From now on, measure how long this rank waits for messages and computes."""
        self._measures_times = True
        for links in self._links.values():
            links.waits.running = links.passes.running = True

    def times(self) -> AttentionTimes | None:
        """What was measured since the last time this was asked; None before `measure_times`, and from attention that
        cannot tell. Waits for what the device has not finished."""
        if not self._measures_times:
            return None
        waited = sum(links.waits.take() for links in self._links.values())
        return AttentionTimes(waited, sum(links.passes.take() for links in self._links.values()) - waited)

    def plan(self, mask: Mask | int) -> Plan:
        """The forward plan of a mask, or of a causal sequence of so many tokens."""
        return build_plan(self.mode, self.world, mask, unit=self._unit, layout=self._layout)

    def prepare(self, mask: Mask) -> None:
        """Plan and lower a mask ahead of its use, for all kinds of calls so far (heads, batch, dtype). From any thread;
        nothing is exchanged."""
        self.plan(mask)
        for request, shapes, keep in tuple(self._kinds):
            passes = self._bind(mask, request, shapes, keep)
            _ = passes.forward, passes.backward  # made when they are first asked for

    def expect(self, masks: Sequence[Mask], varied: bool) -> None:
        """Calls of these masks will come: kernels that are compiled for kinds of calls are compiled for all of these by
        the first one, and none later. varied: also of masks like them, whose documents lie elsewhere."""
        self._expected = masks, varied

    def layout(self, mask: Mask | int) -> Layout:
        """Which rank holds which token."""
        return self.plan(mask).queries

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
            k, v: this rank's keys `[s, b, g, d]` and values `[s, b, g, e]`; `g` divides `h`.
            mask: what the tokens of the whole sequence see (`schedules.mask`); a number of tokens for a causal one.
            scale: factor of the scores; default `d ** -0.5`.
            sink: `[h]`, a logit per head that takes part in every softmax and has no value; None for none.
            result: what `forward` gave for these very inputs; it is returned as it is, differentiably, and nothing is
                computed or sent before backward.
            inference: nothing will be differentiated; only then `kv_format` has an effect.

        Returns:
            `[s, b, h, e]` in q's dtype.

        Raises:
            ValueError: shapes that do not fit each other or the layout, no kernel that can serve them, or gradients
                asked of keys and values in a format.
        """
        wanted = (q, k, v) if sink is None else (q, k, v, sink)
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in wanted)
        kv_format = self._kv_format if inference and self.world > 1 else None
        if kv_format is not None and differentiated:
            remedy = "Call under torch.no_grad(), or leave the format out (attention.kv_int8=false)."
            raise refuse("kv_format", "given", "none in a call with gradients", remedy)
        # A result that is given was computed without a graph: nothing was kept with it.
        keep = differentiated and result is None and self.keeps_received(_length(mask), q.shape[1])
        passes = self._passes(q, k, v, mask, keep=keep, kv_format=kv_format)
        _check_sink(sink, q)
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
        """What a call computes, without a graph: for a later call that is given the result.

        Args and errors as for a call.
        """
        passes = self._passes(q, k, v, mask)
        _check_sink(sink, q)
        out, lse, *_ = forward_pass(passes, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, sink)
        return AttentionResult(out, lse)

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Refuse heads (of one tensor-parallel rank) that the schedule cannot share among the ranks.

        Raises:
            ValueError: names what would fit.
        """
        self.mode.check_heads(self.world, num_heads, num_kv_heads)

    def keeps_received(self, length: int, batch: int = 1) -> bool:
        """Whether calls over `batch` sequences that will be differentiated keep what they receive."""
        return keeps_received(self._keep_received, self.mode.name, self.world, length, batch)

    def _passes(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | int,
        *,
        keep: bool = False,
        kv_format: MakeFormat | None = None,
    ) -> Passes:
        """The call's passes, ready to run."""
        mask = masks.causal(mask) if isinstance(mask, int) else mask
        self._check(q, k, v, mask)
        request = KernelRequest(
            device_type=q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[3],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            deterministic=self.deterministic,
            v_head_dim=v.shape[3],
        )
        shapes = shapes_of(q, k, v, kv_format and kv_format(q.shape[3], v.shape[3], q.dtype))
        kind, (expected, varied) = (request, shapes, keep), self._expected
        if expected and kind not in self._warm:
            self._warm.add(kind)
            compile_kinds((self._bind(each, *kind) for each in expected), varied)
        return self._bind(mask, *kind)

    def _bind(self, mask: Mask, request: KernelRequest, shapes: Shapes, keep: bool) -> Passes:
        """request: without what the mask says."""
        key = mask, request, shapes, keep
        with self._lock:
            found = self._bound.get(key)
            if found is not None:
                self._bound.move_to_end(key)
                return found
        wanted = replace(request, windows=mask.has_windows, packed=len(mask.slices) > 1)
        engine = self._engine(wanted, shapes.device)
        plan = summing_in_nodes(self.plan(mask), self._links[shapes.device].summed)
        hosts = None if engine.transport is None else engine.transport.hosts
        target = Target(shapes.workload, engine.kernel.takes, hosts)
        made = Passes(keeping(plan) if keep else plan, target, self.rank, shapes, engine)
        with self._lock:
            self._kinds.add((request, shapes, keep))
            found = self._bound.setdefault(key, made)
            if len(self._bound) > _MOST_BOUND:
                self._bound.popitem(last=False)
            return found

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        layout = self.layout(mask)
        expected = layout.num_tokens(self.rank)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[0] != expected:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{expected}, b, heads, d], since rank {self.rank} of "
                    f"{self.world} holds {expected} of {mask.length} tokens in the {layout.name} layout. Shard the "
                    "sequence by this layout and give the mask of all of it."
                )
        check_tensors(q, k, v)
        self.check_heads(q.shape[2], k.shape[2])

    def _engine(self, request: KernelRequest, device: torch.device) -> Engine:
        if request not in self._engines:
            kernel = choose(self._kernel, request)
            if device not in self._links:
                group = self._group if self.world > 1 else None
                transport = None if group is None else choose_transport(self._transport, group, device)
                waits, passes = StreamClock(device), StreamClock(device)
                waits.running = passes.running = self._measures_times
                self._links[device] = _Links(transport, BufferPool(device), waits, passes, self._ranks_to_sum())
            links = self._links[device]
            self._engines[request] = Engine(
                kernel, links.transport, links.pool, links.waits, links.passes, self._overlap
            )
        return self._engines[request]

    def _ranks_to_sum(self) -> int:
        """Those of a node whose gradients are summed. All ranks call this together, and say it once; `auto` goes by the
        cluster's description where that is true."""
        if not self._summed or self._group is None:
            return 0
        right = self._sum_in_node == "true" or on_one_machine(self._group, self._summed)
        if self.rank == 0:
            which = f"every {self._summed} neighbouring ranks (attention.sum_in_node={self._sum_in_node})"
            if right:
                logger.info("partial gradients for other nodes are summed by %s", which)
            else:
                reason = "some of these, of a node by parallelism.cluster, are on several machines"
                logger.warning("partial gradients for other nodes are not summed by %s: %s", which, reason)
        return self._summed if right else 0


class _Links(NamedTuple):
    """What all calls on a device share. summed: see `Plan.sum_in_node`."""

    transport: Transport | None
    pool: BufferPool
    waits: StreamClock
    passes: StreamClock
    summed: int


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is not None and (sink.shape != q.shape[2:3] or sink.device != q.device or not sink.dtype.is_floating_point):
        raise refuse(
            "sink",
            f"{sink.dtype} {list(sink.shape)} on {sink.device}",
            f"floating-point numbers, [{q.shape[2]}] on {q.device}, a logit for every query head",
            "Give this rank's share of the heads.",
        )


def _length(mask: Mask | int) -> int:
    return mask if isinstance(mask, int) else mask.length
