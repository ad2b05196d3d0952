"""Where batches lie that peers read: as placing each beside all before it would have it."""

from __future__ import annotations

import random

from megatron_longctx.schedules.send_layout import Batch, Placement, place


def placed_by_looking_at_all(batches: list[Batch]) -> Placement:
    offsets, placed, awaited = [0] * len(batches), [], {}
    for i in sorted(range(len(batches)), key=lambda i: (batches[i].written, batches[i].step)):
        new, size = batches[i], batches[i].num_bytes
        over = {j for j in placed if batches[j].step + 2 <= new.free_by}
        taken = [(offsets[j], offsets[j] + batches[j].num_bytes) for j in placed if j not in over]
        free = (at for at in sorted({0, *(stop for _, stop in taken)}))
        offsets[i] = next(at for at in free if all(at + size <= start or stop <= at for start, stop in taken))
        for j in over:
            if offsets[i] < offsets[j] + batches[j].num_bytes and offsets[j] < offsets[i] + size:
                awaited[batches[j].step] = min(new.free_by, awaited.get(batches[j].step, new.free_by))
        placed.append(i)
    most = max((at + batch.num_bytes for at, batch in zip(offsets, batches, strict=True)), default=0)
    return Placement(tuple(offsets), most, awaited)


def test_batches_that_are_no_longer_looked_at_would_change_nothing() -> None:
    for seed in range(3000):
        draw = random.Random(seed)
        batches = []
        for _ in range(draw.randint(0, 14)):
            step, passed = draw.randint(0, 12), draw.random() < 0.5
            written = step if passed else draw.randint(0, max(0, step - 1))
            batches.append(Batch(step, written, draw.randint(1, 4), passed))
        assert place(batches) == placed_by_looking_at_all(batches), batches
