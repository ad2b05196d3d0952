"""The sequence of one micro-batch as all layers see it: its documents, this rank's tokens of them, and rows' padding.

Megatron's mask tensors state the padding of a batch's rows. No other token sees padding, which sees itself alone. A
tensor that hides anything else is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..core.attention import ContextParallelAttention
from ..core.comm.collectives import all_gather_rows
from ..core.errors import refuse
from ..core.kernels.packed import to_device
from ..core.layout import Layout
from ..core.plans import Mask, mask
from ..core.plans.mask import Window
from ..models.delta_rule import Place

T = TypeVar("T")
UNBOUNDED: Window = (None, None)


class PackRotations(Protocol):
    """The rotations (RoPE) of a pack's tokens on this rank."""

    def of(self, window: Window) -> Callable[[Tensor], Tensor] | None:
        """Return what rotates queries and keys in layers with this window; None if core attention does not rotate."""


class Pack(PackedSeqParams):  # type: ignore[misc]
    """Documents that follow each other and see only themselves and their parents; `ShardedSequence.pack` makes it.

    Pass it to the model as `packed_seq_params`. It belongs to its micro-batch, so layers that are recomputed in
    backward, and pipelines with several micro-batches in flight, use the right documents. All rows of a batch `[b, S]`
    have these documents. For Megatron its format is that of any other batch (`sbhd`).

    Args:
        padding: the number of tokens at the end of each document that no other token sees; empty for none.
    """

    def __init__(
        self,
        attention: ContextParallelAttention,
        documents: Sequence[int],
        padding: Sequence[int] = (),
        *,
        parents: Sequence[int] | None = None,
    ) -> None:
        self.documents, self.parents = tuple(documents), None if parents is None else tuple(parents)
        self._padding = tuple(padding)
        self._masks: dict[tuple[bool, Window], Mask] = {}
        longest = max((each.position + each.stop - each.start for each in self.mask().documents), default=0)
        super().__init__(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest)
        self.rotations: PackRotations | None = None  # see `ShardedSequence.rotation`
        self._attention = attention
        self._made: dict[tuple[Any, ...], Any] = {}

    __eq__ = object.__eq__  # identity: Megatron's class compares fields
    __hash__ = object.__hash__

    @property
    def length(self) -> int:
        """The number of tokens of all documents, on all ranks."""
        return self.mask().length

    @property
    def layout(self) -> Layout:
        """The layout that all layers share; windows do not change it."""
        return self._attention.layout(self.mask())

    @property
    def num_local_tokens(self) -> int:
        return self.layout.num_tokens(self._attention.rank)

    def mask(self, causal: bool = True, window: Window = UNBOUNDED) -> Mask:
        """Return the mask of a layer with this window."""
        key = causal, window
        if key not in self._masks:
            self._masks[key] = mask.documents(self.documents, causal=causal, window=window, parents=self.parents)
            if any(self._padding) and not causal:  # a causal mask hides what comes later
                pairs = zip(self.documents, self._padding, strict=True)
                parts = [part for length, padding in pairs for part in (length - padding, padding)]
                self._masks[key] = divided(self._masks[key], parts, causal, window)
        return self._masks[key]

    def tokens(self, device: torch.device) -> Tensor:
        """Return the global positions of this rank's tokens, int64 `[s]`, in slot order."""
        return self._once(lambda: to_device(self._attention.tokens(self.mask()), device), "tokens", device)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens, int64 `[s]`, in slot order.

        They count from the beginning of a document, or go on after its parent's last token.
        """

        def positions() -> Tensor:
            tokens = self.tokens(torch.device("cpu"))
            starts, stops, first = torch.tensor(self.mask().documents, dtype=torch.int64).view(-1, 3).T.contiguous()
            return to_device(tokens + (first - starts)[torch.bucketize(tokens, stops, right=True)], device)

        return self._once(positions, "positions", device)

    @cached_property
    def place(self) -> Place:
        """Where this rank's tokens lie, for recurrent layers: refused unless ranks hold the sequence in order and no
        prefix is shared."""
        layout, remedy = self.layout, "Recurrent layers read a document's tokens one after another."
        if layout.n > 1 and layout.name != "contiguous":
            raise refuse("layout", layout.name, "contiguous with recurrent layers", remedy)
        if self.parents is not None:
            raise refuse("parents", "given", "None with recurrent layers", "A state has one continuation here.")
        bounds = [0, *accumulate(map(layout.num_tokens, range(layout.n)))]
        return Place([each.start for each in self.mask().documents], bounds, self._attention.rank)

    def stops(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sums of `batch` times `place.lengths`, from 0 on, int64: on a device and on the host."""

        def stops() -> tuple[Tensor, Tensor]:
            host = torch.tensor([0, *accumulate([*self.place.lengths] * batch)])
            return to_device(host, device), host

        return self._once(stops, "stops", batch, device)

    def tail_rows(self, size: int, device: torch.device) -> Tensor:
        """Return `Place.tail_rows` on a device, int64 `[size]`."""
        return self._once(lambda: to_device(torch.tensor(self.place.tail_rows(size)), device), "tail", size, device)

    def _once(self, make: Callable[[], T], *key: Any) -> T:
        """Return what `make` returned for this key first. A pack may serve inference first and training later."""
        if key not in self._made:
            with torch.inference_mode(False):
                self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]


