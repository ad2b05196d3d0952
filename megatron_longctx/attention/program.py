"""One rank's share of a plan, with every block's place in memory decided: computed once, then only followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..schedules import (
    ALL_HEADS,
    RESULTS,
    Attend,
    Block,
    Heads,
    Kind,
    Plan,
    Stay,
    assign,
    backward_plan,
    results_away,
    stays,
)

HOME = -1
"""The slot number of a rank's own tokens."""


class Place(NamedTuple):
    """Rows `start..stop-1` of one kind in a buffer slot, or in the rank's own tensors (`slot=HOME`).

    `heads` are the ones meant, `held` the ones that lie there.
    """

    kind: Kind
    slot: int
    start: int
    stop: int
    heads: Heads = ALL_HEADS
    held: Heads = ALL_HEADS


class Slot(NamedTuple):
    """A buffer for `tokens` rows of one kind, of one of `parts` parts of the heads. kept: not shared between passes,
    since backward needs what lies there."""

    kind: Kind
    tokens: int
    parts: int = 1
    kept: bool = False


class Copy(NamedTuple):
    """Own rows that are attended among those of other ranks, from `source` to `target`."""

    source: Place
    target: Place


class Send(NamedTuple):
    """A message out of `place`, or, where that is None, of the program's outgoing result number `result`."""

    block: Block
    place: Place | None
    peer: int
    result: int = -1


class Receive(NamedTuple):
    """A message into `place`; results are merged into the rank's own rows from `block.start` on once they are in."""

    block: Block
    place: Place
    peer: int


class Away(NamedTuple):
    """A result computed for another rank: part of the program's outgoing result number `result`.

    `complete`: nothing more is to come for that, so that it can be made ready to be sent. `whole`: nor was there
    anything before.
    """

    block: Block
    result: int
    complete: bool
    whole: bool


class Call(NamedTuple):
    """One kernel call; `queries` and `keys` have several places only where they are not side by side in memory.

    keeps_queries, keeps_keys: forward keeps, in this order, (q, out, lse) and (packed keys and values) for backward,
    where they are the kept tensors from number `kept` on; `queries` are then the gradient of out's places, `keys` none.
    """

    attend: Attend
    queries: tuple[Place, ...]
    keys: tuple[Place, ...]
    away: tuple[Away, ...]  # what it computes for other ranks, in the order of `results_away`
    keeps_queries: bool = False
    keeps_keys: bool = False
    kept: int = 0

    @property
    def num_kept(self) -> int:
        """Tensors that it keeps."""
        return 3 * self.keeps_queries + self.keeps_keys


