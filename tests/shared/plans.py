"""Plans written by hand, in which queries and partial results travel as in no mode, and edits of plans."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron_longctx.core.layout import contiguous
from megatron_longctx.core.plans import Attend, Block, Kind, Move, Plan, Slice, Step
from megatron_longctx.core.plans.mask import causal, full
from megatron_longctx.core.plans.slices import FAR


def with_moves(plan: Plan, t: int, edit: Callable[[list[Move]], Iterable[Move]]) -> Plan:
    """Return the plan with the moves of step `t` edited."""
    steps = list(plan.steps)
    steps[t] = steps[t]._replace(moves=tuple(edit(list(steps[t].moves))))
    return replace(plan, steps=tuple(steps))


def with_calls(plan: Plan, t: int, rank: int, *calls: Attend) -> Plan:
    """Return the plan with other calls of a rank in step `t`."""
    steps = list(plan.steps)
    steps[t] = steps[t]._replace(attends=tuple(calls if r == rank else a for r, a in enumerate(steps[t].attends)))
    return replace(plan, steps=tuple(steps))


def kv(home: int, start: int, stop: int) -> Block:
    return Block(Kind.KV, home, start, stop)


def queries(home: int, start: int, stop: int) -> Block:
    return Block(Kind.Q, home, start, stop)


def out(home: int, start: int, stop: int, by: int) -> Block:
    return Block(Kind.OUT, home, start, stop, by)


def attend(queries: tuple[Block, ...], keys: tuple[Block, ...], is_causal: bool) -> Attend:
    """Return the call of these queries on these keys: full, or causal with the last query aligned to the last key."""
    sizes = sum(block.tokens for block in queries), sum(block.tokens for block in keys)
    whole = Slice(0, sizes[0], 0, sizes[1], -FAR, sizes[1] - sizes[0] if is_causal else FAR).tight()
    assert whole is not None
    return Attend(queries, keys, (whole,))


def helper_plan(n: int, length: int) -> Plan:
    """Return the causal plan of 2 or 3 ranks in which rank 0 computes with the last rank's queries.

    With 3 ranks it is the balanced schedule of DistFlashAttention; with 2, rank 0 takes the second half of the
    queries. Every rank must hold at least two tokens.

    Raises:
        ValueError: another number of ranks, or too few tokens.
    """
    layout = contiguous(n, length)
    sizes = [layout.num_tokens(rank) for rank in range(n)]
    if n not in (2, 3) or min(sizes) < 2:
        raise ValueError(f"n={n}, length={length}: expected 2 or 3 ranks with at least 2 tokens each.")
    last, size = n - 1, sizes[n - 1]
    helped = size // 2 if n == 2 else 0
    whole = [kv(rank, 0, sizes[rank]) for rank in range(n)]
    own = tuple((attend((queries(r, 0, sizes[r]),), (whole[r],), True),) for r in range(n))
    fetched = tuple(Move(whole[r - 1], r - 1, r) for r in range(1, n))
    help_away = (attend((queries(last, helped, size),), (whole[0],), False),)
    stop = {1: helped} if n == 2 else {1: sizes[1], 2: size}
    at_home = tuple((attend((queries(r, 0, stop[r]),), (whole[r - 1],), False),) for r in range(1, n))
    steps = (
        Step((*fetched, Move(queries(last, helped, size), last, 0)), own),
        Step((), (help_away, *at_home)),
        Step((Move(out(last, helped, size, 0), 0, last),), ((),) * n),
    )
    return Plan("helper", causal(layout.length), layout, layout, steps)


def tangled_plan(length: int) -> Plan:
    """Return a causal plan for 3 ranks that is legal and awkward.

    Rank 1 splits its queries and the keys of rank 0 unevenly, so that in backward several results of the same name and
    of different sizes travel one after the other. It helps rank 2 over keys in two places (a buffer and its own). The
    result of this help travels by way of rank 0, which holds it for a while.

    Raises:
        ValueError: ranks with fewer than 4 tokens, or with different numbers of them.
    """
    layout = contiguous(3, length)
    c = length // 3
    if length % 3 or c < 4:
        raise ValueError(f"length={length}: expected a multiple of 3, 12 or more.")
    cut = c - 1
    whole = [kv(rank, 0, c) for rank in range(3)]
    own = tuple((attend((queries(r, 0, c),), (whole[r],), True),) for r in range(3))
    crossed = tuple(
        attend((queries(1, *rows),), (kv(0, *columns),), False)
        for rows, columns in (((0, 2), (0, cut)), ((0, 2), (cut, c)), ((2, c), (0, cut)), ((2, c), (cut, c)))
    )
    helped = attend((queries(2, 0, cut),), (whole[0], whole[1]), False)
    rest = attend((queries(2, cut, c),), (whole[0], whole[1]), False)
    result = out(2, 0, cut, 1)
    idle: tuple[tuple[Attend, ...], ...] = ((), (), ())
    steps = (
        Step((Move(whole[0], 0, 1), Move(whole[0], 0, 2), Move(whole[1], 1, 2), Move(queries(2, 0, cut), 2, 1)), own),
        Step((), ((), (*crossed, helped), (rest,))),
        Step((Move(result, 1, 0),), idle),
        Step((), idle),
        Step((Move(result, 0, 2),), idle),
    )
    return Plan("tangled", causal(layout.length), layout, layout, steps)


def one_sided_plan(length: int) -> Plan:
    """Return a full plan of 2 ranks in which rank 0 sends in step 1 and receives nothing, and step 2 computes nothing
    but exchanges results.

    Raises:
        ValueError: ranks with fewer than 2 tokens, or with different numbers of them.
    """
    layout = contiguous(2, length)
    c = length // 2
    if length % 2 or c < 2:
        raise ValueError(f"length={length}: expected a multiple of 2, 4 or more.")
    left, right = kv(0, 0, c - 1), kv(0, c - 1, c)
    q = [queries(rank, 0, c) for rank in range(2)]
    steps = (
        Step((Move(q[0], 0, 1), Move(q[1], 1, 0)), ((), ())),
        Step(
            (Move(right, 0, 1),),
            (
                (attend((q[0],), (kv(0, 0, c),), False), attend((q[1],), (left,), False)),
                (attend((q[1],), (kv(1, 0, c),), False), attend((q[0],), (kv(1, 0, c),), False)),
            ),
        ),
        Step((Move(out(0, 0, c, 1), 1, 0), Move(out(1, 0, c, 0), 0, 1)), ((), ())),
        Step((), ((), (attend((q[1],), (right,), False),))),
    )
    return Plan("one-sided", full(layout.length), layout, layout, steps)
