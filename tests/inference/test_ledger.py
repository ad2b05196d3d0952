"""The cache's books: every token findable where it was put, pages neither leaked nor shared, ranks even."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference.ledger import CacheFull, CacheLedger, PagePool, Turn, slots_of


class Memory:
    """What the slots of all ranks hold, written as the engine would write it."""

    def __init__(self, ledger: CacheLedger) -> None:
        self.ledger = ledger
        self.slots = [[None] * ledger.slots_per_rank for _ in range(ledger.n)]
        self.lengths: dict[int, int] = {}

    def write(self, turns: tuple[Turn, ...]) -> None:
        for turn in turns:
            assert turn.cached == self.lengths[turn.session]
            for rank in range(self.ledger.n):
                slots = slots_of(turn.new_runs[rank])
                positions = [p + turn.cached for span in turn.new_spans(rank) for p in span]
                assert len(slots) == len(positions)
                for slot, position in zip(slots, positions, strict=True):
                    self.slots[rank][slot] = (turn.session, position)
            self.lengths[turn.session] += turn.new

    def check(self) -> None:
        ledger, owners = self.ledger, [set() for _ in range(self.ledger.n)]
        assert set(ledger.sessions) == set(self.lengths)
        for session, length in self.lengths.items():
            seen = []
            for rank in range(ledger.n):
                slots = slots_of(ledger.slots(session, rank))
                positions = [p for span in ledger.positions(session, rank) for p in span]
                assert positions == sorted(positions)
                assert [self.slots[rank][slot] for slot in slots] == [(session, p) for p in positions]
                pages = {slot // ledger.page_tokens for slot in slots}
                assert not pages & owners[rank], "two sessions share a page"
                owners[rank] |= pages
                seen += positions
            assert sorted(seen) == list(range(length)) and ledger.length(session) == length
            sizes = [ledger.num_tokens(session, rank) for rank in range(ledger.n)]
            assert max(sizes) - min(sizes) <= min(2, length)
        for rank in range(ledger.n):
            assert ledger.free_pages(rank) == ledger.pages_per_rank - len(owners[rank]), "pages have leaked"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 40), st.integers(0, 2**32))
def test_thousands_of_random_operations_neither_leak_nor_corrupt(n: int, page: int, pages: int, seed: int) -> None:
    source = random.Random(seed)
    ledger = CacheLedger(n, pages, page)
    memory = Memory(ledger)
    for step in range(120):
        sessions = list(memory.lengths)
        operation = source.choice(("open", "append", "append", "decode", "decode", "undo", "evict", "close"))
        if operation == "open" or not sessions:
            memory.lengths[ledger.open()] = 0
        elif operation in ("append", "decode", "undo"):
            chosen = source.sample(sessions, source.randint(1, len(sessions)))
            counts = {s: 1 if operation == "decode" else source.randint(1, 3 * page * n) for s in chosen}
            before = [(ledger.free_pages(r)) for r in range(n)], {s: ledger.length(s) for s in sessions}
            try:
                turns = ledger.append(counts)
            except CacheFull:
                assert before == ([(ledger.free_pages(r)) for r in range(n)], {s: ledger.length(s) for s in sessions})
                continue
            if operation == "undo":
                ledger.undo(turns)
                assert before == ([(ledger.free_pages(r)) for r in range(n)], {s: ledger.length(s) for s in sessions})
            else:
                memory.write(turns)
        elif operation == "evict":
            chosen = source.choice(sessions)
            ledger.evict(chosen)
            memory.lengths[chosen] = 0
        else:
            chosen = source.choice(sessions)
            ledger.close(chosen)
            del memory.lengths[chosen]
        if step % 5 == 0:
            memory.check()
    memory.check()
    for session in list(memory.lengths):
        ledger.close(session)
    assert ledger.used_pages() == 0


def test_decoded_tokens_go_round_robin_from_the_sessions_number_on() -> None:
    ledger = CacheLedger(4, 8, 16)
    for session in range(3):
        assert ledger.open() == session
        for t in range(9):
            (turn,) = ledger.append({session: 1})
            (rank,) = (r for r in range(4) if turn.num_new(r))
            assert rank == (session + t) % 4


def test_one_token_prompts_do_not_pile_up_on_one_rank() -> None:
    ledger = CacheLedger(3, 100, 4)
    session = ledger.open()
    for _ in range(100):
        ledger.append({session: 1})
        ledger.append({session: 2})
    assert [ledger.num_tokens(session, rank) for rank in range(3)] == [100, 100, 100]


def test_positions_of_a_long_decode_stay_few_ranges() -> None:
    ledger = CacheLedger(4, 100, 16)
    session = ledger.open()
    for _ in range(400):
        ledger.append({session: 1})
    assert ledger.positions(session, 2) == (range(2, 400, 4),)


def test_a_session_alone_grows_in_one_run_of_slots() -> None:
    ledger = CacheLedger(2, 50, 4)
    session = ledger.open()
    for count in (7, 1, 1, 30, 2):
        ledger.append({session: count})
    assert all(len(ledger.slots(session, rank)) == 1 for rank in range(2))


def test_pages_come_from_the_smallest_run_that_holds_them() -> None:
    pool = PagePool(12)
    pool.take(12, -1)
    pool.give_back([0, 1, 2, 3, 6, 7, 10])
    assert pool.take(2, -1) == [6, 7]
    assert pool.take(5, -1) == [0, 1, 2, 3, 10]
    assert pool.num_free == 0


def test_what_is_refused_says_what_was_expected() -> None:
    ledger = CacheLedger(2, 3, 4)
    session = ledger.open()
    with pytest.raises(CacheFull, match=r"need 4 pages of 4 tokens on rank 0: expected at most the 3 of 3"):
        ledger.append({session: 26})
    with pytest.raises(ValueError, match="new tokens=0: expected 1 or more"):
        ledger.append({session: 0})
    ledger.close(session)
    for use in (ledger.length, ledger.close, ledger.evict, lambda s: ledger.append({s: 1})):
        with pytest.raises(ValueError, match=r"session=0: expected an open session"):
            use(session)
    with pytest.raises(ValueError, match="page_tokens=0"):
        CacheLedger(2, 3, 0)


def test_a_batch_that_does_not_fit_as_a_whole_changes_nothing() -> None:
    ledger = CacheLedger(2, 3, 4)
    first, second = ledger.open(), ledger.open()
    with pytest.raises(CacheFull):
        ledger.append({first: 8, second: 20})
    assert ledger.used_pages() == 0 and ledger.length(first) == ledger.length(second) == 0
