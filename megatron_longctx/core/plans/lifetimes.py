"""How long a rank's memory is in use, from its recorded operations, and what its messages therefore wait for."""

from __future__ import annotations

from collections.abc import Sequence

from .recording import Memory, Op, Place, Rows, Send, Slot, Wait, rows_read, rows_written


def assign_slots(
    ops: Sequence[Op],
    arriving: Sequence[Sequence[Memory]],
    sent: Sequence[Sequence[Memory]],
    passed: Sequence[Sequence[Rows]],
) -> tuple[dict[int, int], tuple[Slot, ...]]:
    """Give held memory slots, as its `number`. They are used again after the last operation on what they hold.

    Return for each step that sends the operation behind which its messages start (-1: the beginning), and the slots.

    arriving, sent, passed: indexed by step, the memory that its messages fill and that they are sent from, and the rows
        that they pass on.
    """
    first: dict[Memory, int] = {}
    last: dict[Memory, int] = {}
    written: dict[Memory, int] = {}  # the last operation that writes it
    filled: dict[Memory, int] = {}  # the step whose messages fill it
    after: dict[int, int] = {}
    for i, op in enumerate(ops):
        touched = [rows.memory for rows in (*rows_read(op), *rows_written(op))]
        if isinstance(op, Send | Wait):
            moved = [rows.memory for rows in passed[op.step]]
            touched += [*arriving[op.step], *moved]
            if isinstance(op, Send):
                filled |= dict.fromkeys(arriving[op.step], op.step)
                after[op.step] = max((written.get(memory, -1) for memory in (*sent[op.step], *moved)), default=-1)
        written |= dict.fromkeys((rows.memory for rows in rows_written(op)), i)
        for memory in touched:
            first.setdefault(memory, i)
            last[memory] = i
    slots: list[Slot] = []
    busy: list[int] = []  # until which operation each is in use
    for memory, start in first.items():
        if memory.place is not Place.HELD or memory.number < 0:
            continue
        kind = memory.kind, memory.heads.parts
        free = [(until, i) for i, until in enumerate(busy) if until < start and slots[i][:2] == kind]
        if not free:
            free = [(-1, len(slots))]
            slots.append(Slot(*kind, 0))
            busy.append(-1)
        until, number = min(free)  # free for longest, to wait the least
        memory.number, busy[number] = number, last[memory]
        slots[number] = Slot(*kind, max(slots[number].tokens, memory.tokens))
        if memory in filled:
            after[filled[memory]] = max(after[filled[memory]], until)
    return after, tuple(slots)