class ProgramStep(NamedTuple):
    """What one rank does in one step. The messages wait for its calls of step `after` (-1: only for the start)."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    after: int
    calls: tuple[Call, ...]
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's whole pass. Programs are told apart by identity.

    tokens: how many every rank has. outgoing: the results it sends, numbered. cached: where its own keys and values are
    a cache, the rows from the first to the last that it sends; None where they are as many as its tokens.
    """

    steps: tuple[ProgramStep, ...]
    slots: tuple[Slot, ...]
    rank: int
    tokens: tuple[int, ...]
    outgoing: tuple[Block, ...] = ()
    cached: range | None = None

    @property
    def num_tokens(self) -> int:
        """This rank's."""
        return self.tokens[self.rank]

    def published(self, kind: Kind) -> range:
        """Those rows of this rank's own tensors of a kind that are put where messages take them from."""
        return range(self.num_tokens) if self.cached is None or kind is not Kind.KV else self.cached

    @cached_property
    def num_kept(self) -> int:
        """Tensors that forward keeps for backward, or that backward takes."""
        return sum(call.num_kept for step in self.steps for call in step.calls)

    @cached_property
    def reads_home(self) -> frozenset[Kind]:
        """Kinds of this rank's own tensors that are read: by calls, sent, or copied to lie among others'."""
        places = [send.place for step in self.steps for send in step.sends if send.place is not None]
        places += [place for step in self.steps for call in step.calls for place in (*call.queries, *call.keys)]
        places += [copy.source for step in self.steps for copy in step.copies]
        return frozenset(place.kind for place in places if place.slot == HOME)

    @cached_property
    def first_sends(self) -> tuple[tuple[tuple[Kind, Heads], ...], ...]:
        """By step, of which of this rank's own tensors it is the first to send which part of the heads."""
        seen: set[tuple[Kind, Heads]] = set()
        found = []
        for step in self.steps:
            own = {(place.kind, place.heads) for _, place, _, _ in step.sends if place and place.slot == HOME}
            found.append(tuple(sorted(own - seen)))
            seen |= own
        return tuple(found)

    @cached_property
    def first_parts(self) -> tuple[tuple[tuple[Kind, int, range], ...], ...]:
        """`first_sends` with neighbouring parts of the heads together: (kind, number of parts, which of them)."""
        found = []
        for names in self.first_sends:
            runs: list[tuple[Kind, int, range]] = []
            for kind, (part, parts) in sorted(names, key=lambda name: (name[0], name[1].parts, name[1].part)):
                if runs and runs[-1][:2] == (kind, parts) and runs[-1][2].stop == part:
                    runs[-1] = kind, parts, range(runs[-1][2].start, part + 1)
                else:
                    runs.append((kind, parts, range(part, part + 1)))
            found.append(tuple(runs))
        return tuple(found)

    @cached_property
    def waits_at_once(self) -> tuple[bool, ...]:
        """By step, whether nothing is computed between the start of its messages and the waiting for them, nor after
        what they wait for."""
        return tuple(not step.calls and step.after >= t - 1 for t, step in enumerate(self.steps))

    @cached_property
    def ends_with_results(self) -> bool:
        """Whether the last step brings nothing but results for this rank."""
        last = self.steps[-1].receives if self.steps else ()
        return bool(last) and all(block.kind in RESULTS and block.home == self.rank for block, _, _ in last)

    @cached_property
    def results_last(self) -> tuple[bool, ...]:
        """By step, whether no slot that results came into before it is received into after it."""
        came: set[int] = set()
        coming = [{place.slot for _, place, _ in step.receives} for step in self.steps]
        found = []
        for t, step in enumerate(self.steps):
            found.append(not any(came & later for later in coming[t + 1 :]))
            came |= {place.slot for block, place, _ in step.receives if block.kind in RESULTS}
        return tuple(found)

    @cached_property
    def reads_packed_keys(self) -> bool:
        """Whether calls read this rank's own keys and values as they travel, or all heads of them are sent."""
        read = (place for step in self.steps for call in step.calls for place in call.keys)
        sent = (name for first in self.first_sends for name in first)
        return any(place.kind is Kind.KV and place.slot == HOME for place in read) or (Kind.KV, ALL_HEADS) in sent

    @cached_property
    def slot_names(self) -> tuple[int, ...]:
        """A number for every slot among its kind, the largest first: a shorter sequence fits a longer one's buffers."""
        seen: Counter[tuple[Kind, int]] = Counter()
        names = [0] * len(self.slots)
        for i in sorted(range(len(self.slots)), key=lambda i: -self.slots[i].tokens):
            names[i] = seen[self.slots[i].kind, self.slots[i].parts]
            seen[self.slots[i].kind, self.slots[i].parts] += 1
        return tuple(names)


def programs(plan: Plan, rank: int) -> tuple[Program, Program]:
    """(forward, backward) programs of `rank` for a forward plan, one that keeps what it receives or not."""
    return compile_program(plan, rank), compile_program(backward_plan(plan), rank)


def compile_program(plan: Plan, rank: int) -> Program:
    """Place the blocks of `plan` in as few buffer slots as their stays allow."""
    rank_stays = stays(plan)[rank]
    slot_of, busy_until = assign(rank_stays)
    slots = _slots(rank_stays, slot_of)
    outgoing = _Outgoing(plan, rank)
    steps: list[ProgramStep] = []
    num_kept = 0
    for t, step in enumerate(plan.steps):
        waits_for = -1
        places: dict[Block, Place] = {}
        for index, stay in enumerate(rank_stays):
            if stay.first == t:
                places.update(zip(stay.blocks, _places(stay, slot_of[index]), strict=True))
                waits_for = max(waits_for, busy_until[index])
        copies = _copies(
            [
                Copy(Place(block.kind, HOME, block.start, block.stop, block.heads), place)
                for block, place in places.items()
                if block.home == rank and block.kind not in RESULTS
            ]
        )
        receives = [
            Receive(move.block, places[move.block], move.source) for move in step.moves if move.destination == rank
        ]
        sends = []
        for move in step.moves:
            if move.source == rank:
                if move.block.kind in RESULTS and move.block.origin == rank:
                    number = outgoing.number[move.block, t]
                    waits_for = max(waits_for, outgoing.complete[number][0])
                    sends.append(Send(move.block, None, move.destination, number))
                else:
                    place = _find(move.block, rank, rank_stays, slot_of, t)
                    sends.append(Send(move.block, place, move.destination))
        calls = []
        for i, attend in enumerate(step.attends[rank]):
            found = [_find(block, rank, rank_stays, slot_of, t, True) for block in plan.inputs(attend, rank)]
            call = _call(attend, found, outgoing.away(t, i))
            keeps = plan.keeps_queries(attend, rank), plan.keeps_keys(attend, rank)
            calls.append(call._replace(keeps_queries=keeps[0], keeps_keys=keeps[1], kept=num_kept))
            num_kept += calls[-1].num_kept
        steps.append(ProgramStep(tuple(sends), tuple(receives), waits_for, tuple(calls), copies))
    blocks = tuple(block for block, _ in outgoing.number)
    tokens, cached = tuple(map(plan.layout.num_tokens, range(plan.n))), None
    if plan.num_slots(Kind.KV, rank) != tokens[rank]:
        own = (send.place for step in steps for send in step.sends if send.place and send.place.slot == HOME)
        rows = [(place.start, place.stop) for place in own if place.kind is Kind.KV]
        cached = range(min(rows)[0], max(stop for _, stop in rows)) if rows else range(0)
    return Program(tuple(steps), tuple(slots), rank, tokens, blocks, cached)


