"""The cache manager: every token is found where it was stored, pages do not leak, ranks hold even shards."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference.cache_manager import (
    MAX_CONTIGUOUS,
    CacheFull,
    CacheManager,
    Fork,
    ScheduledChunk,
    split_new_tokens,
)
from megatron_longctx.inference.pages import BlockPool
from tests.inference.histories import slots_of


class Memory:
    """The contents of all ranks' slots, written and copied as the engine would do it. Every token is unique."""

    def __init__(self, manager: CacheManager, max_contiguous: int) -> None:
        self.manager, self.max_contiguous = manager, max_contiguous
        self.slots = [[-1] * manager.slots_per_rank for _ in range(manager.n)]
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}  # of the chunks so far
        self.spread: dict[int, int] = {}  # the bound on how uneven the session may be
        self._numbers = itertools.count()

    def add(self, session: int, tokens: list[int], ends: list[int], spread: int) -> None:
        self.tokens[session], self.ends[session], self.spread[session] = tokens, ends, spread

    def pages(self, session: int, rank: int) -> set[int]:
        return {slot // self.manager.page_tokens for slot in slots_of(self.manager, session, rank)}

    def write(self, chunks: tuple[ScheduledChunk, ...]) -> None:
        for chunk in chunks:
            assert chunk.cached == len(self.tokens[chunk.session])
            new = [next(self._numbers) for _ in range(chunk.new)]
            self.tokens[chunk.session] += new
            self.ends[chunk.session].append(chunk.cached + chunk.new)
            for rank in range(self.manager.n):
                slots = list(itertools.chain.from_iterable(chunk.new_slots[rank]))
                indices = itertools.chain.from_iterable(chunk.new_spans[rank])
                for slot, i in zip(slots, indices, strict=True):
                    self.slots[rank][slot] = new[i]
                self._check_sole_holder({slot // self.manager.page_tokens for slot in slots}, chunk.session, rank)

    def fork(self, session: int, tokens: int) -> None:
        fork = self.manager.fork(session, tokens)
        self._copy(fork)
        ends = [end for end in self.ends[session] if end <= tokens]
        spread = self.spread[session]
        if ends[-1] < tokens:
            cut = next(end for end in self.ends[session] if end > tokens) - ends[-1]
            ends.append(tokens)
            spread += self._uneven(cut)
        self.add(fork.session, self.tokens[session][:tokens], ends, spread)

    def remove_last(self, session: int) -> None:
        self._copy(self.manager.truncate(session, len(self.tokens[session]) - 1))
        self.tokens[session].pop()
        size = self.ends[session].pop() - self.ends[session][-1]
        if size > 1:
            self.ends[session].append(len(self.tokens[session]))
            self.spread[session] += self._uneven(size)

    def _uneven(self, tokens: int) -> int:
        """The bound on what cutting a chunk of `tokens` tokens adds to the unevenness."""
        spans = self.manager.n * (1 if tokens <= self.max_contiguous * self.manager.n else 2)
        return -(-tokens // spans)

    def _copy(self, fork: Fork) -> None:
        for rank, (source, target) in enumerate(fork.copies):
            assert len(source) == len(target) < self.manager.page_tokens
            for old, new in zip(source, target, strict=True):
                self.slots[rank][new] = self.slots[rank][old]
            self._check_sole_holder({slot // self.manager.page_tokens for slot in target}, fork.session, rank)

    def _check_sole_holder(self, pages: set[int], session: int, rank: int) -> None:
        for other in self.manager.sessions:
            assert other == session or not pages & self.pages(other, rank), "written while another session reads it"

    def forget(self, session: int) -> None:
        for of_session in (self.tokens, self.ends, self.spread):
            del of_session[session]

    def check(self) -> None:
        manager = self.manager
        assert set(manager.sessions) == set(self.tokens)
        for session, tokens in self.tokens.items():
            seen = []
            for rank, shard in enumerate(manager.shards(session)):
                positions = list(itertools.chain.from_iterable(shard.positions))
                assert positions == sorted(positions)
                stored = [self.slots[rank][slot] for slot in slots_of(manager, session, rank)]
                assert stored == [tokens[p] for p in positions]
                assert len(self.pages(session, rank)) == len(shard.pages)
                seen += positions
            assert sorted(seen) == list(range(len(tokens))) and manager.length(session) == len(tokens)
            sizes = [shard.tokens for shard in manager.shards(session)]
            assert max(sizes) - min(sizes) <= min(self.spread[session], len(tokens))
        for rank in range(manager.n):
            held = set().union(*(self.pages(session, rank) for session in self.tokens))
            assert manager.held_pages(self.tokens, rank) == len(held)
            assert manager.free_pages(rank) == manager.pages_per_rank - len(held), "pages have leaked"


def test_few_tokens_are_contiguous_and_more_are_even_work() -> None:
    assert split_new_tokens(2, 8, max_contiguous=4).spans == ((range(4),), (range(4, 8),))
    assert split_new_tokens(2, 9, max_contiguous=4).spans == ((range(2), range(6, 9)), (range(2, 4), range(4, 6)))
    for n, new in ((1, 5), (4, 66), (4, 2048), (4, 2049), (3, 100_000)):
        layout = split_new_tokens(n, new)
        sizes = [layout.num_tokens(rank) for rank in range(n)]
        assert max(sizes) - min(sizes) <= 2
        assert layout.name == ("contiguous" if new <= MAX_CONTIGUOUS * n else "zigzag")


OPERATIONS = ("open", "append", "append", "decode", "decode", "fork", "fork", "undo", "truncate", "evict", "close")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from((0, 4, MAX_CONTIGUOUS)),
)
def test_random_operations_neither_leak_nor_corrupt(n: int, page: int, pages: int, seed: int, contiguous: int) -> None:
    source = random.Random(seed)
    manager = CacheManager(n, pages, page, contiguous)
    memory = Memory(manager, contiguous)

    def state() -> object:
        return [manager.free_pages(r) for r in range(n)], {s: manager.length(s) for s in memory.tokens}

    for step in range(120):
        sessions = list(memory.tokens)
        operation = source.choice(OPERATIONS)
        before = state()
        if operation == "open" or not sessions:
            memory.add(manager.open(), [], [0], 2)
            continue
        chosen = source.choice(sessions)
        try:
            if operation == "fork":
                memory.fork(chosen, source.randint(0, manager.length(chosen)))
            elif operation == "truncate" and manager.length(chosen):
                memory.remove_last(chosen)
            elif operation in ("append", "decode", "undo"):
                some = source.sample(sessions, source.randint(1, len(sessions)))
                counts = {s: 1 if operation == "decode" else source.randint(1, 3 * page * n) for s in some}
                most = {s: manager.max_pages(s, count) for s, count in counts.items()}
                chunks = manager.append(counts)
                assert all(len(shard.pages) <= most[s] for s in some for shard in manager.shards(s))
                if operation == "undo":
                    manager.undo(chunks)
                    assert before == state()
                else:
                    memory.write(chunks)
        except CacheFull:
            assert before == state()
        if operation == "evict":
            manager.evict(chosen)
            memory.add(chosen, [], [0], 2)
        elif operation == "close":
            manager.close(chosen)
            memory.forget(chosen)
        if step % 5 == 0:
            memory.check()
    memory.check()
    for session in list(memory.tokens):
        manager.close(session)
    assert manager.used_pages() == 0


def test_a_fork_continues_where_its_source_would() -> None:
    """The same history leads to the same places, whatever the session's number."""
    manager = CacheManager(3, 200, 4)
    first = manager.open()
    manager.append({first: 24})
    manager.open()
    fork = manager.fork(first, 24).session
    for count in (1, 5, 7, 1):
        one, other = manager.append({first: count, fork: count})
        assert one.new_spans == other.new_spans and one.cached_positions == other.cached_positions


def test_decoded_tokens_go_round_robin_from_the_sessions_number_on() -> None:
    manager = CacheManager(4, 8, 16)
    for session in range(3):
        assert manager.open() == session
        for t in range(9):
            (chunk,) = manager.append({session: 1})
            (rank,) = (r for r in range(4) if chunk.num_new(r))
            assert rank == (session + t) % 4


def test_one_token_prompts_do_not_pile_up_on_one_rank() -> None:
    manager = CacheManager(3, 100, 4)
    session = manager.open()
    for _ in range(100):
        manager.append({session: 1})
        manager.append({session: 2})
    assert [shard.tokens for shard in manager.shards(session)] == [100, 100, 100]


def test_positions_of_a_long_decode_stay_few_ranges() -> None:
    manager = CacheManager(4, 100, 16)
    session = manager.open()
    for _ in range(400):
        manager.append({session: 1})
    assert manager.shards(session)[2].positions == [range(2, 400, 4)]


def test_a_session_alone_grows_in_one_run_of_slots() -> None:
    manager = CacheManager(2, 50, 4)
    session = manager.open()
    for count in (7, 1, 1, 30, 2):
        manager.append({session: count})
    assert all(len(shard.slots(0, shard.tokens)) == 1 for shard in manager.shards(session))


def test_pages_come_from_the_smallest_run_that_holds_them() -> None:
    pool = BlockPool(12)
    pool.allocate(12, -1)
    pool.release([0, 1, 2, 3, 6, 7, 10])
    assert pool.allocate(2, -1) == [6, 7]
    assert pool.allocate(5, -1) == [0, 1, 2, 3, 10]
    assert pool.num_free == 0


def test_a_page_is_free_again_when_nobody_holds_it() -> None:
    pool = BlockPool(3)
    pool.allocate(2, -1)
    pool.share([0])
    pool.release([0, 1])
    assert pool.num_free == 2 and pool.allocate(2, -1) == [1, 2], "the first is still held"
    pool.release([1, 2])
    pool.release([0])
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([0])


def test_errors_name_what_was_expected() -> None:
    manager = CacheManager(2, 3, 4)
    session = manager.open()
    with pytest.raises(CacheFull, match=r"need 4 pages of 4 tokens on rank 0: expected at most the 3 of 3"):
        manager.append({session: 26})
    with pytest.raises(ValueError, match="new tokens=0: expected 1 or more"):
        manager.append({session: 0})
    manager.close(session)
    for use in (manager.length, manager.close, manager.evict, lambda s: manager.append({s: 1})):
        with pytest.raises(ValueError, match=r"session=0: expected an open session"):
            use(session)
    with pytest.raises(ValueError, match="page_tokens=0"):
        CacheManager(2, 3, 0)
