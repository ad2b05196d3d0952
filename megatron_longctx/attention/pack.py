"""Parts of a rank's heads, copied to where they are sent from: neighbouring parts of a field in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules import Heads, Kind
from .post import Fields, Post


class Field(NamedTuple):
    """A field of a rank's own tensors, of the shape of `like`: `pieces` is the tensor itself, or what lies side by side
    in its second dimension."""

    like: Tensor
    pieces: tuple[Tensor, ...]

    def write(self, into: Tensor, rows: slice, heads: slice) -> None:
        """Copy some rows and heads."""
        for j, piece in enumerate(self.pieces):
            part = piece[rows].narrow(heads_dim(piece), heads.start, heads.stop - heads.start)
            copy(into if len(self.pieces) == 1 else into[:, j], part)

    def write_parts(self, into: Tensor, parts: int, run: range) -> None:
        """Copy a run of equal parts of the heads, `[len(run), tokens, ...]`."""
        for j, piece in enumerate(self.pieces):
            dim = heads_dim(piece)
            sizes = (parts, piece.shape[dim] // parts)
            split = piece.view(*piece.shape[:dim], *sizes, *piece.shape[dim + 1 :]).movedim(dim, 0)
            copy(into if len(self.pieces) == 1 else into[:, :, j], split[run.start : run.stop])


def copy(into: Tensor, source: Tensor) -> None:
    """`into.copy_(source)` of tensors of one shape and dtype, in the widest words that fit both: torch's kernel for
    strided tensors moves an element at a time, and small ones at a third of the memory's speed."""
    for word in (torch.complex128, torch.int64):
        if word.itemsize > into.element_size() and _holds(into, word) and _holds(source, word):
            into, source = into.view(word), source.view(word)
            break
    into.copy_(source)


def _holds(tensor: Tensor, word: torch.dtype) -> bool:
    """Whether a tensor can be seen as one of words."""
    ratio = word.itemsize // tensor.element_size()
    extents = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and tensor.data_ptr() % word.itemsize == 0 and not any(x % ratio for x in extents)


def heads_dim(field: Tensor) -> int:
    """The dimension of the heads: an lse `[t, b, h]` has none after them."""
    return 2 if field.ndim == 3 else field.ndim - 2


def head_slice(num_heads: int, part: Heads) -> slice:
    """The heads of one of `part.parts` equal parts; where parts outnumber heads, neighbours share one.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_heads % part.parts == 0:
        size = num_heads // part.parts
        return slice(part.part * size, (part.part + 1) * size)
    if part.parts % num_heads == 0:
        head = part.part * num_heads // part.parts
        return slice(head, head + 1)
    raise ValueError(
        f"{num_heads} heads in {part.parts} parts: expected a divisor or a multiple of {num_heads}. "
        "Change the number of ranks that share the heads."
    )


def packed_parts(post: Post, kind: Kind, wanted: Sequence[Heads], fields: Sequence[Field]) -> dict[Heads, Fields]:
    """Parts of the heads as they are sent, each contiguous, in the post's rooms where it has any.

    Args:
        wanted: parts of the same number of parts.
    """
    parts = wanted[0].parts
    found: dict[Heads, list[Tensor]] = {heads: [] for heads in wanted}
    for i, field in enumerate(fields):
        num_heads = field.like.shape[heads_dim(field.like)]
        for run in _runs(sorted(heads.part for heads in wanted)):
            names = [("home", kind, Heads(part, parts), i) for part in run]
            shape = _part_shape(field.like, head_slice(num_heads, wanted[0]))
            if num_heads % parts == 0 and post.joined(names):
                room = post.room(names[0], (len(run), *shape), field.like.dtype)
                together = field.like.new_empty((len(run), *shape)) if room is None else room
                field.write_parts(together, parts, run)
                rooms = list(together)
            else:
                rooms = [_room(post, name, shape, field.like) for name in names]
                for room, part in zip(rooms, run, strict=True):
                    field.write(room, slice(None), head_slice(num_heads, Heads(part, parts)))
            for room, part in zip(rooms, run, strict=True):
                found[Heads(part, parts)].append(room)
    return {heads: tuple(each) for heads, each in found.items()}


def _room(post: Post, name: tuple[object, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    room = post.room(name, shape, like.dtype)
    return like.new_empty(shape) if room is None else room


def _part_shape(like: Tensor, heads: slice) -> tuple[int, ...]:
    dim = heads_dim(like)
    return torch.Size((*like.shape[:dim], heads.stop - heads.start, *like.shape[dim + 1 :]))


def _runs(numbers: Sequence[int]) -> list[range]:
    """Sorted numbers as runs of neighbours."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
