"""The results of attention in one run of a layer, recorded in forward and played back in the recomputation."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ..attention import ContextParallelAttention
from ..schedules import Mask
from .stores import Kept, Store


class AttentionTape:
    """Belongs to one run of one layer with one micro-batch, so that any number may be in flight.

    Args:
        store: where results wait for the recomputation.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: deque[Kept] = deque()
        self._replaying = False

    @property
    def replaying(self) -> bool:
        return self._replaying

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
            self._kept.append(self._store.keep(result))
            return result.out
        if not self._kept:
            raise RuntimeError(
                "an attention call has no recorded result: expected one backward per forward. "
                "Run forward again instead of keeping the graph for a second backward."
            )
        result = self._kept.popleft().take()
        return attention(*qkv, mask=mask, scale=scale, sink=sink, result=result)
