"""Several tensors copied by one kernel launch: what a pass packs, pulls from its peers' memory, or puts side by side.

Launching one copy per tensor takes the host longer than a short pass lasts. Reading all peers at the same time also
fills the links between GPUs better.
"""

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .fused import load_fused
from .no_grad import no_grad

_fused = partial(load_fused, __name__, "attention's copies, one by one,")

MAX_BASES = 16
"""The most allocations that one launch addresses: the number of pointer arguments of the kernel."""

Pair = tuple[Tensor, Tensor]
"""(into, source): of one shape, any strides. The kernel takes pairs of one dtype."""

_MAX_COLUMNS = 256
_MAX_PLANS = 8
_MAX_WORDS = 2**31 - 2**12
"""The most words of one copy: the kernel counts them in 32 bits, up to the end of its last tile."""


class Entry(NamedTuple):
    """The geometry of one copy: `sizes` and strides of three dimensions in words, the outermost of `into` first.

    wide: words have 8 bytes, are adjacent in the last dimension of both tensors and aligned to 16; otherwise words have
    4 bytes and any strides.
    """

    wide: bool
    sizes: tuple[int, int, int]
    into: tuple[int, int, int]
    source: tuple[int, int, int]


class Launch(NamedTuple):
    """The copies of one kernel launch.

    pairs: the index of each copy's pair. table: 16 numbers per copy: base and distance in bytes of source and
    of into, whether the copy is wide, the sizes, the strides of into and of source. anchors: for each base, the
    tensor whose address it is: 2 * index of its pair, + 1 for a source. columns: the largest power of two of adjacent
    8-byte words in all wide copies, up to 256. words: the size of the largest copy.
    """

    pairs: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    anchors: tuple[int, ...]
    columns: int
    words: int


class _Plan(NamedTuple):
    """The launches and tables for tensors of these strides and alignments. left: pairs that the kernel cannot copy."""

    strides: tuple[tuple[int, ...], ...]
    aligned: tuple[int, ...]
    launches: tuple[tuple[Launch, Tensor], ...]
    left: tuple[int, ...]


