"""Caches with a history, for tests of the next batch."""

import random
from collections.abc import Mapping, Sequence
from itertools import chain, count, islice

from megatron_longctx.inference.batch import MAX_CONTIGUOUS, Batch, ScheduledChunk
from megatron_longctx.inference.cache_manager import CacheManager


def slots_of(manager: CacheManager, session: int, rank: int) -> list[int]:
    """The slots of a session's tokens on a rank, in the order of positions."""
    shard = manager.shards(session)[rank]
    return list(chain.from_iterable(shard.slots))


def batch_with_past(
    n: int,
    pasts: Sequence[Sequence[int]],
    new: Sequence[int],
    page: int = 3,
    pages: int = 60,
    max_contiguous: int = MAX_CONTIGUOUS,
) -> Batch:
    """`new[i]` tokens of sequence i, which had earlier chunks of `pasts[i]` tokens, interleaved with the others'."""
    manager = CacheManager(n, pages, page, max_contiguous)
    sessions = [manager.open() for _ in pasts]
    for number in range(max(map(len, pasts), default=0)):
        manager.append({s: past[number] for s, past in zip(sessions, pasts, strict=True) if number < len(past)})
    chunks = manager.append({s: count for s, count in zip(sessions, new, strict=True) if count})
    return Batch(n, manager.slots[0], chunks)


def random_batch(seed: int) -> Batch:
    """Up to 3 sequences with up to 4 earlier chunks each, many of one token, on up to 5 ranks."""
    source = random.Random(seed)

    def tokens() -> int:
        return source.choice((1, 1, 2, 5, source.randint(1, 40)))

    count = source.randint(1, 3)
    pasts = [[tokens() for _ in range(source.randint(0, 4))] for _ in range(count)]
    new, contiguous = [tokens() for _ in range(count)], source.choice((0, 3, MAX_CONTIGUOUS))
    return batch_with_past(source.randint(1, 5), pasts, new, source.randint(1, 5), 400, contiguous)


class Texts:
    """A manager's sessions with unique tokens, which count as computed."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.of: dict[int, list[int]] = {}
        self._numbers = count()

    def open(self) -> int:
        session = self.manager.open()
        self.of[session] = []
        return session

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
        chunks = self.manager.append(counts)
        for session, new in counts.items():
            self.of[session] += islice(self._numbers, new)
            self.manager.name_pages(session, self.of[session])
        return chunks

    def fork(self, session: int, tokens: int) -> int:
        """Open a session with the complete pages of another's first tokens."""
        found = self.manager.fork(session, tokens)
        self.of[found] = self.of[session][: self.manager.length(found)]
        return found


def random_family(seed: int) -> Batch:
    """Up to 4 of up to 5 sequences, each of which shares complete pages of another and has continued since."""
    source = random.Random(seed)
    n = source.randint(1, 5)
    manager = CacheManager(n, 300, source.randint(1, 5), source.choice((0, 3, MAX_CONTIGUOUS)))
    texts = Texts(manager)
    family = [texts.open()]
    texts.append({family[0]: source.randint(1, 60)})
    for _ in range(source.randint(1, 4)):
        parent = source.choice(family)
        family.append(texts.fork(parent, source.randint(0, manager.length(parent))))
        texts.append({session: source.choice((1, 1, 3, 20)) for session in source.sample(family, len(family) // 2)})
    going = source.sample(family, source.randint(2, min(4, len(family))))
    return Batch(n, manager.slots[0], texts.append({s: source.choice((1, 1, 5, 30)) for s in going}))
