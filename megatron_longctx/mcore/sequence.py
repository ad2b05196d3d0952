"""What the layers of one model share: the attention engine, and which tokens of the sequence this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import ContextParallelAttention
from ..config import Config, mode_options, token_unit
from ..layout import Layout


class ShardedSequence:
    """One sequence length in flight, sharded over the context-parallel group.

    Core attention, RoPE and batch slicing of a model all hold the same object, so they agree on the layout. Set
    `length` before a batch of another length. `rotation` turns the queries and keys of this rank's tokens, where the
    model has RoPE (`rope.ShardedRotaryEmbedding` sets it).
    """

    def __init__(self, attention: ContextParallelAttention, length: int) -> None:
        self.attention = attention
        self.length = length
        self.rotation: Callable[[Tensor], Tensor] | None = None
        self._positions: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def layout(self) -> Layout:
        return self.attention.layout(self.length)

    @property
    def num_local_tokens(self) -> int:
        return self.layout.num_tokens(self.attention.rank)

    def positions(self, device: torch.device) -> Tensor:
        """Global positions of this rank's tokens, int64 `[s]`, in slot order."""
        key = (self.length, device)
        if key not in self._positions:
            spans = self.layout.spans[self.attention.rank]
            ranges = [torch.arange(span.start, span.stop, span.step) for span in spans if len(span)]
            self._positions[key] = torch.cat(ranges or [torch.empty(0, dtype=torch.int64)]).to(device)
        return self._positions[key]

    def shard_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tokens of every `[b, S]` tensor, as `[b, s]`.

        Labels must be shifted already: a rank's last token and its label need not be neighbours in the layout.

        Raises:
            ValueError: a tensor that is not `[b, length]`, or a rank without tokens, with which Megatron's layers fail.
        """
        layout = self.layout
        without = [rank for rank in range(self.attention.world) if layout.num_tokens(rank) == 0]
        if without:
            raise ValueError(
                f"length={self.length}: expected tokens for all {self.attention.world} context-parallel ranks, but in "
                f"the {layout.name} layout ranks {without} have none. Give longer sequences, or use fewer ranks."
            )
        for name, tensor in batch.items():
            if tensor.ndim != 2 or tensor.shape[1] != self.length:
                raise ValueError(
                    f"batch[{name!r}] has shape {tuple(tensor.shape)}: expected [batch, {self.length}], the whole "
                    "sequence. Give every rank the full batch, or set the sequence's length first."
                )
        return {name: tensor.index_select(1, self.positions(tensor.device)) for name, tensor in batch.items()}


def build_sequence(config: Config, group: dist.ProcessGroup) -> ShardedSequence:
    """The sequence of `config.data.seq_length` tokens over the context-parallel `group`."""
    par = config.parallelism
    attention = ContextParallelAttention(
        group,
        schedule=par.schedule,
        kernel=config.attention.kernel,
        options=mode_options(par),
        unit=token_unit(par),
        layout=par.layout,
        deterministic=config.attention.deterministic,
        transport=config.attention.transport,
        kv_int8=config.attention.kv_int8,
        keep_received=config.attention.keep_received,
    )
    return ShardedSequence(attention, config.data.seq_length)
