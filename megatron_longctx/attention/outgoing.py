"""What a pass computes for other ranks, from the kernel to the message that takes it along.

A result in one part goes there in one copy together with its neighbours, or is sent from where the kernel has put it.
Results in several parts are brought together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.moves import Mover, Pair
from ..schedules import Block, Kind
from .accumulate import MergedOutput, Sum
from .post import Fields, Post
from .program import Away
from .shapes import Like, Shapes
from .slots import rows


class Part(NamedTuple):
    """Rows `start..stop-1` of what a call has computed: all or part of a result for another rank."""

    start: int
    stop: int
    away: Away


class _Run(NamedTuple):
    """Rows `start..stop-1` of what a call has computed: whole results that lie side by side there, and may where they
    are sent from. likes: all of them, by field."""

    start: int
    stop: int
    parts: tuple[Part, ...]
    likes: tuple[Like, ...]


class Routes:
    """Which results of a call go together; worked out once for all passes of a kind."""

    def __init__(self, outgoing: Sequence[Block], shapes: Shapes, post: Post) -> None:
        self._outgoing, self._shapes, self._post = outgoing, shapes, post
        self._runs: dict[tuple[int, ...], list[_Run]] = {}

    def likes(self, result: int) -> tuple[Like, ...]:
        """The fields of a result."""
        block = self._outgoing[result]
        return self._shapes.rows(block.kind, block.tokens, block.heads.parts)

    def rooms(self, result: int, likes: Sequence[Like]) -> Fields | None:
        """Where a result, and those that follow it, have to lie to be sent; None for anywhere."""
        rooms = [self._post.room(("result", result, i), like.shape, like.dtype) for i, like in enumerate(likes)]
        found = [room for room in rooms if room is not None]
        return tuple(found) or None

    def runs(self, parts: Sequence[Part]) -> list[_Run]:
        """Whole results of one call, in the order of its rows."""
        key = tuple(part.away.result for part in parts)
        if key not in self._runs:
            joined: list[list[Part]] = []
            for part in parts:
                if joined and self._follows(joined[-1][-1], part):
                    joined[-1].append(part)
                else:
                    joined.append([part])
            self._runs[key] = [self._run(run) for run in joined]
        return self._runs[key]

    def _follows(self, before: Part, part: Part) -> bool:
        names = (
            [("result", each.away.result, i) for each in (before, part)]
            for i in range(len(self.likes(part.away.result)))
        )
        return before.stop == part.start and all(map(self._post.joined, names))

    def _run(self, parts: Sequence[Part]) -> _Run:
        start, stop = parts[0].start, parts[-1].stop
        likes = self.likes(parts[0].away.result)
        return _Run(
            start, stop, tuple(parts), tuple(like._replace(shape=(stop - start, *like.shape[1:])) for like in likes)
        )


class Outgoing:
    """The results of one pass of a program, numbered as it does in `outgoing`. Fields of a call: (out, lse), (dq) or
    (dk, dv)."""

    def __init__(self, outgoing: Sequence[Block], routes: Routes, mover: Mover) -> None:
        self._outgoing, self._routes, self._mover = outgoing, routes, mover
        self._gathered: dict[int, MergedOutput | tuple[Sum, ...]] = {}
        self._ready: dict[int, Fields] = {}

    def take(self, result: int) -> Fields:
        """The fields of a complete result as they travel."""
        return self._ready.pop(result)

    def add(self, parts: Sequence[Part], fields: Fields) -> None:
        """Keep parts of what a call has computed. What is complete is made ready to be sent here, before the mark that
        its message awaits."""
        whole = [part for part in parts if part.away.whole]
        if whole:
            self._send(self._routes.runs(whole), fields)
        for start, stop, away in parts if len(whole) < len(parts) else ():
            if not away.whole:
                self._gather(away, tuple(rows(field, start, stop) for field in fields))
                if away.complete:
                    self._close(away.result)

    def _send(self, runs: Sequence[_Run], fields: Fields) -> None:
        """Make results ready that this call alone has computed."""
        pair = runs[0].parts[0].away.block.kind is Kind.DKV
        loose: list[_Run] = []
        pairs: list[Pair] = []
        for run in runs:
            rooms = self._routes.rooms(run.parts[0].away.result, run.likes)
            if rooms is None:
                loose.append(run)
                continue
            found = tuple(rows(field, run.start, run.stop) for field in fields)
            pairs += zip(rooms[0].unbind(1) if pair else rooms, found, strict=True)
            self._cut(run, rooms, run.start)
        self._mover.move(("send", runs[0].parts[0].away.result), pairs)
        if loose:  # may be sent from anywhere
            start, stop = loose[0].start, loose[-1].stop
            found = tuple(rows(field, start, stop) for field in fields)
            packed = (torch.stack(found, dim=1),) if pair else found
            packed = tuple(_sendable(field, like) for field, like in zip(packed, loose[0].likes, strict=True))
            for run in loose:
                self._cut(run, packed, start)

    def _cut(self, run: _Run, packed: Fields, first: int) -> None:
        for start, stop, away in run.parts:
            self._ready[away.result] = tuple(rows(field, start - first, stop - first) for field in packed)

    def _gather(self, away: Away, fields: Fields) -> None:
        whole = self._outgoing[away.result]
        found = self._gathered.get(away.result)
        if found is None:
            like = self._routes.likes(away.result)[0]
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

    def _close(self, result: int) -> None:
        likes = self._routes.likes(result)
        into = self._routes.rooms(result, likes) or tuple(like.empty() for like in likes)
        found = self._gathered.pop(result)
        if isinstance(found, MergedOutput):
            found.finish((into[0], into[1]))
        elif len(found) == 1:
            found[0].finish(into[0])
        else:
            for total, field in zip(found, into[0].unbind(1), strict=True):
                total.finish(field)
        self._ready[result] = into


def _sendable(tensor: Tensor, like: Like) -> Tensor:
    """The tensor itself where it can be sent as it lies."""
    if tensor.dtype != like.dtype:
        tensor = tensor.to(like.dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
