"""The cache's books: every token findable where it was put, pages neither leaked nor shared, ranks even."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference.cache_manager import (
    FEW,
    CacheFull,
    CacheManager,
    Fork,
    ScheduledChunk,
    shares_of,
    slots_of,
)
from megatron_longctx.inference.pages import BlockPool


class Memory:
    """What the slots of all ranks hold, written and copied as the engine would do it. Every token is one of a kind."""

    def __init__(self, manager: CacheManager, few: int) -> None:
        self.cache_manager, self.few = manager, few
        self.slots = [[-1] * manager.slots_per_rank for _ in range(manager.n)]
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}  # of the turns so far
        self.spread: dict[int, int] = {}  # the bound on how uneven the session may be
        self._numbers = itertools.count()

    def open(self) -> None:
        self._add(self.cache_manager.open(), [], [0], 2)

    def _add(self, session: int, tokens: list[int], ends: list[int], spread: int) -> None:
        self.tokens[session], self.ends[session], self.spread[session] = tokens, ends, spread

    def pages(self, session: int, rank: int) -> set[int]:
        return {slot // self.cache_manager.page_tokens for slot in slots_of(self.cache_manager.slots(session, rank))}

    def write(self, turns: tuple[ScheduledChunk, ...]) -> None:
        for turn in turns:
            assert turn.cached == len(self.tokens[turn.session])
            new = [next(self._numbers) for _ in range(turn.new)]
            self.tokens[turn.session] += new
            self.ends[turn.session].append(turn.cached + turn.new)
            for rank in range(self.cache_manager.n):
                slots = slots_of(turn.new_runs[rank])
                places = [i for span in turn.new_spans(rank) for i in span]
                for slot, i in zip(slots, places, strict=True):
                    self.slots[rank][slot] = new[i]
                self._nobody_else_has({slot // self.cache_manager.page_tokens for slot in slots}, turn.session, rank)

    def fork(self, session: int, tokens: int) -> None:
        fork = self.cache_manager.fork(session, tokens)
        self._copy(fork)
        ends = [end for end in self.ends[session] if end <= tokens]
        spread = self.spread[session]
        if ends[-1] < tokens:
            cut = next(end for end in self.ends[session] if end > tokens) - ends[-1]
            ends.append(tokens)
            spread += self._uneven(cut)
        self._add(fork.session, self.tokens[session][:tokens], ends, spread)

    def shorten(self, session: int) -> None:
        """By its last token."""
        self._copy(self.cache_manager.shorten(session, len(self.tokens[session]) - 1))
        self.tokens[session].pop()
        size = self.ends[session].pop() - self.ends[session][-1]
        if size > 1:
            self.ends[session].append(len(self.tokens[session]))
            self.spread[session] += self._uneven(size)

    def _uneven(self, tokens: int) -> int:
        """The bound on what cutting a turn of so many tokens adds."""
        stretches = self.cache_manager.n * (1 if tokens <= self.few * self.cache_manager.n else 2)
        return -(-tokens // stretches)

    def _copy(self, fork: Fork) -> None:
        for rank, (source, target) in enumerate(fork.copies):
            assert len(source) == len(target) < self.cache_manager.page_tokens
            for old, new in zip(source, target, strict=True):
                self.slots[rank][new] = self.slots[rank][old]
            self._nobody_else_has({slot // self.cache_manager.page_tokens for slot in target}, fork.session, rank)

    def _nobody_else_has(self, pages: set[int], session: int, rank: int) -> None:
        for other in self.cache_manager.sessions:
            assert other == session or not pages & self.pages(other, rank), "written while another session reads it"

    def forget(self, session: int) -> None:
        for of_session in (self.tokens, self.ends, self.spread):
            del of_session[session]

    def check(self) -> None:
        manager = self.cache_manager
        assert set(manager.sessions) == set(self.tokens)
        for session, tokens in self.tokens.items():
            seen = []
            for rank in range(manager.n):
                positions = [p for span in manager.positions(session, rank) for p in span]
                assert positions == sorted(positions)
                slots = slots_of(manager.slots(session, rank))
                assert [self.slots[rank][slot] for slot in slots] == [tokens[p] for p in positions]
                assert len(self.pages(session, rank)) == manager.num_pages(session, rank)
                seen += positions
            assert sorted(seen) == list(range(len(tokens))) and manager.length(session) == len(tokens)
            sizes = [manager.num_tokens(session, rank) for rank in range(manager.n)]
            assert max(sizes) - min(sizes) <= min(self.spread[session], len(tokens))
        for rank in range(manager.n):
            held = set().union(*(self.pages(session, rank) for session in self.tokens))
            assert manager.held_pages(self.tokens, rank) == len(held)
            assert manager.free_pages(rank) == manager.pages_per_rank - len(held), "pages have leaked"


def test_few_tokens_lie_in_a_row_and_more_are_even_work() -> None:
    assert shares_of(2, 8, few=4).spans == ((range(4),), (range(4, 8),))
    assert shares_of(2, 9, few=4).spans == ((range(2), range(6, 9)), (range(2, 4), range(4, 6)))
    for n, new in ((1, 5), (4, 66), (4, 2048), (4, 2049), (3, 100_000)):
        layout = shares_of(n, new)
        sizes = [layout.num_tokens(rank) for rank in range(n)]
        assert max(sizes) - min(sizes) <= 2 and layout.name == ("contiguous" if new <= FEW * n else "zigzag")


OPERATIONS = ("open", "append", "append", "decode", "decode", "fork", "fork", "undo", "shorten", "evict", "close")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from((0, 4, FEW)))
def test_thousands_of_random_operations_neither_leak_nor_corrupt(
    n: int, page: int, pages: int, seed: int, few: int
) -> None:
    source = random.Random(seed)
    manager = CacheManager(n, pages, page, few)
    memory = Memory(manager, few)
    for step in range(120):
        sessions = list(memory.tokens)
        operation = source.choice(OPERATIONS)
        before = [(manager.free_pages(r)) for r in range(n)], {s: manager.length(s) for s in sessions}
        if operation == "open" or not sessions:
            memory.open()
            continue
        chosen = source.choice(sessions)
        try:
            if operation == "fork":
                memory.fork(chosen, source.randint(0, manager.length(chosen)))
            elif operation == "shorten" and manager.length(chosen):
                memory.shorten(chosen)
            elif operation in ("append", "decode", "undo"):
                some = source.sample(sessions, source.randint(1, len(sessions)))
                counts = {s: 1 if operation == "decode" else source.randint(1, 3 * page * n) for s in some}
                most = {s: manager.most_pages(s, count) for s, count in counts.items()}
                turns = manager.append(counts)
                assert all(manager.num_pages(s, rank) <= most[s] for s in some for rank in range(n))
                if operation == "undo":
                    manager.undo(turns)
                    assert before == (
                        [manager.free_pages(r) for r in range(n)],
                        {s: manager.length(s) for s in sessions},
                    )
                else:
                    memory.write(turns)
        except CacheFull:
            assert before == ([(manager.free_pages(r)) for r in range(n)], {s: manager.length(s) for s in sessions})
        if operation == "evict":
            manager.evict(chosen)
            memory._add(chosen, [], [0], 2)
        elif operation == "close":
            manager.close(chosen)
            memory.forget(chosen)
        if step % 5 == 0:
            memory.check()
    memory.check()
    for session in list(memory.tokens):
        manager.close(session)
    assert manager.used_pages() == 0


def test_a_prefix_is_held_once_until_the_last_holder_closes() -> None:
    manager = CacheManager(2, 50, 4)
    first = manager.open()
    manager.append({first: 83})  # 41 or 42 a rank: 10 full pages and a bit
    forks = [manager.fork(first, 83).session for _ in range(5)]
    assert manager.used_pages() == 2 * (10 + 1 + 5)
    assert manager.held_pages([first, *forks], 0) == 16 and manager.held_pages(forks[:1], 0) == 11
    manager.close(first)
    assert manager.used_pages() == 2 * (10 + 5)
    for fork in forks[1:]:
        manager.evict(fork)
    manager.append({forks[0]: 1})
    assert manager.used_pages() == 2 * 11 and manager.length(forks[0]) == 84
    manager.close(forks[0])
    assert manager.used_pages() == 0


def test_a_fork_goes_on_where_its_source_would() -> None:
    """Whatever its number: the same history has the same places."""
    manager = CacheManager(3, 200, 4)
    first = manager.open()
    manager.append({first: 24})
    manager.open()
    fork = manager.fork(first, 24).session
    for count in (1, 5, 7, 1):
        one, other = manager.append({first: count, fork: count})
        assert one.shares == other.shares and one.positions == other.positions


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = CacheManager(2, 3, 4)
    session = manager.open()
    manager.append({session: 22})
    with pytest.raises(CacheFull, match="a fork needs 1 page on rank 0: expected one that is free, of 3"):
        manager.fork(session, 22)
    with pytest.raises(ValueError, match="tokens of the fork=23: expected at most the 22 that are cached"):
        manager.fork(session, 23)
    assert manager.sessions == (session,) and manager.used_pages() == 6
    fork = manager.fork(session, 0)
    assert manager.length(fork.session) == 0 and manager.used_pages() == 6


def test_decoded_tokens_go_round_robin_from_the_sessions_number_on() -> None:
    manager = CacheManager(4, 8, 16)
    for session in range(3):
        assert manager.open() == session
        for t in range(9):
            (turn,) = manager.append({session: 1})
            (rank,) = (r for r in range(4) if turn.num_new(r))
            assert rank == (session + t) % 4


def test_one_token_prompts_do_not_pile_up_on_one_rank() -> None:
    manager = CacheManager(3, 100, 4)
    session = manager.open()
    for _ in range(100):
        manager.append({session: 1})
        manager.append({session: 2})
    assert [manager.num_tokens(session, rank) for rank in range(3)] == [100, 100, 100]


def test_positions_of_a_long_decode_stay_few_ranges() -> None:
    manager = CacheManager(4, 100, 16)
    session = manager.open()
    for _ in range(400):
        manager.append({session: 1})
    assert manager.positions(session, 2) == (range(2, 400, 4),)


def test_a_session_alone_grows_in_one_run_of_slots() -> None:
    manager = CacheManager(2, 50, 4)
    session = manager.open()
    for count in (7, 1, 1, 30, 2):
        manager.append({session: count})
    assert all(len(manager.slots(session, rank)) == 1 for rank in range(2))


def test_pages_come_from_the_smallest_run_that_holds_them() -> None:
    pool = BlockPool(12)
    pool.take(12, -1)
    pool.give_back([0, 1, 2, 3, 6, 7, 10])
    assert pool.take(2, -1) == [6, 7]
    assert pool.take(5, -1) == [0, 1, 2, 3, 10]
    assert pool.num_free == 0


def test_a_page_is_free_again_when_nobody_holds_it() -> None:
    pool = BlockPool(3)
    pool.take(2, -1)
    pool.share([0])
    pool.give_back([0, 1])
    assert pool.num_free == 2 and pool.take(2, -1) == [1, 2], "the first is still held"
    pool.give_back([1, 2])
    pool.give_back([0])
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back([0])


def test_what_is_refused_says_what_was_expected() -> None:
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


def test_a_batch_that_does_not_fit_as_a_whole_changes_nothing() -> None:
    manager = CacheManager(2, 3, 4)
    first, second = manager.open(), manager.open()
    with pytest.raises(CacheFull):
        manager.append({first: 8, second: 20})
    assert manager.used_pages() == 0 and manager.length(first) == manager.length(second) == 0
