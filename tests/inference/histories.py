"""Caches with a past, for tests of what comes next."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import FEW, CacheManager


def batch_with_past(
    n: int, pasts: Sequence[Sequence[int]], new: Sequence[int], page: int = 3, pages: int = 60, few: int = FEW
) -> Batch:
    """Sequence i has had turns of `pasts[i]` tokens, taken by turns with the others; `new[i]` tokens come now."""
    manager = CacheManager(n, pages, page, few)
    sessions = [manager.open() for _ in pasts]
    for turn in range(max(map(len, pasts), default=0)):
        counts = {s: past[turn] for s, past in zip(sessions, pasts, strict=True) if turn < len(past)}
        manager.append(counts)
    turns = manager.append({s: count for s, count in zip(sessions, new, strict=True) if count})
    return Batch(n, manager.slots_per_rank, turns)


def random_batch(seed: int) -> Batch:
    """Up to 3 sequences with up to 4 earlier turns each, many of one token, on up to 5 ranks."""
    source = random.Random(seed)

    def tokens() -> int:
        return source.choice((1, 1, 2, 5, source.randint(1, 40)))

    count = source.randint(1, 3)
    pasts = [[tokens() for _ in range(source.randint(0, 4))] for _ in range(count)]
    new, few = [tokens() for _ in range(count)], source.choice((0, 3, FEW))
    return batch_with_past(source.randint(1, 5), pasts, new, source.randint(1, 5), 400, few)


def random_family(seed: int) -> Batch:
    """Up to 5 sequences, each a fork of another at any place, that have gone on apart; up to 4 go on together now."""
    source = random.Random(seed)
    n = source.randint(1, 5)
    manager = CacheManager(n, 300, source.randint(1, 5), source.choice((0, 3, FEW)))
    family = [manager.open()]
    manager.append({family[0]: source.randint(1, 60)})
    for _ in range(source.randint(1, 4)):
        parent = source.choice(family)
        family.append(manager.fork(parent, source.randint(1, manager.length(parent))).session)
        manager.append({session: source.choice((1, 1, 3, 20)) for session in source.sample(family, len(family) // 2)})
    going = source.sample(family, source.randint(2, min(4, len(family))))
    return Batch(n, manager.slots_per_rank, manager.append({s: source.choice((1, 1, 5, 30)) for s in going}))
