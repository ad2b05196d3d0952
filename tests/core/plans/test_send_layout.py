"""The placement of send batches: valid, and the same as if each were compared with all earlier ones."""

import random
from itertools import combinations

from megatron_longctx.core.plans.send_layout import MessageBatch, place


def place_without_pruning(batches: list[MessageBatch]) -> tuple[list[int], int, dict[int, int]]:
    offsets, placed, awaited = [0] * len(batches), [], {}
    for i in sorted(range(len(batches)), key=lambda i: (batches[i].written, batches[i].step)):
        new, size = batches[i], batches[i].num_bytes
        free = {j for j in placed if batches[j].step + 2 <= new.free_by}
        taken = [(offsets[j], offsets[j] + batches[j].num_bytes) for j in placed if j not in free]
        starts = sorted({0, *(stop for _, stop in taken)})
        offsets[i] = next(at for at in starts if all(at + size <= start or stop <= at for start, stop in taken))
        for j in free:
            if offsets[i] < offsets[j] + batches[j].num_bytes and offsets[j] < offsets[i] + size:
                awaited[batches[j].step] = min(new.free_by, awaited.get(batches[j].step, new.free_by))
        placed.append(i)
    most = max((at + batch.num_bytes for at, batch in zip(offsets, batches, strict=True)), default=0)
    return offsets, most, awaited


def test_placement_is_valid_and_pruning_does_not_change_it() -> None:
    for seed in range(3000):
        draw = random.Random(seed)
        batches = []
        for _ in range(draw.randint(0, 14)):
            step, passed = draw.randint(0, 12), draw.random() < 0.5
            written = step if passed else draw.randint(0, step)
            batches.append(MessageBatch(step, written, draw.randint(1, 4), passed))
        offsets, num_bytes, awaited = place(batches)
        assert (offsets, num_bytes, awaited) == place_without_pruning(batches), batches
        assert num_bytes <= sum(batch.num_bytes for batch in batches)
        spans = [(at, at + batch.num_bytes, batch) for at, batch in zip(offsets, batches, strict=True)]
        for (start, stop, one), (other_start, other_stop, two) in combinations(spans, 2):
            if start < other_stop and other_start < stop:
                first, second = sorted((one, two), key=lambda batch: (batch.written, batch.step))
                # The readers were done two steps before, and their confirmation is awaited in time.
                assert first.step + 2 <= second.free_by
                assert awaited[first.step] <= second.free_by
