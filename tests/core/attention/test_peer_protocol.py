"""The protocol of peer memory without a GPU.

Ranks issue passes to simulated streams, whose operations run in any order that a device may choose. No pass may hang,
every message must have the sender's content, and no rank may read a message before it arrives or after it is
overwritten.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.core.attention import run
from megatron_longctx.core.attention.bind import Runtime
from megatron_longctx.core.attention.run import Run
from megatron_longctx.core.comm import HybridTransport, PeerTransport, peer
from megatron_longctx.core.plans import (
    RESULTS,
    Block,
    Heads,
    KernelSupport,
    Lowering,
    ModeOptions,
    Plan,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.core.plans.plan import NUM_FIELDS
from megatron_longctx.core.plans.program import Acquire, Compute, Copy, Merge, Program, Receive, Rows, Send, Space, Wait
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


class Memory:
    """Rows in memory, and their content once all issued operations have run; None for a message in flight."""

    def __init__(self, tokens: int, size: int) -> None:
        self.size, self.real = size, memoryview(bytearray(tokens * size))
        self.held: list[bytes | None] = [bytes(size)] * tokens


class Pass(Run):
    """A pass whose kernels and merges only check their inputs."""

    def __init__(self, rank: Rank, program: Program, channel: Any, number: int) -> None:
        runtime = Runtime(None, rank.links, None, overlap=rank.overlap)  # type: ignore[arg-type]
        bound = SimpleNamespace(
            program=program, channel=channel, runtime=runtime, shapes=None, begin=channel.begin, new_buffers=lambda: (),
            received=lambda step, _: [x for each in program.receives[step] for x in self.places(each)],
        )  # fmt: skip
        super().__init__(bound, {}, 1.0)  # type: ignore[arg-type]
        self.rank, self.channel, self.number = rank, channel, number
        self.acquired_step = -1
        self.kept_memory: dict[Any, Memory] = {}
        self.away = {region: block for (block, _), region in program.sends.results.items()}

    def places(self, receive: Receive) -> list[Any]:
        return [None] * NUM_FIELDS[receive.block.kind] if receive.into is None else self._fields(receive.into)

    def memory(self, rows: Rows) -> list[Memory]:
        """Return the rows' buffer, shared by all passes, or of this pass if it is kept."""
        buffer, name = self._program.buffers[rows.number], self._program.buffer_names[rows.number]
        assert rows.heads == rows.held == buffer.heads._replace(part=rows.heads.part)
        known = self.kept_memory if buffer.kept else self.rank.buffers
        found = []
        for i, size in enumerate(WORK.field_bytes(rows.kind, buffer.heads)):
            key = buffer.kind, buffer.parts, name, i
            if key not in known or len(known[key].held) < buffer.tokens:
                known[key] = Memory(buffer.tokens, size)
            found.append(known[key])
        return found

    def _fields(self, rows: Rows) -> Any:
        if rows.space is Space.PEER:
            return super()._fields(rows)
        if rows.space is Space.SENT:
            spans = self._program.sends.regions[rows.number].spans(rows.start, rows.tokens)
            return [self.channel.memory()[at : at + size] for at, size in spans]
        return [Bytes(each.real[rows.start * each.size : rows.stop * each.size]) for each in self.memory(rows)]

    def expected(self, rows: Rows) -> list[list[bytes]]:
        """Return the content of rows once all issued operations have run."""
        if rows.space is Space.OWN:
            return content(Block(rows.kind, self.rank.number, rows.start, rows.stop, -1, rows.heads), self.number)
        if rows.space is Space.PEER:
            return content(self._program.receives[self.acquired_step][rows.number].block, self.number)
        found = [each.held[rows.start : rows.stop] for each in self.memory(rows)]
        assert None not in found[0], f"{rows} are read while a message to them is in flight"
        return found  # type: ignore[return-value]

    def arrive(self, step: int, there: bool) -> None:
        for block, _, into, _ in self._program.receives[step]:
            if into is not None:
                what: Any = content(block, self.number) if there else [[None] * block.tokens] * NUM_FIELDS[block.kind]
                self.hold(into, what)
                self.read(into) if there else None

    def hold(self, rows: Rows, what: Sequence[Sequence[bytes]]) -> None:
        for memory, values in zip(self.memory(rows), what, strict=True):
            memory.held[rows.start : rows.stop] = values

    def read(self, rows: Rows) -> None:
        if rows.space in (Space.BUFFER, Space.PEER):
            for field, values in zip(self._fields(rows), self.expected(rows), strict=True):
                field.check(b"".join(values), f"rank {self.rank.number}, pass {self.number}: {rows}")

    def write(self, into: Rows, source: Rows | None) -> None:
        if into.space is Space.BUFFER:
            assert source is not None
            what = self.expected(source)
            self.hold(into, what)
            for i, field in enumerate(self._fields(into)):
                if source.space is Space.OWN:
                    field.write(b"".join(what[i]))
                else:
                    field.copy_(self._fields(source)[i])
        elif into.space is Space.SENT:
            if into.kind in RESULTS:
                whole = self.away[into.number]
                block = whole._replace(start=whole.start + into.start, stop=whole.start + into.stop)
            else:
                assert source is not None
                block = Block(source.kind, self.rank.number, source.start, source.stop, -1, into.heads)
            for field, values in zip(self._fields(into), content(block, self.number), strict=True):
                field.write(b"".join(values))

    # Operations: messages are sent, the others only check their inputs and write results.

    def copied(self, op: Copy, _: int) -> None:
        for _, source in op.pairs:
            self.read(source)
        for into, source in op.pairs:
            self.write(into, source)

    def computed(self, op: Compute, _: int) -> None:
        self.read(op.queries)
        self.read(op.keys)

    def merged(self, op: Merge, _: int) -> None:
        for part in op.parts:
            self.read(part.rows)
        self.write(op.into, None)

    def sent(self, op: Send, number: int) -> None:
        self.arrive(op.step, False)
        for rows in self._program.passed[op.step]:
            self.expected(rows)
        self._send(op, number)

    def waited(self, op: Wait, number: int) -> None:
        self._wait(op, number)
        self.arrive(op.step, True)

    def acquire(self, op: Acquire, number: int) -> None:
        self._acquire(op, number)
        self.acquired_step, self.rank.acquired = op.step, self.rank.acquired + 1


