"""What one run of a layer keeps: its input, and the results of attention, which the recomputation plays back."""

from __future__ import annotations

from collections import deque

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..attention import AttentionResult, ContextParallelAttention
from ..schedules import Mask
from .stores import AGAIN, Kept, Store


class AttentionTape:
    """Belongs to one run of one layer with one micro-batch, so that any number may be in flight.

    Args:
        store: where inputs and results wait for the recomputation.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        store.begin()
        self._kept: deque[Kept] = deque()
        self._replaying = False

    @property
    def replaying(self) -> bool:
        return self._replaying

    def keeping(self, layer_input: Tensor) -> saved_tensors_hooks:
        """Inside, what autograd saves of the layer's input `[s, b, h]` waits in the store; all else where it is."""
        kept = self._store.keep(layer_input.detach())
        address = layer_input.data_ptr()  # not the tensor, which what is saved would keep alive

        def save(x: Tensor) -> Tensor | Kept:
            return kept if x.data_ptr() == address else x

        return saved_tensors_hooks(save, lambda saved: saved.take()[0] if isinstance(saved, Kept) else saved)

    def rewind(self) -> None:
        """The run is over: calls that follow are its repetition."""
        self._replaying = True

    def attend(
        self,
        attention: ContextParallelAttention,
        qkv: tuple[Tensor, Tensor, Tensor],
        *,
        mask: Mask | int,
        scale: float | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """`attention(*qkv, ...)`: computed and recorded without a graph, or, after `rewind`, replayed with one.

        A replayed result is let go: it can be played back once.

        Raises:
            RuntimeError: more calls in the repetition than in the run.
        """
        if not self._replaying:
            result = attention.forward(*qkv, mask=mask, scale=scale, sink=sink)
            self._kept.append(self._store.keep(*result))
            return result.out
        if not self._kept:
            raise RuntimeError(f"the result of an attention call {AGAIN}")
        result = AttentionResult(*self._kept.popleft().take())
        return attention(*qkv, mask=mask, scale=scale, sink=sink, result=result)
