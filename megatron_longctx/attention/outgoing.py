"""What a pass computes for other ranks, from the kernel to the message that takes it along.

A result in one part goes there in one copy together with its neighbours, or is sent from where the kernel has put it.
Results in several parts are brought together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules import Kind
from .accumulate import MergedOutput, Sum
from .pack import copy
from .post import Fields, Post
from .program import Away, Program
from .shapes import Like, Shapes
from .slots import rows


class Part(NamedTuple):
    """Rows `start..stop-1` of what a call has computed: all or part of a result for another rank."""

    start: int
    stop: int
    away: Away


class Outgoing:
    """The results of one pass of a program. Fields of a call: (out, lse), (dq) or (dk, dv)."""

    def __init__(self, program: Program, shapes: Shapes) -> None:
        self._program, self._shapes = program, shapes
        self._gathered: dict[int, MergedOutput | tuple[Sum, ...]] = {}
        self._ready: dict[int, Fields] = {}

    def take(self, result: int) -> Fields:
        """The fields of a complete result as they travel."""
        return self._ready.pop(result)

    def add(self, parts: Sequence[Part], fields: Fields, post: Post) -> None:
        """Keep parts of what a call has computed. What is complete is made ready to be sent here, before the mark that
        its message awaits."""
        whole = [part for part in parts if part.away.whole]
        if whole:
            self._send(whole, fields, post)
        for start, stop, away in parts:
            if not away.whole:
                self._gather(away, tuple(rows(field, start, stop) for field in fields))
                if away.complete:
                    self._close(away.result, post)

    def _send(self, parts: Sequence[Part], fields: Fields, post: Post) -> None:
        """Make results ready that this call alone has computed."""
        kind = parts[0].away.block.kind
        likes = self._likes(parts[0].away.result)
        loose: list[Part] = []
        for run in _runs(parts, len(likes), post):
            first, last = run[0], run[-1]
            number = first.away.result
            tokens = last.stop - first.start
            rooms = _rooms(post, number, [like._replace(shape=(tokens, *like.shape[1:])) for like in likes])
            if rooms is None:
                loose += run
                continue
            _write(rooms, kind, tuple(rows(field, first.start, last.stop) for field in fields))
            self._cut(run, rooms, first.start)
        if loose:  # may be sent from anywhere
            first, last = loose[0], loose[-1]
            found = tuple(rows(field, first.start, last.stop) for field in fields)
            packed = (torch.stack(found, dim=1),) if kind is Kind.DKV else found
            self._cut(loose, tuple(_sendable(x, like) for x, like in zip(packed, likes, strict=True)), first.start)

    def _cut(self, parts: Sequence[Part], packed: Fields, first: int) -> None:
        for start, stop, away in parts:
            self._ready[away.result] = tuple(rows(field, start - first, stop - first) for field in packed)

    def _gather(self, away: Away, fields: Fields) -> None:
        whole = self._program.outgoing[away.result]
        found = self._gathered.get(away.result)
        if found is None:
            like = self._likes(away.result)[0]
            if whole.kind is Kind.OUT:
                found = MergedOutput(like)
            elif whole.kind is Kind.DQ:
                found = (Sum(like),)
            else:
                one = like._replace(shape=(like.shape[0], *like.shape[2:]))  # of keys and values one
                found = Sum(one), Sum(one)
            self._gathered[away.result] = found
        start = away.block.start - whole.start
        if isinstance(found, MergedOutput):
            out, lse = fields
            found.add(start, out, lse)
            return
        for total, field in zip(found, fields, strict=True):
            total.add(start, field)

    def _close(self, result: int, post: Post) -> None:
        likes = self._likes(result)
        into = _rooms(post, result, likes) or tuple(like.empty() for like in likes)
        found = self._gathered.pop(result)
        if isinstance(found, MergedOutput):
            found.finish((into[0], into[1]))
        elif len(found) == 1:
            found[0].finish(into[0])
        else:
            for total, field in zip(found, into[0].unbind(1), strict=True):
                total.finish(field)
        self._ready[result] = into

    def _likes(self, result: int) -> tuple[Like, ...]:
        block = self._program.outgoing[result]
        return self._shapes.rows(block.kind, block.tokens, block.heads.parts)


def _runs(parts: Sequence[Part], num_fields: int, post: Post) -> list[list[Part]]:
    """Parts in runs that lie side by side where they come from and may where they go."""
    runs: list[list[Part]] = []
    for part in parts:
        before = runs[-1][-1] if runs else None
        if (
            before is not None
            and before.stop == part.start
            and all(
                post.joined([("result", before.away.result, i), ("result", part.away.result, i)])
                for i in range(num_fields)
            )
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _rooms(post: Post, result: int, likes: Sequence[Like]) -> Fields | None:
    """Where a result, and those that follow it, have to lie to be sent; None for anywhere."""
    rooms = [post.room(("result", result, i), like.shape, like.dtype) for i, like in enumerate(likes)]
    found = [room for room in rooms if room is not None]
    return tuple(found) or None


def _sendable(tensor: Tensor, like: Like) -> Tensor:
    """The tensor itself where it can be sent as it lies."""
    if tensor.dtype != like.dtype:
        tensor = tensor.to(like.dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _write(rooms: Fields, kind: Kind, fields: Fields) -> None:
    if kind is Kind.DKV:
        torch.stack(fields, dim=1, out=rooms[0])
        return
    for room, field in zip(rooms, fields, strict=True):
        copy(room, field)
