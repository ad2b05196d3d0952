"""Padding of a batch's rows, as Megatron's mask tensors state it, as masks of plans.

No other token sees padding, which sees itself alone. A tensor that hides anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from ..core.attention import ContextParallelAttention
from ..core.comm.collectives import all_gather_rows
from ..core.errors import refuse
from ..core.plans.mask import Mask, Window
from .pack import Pack, divided
from .sequence import version_of

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
