"""The cache manager: every token is found where it was stored, pages do not leak, ranks hold even shards."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference.batch import MAX_CONTIGUOUS, ScheduledChunk, split_pages
from megatron_longctx.inference.cache_manager import CacheFull, CacheManager
from megatron_longctx.inference.pages import PagePool
from megatron_longctx.inference.window_pages import Windows
from tests.inference.histories import slots_of


class Memory:
    """The contents of all ranks' slots, written as the engine would do it. Every token is unique."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.slots = [[[-1] * g.num_pages * manager.page_tokens for _ in range(manager.n)] for g in manager.groups]
        self.tokens: dict[int, list[int]] = {}
        self.spread: dict[int, int] = {}  # the bound on how uneven the session may be
        self._numbers = itertools.count()

    def pages(self, session: int, rank: int) -> set[int]:
        return {slot // self.manager.page_tokens for slot in slots_of(self.manager, session, rank)}

    def open(self, text: list[int]) -> int:
        session = self.manager.open(text)
        self.tokens[session] = text[: self.manager.length(session)]
        self._spread_now(session)
        return session

    def write(self, chunks: tuple[ScheduledChunk, ...]) -> None:
        for chunk in chunks:
            assert chunk.cached == len(self.tokens[chunk.session])
            new = [next(self._numbers) for _ in range(chunk.new)]
            self.tokens[chunk.session] += new
            for rank, (of_group, its) in itertools.product(range(self.manager.n), self._groups(chunk)):
                slots = list(itertools.chain.from_iterable(its.new_slots[rank]))
                indices = itertools.chain.from_iterable(its.new_spans[rank])
                for slot, i in zip(slots, indices, strict=True):
                    of_group[rank][slot] = new[i]
                if its is chunk:
                    self._check_sole_holder({slot // self.manager.page_tokens for slot in slots}, chunk.session, rank)
                self._check_cached(of_group[rank], its, rank)
            self.manager.name_pages(chunk.session, self.tokens[chunk.session])

    def _groups(self, chunk: ScheduledChunk) -> list[tuple[list[list[int]], ScheduledChunk]]:
        chunks = [chunk, *([] if chunk.windowed is None else [chunk.windowed])]
        return list(zip(self.slots, chunks, strict=True))

    def _check_cached(self, slots: list[int], chunk: ScheduledChunk, rank: int) -> None:
        """Cached slots have the tokens of their positions, and none is missing that the new tokens see."""
        tokens, positions = self.tokens[chunk.session], [*itertools.chain.from_iterable(chunk.cached_positions[rank])]
        stored = [slots[slot] for slot in itertools.chain.from_iterable(chunk.cached_slots[rank])]
        assert stored == [tokens[position] for position in positions]
        if self.manager.windows is not None:
            seen = max(0, chunk.cached - self.manager.windows.tokens)
            own = set(itertools.chain.from_iterable(self.manager.shards(chunk.session)[rank].positions))
            assert {position for position in own if seen <= position < chunk.cached} <= set(positions)

    def truncate(self, session: int, source: random.Random) -> None:
        """Cut at a multiple of the page, or inside of a last page that is not complete."""
        length, page = len(self.tokens[session]), self.manager.page_tokens
        tokens = source.choice(
            (source.randint(0, length) // page * page, source.randint(length // page * page, length))
        )
        self.manager.truncate(session, tokens)
        kept = self.manager.length(session)
        assert kept == tokens or (kept < tokens and self.manager.windows is not None)
        del self.tokens[session][kept:]
        self._spread_now(session)

    def _spread_now(self, session: int) -> None:
        counts = [len(shard.pages) for shard in self.manager.shards(session)]
        self.spread[session] = max(1, max(counts) - min(counts))

    def _check_sole_holder(self, pages: set[int], session: int, rank: int) -> None:
        for other in self.manager.sessions:
            assert other == session or not pages & self.pages(other, rank), "written while another session reads it"

    def check(self) -> None:
        manager = self.manager
        assert set(manager.sessions) == set(self.tokens)
        for session, tokens in self.tokens.items():
            seen = []
            for rank, shard in enumerate(manager.shards(session)):
                positions = list(itertools.chain.from_iterable(shard.positions))
                assert positions == sorted(positions)
                stored = [self.slots[0][rank][slot] for slot in slots_of(manager, session, rank)]
                assert stored == [tokens[p] for p in positions]
                assert len(self.pages(session, rank)) == len(shard.pages)
                seen += positions
            assert sorted(seen) == list(range(len(tokens))) and manager.length(session) == len(tokens)
            counts = [len(shard.pages) for shard in manager.shards(session)]
            assert max(counts) - min(counts) <= self.spread[session] and sum(counts) == -(
                -len(tokens) // manager.page_tokens
            )
        for rank in range(manager.n):
            held = set().union(*(self.pages(session, rank) for session in self.tokens))
            assert manager.held_pages(self.tokens, rank) == len(held)
            assert manager.groups[0].pools[rank].available == manager.pages_per_rank - len(held), "pages have leaked"
            windowed = set().union(*(manager._held(session).groups[-1][rank].pages for session in self.tokens))
            assert manager.groups[-1].pools[rank].available == manager.groups[-1].num_pages - len(windowed)


def test_few_pages_are_contiguous_and_more_are_even_work() -> None:
    assert split_pages(2, 8, few=True) == ((range(4),), (range(4, 8),))
    assert split_pages(2, 9, few=False) == ((range(3), range(7, 9)), (range(3, 5), range(5, 7)))
    for n, new in ((1, 5), (4, 1), (4, 66), (4, 2048), (4, 2049), (3, 100_000)):
        for few in (True, False):
            sizes = [sum(map(len, spans)) for spans in split_pages(n, new, few)]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == new
    manager = CacheManager(2, 100, 4, max_contiguous=8)
    chunks = [manager.append({manager.open(): new})[0] for new in (16, 17)]
    assert [len(chunk.new_spans[0]) for chunk in chunks] == [1, 2]


OPERATIONS = ("open", "undo", "truncate", "fork", *2 * ("append", "decode", "find", "close"))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from((0, 4, MAX_CONTIGUOUS)),
    st.sampled_from((None, 1, 3, 12)),
)
def test_random_operations_neither_leak_nor_corrupt(
    n: int, page: int, pages: int, seed: int, contiguous: int, window: int | None
) -> None:
    source = random.Random(seed)
    windows = None if window is None else Windows(window, source.randint(1, pages), 1)
    manager = CacheManager(n, pages, page, contiguous, windows=windows)
    memory = Memory(manager)
    texts: list[list[int]] = [[]]  # also of closed sessions, whose pages may still be there

    def state() -> object:
        return [manager.groups[0].pools[r].available for r in range(n)], {s: manager.length(s) for s in memory.tokens}

    for step in range(80):
        sessions = list(memory.tokens)
        operation = source.choice(OPERATIONS)
        before = state()
        if operation == "open" or not sessions:
            memory.open([])
            continue
        chosen = source.choice(sessions)
        try:
            if operation == "find":
                text = source.choice(texts)
                memory.open([*text[: source.randint(0, len(text))], -1])
            elif operation == "fork":
                fork = manager.fork(chosen, source.randint(0, len(memory.tokens[chosen])))
                memory.tokens[fork] = memory.tokens[chosen][: manager.length(fork)]
                memory._spread_now(fork)
            elif operation == "truncate":
                memory.truncate(chosen, source)
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
                    texts += [list(memory.tokens[s]) for s in some]
        except CacheFull:
            assert before == state()
        if operation == "close":
            manager.close(chosen)
            del memory.tokens[chosen]
        if step % 5 == 0:
            memory.check()
    memory.check()
    for session in list(memory.tokens):
        manager.close(session)
    assert manager.used_pages() == 0
    manager.drop_cached()
    assert not manager._index and all(not group.used + group.cached for group in manager.groups)
    assert windows or manager.append({manager.open(): n * pages * page}), "every page is free again"


def placed(manager: CacheManager, text: list[int], *chunks: int) -> int:
    """A session with the first tokens of a text, computed in some chunks after what the cache has."""
    session = manager.open(text[: sum(chunks)])
    for end in itertools.accumulate(chunks):
        if end > manager.length(session):
            manager.append({session: end - manager.length(session)})
            manager.name_pages(session, text)
    return session


TEXT = list(range(100, 300))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_prefix_is_found_where_it_was_computed(n: int) -> None:
    """In whatever chunks, by closed and open sessions, as long as tokens and salt are the same."""
    manager = CacheManager(n, 100, 4)
    first = placed(manager, TEXT, 5, 30, 1, 1, 40)
    pages = manager._held(first).pages
    other = placed(manager, [*TEXT[:50], 7, 7, 7, 7], 54)
    assert manager._held(other).pages[:12] == pages[:12] and manager._held(other).pages[12] != pages[12]
    manager.close(first)
    again = manager.open(TEXT)
    assert manager._held(again).pages == pages[:19] and manager.length(again) == 76
    assert manager.length(manager.open(TEXT, salt=1)) == 0
    assert manager.length(manager.open(TEXT[1:])) == 0
    assert manager.length(manager.open(TEXT, multiple=10)) == 60


def test_the_least_recently_used_pages_make_room_from_their_end() -> None:
    manager = CacheManager(2, 10, 4)

    def length(text: list[int]) -> int:
        session = manager.open(text)
        tokens = manager.length(session)
        manager.close(session)
        return tokens

    old, new = TEXT[:32], TEXT[100:132]
    manager.close(placed(manager, old, 32))
    manager.close(placed(manager, new, 32))
    assert manager.groups[0].cached == 16 and manager.used_pages() == 0 and length(old) == 32  # it is the newest now
    held = manager.open()
    manager.append({held: 32})  # 4 of the pages that are left are free
    assert (length(new), length(old)) == (8, 32) and manager.used_pages() == 8
    manager.append({held: 40})
    assert length(new) == 0 and length(old) == 4
    with pytest.raises(CacheFull, match="expected at most the 1 of 10"):
        manager.append({held: 12})


def test_pages_that_are_written_again_are_not_found() -> None:
    manager = CacheManager(1, 10, 4)
    session = placed(manager, TEXT, 12)
    manager.truncate(session, 10)
    assert manager.length(manager.open(TEXT)) == 8
    manager.forget(session)
    assert manager.length(manager.open(TEXT)) == 0


def test_a_found_prefix_continues_as_the_session_that_computed_it() -> None:
    """The same history leads to the same places, whatever the session's number, if the manager is repeatable."""
    manager = CacheManager(3, 200, 4, repeatable=True)
    first = placed(manager, TEXT, 24)
    manager.open()
    other = manager.open(TEXT[:24])
    for count in (1, 5, 7, 1, 30):
        one, two = manager.append({first: count, other: count})
        assert one.new_spans == two.new_spans and one.cached_positions == two.cached_positions


def test_sessions_with_a_common_prefix_go_on_on_different_ranks() -> None:
    manager = CacheManager(2, 20, 4)
    placed(manager, TEXT, 16)
    sessions = [manager.open(TEXT[:16]) for _ in range(8)]
    manager.append(dict.fromkeys(sessions, 1))
    assert [manager.held_pages(sessions, rank) for rank in range(2)] == [2 + 4, 2 + 4]


def test_decoded_pages_go_round_robin_from_the_sessions_number_on() -> None:
    manager = CacheManager(4, 8, 2)
    for session in range(3):
        assert manager.open() == session
        for t in range(18):
            (chunk,) = manager.append({session: 1})
            (rank,) = (r for r in range(4) if chunk.num_new(r))
            assert rank == (session + t // 2) % 4


def test_a_session_alone_grows_in_one_run_of_slots() -> None:
    manager = CacheManager(2, 50, 4)
    session = manager.open()
    for count in (7, 1, 1, 30, 2):
        manager.append({session: count})
    assert all(len(shard.slots) == 1 for shard in manager.shards(session))


def test_pages_come_from_the_smallest_run_that_holds_them() -> None:
    pool = PagePool(12, {})
    pool.allocate(12, -1)
    pool.release([0, 1, 2, 3, 6, 7, 10])
    assert pool.allocate(2, -1) == [6, 7]
    assert pool.allocate(5, -1) == [0, 1, 2, 3, 10]
    assert pool.available == 0


def test_a_page_is_free_again_when_nobody_holds_it() -> None:
    pool = PagePool(3, {})
    pool.allocate(2, -1)
    pool.hold([0])
    pool.release([0, 1])
    assert pool.available == 2 and pool.allocate(2, -1) == [1, 2], "the first is still held"
    pool.release([1, 2])
    pool.release([0])
    assert pool.available == 3
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([0])


def test_errors_name_what_was_expected() -> None:
    manager = CacheManager(2, 3, 4)
    session = manager.open()
    with pytest.raises(CacheFull, match=r"need 4 pages of 4 tokens on rank \d: expected at most the 3 of 3"):
        manager.append({session: 26})
    with pytest.raises(ValueError, match="new tokens=0: expected 1 or more"):
        manager.append({session: 0})
    manager.close(session)
    for use in (manager.length, manager.close, lambda s: manager.append({s: 1})):
        with pytest.raises(ValueError, match=r"session=0: expected an open session"):
            use(session)
    with pytest.raises(ValueError, match="page_tokens=0"):
        CacheManager(2, 3, 0)