class Device:
    """The memory of all ranks, which all allocate the same sizes at the same time.

    one_queue: whether a rank's streams share a hardware queue; not with NCCL.
    """

    def __init__(self, plan: Plan, hosts: Sequence[tuple[int, ...]], draw: random.Random, one_queue: bool) -> None:
        self.draw, self.n = draw, plan.n
        self.taken: list[tuple[int, int]] = []
        self.memories: list[list[list[memoryview]]] = []
        self.ranks: list[Rank] = []
        for number in range(plan.n):
            queue: Any = deque() if one_queue else None
            self.ranks.append(Rank(self, number, hosts[number], [Stream(queue) for _ in range(4)]))

    def take(self, generation: int, capacity: int, steps: int) -> None:
        """Allocate peer memory collectively, after all devices have finished."""
        if generation == len(self.taken):
            self.finish()
            Flags.state.clear()
            self.taken.append((capacity, steps))
            self.memories.append([[memoryview(bytearray(capacity)) for _ in range(2)] for _ in range(self.n)])
        assert self.taken[generation] == (capacity, steps), "ranks allocate different memory, or at different times"

    def finish(self) -> None:
        run_all([stream for rank in self.ranks for stream in rank.streams], self.draw)


class Rank:
    """One rank's streams, transports and buffers."""

    def __init__(self, device: Device, number: int, peers: tuple[int, ...], streams: list[Stream]) -> None:
        self.device, self.number, self.streams, self.overlap = device, number, streams, True
        self.caller, self.acquired = streams[0], 0
        self.buffers: dict[Any, Memory] = {}
        self.sent = bytearray(2**22)  # a rank without peers has no peer memory
        transport = self.peers = PeerTransport.__new__(PeerTransport)
        transport.rank, transport.world, transport.peers = number, device.n, peers
        transport.stream, transport.signals = streams[1:3]  # type: ignore[assignment]
        transport.device, transport.group, transport.generation = torch.device("cpu"), None, 0  # type: ignore[assignment]
        transport._broken, transport._parity, transport._unread, transport._growth = None, 0, [None, None], 1.0
        transport._capacity = transport._steps = 0
        transport._allocate = self.take  # type: ignore[method-assign]
        self.links: Any = transport
        self.far = Far(number, streams[3])
        if len(peers) < device.n:
            self.links = HybridTransport.__new__(HybridTransport)
            self.links.peer, self.links.p2p = transport, self.far
        self.links.record_event = lambda: Bytes.here.record_event()

    def take(self, capacity: int, steps: int) -> None:
        transport, peers = self.peers, self.peers.peers
        base, memories = 10**9 * transport.generation, self.device.memories
        self.device.take(transport.generation, capacity, steps)
        now = memories[transport.generation]
        transport._flags = SimpleNamespace(buffer_ptrs=[base + 10**6 * (1 + r) for r in peers])
        transport._memories = [
            SimpleNamespace(get_buffer=lambda place, *_, parity=parity: Bytes(now[peers[place]][parity]))
            for parity in range(2)
        ]
        if len(peers) == 1:
            transport._flags, transport._memories = None, [None, None]

    def channel(self, lowering: Lowering) -> tuple[Program, Any]:
        program = lowering.program(self.number)
        return program, self.links.channel(
            program, lowering.send_bytes(), lambda size: Bytes(memoryview(self.sent)[:size])
        )


