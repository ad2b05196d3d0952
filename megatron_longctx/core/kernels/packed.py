"""Kernels that take several segments in one call, and the segments on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..plans.kernel_calls import KernelCall, KernelSupport, Segment
from ..plans.slices import FAR
from .interface import AttentionKernel, BlockInputs, dense_call


class Segments(NamedTuple):
    """A call's segments on the device. Rows between them are segments too: queries without keys, or the reverse.

    q_starts, k_starts: int32 `[n + 1]`, the first row of each segment, then the number of rows of the tensor.
    most_queries, most_keys: the largest numbers of one segment. q_gaps, k_gaps: bool, the rows of no segment; None if
    there are none.
    """

    q_starts: Tensor
    k_starts: Tensor
    most_queries: int
    most_keys: int
    q_gaps: Tensor | None
    k_gaps: Tensor | None

    @classmethod
    def of(cls, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments:
        """Return the segments of a call over tensors of `rows` (queries, keys)."""
        q_starts, k_starts = [0], [0]
        for q0, q1, k0, k1 in (*call.segments, Segment(rows[0], rows[0], rows[1], rows[1])):
            if q0 > q_starts[-1]:
                q_starts.append(q0)
                k_starts.append(k_starts[-1])
            if k0 > k_starts[-1]:
                q_starts.append(q_starts[-1])
                k_starts.append(k0)
            if q1 > q0:
                q_starts.append(q1)
                k_starts.append(k1)
        first_q, first_k = (to_device(torch.tensor(x, dtype=torch.int32), device) for x in (q_starts, k_starts))
        q_gaps = _gaps([each[:2] for each in call.segments], rows[0], device)
        k_gaps = _gaps([each[2:] for each in call.segments], rows[1], device)
        return cls(first_q, first_k, call.most_queries, call.most_keys, q_gaps, k_gaps)

    def fill_outputs(self, out: Tensor, lse: Tensor) -> None:
        """Write out 0 and lse -inf to queries of no segment."""
        if self.q_gaps is not None:
            out.masked_fill_(self.q_gaps[:, None, None, None], 0)
            lse.masked_fill_(self.q_gaps[:, None, None], -torch.inf)

    def fill_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write gradients of 0 to rows of no segment."""
        for grad, gaps in ((dq, self.q_gaps), (dk, self.k_gaps), (dv, self.k_gaps)):
            if gaps is not None:
                grad.masked_fill_(gaps[:, None, None, None], 0)


def _gaps(spans: Sequence[tuple[int, int]], rows: int, device: torch.device) -> Tensor | None:
    gaps = torch.ones(rows, dtype=torch.bool)
    for start, stop in spans:
        gaps[start:stop] = False
    return to_device(gaps, device) if gaps.any() else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without blocking the host; later calls use the tensor too, so it must not be an inference tensor."""
    with torch.inference_mode(False):
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def window_arguments(call: KernelCall, unbounded: int | None) -> dict[str, int | None]:
    """Return flash-attention's arguments for the call's window: none for a causal or full call."""
    if call.causal or call.full:
        return {}
    bounds = {"window_size_left": call.left, "window_size_right": call.right}
    return {name: unbounded if bound == FAR else bound for name, bound in bounds.items()}


class PackedKernel(AttentionKernel):
    """A provider whose kernel takes packed segments.

    Subclasses implement `_forward_rows` and `_backward_rows` over dense tensors `[b, s, h, d]` with lse `[b, h, s]`, or
    packed ones `[s, h, d]` with lse `[h, s]`.
    """

    takes: KernelSupport = KernelSupport(packed=True, rectangles=True, windows=True)

    @abstractmethod
    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]: ...

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments | None:
        """Return the call's segments; None if it is one segment of all rows."""
        return None if call.segments == dense_call(*rows).segments else Segments.of(call, rows, device)

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        packed: Segments | None = inputs.prepared
        if packed is None:
            out, lse = self._forward_rows(_batch_first(inputs), None)
            return out.transpose(0, 1), lse.permute(2, 0, 1)
        results = [self._forward_rows(_sequence(inputs, i), packed) for i in range(inputs.q.shape[1])]
        out, lse = _stacked([out for out, _ in results]), _stacked([lse.mT for _, lse in results])
        packed.fill_outputs(out, lse)
        return out, lse

    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        packed: Segments | None = inputs.prepared
        if packed is None:
            whole = (grad_out.transpose(0, 1), out.transpose(0, 1), lse.permute(1, 2, 0).contiguous())
            dq, dk, dv, *_ = self._backward_rows(_batch_first(inputs), None, *whole)
            return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
        results = [
            self._backward_rows(_sequence(inputs, i), packed, grad_out[:, i], out[:, i], lse[:, i].mT.contiguous())[:3]
            for i in range(inputs.q.shape[1])
        ]
        dq, dk, dv = map(_stacked, zip(*results, strict=True))
        packed.fill_gradients(dq, dk, dv)
        return dq, dk, dv


def _batch_first(inputs: BlockInputs) -> BlockInputs:
    return BlockInputs(inputs.q.transpose(0, 1), inputs.k.transpose(0, 1), inputs.v.transpose(0, 1), *inputs[3:])


def _sequence(inputs: BlockInputs, number: int) -> BlockInputs:
    """Return one sequence of a batch; sequences are packed separately."""
    return inputs._replace(q=inputs.q[:, number], k=inputs.k[:, number], v=inputs.v[:, number])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(1) if len(tensors) == 1 else torch.stack(tuple(tensors), dim=1)
