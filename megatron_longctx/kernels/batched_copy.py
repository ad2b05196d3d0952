"""Several tensors copied by one kernel: what a pass packs, pulls out of its peers' memory, and puts side by side.

Launching a copy for each takes the host longer than a short pass lasts, and links between GPUs are filled better when
all peers are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_longctx.kernels.fused import fused
from megatron_longctx.kernels.no_grad import no_grad

_fused = partial(fused, __name__, "attention's copies, one by one,")

MOST_BASES = 16
"""Different memories of one launch: what a kernel's arguments hold."""

Pair = tuple[Tensor, Tensor]
"""(into, source): of one shape, any strides. The kernel takes those of one dtype."""

_MOST_WORDS = 256
_MOST_PLANS = 8
_MOST_COUNTED = 2**31 - 2**12
"""Words of a copy: the kernel counts them in 32 bits, up to the end of its last tile."""


class Entry(NamedTuple):
    """One copy, in words: `sizes` and strides of three dimensions, the outermost of `into` first. wide: words of 8
    bytes, side by side in the last dimension of both and aligned to 16; else of 4, with any strides."""

    wide: bool
    sizes: tuple[int, int, int]
    into: tuple[int, int, int]
    source: tuple[int, int, int]


class Launch(NamedTuple):
    """Copies of one kernel launch. pairs: their numbers; for each, `entries`, and by the two tensors of each, in
    `places`, which of the bases it lies behind and how many bytes. leads: of every base the tensor it is known by.
    columns: words of 8 bytes that lie side by side in all wide copies, a power of two. words: of the largest copy."""

    pairs: tuple[int, ...]
    entries: tuple[Entry, ...]
    places: tuple[tuple[int, int], ...]
    leads: tuple[int, ...]
    columns: int
    words: int


class _Plan(NamedTuple):
    """How tensors that lie like this are copied. strides, aligned: of all of them. table: by launch, on the device."""

    strides: tuple[tuple[int, ...], ...]
    aligned: tuple[int, ...]
    launches: tuple[tuple[Launch, Tensor], ...]
    left: tuple[int, ...]


