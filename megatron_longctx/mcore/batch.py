"""What a training step is fed: whole micro-batches, before they are sharded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    tokens, labels, position_ids: int64 `[b, S]`. labels are the next tokens of the same document. loss_mask: fp32
    `[b, S]`. documents: lengths of a pack's documents, which sum to S; then b is 1. None: every row is one causal
    sequence.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    documents: tuple[int, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the documents of a row, which is one where it is no pack."""
        return self.documents or (self.tokens.shape[1],)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; PyTorch's `DataLoader` asks for it by this name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return Batch(**pinned, documents=self.documents)
