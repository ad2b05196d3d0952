"""The protocol of peer memory without a GPU.

Ranks issue passes to simulated streams, whose operations run in any order that a device may choose. No pass may hang,
every message must have the sender's content, and no rank may read a message before it arrives or after it is
overwritten. Ranks may run out of memory anywhere in a pass.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm import PeerTransport, p2p, peer
from megatron_longctx.core.plans import (
    RESULTS,
    Block,
    Heads,
    KernelSupport,
    ModeOptions,
    Plan,
    Recorder,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.core.plans.plan import NUM_FIELDS
from megatron_longctx.core.plans.recording import (
    Acquire,
    Copy,
    Memory,
    Place,
    Recording,
    Release,
    Rows,
    Send,
    Wait,
    rows_read,
    rows_written,
)
from tests.core.attention.streams import Bytes, Far, Flags, Stream, on, run_all
from tests.shared.plans import one_sided_plan, tangled_plan

WORK = Workload(num_heads=60, num_kv_heads=60, head_dim=2, element_bytes=2)  # 60 has all parts as divisors
TAKES = KernelSupport(packed=True, rectangles=True, windows=True)


@functools.lru_cache(maxsize=2**18)
def row(kind: str, home: int, slot: int, origin: int, heads: Heads, of: tuple[int, int, int]) -> bytes:
    """Return the bytes of a block's row. of: field, number of the pass, bytes."""
    return zlib.crc32(repr((str(kind), home, slot, origin, heads, of)).encode()).to_bytes(4) * (of[2] // 4)


def content(block: Block, number: int) -> list[list[bytes]]:
    """Return the rows of each field of a block in pass `number`."""
    kind, home, start, stop, origin, heads = block
    sizes = enumerate(WORK.field_bytes(kind, heads))
    return [
        [row(kind, home, slot, origin, heads, (i, number, size)) for slot in range(start, stop)] for i, size in sizes
    ]


def sizes(block: Block) -> list[int]:
    return [size * block.tokens for size in WORK.field_bytes(block.kind, block.heads)]


class Pass:
    """A pass that sends messages as the executor does, and whose kernels and merges only check their inputs.

    Attributes:
        held: the content of held rows once all issued operations have run, keyed by kept memory or slot and by row;
            None for a message in flight.
        or_nan: whether others run out of memory in this pass, and send NaN.
    """

    def __init__(self, rank: Rank, recording: Recording, channel: Any, number: int, or_nan: bool) -> None:
        self.or_nan, self.recording, self.rank, self.channel, self.number = or_nan, recording, rank, channel, number
        self.acquired: tuple[int, list[Any]] = -1, []
        self.kept_bytes: dict[Memory, list[Any]] = {}
        self.held: dict[tuple[Memory | int, int, int], bytes | None] = {}
        self.away = {region: block for (block, _), region in recording.sends.results.items()}
        self.offsets, end = [], 0
        for kind, parts, tokens in recording.slots:
            self.offsets.append([])
            for size in WORK.field_bytes(kind, Heads(0, parts)):
                self.offsets[-1].append(end)
                end += size * tokens
        assert end <= len(rank.held)

    def run(self, last: int | None = None) -> None:
        """Issue the operations; with `last`, run out of memory after operation `last`, -1 for before the first."""
        now, marks, exchange = self.recording, dict[int, Any](), None
        self.channel.begin()
        for i, op in enumerate((None, *now.ops), -1):
            if last is not None and i > last:
                break
            if isinstance(op, Send):
                self.arrive(op.step, False)
                passed = [x for rows in now.passed[op.step] if self.expected(rows) for x in self.fields(rows)]
                after = (marks[now.after[op.step]],)
                exchange = self.channel.start(op.step, passed, self.targets(op.step), after)
                if not self.rank.overlap:
                    self.channel.wait(exchange)
                    exchange = None
            elif isinstance(op, Wait):
                if exchange is not None:
                    self.channel.wait(exchange)
                self.arrive(op.step, True)
            elif isinstance(op, Acquire):
                self.acquired = op.step, self.channel.acquire(op.step, self.targets(op.step))
                self.rank.acquired += 1
            elif isinstance(op, Release):
                self.channel.release(op.step)
            elif op is not None:
                for rows in rows_read(op):
                    self.read(rows)
                for into, source in op.pairs if isinstance(op, Copy) else [(rows, None) for rows in rows_written(op)]:
                    self.write(into, source)
            if i in now.after.values():
                marks[i] = Bytes.here.record_event()
        if last is not None:
            self.rank.transport.abort(torch.OutOfMemoryError("no memory\nleft"), self.channel, sizes)

    def targets(self, step: int) -> list[Any]:
        return [
            x
            for each in self.recording.receives[step]
            for x in ([None] * NUM_FIELDS[each.block.kind] if each.into is None else self.fields(each.into))
        ]

    def fields(self, rows: Rows) -> list[Any]:
        memory = rows.memory
        if memory.place is Place.PEER:
            step, found = self.acquired
            first = sum(NUM_FIELDS[each.block.kind] for each in self.recording.receives[step][: memory.number])
            return found[first : first + NUM_FIELDS[rows.kind]]
        if memory.place is Place.SENT:
            spans = self.recording.sends.regions[memory.number].spans(rows.start, rows.tokens)
            return [self.channel.memory()[at : at + size] for at, size in spans]
        assert rows.heads == memory.heads
        sizes = WORK.field_bytes(rows.kind, memory.heads)
        if memory.is_kept and memory not in self.kept_bytes:
            self.kept_bytes[memory] = [memoryview(bytearray(memory.tokens * size)) for size in sizes]
        whole = self.kept_bytes.get(memory) or [self.rank.held[at:] for at in self.offsets[memory.number]]
        return [Bytes(x[rows.start * n : rows.stop * n]) for x, n in zip(whole, sizes, strict=True)]

    def expected(self, rows: Rows) -> list[list[bytes]]:
        """Return the content of rows once all issued operations have run."""
        if rows.memory.place is Place.OWN:
            return content(Block(rows.kind, self.rank.number, rows.start, rows.stop, -1, rows.heads), self.number)
        if rows.memory.place is Place.PEER:
            return content(self.recording.receives[self.acquired[0]][rows.memory.number].block, self.number)
        found = [[self.held[key] for key in keys] for keys in self.keys(rows)]
        assert None not in found[0], f"{rows} are read while a message to them is in flight"
        return found  # type: ignore[return-value]

    def keys(self, rows: Rows) -> list[list[tuple[Memory | int, int, int]]]:
        memory = rows.memory if rows.memory.is_kept else rows.memory.number
        return [[(memory, i, row) for row in range(rows.start, rows.stop)] for i in range(NUM_FIELDS[rows.kind])]

    def arrive(self, step: int, there: bool) -> None:
        for block, _, into, _ in self.recording.receives[step]:
            if into is not None:
                what: Any = content(block, self.number) if there else [[None] * block.tokens] * NUM_FIELDS[block.kind]
                self.hold(into, what)
                self.read(into) if there else None

    def hold(self, rows: Rows, what: Sequence[Sequence[bytes]]) -> None:
        for keys, values in zip(self.keys(rows), what, strict=True):
            self.held.update(zip(keys, values, strict=True))

    def read(self, rows: Rows) -> None:
        if rows.memory.place in (Place.HELD, Place.PEER):
            for field, values in zip(self.fields(rows), self.expected(rows), strict=True):
                field.check(b"".join(values), f"rank {self.rank.number}, pass {self.number}: {rows}", self.or_nan)

    def write(self, into: Rows, source: Rows | None) -> None:
        if into.memory.place is Place.HELD:
            assert source is not None
            what = self.expected(source)
            self.hold(into, what)
            for i, field in enumerate(self.fields(into)):
                if source.memory.place is Place.OWN:
                    field.write(b"".join(what[i]))
                else:
                    field.copy_(self.fields(source)[i])
        elif into.memory.place is Place.SENT:
            if into.kind in RESULTS:
                whole = self.away[into.memory.number]
                block = whole._replace(start=whole.start + into.start, stop=whole.start + into.stop)
            else:
                assert source is not None
                block = Block(source.kind, self.rank.number, source.start, source.stop, -1, into.heads)
            for field, values in zip(self.fields(into), content(block, self.number), strict=True):
                field.write(b"".join(values))


class Device:
    """The memory of all ranks, which all allocate the same sizes at the same time.

    one_queue: whether a rank's streams share a hardware queue; not with NCCL.
    """

    def __init__(self, plan: Plan, over_peers: bool, draw: random.Random, one_queue: bool) -> None:
        self.draw, self.n, self.reports = draw, plan.n, set[str]()
        self.taken: list[tuple[int, int]] = []
        self.memories: list[list[list[memoryview]]] = []
        self.ranks: list[Rank] = []
        for number in range(plan.n):
            queue: Any = deque() if one_queue else None
            self.ranks.append(Rank(self, number, over_peers, [Stream(queue) for _ in range(4)]))

    def take(self, generation: int, capacity: int, steps: int) -> None:
        """Allocate peer memory collectively, after all devices have finished."""
        if generation == len(self.taken):
            self.finish()
            Flags.state.clear()
            self.taken.append((capacity, steps))
            self.memories.append([[memoryview(bytearray(capacity)) for _ in range(2)] for _ in range(self.n)])
        assert self.taken[generation] == (capacity, steps), "ranks allocate different memory, or at different times"

    def set(self, key: str, _: str) -> None:
        """Set a key, as the ranks' store does."""
        self.reports.add(key)

    def wait(self, keys: Sequence[str], _: Any) -> None:
        if not self.reports.issuperset(keys):
            raise dist.DistStoreError("timeout")

    def finish(self) -> None:
        run_all([stream for rank in self.ranks for stream in rank.streams], self.draw)


class Rank:
    """One rank's streams, transports and held memory."""

    def __init__(self, device: Device, number: int, over_peers: bool, streams: list[Stream]) -> None:
        self.device, self.number, self.streams, self.overlap = device, number, streams, True
        self.caller, self.acquired = streams[0], 0
        self.channels: list[tuple[Recording, Any]] = []
        self.held = memoryview(bytearray(2**20))  # which all passes share
        self.sent = bytearray(2**22)  # for point-to-point messages
        transport = self.peers = PeerTransport.__new__(PeerTransport)
        transport.rank, transport.world = number, device.n
        transport.stream, transport.signals = streams[1:3]  # type: ignore[assignment]
        transport.device, transport.generation = torch.device("cpu"), 0
        transport._parity, transport._unread, transport._growth = 0, [None, None], 1.0
        transport._capacity = transport._steps = 0
        transport._allocate = self.take  # type: ignore[method-assign]
        self.transport: Any = transport if over_peers else Far(number, streams[3])
        self.transport.world, self.transport._number = device.n, 1
        self.transport._group = lambda: SimpleNamespace(get_group_store=lambda: device)

    def take(self, capacity: int, steps: int) -> None:
        transport, ranks = self.peers, range(self.device.n)
        base, memories = 10**9 * transport.generation, self.device.memories
        self.device.take(transport.generation, capacity, steps)
        now = memories[transport.generation]
        transport._flags = SimpleNamespace(buffer_ptrs=[base + 10**6 * (1 + r) for r in ranks])
        transport._memories = [
            SimpleNamespace(get_buffer=lambda rank, *_, parity=parity: Bytes(now[rank][parity])) for parity in range(2)
        ]

    def channel(self, recorder: Recorder) -> tuple[Recording, Any]:
        recording = recorder.record(self.number)
        memory: Any = lambda size: Bytes(memoryview(self.sent)[:size])  # noqa: E731
        return recording, self.transport.channel(recording, recorder.send_bytes(), memory)


MODES: dict[str, Any] = {
    **{name: (name, 6, 75, ModeOptions()) for name in ("zigzag", "tasp", "helper", "ulysses")},
    "usp": ("usp", 6, 75, ModeOptions(inner_size=2)),
    "ring": ("ring", 6, full(72), ModeOptions()),
    "double_ring": ("double_ring", 6, 75, ModeOptions(inner_size=3)),
    "node_gather": ("node_gather", 6, 75, ModeOptions(inner_size=3, rounds=2)),
    "all_gather": ("all_gather", 5, 75, ModeOptions(8)),
    "ulysses, ranks without tokens": ("ulysses", 6, 4, ModeOptions()),
    "usp, ranks without tokens": ("usp", 6, 4, ModeOptions(inner_size=2)),
    "ring, documents": ("ring", 6, documents([30, 4, 1, 24, 13]), ModeOptions()),
    "zigzag, a window": ("zigzag", 6, documents([75], window=(20, None)), ModeOptions()),
    "helper, documents in a window": ("helper", 5, documents([50, 25], window=(30, None)), ModeOptions()),
    "all_gather, a tree": ("all_gather", 5, documents([20, 25, 30], parents=[-1, 0, 0]), ModeOptions(20)),
    "usp, documents": ("usp", 6, documents([40, 5, 30]), ModeOptions(inner_size=3)),
}
PLANS = {name: build_plan(mode, n, mask, options) for name, (mode, n, mask, options) in MODES.items()}
PLANS |= {f"{name}, kept": keep_received(PLANS[name]) for name in ("ulysses", "usp", "zigzag")}
PLANS |= {"tangled": tangled_plan(12), "one-sided": one_sided_plan(8)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA's streams and tensors."""
    cuda = SimpleNamespace(stream=on, current_stream=lambda _: Bytes.here, is_available=lambda: False)
    fake = SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode, uint8=torch.uint8)
    monkeypatch.setattr(peer, "torch", fake)
    fake.OutOfMemoryError = torch.OutOfMemoryError
    fake.full = lambda n, x, **_: Bytes(memoryview(bytearray([x] * n[0])))
    monkeypatch.setattr(p2p, "torch", fake)
    monkeypatch.setattr(peer, "FlagOperations", Flags)
    monkeypatch.setattr(peer, "_view_like", lambda views, i, tensor: views[i])
    monkeypatch.setattr(peer, "gather_objects", lambda _, value: [value])


def simulated(name: str, over_peers: bool, seed: int) -> tuple[Device, Callable[..., None]]:
    """Return a device, and `issue(way, number, last)`, which issues a pass on all ranks. last: see `Pass.run`."""
    plan = PLANS[name]
    passes = [Recorder(each, Target(WORK, TAKES, over_peers)) for each in (plan, backward_plan(plan))]
    Flags.state, Far.channels = {}, {}
    device = Device(plan, over_peers, random.Random(seed), one_queue=over_peers and seed % 2 == 1)
    for rank in device.ranks:
        rank.channels = [rank.channel(each) for each in passes]

    def issue(way: int, number: int, last: Callable[[int, int], int | None] | None = None) -> None:
        for rank in device.ranks:
            Bytes.here, of = rank.caller, rank.channels[way]
            each = Pass(rank, *of, number, last is not None)
            each.run(None if last is None else last(rank.number, len(of[0].ops)))

    return device, issue


@pytest.mark.parametrize("over_peers", [True, False])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("device")
def test_nothing_hangs_and_every_message_arrives(name: str, over_peers: bool) -> None:
    plan = PLANS[name]
    passes = [Recorder(each, Target(WORK, TAKES, over_peers)) for each in (plan, backward_plan(plan))]
    reused = any(each.send_layout(rank).awaits for each in passes for rank in range(plan.n))
    assert reused or not over_peers or name not in ("zigzag", "ring", "tasp")
    for seed in range(4 if over_peers else 2):
        device, issue = simulated(name, over_peers, seed)
        for rank in device.ranks:
            rank.overlap = seed < (2 if over_peers else 1)
        # The host waits only for more memory, so all passes can be issued without running any.
        for number, way in enumerate((0, 1, 1, 0, 0, 1)):
            issue(way, number)
        device.finish()
        assert not over_peers or name.startswith("all_gather") or any(rank.acquired for rank in device.ranks)
        assert len(device.taken) == (1 + (passes[1].send_bytes() > passes[0].send_bytes()) if over_peers else 0)


def _somewhere(draw: random.Random, _: int, operations: int) -> int:
    return draw.randint(-1, max(operations - 2, -1))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("device")
def test_passes_go_on_after_one_in_which_all_ranks_ran_out_of_memory(name: str) -> None:
    """Each rank runs out of memory at another operation, in forward and in backward. `test_broken_pass` has messages
    without peer memory."""
    for seed in range(2):
        device, issue = simulated(name, True, seed)
        for number, (way, fails) in enumerate(((0, 0), (1, 1), (0, 1), (0, 1), (1, 0), (0, 0), (1, 0))):
            draw = random.Random(10 * seed + number)
            issue(way, number, functools.partial(_somewhere, draw) if fails else None)
        device.finish()
        assert len(device.reports) == 3 * device.n


@pytest.mark.parametrize("over_peers", [True, False])
@pytest.mark.usefixtures("device")
def test_a_rank_that_alone_runs_out_of_memory_sends_nan_and_is_refused(over_peers: bool) -> None:
    device, issue = simulated("zigzag", over_peers, 1)
    issue(0, 0)
    issue(1, 1, lambda rank, _: 3 if rank == 2 else None)
    Bytes.nan = 0
    device.finish()
    assert Bytes.nan
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"broken off before \(OutOfMemoryError: no memory, not on all ranks\)"):
            device.ranks[2].channels[0][1].begin()