class BatchedCopy:
    """Copies what lies alike every time it is told the same key: the tensors' shapes and dtypes stay the same, their
    memory may be another."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, list[_Plan]] = {}

    @no_grad
    def copy(self, key: Hashable, pairs: Sequence[Pair]) -> None:
        """Copy, on the caller's stream. No tensor of a launch is written and read by two of the copies."""
        twin = _fused() if len(pairs) > 1 and pairs[0][0].is_cuda else None
        if twin is None:
            for into, source in pairs:
                copy(into, source)
            return
        plan = self._plan(key, pairs)
        for launch, table in plan.launches:
            twin.copy_triton(launch, table, [pairs[lead // 2][lead % 2].data_ptr() for lead in launch.leads])
        for number in plan.left:
            copy(*pairs[number])

    def _plan(self, key: Hashable, pairs: Sequence[Pair]) -> _Plan:
        """The one that was made for tensors that lie like these, or a new one."""
        tensors = [x for pair in pairs for x in pair]
        pointers = [x.data_ptr() for x in tensors]
        strides = tuple([x.stride() for x in tensors])
        aligned = tuple([pointer % 16 for pointer in pointers])
        known = self._plans.setdefault(key, [])
        for plan in known:
            if plan.strides == strides and plan.aligned == aligned and _fits(plan, pointers):
                return plan
        plan = _Plan(strides, aligned, *_launches(pairs, tensors[0].device))
        known[:] = [plan, *known[: _MOST_PLANS - 1]]
        return plan


def copy(into: Tensor, source: Tensor) -> None:
    """`into.copy_(source)` of tensors of one shape, in the widest words that fit both: torch's kernel for strided
    tensors moves an element at a time, and small ones at a third of the memory's speed."""
    if into.dtype == source.dtype and not (into.is_contiguous() and source.is_contiguous()):
        for word in (torch.complex128, torch.int64):
            if word.itemsize > into.element_size() and _holds(into, word) and _holds(source, word):
                into, source = into.view(word), source.view(word)
                break
    into.copy_(source)


def entry(into: Tensor, source: Tensor) -> Entry | None:
    """How the kernel copies a pair; None where it cannot."""
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
    wide = bool(merged) and _wide(merged, size) and not any(x.data_ptr() % 16 for x in (into, source))
    if not wide and size != 4:
        return None
    if wide:
        *outer, (n, _, _) = merged
        merged = [(m, d * size // 8, s * size // 8) for m, d, s in outer] + [(n * size // 8, 1, 1)]
    sizes, to, of = zip(*([(1, 0, 0)] * (3 - len(merged)) + merged), strict=True)
    if math.prod(sizes) > _MOST_COUNTED:
        return None
    return Entry(wide, sizes, to, of)


def _columns(entries: Sequence[Entry]) -> int:
    together = math.gcd(_MOST_WORDS, *(entry.sizes[2] for entry in entries if entry.wide))
    return together & -together


def launches(pairs: Sequence[Pair]) -> tuple[list[Launch], list[int]]:
    """Copies by launch, and the numbers of those that the kernel cannot make."""
    found: list[Launch] = []
    left: list[int] = []
    some: list[tuple[int, Entry]] = []
    leads: dict[int, int] = {}
    for number, (into, source) in enumerate(pairs):
        each = entry(into, source)
        if each is None:
            if into.numel():
                left.append(number)
            continue
        new = {
            x.untyped_storage().data_ptr(): 2 * number + side
            for side, x in reversed(list(enumerate((into, source))))
            if x.untyped_storage().data_ptr() not in leads
        }
        if len(leads) + len(new) > MOST_BASES:
            found.append(_launch(pairs, some, leads))
            some, leads = [], {}
            new = {x.untyped_storage().data_ptr(): 2 * number + side for side, x in ((1, source), (0, into))}
        leads |= new
        some.append((number, each))
    if some:
        found.append(_launch(pairs, some, leads))
    return found, left


def _launch(pairs: Sequence[Pair], some: Sequence[tuple[int, Entry]], leads: dict[int, int]) -> Launch:
    order = {storage: i for i, storage in enumerate(leads)}
    first = [pairs[lead // 2][lead % 2].data_ptr() for lead in leads.values()]

    def places() -> Iterator[tuple[int, int]]:
        for number, _ in some:
            for x in pairs[number]:
                base = order[x.untyped_storage().data_ptr()]
                yield base, x.data_ptr() - first[base]

    numbers, entries = zip(*some, strict=True)
    words = max(math.prod(each.sizes) for each in entries)
    return Launch(numbers, entries, tuple(places()), tuple(leads.values()), _columns(entries), words)


def rows(launch: Launch) -> list[list[int]]:
    """A launch's copies as the kernel reads them: for source and into the base and bytes behind it; then whether it is
    wide, the sizes, the strides of into and those of source."""
    found = []
    for i, each in enumerate(launch.entries):
        (to, to_bytes), (of, of_bytes) = launch.places[2 * i : 2 * i + 2]
        found.append([of, of_bytes, to, to_bytes, int(each.wide), *each.sizes, *each.into, *each.source, 0, 0])
    return found


def _launches(pairs: Sequence[Pair], device: torch.device) -> tuple[tuple[tuple[Launch, Tensor], ...], tuple[int, ...]]:
    found, left = launches(pairs)
    with torch.inference_mode(False):  # they outlive the call that asks first
        tables = [torch.tensor(rows(launch), dtype=torch.int64).to(device, non_blocking=True) for launch in found]
    return tuple(zip(found, tables, strict=True)), tuple(left)


def _fits(plan: _Plan, pointers: Sequence[int]) -> bool:
    """Whether what shared a memory lies in it as it did."""
    for launch, _ in plan.launches:
        first = [pointers[lead] for lead in launch.leads]
        numbers = (2 * number + side for number in launch.pairs for side in range(2))
        for number, (base, after) in zip(numbers, launch.places, strict=True):
            if pointers[number] - first[base] != after:
                return False
    return True


def _wide(merged: Sequence[tuple[int, int, int]], size: int) -> bool:
    *outer, (n, d, s) = merged
    strides = [stride * size for _, *pair in outer for stride in pair]
    return d == s == 1 and not n * size % 16 and not any(stride % 16 for stride in strides)


def _holds(tensor: Tensor, word: torch.dtype) -> bool:
    """Whether a tensor can be seen as one of words."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % word.itemsize:
        return False
    return math.gcd(tensor.shape[-1], tensor.storage_offset(), *strides) % (word.itemsize // tensor.element_size()) == 0
