"""A rank's own tensors, copied to where they are sent from: neighbouring parts of the heads in one go."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules import Heads, Kind
from .post import Fields, Post
from .program import Program
from .shapes import Like, Shapes, heads_dim
from .slots import rows


class Field(NamedTuple):
    """A field of a rank's own tensors: `pieces` is the tensor itself, or what lies side by side in its second
    dimension."""

    pieces: tuple[Tensor, ...]

    def write(self, into: Tensor, start: int, stop: int, heads: slice) -> None:
        """Copy some rows and heads."""
        for j, piece in enumerate(self.pieces):
            source = rows(piece, start, stop).narrow(heads_dim(piece), heads.start, heads.stop - heads.start)
            copy(into if len(self.pieces) == 1 else into.select(1, j), source)

    def write_parts(self, into: Tensor, parts: int, first: int) -> None:
        """Copy neighbours of `parts` equal parts of the heads, from number `first` on: `[number, tokens, ...]`."""
        for j, piece in enumerate(self.pieces):
            dim = heads_dim(piece)
            shape, strides = list(piece.shape), piece.stride()
            shape[dim] //= parts
            step = shape[dim] * strides[dim]
            source = piece.as_strided((into.shape[0], *shape), (step, *strides), piece.storage_offset() + first * step)
            copy(into if len(self.pieces) == 1 else into.select(2, j), source)


def copy(into: Tensor, source: Tensor) -> None:
    """`into.copy_(source)` of tensors of one shape and dtype, in the widest words that fit both: torch's kernel for
    strided tensors moves an element at a time, and small ones at a third of the memory's speed."""
    if not (into.is_contiguous() and source.is_contiguous()):
        for word in (torch.complex128, torch.int64):
            if word.itemsize > into.element_size() and _holds(into, word) and _holds(source, word):
                into, source = into.view(word), source.view(word)
                break
    into.copy_(source)


def _holds(tensor: Tensor, word: torch.dtype) -> bool:
    """Whether a tensor can be seen as one of words."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % word.itemsize:
        return False
    return math.gcd(tensor.shape[-1], tensor.storage_offset(), *strides) % (word.itemsize // tensor.element_size()) == 0


class _Packed(NamedTuple):
    """Such parts of one field. names: of their rooms. whole: all of them side by side, where they may lie so."""

    names: tuple[Hashable, ...]
    like: Like
    whole: Like | None


class _Run(NamedTuple):
    """Neighbouring parts of the heads of one kind, as they are sent."""

    kind: Kind
    heads: tuple[Heads, ...]
    fields: tuple[_Packed, ...]


class Packer:
    """Copies what one kind of pass sends of a rank's own tensors to where it is sent from.

    Only the rows that `Program.published` names are copied.
    """

    def __init__(self, program: Program, shapes: Shapes, post: Post) -> None:
        self._shapes, self._post = shapes, post
        # Of the program no more: what is worked out for it lives as long as it does.
        self._published = {kind: program.published(kind) for step in program.first_parts for kind, *_ in step}
        self._runs = [[self._run(*each) for each in step] for step in program.first_parts]

    def pack(self, step: int, own: Callable[[Kind], Sequence[Field]], packed: dict[tuple[Kind, Heads], Fields]) -> bool:
        """Add to `packed` what a step is the first to send. Returns whether there was any.

        Args:
            own: this rank's own tensors.
            packed: by kind and part of the heads, what has been packed already.
        """
        left = [run for run in self._runs[step] if (run.kind, run.heads[0]) not in packed]
        for run in left:
            found = [self._copy(run, *pair) for pair in zip(run.fields, own(run.kind), strict=True)]
            for heads, fields in zip(run.heads, zip(*found, strict=True), strict=True):
                packed[run.kind, heads] = fields
        return bool(left)

    def _run(self, kind: Kind, parts: int, run: range) -> _Run:
        heads = tuple(Heads(part, parts) for part in run)
        equal = self._shapes.num_heads(kind) % parts == 0
        tokens = len(self._published[kind])
        fields = []
        for i, like in enumerate(self._shapes.rows(kind, tokens, parts)):
            names = tuple(("home", kind, each, i) for each in heads)
            joined = parts > 1 and equal and self._post.joined(names)
            whole = like._replace(shape=(len(names), *like.shape)) if joined else None
            fields.append(_Packed(names, like, whole))
        return _Run(kind, heads, tuple(fields))

    def _copy(self, run: _Run, packed: _Packed, field: Field) -> Sequence[Tensor]:
        """The parts of one field, each contiguous, in the post's rooms where it has any."""
        names, like, whole = packed
        if run.heads[0].parts == 1:
            sent = self._published[run.kind]
            own = rows(field.pieces[0], sent.start, sent.stop)
            room = self._post.room(names[0], like.shape, like.dtype)
            return [own.contiguous() if room is None else room.copy_(own)]
        if whole is not None:
            room = self._post.room(names[0], whole.shape, whole.dtype)
            together = whole.empty() if room is None else room
            field.write_parts(together, run.heads[0].parts, run.heads[0].part)
            return together.unbind()
        rooms = [self._post.room(name, like.shape, like.dtype) for name in names]
        found = [like.empty() if room is None else room for room in rooms]
        for room, heads in zip(found, run.heads, strict=True):
            field.write(room, 0, like.shape[0], self._shapes.heads(run.kind, heads))
        return found
