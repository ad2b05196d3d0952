"""The object that all layers of a model share: the attention engine, and the tokens of a sequence that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..config import SWITCHES, Config, mode_options, names_as_keys, token_unit
from ..core.attention import ContextParallelAttention
from ..core.attention.sharding import check_equal_batches, checksum
from ..core.errors import refuse
from ..core.plans.mask import Window
from ..inference.quantize_kv import int8_kv
from .pack import UNBOUNDED, Pack, PackRotations, document_lengths, tree_of, version_of

MEGATRONS_LAYOUTS = ("zigzag", "per_document")
"""The layouts in which Megatron slices batches: whole ones, and packs document by document."""


class Rope(Protocol):
    """A model's RoPE, which rotates queries and keys by the positions of their tokens.

    needs_own_batches: whether it can only be there if the caller knows this project's layouts.
    """

    needs_own_batches: bool

    def equals(self, other: Rope) -> bool:
        """Whether both rotate by the same angles."""

    def rotations_of(self, pack: Pack) -> PackRotations:
        """Return the rotations of this rank's tokens."""


class ShardedSequence:
    """The sequences of a context-parallel group: plain ones of `length` tokens, and packs of documents of any length.

    Core attention, RoPE and batch sharding of a model share one object, so they agree on the layout. It stores nothing
    about the current batch: documents that differ from a plain sequence come with their `pack`.

    Without a length, Megatron slices the batches itself (`get_batch_on_this_cp_rank`, `thd_get_partitioned_indices`):
    all ranks hold equally many tokens, their number tells the length, and only Megatron's layouts are accepted.

    whole_packs: whether Megatron slices packs like plain sequences, and not document by document.

    Attributes:
        rope: the model's RoPE, if it has one.
        windows: the windows of all layers; each layer adds its own.
    """

    def __init__(
        self, attention: ContextParallelAttention, length: int | None = None, whole_packs: bool = False
    ) -> None:
        self.attention, self._whole_packs = attention, whole_packs
        self.rope: Rope | None = None
        self.windows: set[Window] = set()
        self._length = length
        self._content: tuple[int, ...] = ()  # of the first batch that was sharded here
        self._plain = lru_cache(maxsize=64)(lambda tokens: Pack(attention, (tokens,)))

    @property
    def length(self) -> int | None:
        """The number of tokens of a plain sequence. A sequence of another length is a `pack` of one document."""
        return self._length

    @property
    def megatron_slices(self) -> bool:
        """Whether Megatron slices batches, so that everything around attention is as in Megatron."""
        return self._length is None

    def set_rope(self, rope: Rope) -> None:
        """Set the model's RoPE; refuse other angles than those of a model that uses this sequence already."""
        if self.rope is not None and not rope.equals(self.rope):
            remedy = "Build a ShardedSequence for each model; they may share their attention."
            raise refuse("sequence", "of a model with other RoPE angles", "one of this model only", remedy)
        self.rope = rope

    @cached_property
    def whole(self) -> Pack:
        """A plain sequence, as a pack of one document."""
        if self.length is None:
            raise refuse("length", None, "the number of tokens of a plain sequence", "Give it to ShardedSequence.")
        return self._plain(self.length)

    def pack(self, documents: Sequence[int], parents: Sequence[int] | None = None) -> Pack:
        """Return the sequence of documents of these lengths: for `shard_batch`, and as the model's `packed_seq_params`.

        parents: for each document, the number of an earlier one that it continues and sees, or -1: trees of shared
            prefixes. A prefix is computed once. Positions count from the tree's beginning along a branch.

        Raises:
            ValueError: a document without tokens, or a parent that is not an earlier document.
        """
        if parents is None and len(documents) == 1:
            return self._plain(documents[0])
        return Pack(self.attention, documents, parents=parents)

    def prepare(self, documents: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Plan a pack before its use, for the windows of all layers. Any thread may call this."""
        pack = self.pack(documents, parents)
        for window in self.windows:
            self.attention.prepare(pack.mask(window=window))

    def announce(self, packs: bool) -> None:
        """Announce a run's sequences, plain or packs of any documents, with the windows of all layers.

        The first step then compiles the kernels of all kinds of calls, instead of the first pack of another kind.
        """
        count = min(4 * self.attention.world, self.whole.length)
        several = [len(range(i, self.whole.length, count)) for i in range(count)]
        examples = [self.whole, *([Pack(self.attention, several)] if packs else [])]
        self.attention.announce([each.mask(window=window) for each in examples for window in self.windows], packs)

    def pack_of(self, params: PackedSeqParams | None, num_local_tokens: int = 2) -> Pack:
        """Return the pack of a model's input: a `pack`, Megatron's own parameters (thd), or None for a plain sequence.

        Megatron's parameters are on the device. They are read once, when an object is new or its tensors have changed.
        They may have an attribute `parents`, as `pack` takes them.

        num_local_tokens: this rank's tokens; they tell the length of a plain sequence if none was given.

        Raises:
            ValueError: unsupported parameters (see `pack.document_lengths`).
        """
        if params is None:
            return self._plain(num_local_tokens * self.attention.world) if self.megatron_slices else self.whole
        if isinstance(params, Pack):
            return params
        parsed: _ParsedParams | None = getattr(params, "_longctx", None)
        if parsed is None or not parsed.is_current(self, params):
            parents = getattr(params, "parents", None)
            if parents is not None and self.megatron_slices:
                remedy = "Give ShardedSequence a length, and shard batches by it: Megatron's RoPE knows no trees."
                raise refuse("packed_seq_params.parents", "given", "None where Megatron slices batches", remedy)
            if parents is not None:
                pack = self.pack(*tree_of(params, parents))
            else:
                given = [each for each in document_lengths(params) if any(each)]
                lengths, padding = [sum(each) for each in given], [each[1] for each in given]
                pack = Pack(self.attention, lengths, padding) if any(padding) else self.pack(lengths)
            parsed = params._longctx = _ParsedParams(self, _versions(params), pack)
        return parsed.pack

    def check_slices(self, pack: Pack, params: PackedSeqParams | None) -> None:
        """Refuse batches that Megatron slices while attention has another layout: no `shard_batch`, pack or
        ShardedRotaryEmbedding shows that the caller knows it, and the number of tokens is mostly the same."""
        check_equal_batches(self.attention, pack.mask(), lambda: self._content)
        known = self._content or isinstance(params, Pack) or (self.rope is not None and self.rope.needs_own_batches)
        layouts: tuple[str, ...] = MEGATRONS_LAYOUTS
        if len(pack.documents) > 1:
            layouts = MEGATRONS_LAYOUTS[:1] if self._whole_packs else MEGATRONS_LAYOUTS[1:]
        if self.attention.world == 1 or known or pack.layout.name in layouts:
            return
        expected = f"{' or '.join(layouts)}, in which Megatron slices {'packs' if len(layouts) == 1 else 'batches'}"
        remedy = f"Set ContextParallelAttention(layout={layouts[-1]!r}), or use sequence.shard_batch on every rank."
        raise refuse("layout", pack.layout.name, expected, remedy)

    def check_megatrons_rope(self, params: PackedSeqParams | None) -> None:
        """Refuse Megatron's own RoPE in other layouts, or for a `pack` of several documents.

        It assumes zigzag, and that Megatron's own packs are in zigzag document by document.
        """
        pack = self.pack_of(params)
        several = len(pack.documents) > 1
        remedy = "Set gpt.rotary_pos_emb = ShardedRotaryEmbedding(gpt.rotary_pos_emb, sequence)"
        if several and isinstance(params, Pack):
            raise refuse("rotary_pos_emb", "Megatron's", "ShardedRotaryEmbedding with sequence.pack", f"{remedy}.")
        fitting = MEGATRONS_LAYOUTS[1:] if several else MEGATRONS_LAYOUTS
        if self.attention.world > 1 and pack.layout.name not in fitting:
            expected = f"{' or '.join(fitting)} with Megatron's own RoPE" + " of packs" * several
            raise refuse("layout", pack.layout.name, expected, f"{remedy}, or choose the layout.")

    def rotation(self, pack: Pack, window: Window = UNBOUNDED) -> Callable[[Tensor], Tensor] | None:
        """Return the function that rotates queries and keys in layers with this window, computed once for a pack; None
        without RoPE."""
        if self.rope is not None and pack.rotations is None:
            with torch.inference_mode(False):  # a pack may be used for inference first and for training later
                pack.rotations = self.rope.rotations_of(pack)
        return None if pack.rotations is None else pack.rotations.of(window)

    def shard_batch(self, batch: Mapping[str, Tensor], packed: PackedSeqParams | None = None) -> dict[str, Tensor]:
        """Return this rank's tokens of every `[b, S]` tensor, as `[b, s]`.

        Labels must be shifted already: a rank's last token and its label need not be neighbors in the layout.

        Args:
            batch: whole sequences, the same on all ranks. Do not pass the result of Megatron's own functions
                (`get_batch_on_this_cp_rank`, `thd_get_partitioned_indices`): they select other tokens.
            packed: the model's `packed_seq_params`.

        Raises:
            ValueError: a tensor that is not `[b, S]`, or a rank without tokens, for which Megatron's layers fail.
        """
        tokens = next(iter(batch.values())).shape[-1] if batch else 0
        pack = self._plain(tokens) if packed is None and self.megatron_slices else self.pack_of(packed)
        length, layout = pack.length, pack.layout
        empty = [rank for rank in range(self.attention.world) if layout.num_tokens(rank) == 0]
        if empty:
            expected = (
                f"tokens for all {self.attention.world} context-parallel ranks, but in the {layout.name} layout ranks "
                f"{empty} have none"
            )
            raise refuse("length", length, expected, "Pass longer sequences or packs, or use fewer ranks.")
        for name, tensor in batch.items():
            if tensor.ndim != 2 or tensor.shape[1] != length:
                raise ValueError(
                    f"batch[{name!r}] has shape {tuple(tensor.shape)}: expected [batch, {length}], the whole sequence. "
                    "Pass the full batch on every rank, and sequences of another length with their pack."
                )
        self._content = self._content or (length, *(checksum(tensor) for tensor in batch.values()))
        return {name: tensor.index_select(1, pack.tokens(tensor.device)) for name, tensor in batch.items()}


class _ParsedParams(NamedTuple):
    """The pack that Megatron's parameters describe, stored with them."""

    sequence: ShardedSequence
    versions: list[tuple[Any, Any]]
    pack: Pack

    def is_current(self, sequence: ShardedSequence, params: PackedSeqParams) -> bool:
        """Whether the parameters are unchanged, found without reading the device."""
        pairs = zip(self.versions, _versions(params), strict=True)
        return self.sequence is sequence and all(x is y and old == new for (x, old), (y, new) in pairs)


def _versions(params: PackedSeqParams) -> list[tuple[Any, Any]]:
    """Return the parameters' tensors, each with the number of writes to it; parents in a list with a copy of it."""
    names = [f"cu_seqlens_{of}{suffix}" for of in ("q", "kv") for suffix in ("", "_padded")]
    return [(x, version_of(x)) for x in (getattr(params, name, None) for name in (*names, "parents"))]


@lru_cache(maxsize=8)
def shared_attention(group: dist.ProcessGroup, **options: Any) -> ContextParallelAttention:
    """Return the attention that all stages and models of a job share."""
    return ContextParallelAttention(group, **options)


def build_sequence(config: Config, group: dist.ProcessGroup) -> ShardedSequence:
    """Build the sequence of `config.data.seq_length` tokens over the context-parallel `group`."""
    par, settings, unit = config.parallelism, config.attention, token_unit(config)
    with names_as_keys():
        attention = ContextParallelAttention(
            group,
            schedule=par.schedule,
            kernel=settings.kernel,
            options=mode_options(par),
            unit=unit,
            layout=config.layout,
            deterministic=settings.deterministic,
            transport=settings.transport,
            kv_format=int8_kv if settings.kv_int8 else None,
            keep_received=SWITCHES[settings.keep_received],
            overlap=settings.overlap,
            sum_in_node=config.sum_in_node,
        )
    return ShardedSequence(attention, config.data.seq_length)