def divided(whole: Mask, parts: Sequence[int], causal: bool, window: Window) -> Mask:
    """Return the mask of tokens that see those of their own part alone. The layout is that of the whole."""
    return replace(whole, slices=mask.documents([*filter(None, parts)], causal=causal, window=window).slices)


def version_of(x: Any) -> Any:
    """Return the number of writes to a tensor, found without reading the device; a copy of a list."""
    if isinstance(x, Tensor):
        return 0 if x.is_inference() else x._version
    return None if x is None else tuple(x)


def document_lengths(params: PackedSeqParams) -> list[tuple[int, int]]:
    """Return the number of tokens of each document in Megatron's own parameters, and the padding after them.

    Both are read from the device once. Tokens between the end of a document and the padded start of the next one belong
    to it, so a rank's tokens are those of TransformerEngine's `thd_get_partitioned_indices`.

    Raises:
        ValueError: the format is not thd, keys differ from queries, there is a separate context-parallel group, or the
            values are not sums of lengths.
    """
    if params.qkv_format != "thd":
        raise refuse("packed_seq_params.qkv_format", params.qkv_format, "thd", "Give cu_seqlens_q in that format.")
    for name in ("local_cp_size", "cp_group"):
        if getattr(params, name) is not None:
            remedy = "Unset it: all documents are spread over the group that the attention was built with."
            raise refuse(f"packed_seq_params.{name}", "given", "None", remedy)
    stops, padded = (_cu_seqlens(params, suffix) for suffix in ("", "_padded"))
    padded = padded or stops
    if len(stops) < 2 or len(padded) != len(stops) or stops[0] != 0 or padded[0] != 0:
        expected = "sums of lengths that begin with 0, and padded ones of as many documents or None"
        raise refuse("packed_seq_params.cu_seqlens_q", f"{stops}, padded {padded}", expected, "Correct them.")
    lengths, whole = ([stop - start for start, stop in pairwise(each)] for each in (stops, padded))
    if not all(0 <= own <= most for own, most in zip(lengths, whole, strict=True)):
        expected = "lengths from 0 on, each at most its padded one"
        raise refuse("packed_seq_params.cu_seqlens_q", f"{stops}, padded {padded}", expected, "Correct them.")
    return [(own, most - own) for own, most in zip(lengths, whole, strict=True)]


def tree_of(params: PackedSeqParams, parents: Sequence[int] | Tensor) -> tuple[list[int], list[int]]:
    """Return the lengths and parents of documents in Megatron's own parameters, with the parents that a caller gives.

    Positions go on after a parent's last token, not after its padding: padding is a separate document. A document that
    continues an empty one continues the parent of that.

    Args:
        parents: for each document of `cu_seqlens_q`, the number of an earlier one that it continues, or -1.

    Raises:
        ValueError: as `document_lengths`, or a parent that is not an earlier document.
    """
    documents = document_lengths(params)
    given = parents.tolist() if isinstance(parents, Tensor) else list(parents)
    if len(given) != len(documents):
        expected = f"{len(documents)}, one for each document of cu_seqlens_q"
        raise refuse("packed_seq_params.parents", f"{len(given)} numbers", expected, "Correct it.")
    lengths: list[int] = []
    above: list[int] = []
    numbers: list[int] = []  # of each given document, or of its parent's if it has no tokens
    for number, ((own, padding), parent) in enumerate(zip(documents, given, strict=True)):
        if not -1 <= parent < number:
            expected = f"-1 to {number - 1}"
            raise refuse(f"packed_seq_params.parents[{number}]", parent, expected, "A parent is an earlier document.")
        continued = numbers[parent] if parent >= 0 else -1
        numbers.append(len(lengths) if own else continued)
        for length, each in ((own, continued), (padding, -1)):
            lengths += [length] * (length > 0)
            above += [each] * (length > 0)
    return lengths, above


def _cu_seqlens(params: PackedSeqParams, suffix: str) -> list[int]:
    """Return the sums of lengths, which queries and keys must share; empty if there are none."""
    name, of_keys = f"cu_seqlens_q{suffix}", f"cu_seqlens_kv{suffix}"
    queries, keys = getattr(params, name), getattr(params, of_keys)
    if keys is not None and (queries is None or not torch.equal(queries, keys)):
        remedy = "Keys are those of the same tokens here: give the same sums twice, or leave those of the keys out."
        raise refuse(f"packed_seq_params.{of_keys}", "other", f"what {name} says", remedy)
    return [] if queries is None else [int(stop) for stop in queries.tolist()]


Span = tuple[int, int]
"""The first token of a row that is no padding, and the one after the last."""


