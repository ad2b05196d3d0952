"""When blocks leave a rank's buffers: after their last use, found without looking at all of a batch's blocks."""

from __future__ import annotations

import pytest

from megatron_longctx.inference.plan import MODES, build
from megatron_longctx.schedules import RESULTS, Block, Plan, PlanOptions, backward_plan, build_plan
from megatron_longctx.schedules.residency import stays
from tests.inference.histories import batch_with_past, random_family


def last_use(plan: Plan, rank: int, block: Block, arrived: int) -> int:
    """By the definition: the last step in which the rank attends a piece of it or sends one on."""
    used = [
        t
        for t, step in enumerate(plan.steps)
        for piece in (
            *(piece for attend in step.attends[rank] for piece in plan.inputs(attend, rank)),
            *(move.block for move in step.moves if move.source == rank),
        )
        if block.contains(piece)
    ]
    return max(used, default=arrived + (block.kind in RESULTS))


def check(plan: Plan) -> int:
    found = stays(plan)
    for rank, of_rank in enumerate(found):
        for stay in of_rank:
            received = [block for block in stay.blocks if block.home != rank or block.kind in RESULTS]
            assert stay.last == max(last_use(plan, rank, block, stay.first) for block in received)
    return sum(map(len, found))


def test_blocks_stay_until_their_last_use() -> None:
    assert sum(check(build(mode, random_family(seed))) for mode in MODES for seed in range(12)) > 100
    for schedule, n, head_chunks in (("zigzag", 4, 1), ("ulysses", 2, 2), ("usp", 4, 1)):
        plan = build_plan(schedule, n, 37, True, PlanOptions(head_chunks=head_chunks))
        assert check(plan) and check(backward_plan(plan))


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_many_sequences_are_planned_in_linear_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode is chosen by plans of all, for every batch."""
    contains, compared = Block.contains, []
    monkeypatch.setattr(Block, "contains", lambda block, other: bool(compared.append(1)) or contains(block, other))

    def comparisons(sequences: int) -> int:
        plan = build(mode, batch_with_past(4, [(64,)] * sequences, [7] * sequences, page=4, pages=1000))
        compared.clear()
        stays(plan)
        return len(compared)

    assert 0 < comparisons(40) <= 4.5 * comparisons(10)
