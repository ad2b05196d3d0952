"""An emulated device: its results are computed by the CPU at once, and its kernel calls take the time of given costs.

Ranks share the processors of one machine, and a CPU that computes starts no messages. A GPU does neither. So the device
has a clock: work is issued in order and takes its time on the clock, while the host goes on to the next messages.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.execute import Runtime
from megatron_longctx.core.attention.kv_format import Shapes
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.core.comm.p2p import Exchange, Message
from megatron_longctx.core.kernels.interface import BlockInputs
from megatron_longctx.core.kernels.providers.cpu import CpuKernel
from megatron_longctx.core.plans import Mask, Workload
from megatron_longctx.core.plans.plan import Heads
from megatron_longctx.planner.cost import Costs


class Device:
    """The work of one rank: `free` is the time at which all that was issued is done."""

    def __init__(self, costs: Costs, workload: Workload) -> None:
        self.costs, self.workload, self.free = costs, workload, 0.0

    def call(self, issued: float, inputs: BlockInputs, backward: bool) -> None:
        """Issue a kernel call; it starts when the work before it is done."""
        heads = Heads(0, self.workload.num_heads // inputs.q.shape[2])
        seconds = self.costs.call_seconds(inputs.call, heads, self.workload, backward)
        self.free = max(self.free, issued) + seconds

    def synchronize(self, until: float | None = None) -> None:
        """Wait until a time of its clock; None for the end of all work."""
        time.sleep(max(0.0, (self.free if until is None else until) - time.perf_counter()))


class EmulatedAttention(ContextParallelAttention):
    """Attention on an emulated device. Merges and copies take no time of its clock."""

    def __init__(self, device: Device, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._emulated = device
        self._changed: Runtime | None = None

    def _runtime(self, mask: Mask, shapes: Shapes) -> Runtime:
        if self._changed is None:
            runtime = super()._runtime(mask, shapes)
            assert runtime.transport is not None
            transport = _Transport(runtime.transport.group, shapes.device)
            transport.emulated = self._emulated
            self._changed = replace(runtime, kernel=_Kernel(self._emulated), transport=transport)
        return self._changed


class _Kernel(CpuKernel):
    def __init__(self, emulated: Device) -> None:
        super().__init__()
        self._emulated = emulated

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        self._emulated.call(time.perf_counter(), inputs, backward=False)
        return super()._forward(inputs)

    def _backward(self, inputs: BlockInputs, *rest: Tensor) -> tuple[Tensor, ...]:
        self._emulated.call(time.perf_counter(), inputs, backward=True)
        return super()._backward(inputs, *rest)


class _Transport(P2PTransport):
    emulated: Device

    def record_event(self) -> Any:
        return self.emulated.free

    def start(self, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Any] = ()) -> Exchange:
        self.emulated.synchronize(max(after, default=0.0))
        return super().start(sends, receives)