def attend_rows(
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor], q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask]
) -> Tensor:
    """Return `attend` of a batch `[s, b, heads, d]`, in one call for neighbouring rows with the same mask.

    masks: one for each row, or one for all.
    """
    different = [(mask, len([*rows])) for mask, rows in groupby(masks)]
    if len(different) == 1:
        return attend(q, k, v, masks[0])
    counts = [count for _, count in different]
    rows = zip(different, *(torch.split(x, counts, 1) for x in (q, k, v)), strict=True)
    return torch.cat([attend(some_q, some_k, some_v, mask) for (mask, _), some_q, some_k, some_v in rows], 1)


@lru_cache(maxsize=256)
def padded_mask(whole: Mask, span: Span, causal: bool, window: Window) -> Mask:
    """Return the mask of one document of which the tokens outside of the span are padding; its layout stays."""
    start, stop = span
    return divided(whole, (start, stop - start, whole.length - stop), causal, window)


def read_spans(hidden: Tensor, pack: Pack, attention: ContextParallelAttention, batch: int, causal: bool) -> list[Span]:
    """Return the tokens of each row that are no padding; one span for a tensor that has one row for all.

    The tensor is read once from the device, and again when it has changed. Ranks that hold only their own queries of it
    exchange what they saw.

    Args:
        hidden: bool, True where a query does not see a key: `[b, 1, 1, S]`, `[b, 1, S, S]`, or `[b, 1, s, S]` with this
            rank's queries, as Megatron slices it. In the latter two, padding sees the row's tokens or nothing.
        causal: whether tokens see no later ones, so that padding after them changes nothing.

    Raises:
        ValueError: another form, several documents, a row of padding alone, or a mask that hides anything else.
    """
    key = pack, version_of(hidden), causal
    known: tuple[object, list[Span]] | None = getattr(hidden, "_longctx", None)
    if known is None or known[0] != key:
        known = key, _read(hidden, pack, attention, batch, causal)
        hidden._longctx = known  # type: ignore[attr-defined]
    return known[1]


def _read(hidden: Tensor, pack: Pack, attention: ContextParallelAttention, batch: int, causal: bool) -> list[Span]:
    name, length, shares = "attention_mask", pack.length, [*map(pack.layout.num_tokens, range(attention.world))]
    own = shares[attention.rank] if min(shares) > 1 else length  # one query may be all of them
    if len(pack.documents) > 1:
        raise refuse(name, "given", "None for packed documents", "A pack says itself which tokens see each other.")
    shape = tuple(hidden.shape)
    if hidden.dtype != torch.bool or len(shape) != 4 or shape[0] not in (1, batch) or shape[1] != 1 or (
        shape[2] not in (1, own, length) or shape[3] != length
    ):  # fmt: skip
        expected = f"torch.bool [{batch}, 1, q, {length}] with all keys of the sequence and q = 1, {own} or {length}"
        raise refuse(
            name, f"{hidden.dtype} {list(shape)}", expected, "True hides a key; do not slice the last dimension."
        )
    group = attention._group_to_send() if shape[2] == own != length else None
    visible, numbers = ~hidden[:, 0], torch.arange(length, device=hidden.device)
    keys = visible.any(1)
    ends = torch.stack([torch.where(keys, length - numbers, 0).amax(1), torch.where(keys, numbers + 1, 0).amax(1)])
    start, stop = all_gather_rows(group, ends.flatten()).amax(0).view(2, -1).unbind()
    start = length - start
    inside = (start[:, None] <= numbers) & (numbers < stop[:, None])
    wrong = _other_rows(visible, inside, pack.tokens(hidden.device) if shape[2] == own else numbers, causal)
    wrong = all_gather_rows(group, wrong).amax(0)
    spans: list[Span] = []
    for row, (first, last, other) in enumerate(torch.stack([start, stop, wrong], 1).tolist()):
        if last <= first:
            remedy = "True hides a key: invert a mask that is True for tokens, and leave out rows without any."
            raise refuse(f"{name}[{row}]", "True for all keys", "False for the row's tokens", remedy)
        if other:
            seen = f"the keys {first} to {last - 1}" + " up to itself" * causal
            expected = f"a padding mask: each token sees {seen}, and padding sees these or none"
            remedy = "Give other masks as packs or windows; attn_mask_type says whether a layer is causal."
            raise refuse(f"{name}[{row}]", "another mask", expected, remedy)
        spans.append((first, length if causal else last))
    return spans


def _other_rows(visible: Tensor, inside: Tensor, tokens: Tensor, causal: bool) -> Tensor:
    """Return for each row whether a query sees other keys than padding leaves it, int64 `[b]`.

    visible: bool `[b, q, S]`; with q = 1, for all queries. inside: bool `[b, S]`, the keys that are no padding.
    tokens: the numbers of the queries.
    """
    expected = inside[:, None]
    if visible.shape[1] == 1:
        return (visible != expected).any(2).any(1).long()
    if causal:
        expected = expected & (torch.arange(inside.shape[1], device=inside.device) <= tokens[:, None])
    blind_padding = ~visible.any(2) & ~inside[:, tokens]
    return ((visible != expected).any(2) & ~blind_padding).any(1).long()
