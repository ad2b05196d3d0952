"""What the layers of one model share: the attention engine, and which tokens of a sequence this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..attention import ContextParallelAttention
from ..attention.kv_format import int8_kv
from ..config import Config, mode_options, token_unit
from ..errors import refuse
from ..schedules.mask import Window
from .baseline import TransformerEngineAttention
from .pack import UNBOUNDED, Pack, Turns, documents_of

Rotate = Callable[[Tensor], Tensor]


class Rope(Protocol):
    """How tokens turn."""

    def equals(self, other: Rope) -> bool:
        """Whether the other turns them alike."""

    def of_pack(self, pack: Pack) -> Turns:
        """What turns the queries and keys of this rank's tokens."""


class ShardedSequence:
    """Sequences over the context-parallel group: plain ones of `length` tokens, and packs of documents of any.

    Core attention, RoPE and batch slicing of a model all hold the same object, so they agree on the layout. It knows
    nothing of the batch under way: what is not plain comes with its `pack`.
    """

    def __init__(self, attention: ContextParallelAttention, length: int) -> None:
        self.attention = attention
        self.rope: Rope | None = None
        self.windows: set[Window] = set()
        """Of the layers; they enter their own."""
        self._length = length

    @property
    def length(self) -> int:
        """Tokens of a plain sequence; one of another length is a `pack` of one document."""
        return self._length

    def turn_by(self, rope: Rope) -> None:
        """Take what a model's tokens turn by.

        Raises:
            ValueError: those of another model turn otherwise.
        """
        if self.rope is not None and not rope.equals(self.rope):
            remedy = "Build a ShardedSequence for each model; they may share their attention."
            raise refuse("sequence", "of a model whose tokens turn otherwise", "one of this model's", remedy)
        self.rope = rope

    @cached_property
    def whole(self) -> Pack:
        """A plain sequence."""
        return Pack(self.attention, (self.length,))

    def pack(self, documents: Sequence[int]) -> Pack:
        """The sequence of documents of these lengths, to be given to `shard_batch` and, as `packed_seq_params`, to the
        model.

        Raises:
            ValueError: a document without tokens.
        """
        pack = self.whole if tuple(documents) == (self.length,) else Pack(self.attention, documents)
        pack.mask()
        return pack

    def prepare(self, documents: Sequence[int]) -> None:
        """Plan a pack ahead of its use, for the windows of all layers; from any thread."""
        pack = self.pack(documents)
        for window in self.windows:
            self.attention.prepare(pack.mask(window=window))

    def expect(self, packs: bool) -> None:
        """What a run will bring, in the windows of all layers: plain sequences, or packs of any documents. Kernels that
        are compiled for kinds of calls are compiled by the first step, and not by the first pack of another kind."""
        count = min(4 * self.attention.world, self.length)
        several = [len(range(i, self.length, count)) for i in range(count)]
        found = [self.whole, *([Pack(self.attention, several)] if packs else [])]
        self.attention.expect([each.mask(window=window) for each in found for window in self.windows], packs)

    def pack_of(self, params: PackedSeqParams | None) -> Pack:
        """What a model was given: a `pack`, Megatron's own parameters of packed (thd) documents, or None for a plain
        sequence.

        Megatron's lie on the device and are read once, when they are first met.

        Raises:
            ValueError: parameters that are not served (see `pack.documents_of`).
        """
        if params is None:
            return self.whole
        if isinstance(params, Pack):
            return params
        known: _Read | None = getattr(params, "_longctx", None)
        if known is None or not known.holds(self, params):
            known = params._longctx = _Read(self, _stated(params), self.pack(documents_of(params)))
        return known.pack

    def rotation(self, pack: Pack, window: Window = UNBOUNDED) -> Rotate | None:
        """What turns the queries and keys of this rank's tokens in layers with this window, where the model has RoPE;
        made once for a pack."""
        if self.rope is not None and pack.rotations is None:
            with torch.inference_mode(False):  # it may first be asked for there, and then be trained with
                pack.rotations = self.rope.of_pack(pack)
        return None if pack.rotations is None else pack.rotations.of(window)

    def shard_batch(self, batch: Mapping[str, Tensor], packed: PackedSeqParams | None = None) -> dict[str, Tensor]:
        """This rank's tokens of every `[b, S]` tensor, as `[b, s]`.

        Labels must be shifted already: a rank's last token and its label need not be neighbours in the layout.

        Args:
            batch: whole sequences, the same on all ranks. Not what Megatron's own rule (`get_batch_on_this_cp_rank`,
                `thd_get_partitioned_indices`) has cut: it holds other tokens.
            packed: what the model will be given as `packed_seq_params`.

        Raises:
            ValueError: a tensor that is not `[b, S]`, or a rank without tokens, with which Megatron's layers fail.
        """
        pack = self.pack_of(packed)
        length, layout = pack.length, pack.layout
        without = [rank for rank in range(self.attention.world) if layout.num_tokens(rank) == 0]
        if without:
            raise ValueError(
                f"length={length}: expected tokens for all {self.attention.world} context-parallel ranks, but in "
                f"the {layout.name} layout ranks {without} have none. Give longer sequences or packs, or use fewer "
                "ranks."
            )
        for name, tensor in batch.items():
            if tensor.ndim != 2 or tensor.shape[1] != length:
                raise ValueError(
                    f"batch[{name!r}] has shape {tuple(tensor.shape)}: expected [batch, {length}], the whole "
                    "sequence. Give every rank the full batch, and sequences of another length with their pack."
                )
        return {name: tensor.index_select(1, pack.tokens(tensor.device)) for name, tensor in batch.items()}


class _Read(NamedTuple):
    """What Megatron's parameters said when they were read; it stays with them."""

    by: ShardedSequence
    stated: list[tuple[Tensor | None, int]]
    pack: Pack

    def holds(self, sequence: ShardedSequence, params: PackedSeqParams) -> bool:
        """Whether they still say so, without a look at the device."""
        now = zip(self.stated, _stated(params), strict=True)
        return self.by is sequence and all(x is y and old == new for (x, old), (y, new) in now)


def _stated(params: PackedSeqParams) -> list[tuple[Tensor | None, int]]:
    """Tensors, and how often each was written to."""
    names = (f"cu_seqlens_{of}{suffix}" for of in ("q", "kv") for suffix in ("", "_padded"))
    given: list[Tensor | None] = [getattr(params, name) for name in names]
    return [(x, 0 if x is None or x.is_inference() else x._version) for x in given]


def build_sequence(config: Config, group: dist.ProcessGroup) -> ShardedSequence:
    """The sequence of `config.data.seq_length` tokens over the context-parallel `group`."""
    par = config.parallelism
    if config.attention.baseline is not None:
        kind = config.attention.baseline.removeprefix("te_")
        theirs = TransformerEngineAttention(
            group, kind, unit=token_unit(par), deterministic=config.attention.deterministic
        )
        return ShardedSequence(theirs, config.data.seq_length)
    attention = ContextParallelAttention(
        group,
        schedule=par.schedule,
        kernel=config.attention.kernel,
        options=mode_options(par),
        unit=token_unit(par),
        layout=par.layout,
        deterministic=config.attention.deterministic,
        transport=config.attention.transport,
        kv_format=int8_kv if config.attention.kv_int8 else None,
        keep_received=config.attention.keep_received,
        overlap=config.attention.overlap,
        sum_in_node=config.attention.sum_in_node,
    )
    return ShardedSequence(attention, config.data.seq_length)
