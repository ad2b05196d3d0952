"""Several tensors copied by one kernel launch: what a pass packs, pulls from its peers' memory, or puts side by side.

Launching one copy per tensor takes the host longer than a short pass lasts. Reading all peers at the same time also
fills the links between GPUs better.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    root whose address it is. columns: the largest power of two of adjacent 8-byte words in all wide copies, up to 256.
    words: the size of the largest copy.
    """

    pairs: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    anchors: tuple[int, ...]
    columns: int
    words: int


Rooted = tuple[Pair, tuple[int, int]]
"""A pair, and the numbers of the roots, the tensors of which its two are views."""


class _Plan(NamedTuple):
    """The launches and tables for roots of these strides and alignments. left: pairs that the kernel cannot copy."""

    geometry: list[tuple[tuple[int, ...], int]]
    launches: tuple[tuple[Launch, Tensor], ...]
    left: tuple[int, ...]


class BatchedCopy:
    """Copies of pairs whose shapes, dtypes and roots are the same in every use."""

    def __init__(self) -> None:
        self._plans: list[_Plan] = []

    @no_grad
    def copy(self, roots: Sequence[Tensor], moving: int, pairs: Callable[[], Sequence[Rooted]]) -> None:
        """Copy on the current stream. No two of the copies may write and read the same elements.

        moving: how many roots, the first ones, may be anywhere. The others keep their strides and alignment, and their
            distances within an allocation.
        pairs: makes the views, which only a new plan and copies that the kernel cannot make need.
        """
        impl: Any = _fused() if roots[0].is_cuda else None
        plan = self._plan(roots, moving, pairs) if impl is not None else None
        for launch, table in plan.launches if plan else ():
            impl.copy_triton(launch, table, [roots[anchor].data_ptr() for anchor in launch.anchors])
        if plan is None or plan.left:
            found = pairs()
            for number in range(len(found)) if plan is None else plan.left:
                copy(*found[number][0])

    def _plan(self, roots: Sequence[Tensor], moving: int, pairs: Callable[[], Sequence[Rooted]]) -> _Plan:
        geometry = [(x.stride(), x.data_ptr() % 16) for x in roots[:moving]]
        for plan in self._plans:
            if plan.geometry == geometry:
                return plan
        found = pairs()
        new, left = launches(found, roots, moving) if len(found) > 1 else ([], [0])
        with torch.inference_mode(False):  # later calls use the tables too
            tables = [torch.tensor(each.table, dtype=torch.int64) for each in new]
            tables = [table.to(roots[0].device, non_blocking=True) for table in tables]
        plan = _Plan(geometry, tuple(zip(new, tables, strict=True)), tuple(left))
        self._plans = [plan, *self._plans[: _MAX_PLANS - 1]]
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


def launches(pairs: Sequence[Rooted], roots: Sequence[Tensor], moving: int) -> tuple[list[Launch], list[int]]:
    """Distribute copies over launches; also return the indices of pairs that the kernel cannot copy."""
    # A moving root is a base, and the others share one for each allocation.
    bases = [i if i < moving else -x.untyped_storage().data_ptr() for i, x in enumerate(roots)]
    result, left, entries, anchors = list[Launch](), list[int](), dict[int, Entry](), dict[int, int]()

    def place(x: Tensor, root: int) -> tuple[int, int]:
        return list(anchors).index(bases[root]), x.data_ptr() - roots[anchors[bases[root]]].data_ptr()

    def launch() -> Launch:
        table = []
        for number, each in entries.items():
            (into, source), (to, of) = pairs[number]
            places = *place(source, of), *place(into, to)
            table.append((*places, int(each.wide), *each.sizes, *each.into, *each.source, 0, 0))
        adjacent = math.gcd(_MAX_COLUMNS, *(each.sizes[2] for each in entries.values() if each.wide))
        words = max(math.prod(each.sizes) for each in entries.values())
        return Launch(tuple(entries), tuple(table), tuple(anchors.values()), adjacent & -adjacent, words)

    for number, (pair, of) in enumerate(pairs):
        each = entry(*pair)
        if each is None:
            left += [number] * (pair[0].numel() > 0)
            continue
        needed = {bases[root]: root for root in of}
        if len(anchors.keys() | needed.keys()) > MAX_BASES:
            result.append(launch())
            entries, anchors = {}, {}
        anchors = needed | anchors
        entries[number] = each
    return [*result, launch()] if entries else result, left


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