MODES: dict[str, Any] = {
    **{name: (name, 6, 75, ModeOptions()) for name in ("zigzag", "tasp", "helper", "ulysses")},
    "usp": ("usp", 6, 75, ModeOptions(inner_size=2)),
    "ring": ("ring", 6, full(72), ModeOptions()),
    "double_ring": ("double_ring", 6, 75, ModeOptions(inner_size=3)),
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


def hosts_of(n: int, kind: str) -> list[tuple[int, ...]]:
    """Return, for each rank, the ranks that share its host."""
    if kind == "one":
        return [tuple(range(n))] * n
    if kind == "halves":
        half = n // 2
        return [tuple(range(half)) if rank < half else tuple(range(half, n)) for rank in range(n)]
    if kind == "apart":
        return [(rank,) for rank in range(n)]
    return [tuple(r for r in range(n) if r % 2 == rank % 2 and r) if rank else (0,) for rank in range(n)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA's streams and tensors."""
    cuda = SimpleNamespace(stream=on, current_stream=lambda _: Bytes.here, is_available=lambda: False)
    fake = SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode, uint8=torch.uint8)
    monkeypatch.setattr(peer, "torch", fake)
    monkeypatch.setattr(peer, "FlagOperations", Flags)
    monkeypatch.setattr(peer, "_view_like", lambda views, i, tensor: views[i])
    monkeypatch.setattr(peer, "gather_objects", lambda _, value: [value])
    ops = {Copy: Pass.copied, Compute: Pass.computed, Merge: Pass.merged, Send: Pass.sent, Wait: Pass.waited}
    monkeypatch.setattr(run, "_HANDLERS", {**run._HANDLERS, **ops, Acquire: Pass.acquire})


@pytest.mark.parametrize("kind", ["one", "halves", "scattered", "apart"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("device")
def test_nothing_hangs_and_every_message_arrives(name: str, kind: str) -> None:
    plan = PLANS[name]
    hosts = hosts_of(plan.n, kind)
    passes = [Lowering(each, Target(WORK, TAKES, tuple(hosts))) for each in (plan, backward_plan(plan))]
    reused = any(each.send_layout(rank).awaits for each in passes for rank in range(plan.n))
    assert reused or kind != "one" or name not in ("zigzag", "ring", "tasp")
    for seed in range(4 if kind == "one" else 2):
        Flags.state, Far.channels = {}, {}
        device = Device(plan, hosts, random.Random(seed), one_queue=kind == "one" and seed % 2 == 1)
        channels = [[rank.channel(each) for each in passes] for rank in device.ranks]
        for rank in device.ranks:
            rank.overlap = seed < (2 if kind == "one" else 1)
        # The host waits only for more memory, so all passes can be issued without running any.
        for number, way in enumerate((0, 1, 1, 0, 0, 1)):
            for rank, both in zip(device.ranks, channels, strict=True):
                Bytes.here = rank.caller
                Pass(rank, *both[way], number)()
        device.finish()
        assert kind != "one" or name.startswith("all_gather") or any(rank.acquired for rank in device.ranks)
        assert len(device.taken) == 1 + (passes[1].send_bytes() > passes[0].send_bytes())