class BatchedCopy:
    """Copies of pairs whose shapes and dtypes are the same for every use of a key; their memory may change."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, list[_Plan]] = {}

    @no_grad
    def copy(self, key: Hashable, pairs: Sequence[Pair]) -> None:
        """Copy on the current stream. No two of the copies may write and read the same elements."""
        impl = _fused() if len(pairs) > 1 and pairs[0][0].is_cuda else None
        if impl is None:
            for into, source in pairs:
                copy(into, source)
            return
        plan = self._plan(key, pairs)
        for launch, table in plan.launches:
            impl.copy_triton(launch, table, [pairs[anchor // 2][anchor % 2].data_ptr() for anchor in launch.anchors])
        for number in plan.left:
            copy(*pairs[number])

    def _plan(self, key: Hashable, pairs: Sequence[Pair]) -> _Plan:
        tensors = [x for pair in pairs for x in pair]
        pointers = [x.data_ptr() for x in tensors]
        strides = tuple([x.stride() for x in tensors])
        aligned = tuple([pointer % 16 for pointer in pointers])
        known = self._plans.setdefault(key, [])
        for plan in known:
            if plan.strides == strides and plan.aligned == aligned and _has_distances(plan, pointers):
                return plan
        new, left = launches(pairs)
        with torch.inference_mode(False):  # later calls use the tables too
            tables = [torch.tensor(each.table, dtype=torch.int64) for each in new]
            tables = [table.to(tensors[0].device, non_blocking=True) for table in tables]
        plan = _Plan(strides, aligned, tuple(zip(new, tables, strict=True)), tuple(left))
        known[:] = [plan, *known[: _MAX_PLANS - 1]]
        return plan


def copy(into: Tensor, source: Tensor) -> None:
    """Run `into.copy_(source)` in the widest words that fit both tensors.

    torch's kernel for strided tensors moves one element at a time, and small ones at a third of the memory's speed.
    """
    if into.dtype == source.dtype and not (into.is_contiguous() and source.is_contiguous()):
        for word in (torch.complex128, torch.int64):
            if word.itemsize > into.element_size() and _consists_of(into, word) and _consists_of(source, word):
                into, source = into.view(word), source.view(word)
                break
    into.copy_(source)


def entry(into: Tensor, source: Tensor) -> Entry | None:
    """Return the geometry of a copy, or None if the kernel cannot make it."""
    if into.dtype != source.dtype:
        return None
    size = into.element_size()
    dims = [dim for dim in zip(into.shape, into.stride(), source.stride(), strict=True) if dim[0] != 1]
    merged: list[tuple[int, int, int]] = []
    for n, d, s in sorted(dims, key=lambda dim: -dim[1]):
        if merged and merged[-1][1:] == (n * d, n * s):
            merged[-1] = merged[-1][0] * n, d, s
        else:
            merged.append((n, d, s))
    if len(merged) > 3 or not into.numel():
        return None
    wide = bool(merged) and _is_wide(merged, size) and not any(x.data_ptr() % 16 for x in (into, source))
    if not wide and size != 4:
        return None
    if wide:
        *outer, (n, _, _) = merged
        merged = [(m, d * size // 8, s * size // 8) for m, d, s in outer] + [(n * size // 8, 1, 1)]
    sizes, to, of = zip(*([(1, 0, 0)] * (3 - len(merged)) + merged), strict=True)
    if math.prod(sizes) > _MAX_WORDS:
        return None
    return Entry(wide, sizes, to, of)


def launches(pairs: Sequence[Pair]) -> tuple[list[Launch], list[int]]:
    """Distribute copies over launches; also return the indices of pairs that the kernel cannot copy."""
    result: list[Launch] = []
    left: list[int] = []
    entries: dict[int, Entry] = {}
    anchors: dict[int, int] = {}
    for number, (into, source) in enumerate(pairs):
        each = entry(into, source)
        if each is None:
            if into.numel():
                left.append(number)
            continue
        storages = {x.untyped_storage().data_ptr(): 2 * number + side for side, x in ((1, source), (0, into))}
        if len(anchors.keys() | storages.keys()) > MAX_BASES:
            result.append(_launch(pairs, entries, anchors))
            entries, anchors = {}, {}
        anchors = storages | anchors
        entries[number] = each
    if entries:
        result.append(_launch(pairs, entries, anchors))
    return result, left


def _launch(pairs: Sequence[Pair], entries: dict[int, Entry], anchors: dict[int, int]) -> Launch:
    numbered = enumerate(anchors.items())
    bases = {storage: (i, pairs[anchor // 2][anchor % 2].data_ptr()) for i, (storage, anchor) in numbered}

    def place(x: Tensor) -> tuple[int, int]:
        base, address = bases[x.untyped_storage().data_ptr()]
        return base, x.data_ptr() - address

    table = []
    for number, each in entries.items():
        into, source = pairs[number]
        table.append((*place(source), *place(into), int(each.wide), *each.sizes, *each.into, *each.source, 0, 0))
    adjacent = math.gcd(_MAX_COLUMNS, *(each.sizes[2] for each in entries.values() if each.wide))
    words = max(math.prod(each.sizes) for each in entries.values())
    return Launch(tuple(entries), tuple(table), tuple(anchors.values()), adjacent & -adjacent, words)


def _has_distances(plan: _Plan, pointers: Sequence[int]) -> bool:
    """Whether tensors that share an allocation have the distances of the plan."""
    for launch, _ in plan.launches:
        bases = [pointers[anchor] for anchor in launch.anchors]
        for number, row in zip(launch.pairs, launch.table, strict=True):
            into, source = pointers[2 * number : 2 * number + 2]
            if into - bases[row[2]] != row[3] or source - bases[row[0]] != row[1]:
                return False
    return True


def _is_wide(merged: Sequence[tuple[int, int, int]], size: int) -> bool:
    *outer, (n, d, s) = merged
    strides = [stride * size for _, *pair in outer for stride in pair]
    return d == s == 1 and not n * size % 16 and not any(stride % 16 for stride in strides)


def _consists_of(tensor: Tensor, word: torch.dtype) -> bool:
    """Whether a tensor can be viewed as words."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % word.itemsize:
        return False
    return math.gcd(tensor.shape[-1], tensor.storage_offset(), *strides) % (word.itemsize // tensor.element_size()) == 0
