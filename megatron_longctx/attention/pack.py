"""A rank's own tensors, copied to where they are sent from: neighbouring parts of the heads in one go."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels.moves import Pair
from ..schedules import Heads, Kind
from .post import Fields, Post
from .program import Program
from .shapes import Like, Shapes, heads_dim
from .slots import rows


class Field(NamedTuple):
    """A field of a rank's own tensors: `pieces` is the tensor itself, or what lies side by side in its second
    dimension."""

    pieces: tuple[Tensor, ...]

    def write(self, into: Tensor, start: int, stop: int, heads: slice) -> list[Pair]:
        """The copies of some rows and heads."""
        pairs = []
        for j, piece in enumerate(self.pieces):
            source = rows(piece, start, stop).narrow(heads_dim(piece), heads.start, heads.stop - heads.start)
            pairs.append((into if len(self.pieces) == 1 else into.select(1, j), source))
        return pairs

    def write_parts(self, into: Tensor, parts: int, first: int) -> list[Pair]:
        """The copies of neighbours of `parts` equal parts of the heads, from number `first` on: `[number, tokens,
        ...]`."""
        pairs = []
        for j, piece in enumerate(self.pieces):
            dim = heads_dim(piece)
            shape, strides = list(piece.shape), piece.stride()
            shape[dim] //= parts
            step = shape[dim] * strides[dim]
            source = piece.as_strided((into.shape[0], *shape), (step, *strides), piece.storage_offset() + first * step)
            pairs.append((into if len(self.pieces) == 1 else into.select(2, j), source))
        return pairs


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

    def pack(
        self, step: int, own: Callable[[Kind], Sequence[Field]], packed: dict[tuple[Kind, Heads], Fields]
    ) -> list[Pair]:
        """Add to `packed` what a step is the first to send. Returns the copies that bring it there.

        Args:
            own: this rank's own tensors.
            packed: by kind and part of the heads, what has been packed already.
        """
        left = [run for run in self._runs[step] if (run.kind, run.heads[0]) not in packed]
        pairs: list[Pair] = []
        for run in left:
            found = [self._copy(run, *pair, pairs) for pair in zip(run.fields, own(run.kind), strict=True)]
            for heads, fields in zip(run.heads, zip(*found, strict=True), strict=True):
                packed[run.kind, heads] = fields
        return pairs

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

    def _copy(self, run: _Run, packed: _Packed, field: Field, pairs: list[Pair]) -> Sequence[Tensor]:
        """The parts of one field, each contiguous, in the post's rooms where it has any; adds their copies."""
        names, like, whole = packed
        if run.heads[0].parts == 1:
            sent = self._published[run.kind]
            own = rows(field.pieces[0], sent.start, sent.stop)
            room = self._post.room(names[0], like.shape, like.dtype)
            if room is None and own.is_contiguous():
                return [own]
            found = like.empty() if room is None else room
            pairs.append((found, own))
            return [found]
        if whole is not None:
            room = self._post.room(names[0], whole.shape, whole.dtype)
            together = whole.empty() if room is None else room
            pairs += field.write_parts(together, run.heads[0].parts, run.heads[0].part)
            return together.unbind()
        rooms = [self._post.room(name, like.shape, like.dtype) for name in names]
        parts = [like.empty() if room is None else room for room in rooms]
        for part, heads in zip(parts, run.heads, strict=True):
            pairs += field.write(part, 0, like.shape[0], self._shapes.heads(run.kind, heads))
        return parts