class _Outgoing:
    """Which message takes along which of the results that a rank computes for others."""

    def __init__(self, plan: Plan, rank: int) -> None:
        sent = [
            (move.block, t)
            for t, step in enumerate(plan.steps)
            for move in step.moves
            if move.source == rank and move.block.kind in RESULTS and move.block.origin == rank
        ]
        self.number = {key: i for i, key in enumerate(sent)}
        self.blocks = [block for block, _ in sent]
        self.complete: dict[int, tuple[int, int, int]] = {}  # (step, call, place in the call) of the last part
        self.parts: dict[int, list[Block]] = {}
        self._taken: dict[tuple[int, int], list[tuple[Block, int]]] = {}
        by_home: dict[tuple[Kind, int], list[tuple[Block, int]]] = {}
        for block, t in sent:
            by_home.setdefault((block.kind, block.home), []).append((block, t))
        for t, step in enumerate(plan.steps):
            for i, attend in enumerate(step.attends[rank]):
                parts = self._taken[t, i] = []
                for j, part in enumerate(results_away(attend, rank, plan.backward)):
                    candidates = by_home.get((part.kind, part.home), ())
                    key = next((b, u) for b, u in candidates if u > t and b.contains(part))
                    parts.append((part, self.number[key]))
                    self.complete[self.number[key]] = (t, i, j)
                    self.parts.setdefault(self.number[key], []).append(part)

    def away(self, t: int, i: int) -> tuple[Away, ...]:
        """The results of call i of step t."""
        return tuple(
            Away(
                block,
                number,
                self.complete[number] == (t, i, j),
                self.parts[number] == [self.blocks[number]] == [block],
            )
            for j, (block, number) in enumerate(self._taken[t, i])
        )


def _slots(rank_stays: list[Stay], slot_of: list[int]) -> list[Slot]:
    """Every slot, as large as the largest of its stays."""
    slots: dict[int, Slot] = {}
    for stay, number in zip(rank_stays, slot_of, strict=True):
        tokens = max(stay.tokens, slots[number].tokens if number in slots else 0)
        slots[number] = Slot(stay.kind, tokens, stay.heads.parts, stay.kept)
    return [slots[number] for number in range(len(slots))]


def _places(stay: Stay, slot: int) -> Iterator[Place]:
    """Where the blocks of `stay` lie, side by side."""
    start = 0
    for block in stay.blocks:
        yield Place(stay.kind, slot, start, start + block.tokens, block.heads, block.heads)
        start += block.tokens


def _find(block: Block, rank: int, rank_stays: list[Stay], slot_of: list[int], t: int, copied: bool = False) -> Place:
    """Where `rank` holds an input block in step `t`; `copied`: its own among others', where they are copied there."""
    home = Place(block.kind, HOME, block.start, block.stop, block.heads)
    if block.home == rank and not copied:
        return home
    for stay, slot in zip(rank_stays, slot_of, strict=True):
        if stay.first < t <= stay.last:
            start = 0
            for held in stay.blocks:
                if held.contains(block):
                    start += block.start - held.start
                    return Place(block.kind, slot, start, start + block.tokens, block.heads, held.heads)
                start += held.tokens
    if block.home == rank:
        return home
    raise AssertionError(f"rank {rank} does not hold {block} in step {t}: the plan was not verified")


def _call(attend: Attend, places: list[Place], away: tuple[Away, ...]) -> Call:
    num_queries = len(attend.queries)
    return Call(attend, _joined(places[:num_queries]), _joined(places[num_queries:]), away)


def _joined(places: list[Place]) -> tuple[Place, ...]:
    """Neighbours in memory as one place."""
    joined: list[Place] = []
    for place in places:
        if joined and _follows(joined[-1], place):
            joined[-1] = joined[-1]._replace(stop=place.stop)
        else:
            joined.append(place)
    return tuple(joined)


def _copies(copies: list[Copy]) -> tuple[Copy, ...]:
    """Neighbours at both ends as one copy."""
    joined: list[Copy] = []
    for source, target in copies:
        if joined and _follows(joined[-1].source, source) and _follows(joined[-1].target, target):
            before = joined[-1]
            joined[-1] = Copy(before.source._replace(stop=source.stop), before.target._replace(stop=target.stop))
        else:
            joined.append(Copy(source, target))
    return tuple(joined)


def _follows(place: Place, after: Place) -> bool:
    """Whether `after` lies right behind `place`."""
    return (place.slot, place.stop, *place[4:]) == (after.slot, after.start, *after[4:]) and place.kind is after.kind
