"""The number and order of operations that the host issues in a pass, each of which costs a call of the driver."""

import gc
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.core.attention import execute
from megatron_longctx.core.attention.execute import Pass, Replay, Runtime
from megatron_longctx.core.attention.function import shapes_of
from megatron_longctx.core.comm import BufferPool, Exchange
from megatron_longctx.core.kernels import AttentionKernel
from megatron_longctx.core.kernels.batched_copy import BatchedCopy, launches
from megatron_longctx.core.plans import (
    MODES,
    KernelSupport,
    Kind,
    ModeOptions,
    Plan,
    Recorder,
    Recording,
    Target,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager

CPU = torch.device("cpu")
BF16 = torch.bfloat16
VIEWS = ("slice", "view", "select", "permute", "detach", "as_strided", "expand", "unbind", "transpose", "narrow")
WITHOUT_LAUNCH = ("empty", *VIEWS)
HEADS, KV_HEADS, DIM = 32, 16, 8


class Counted(TorchDispatchMode):
    """A counter of operations; `launches` are merges and operations that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.views = self.launches = self.merges = self.copies = 0

    def __repr__(self) -> str:
        return f"{self.merges} merges among {self.launches} launches, {self.views} views"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        self.views += any(view in name for view in VIEWS)
        self.launches += not any(free in name for free in WITHOUT_LAUNCH)
        return function(*args, **(kwargs or {}))


class Silent:
    """A transport that sends nothing and records calls. peers: whether all ranks read each other's memory."""

    def __init__(self, n: int, peers: bool = False) -> None:
        self.over_peers = peers
        self.events: list[str] = []
        self.marks = self.channels = 0
        self.received: list[list[Tensor]] = []

    def record_event(self) -> int:
        self.marks += 1
        self.events.append("mark")
        return self.marks

    def channel(self, recording: Recording, num_bytes: int, memory: Callable[[int], Tensor]) -> Any:
        assert num_bytes >= recording.sends.num_bytes
        self.channels += 1
        return SilentChannel(self, memory(num_bytes))

    def abort(self, error: BaseException, channel: Any, sizes: Any) -> None:
        raise AssertionError("a pass failed") from error


class SilentChannel:
    generation = 0

    def __init__(self, transport: Silent, memory: Tensor) -> None:
        self._transport, self._memory = transport, memory
        self._pending: list[Exchange] = []

    def begin(self) -> int:
        return 0

    def memory(self) -> Tensor:
        return self._memory

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        assert all(tensor.is_contiguous() for tensor in (*passed, *receives))
        self._transport.received.append(list(receives))
        self._transport.events.append("start")
        self._pending.append(Exchange())
        return self._pending[-1]

    def wait(self, exchange: Exchange) -> None:
        self._pending.remove(exchange)  # each is awaited once
        self._transport.events.append("wait")

    def acquire(self, step: int, receives: Sequence[Any]) -> list[Tensor]:
        self._transport.events.append("acquire")
        return [torch.empty(x.shape, dtype=x.dtype) for x in receives]

    def release(self, step: int) -> None:
        self._transport.events.append("release")


class NoAttention(AttentionKernel):
    """A kernel that returns uninitialized results in flash-attn's memory layout."""

    takes = KernelSupport(packed=True, rectangles=True, windows=True)

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def why_not(self, request: Any) -> None:
        return None

    def _forward(self, block: Any) -> tuple[Tensor, Tensor]:
        self.events.append("kernel")
        s, b, h, d = block.q.shape
        return torch.empty(b, s, h, d, dtype=BF16).permute(1, 0, 2, 3), torch.empty(b, h, s).permute(2, 0, 1)

    def _backward(self, block: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.events.append("kernel")
        return tuple(torch.empty(x.shape, dtype=BF16) for x in (block.q, block.k, block.v))  # type: ignore[return-value]


class Layer:
    """A rank's passes over tensors of zeros."""

    def __init__(self, plan: Plan, rank: int, peers: bool = False, runtime: Runtime | None = None) -> None:
        self.transport: Any = runtime.transport if runtime else Silent(plan.n, peers)
        self.runtime = runtime or Runtime(NoAttention(self.transport.events), self.transport, BufferPool(CPU))
        self.q = torch.zeros(plan.queries.num_tokens(rank), 1, HEADS, DIM, dtype=BF16)
        self.k = torch.zeros(plan.keys.num_tokens(rank), 1, KV_HEADS, DIM, dtype=BF16)
        shapes = shapes_of(self.q, self.k, self.k)
        target = Target(shapes.workload, NoAttention.takes, self.transport.over_peers)
        both = [plan] if plan.keys != plan.queries else [plan, backward_plan(plan)]
        self.passes = [Pass(Recorder(each, target), rank, shapes, self.runtime) for each in both]

    def forward(self) -> Replay:
        return self.passes[0].run({Kind.Q: (self.q,), Kind.KV: (self.k, self.k)}, 1.0)

    def backward(self, out: Tensor, lse: Tensor, kept: Any) -> None:
        own = {Kind.Q_GRAD: (self.q, out, self.q, lse), Kind.GRAD: (self.q,), Kind.KV: (self.k, self.k)}
        back = self.passes[1].run(own, 1.0, kept)
        back.result(Kind.DQ), back.result(Kind.DKV)

    def both(self) -> None:
        run = self.forward()
        computed = *run.result(Kind.OUT), run.kept
        del run  # which has views of all memory
        self.backward(*computed)


def counted(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count the operations of `work` after two warm-up runs. A merge or batched copy is one launch, as on GPUs."""
    counts: Counter[str] = Counter()
    for name in ("merge_partials", "sum_partials"):
        monkeypatch.setattr(execute, name, lambda *_, name=name: counts.update([name]))
    monkeypatch.setattr(BatchedCopy, "copy", lambda *_: counts.update(["copies"]))
    with torch.no_grad():
        work()
        work()
        counts.clear()
        with Counted() as found:
            work()
    found.copies, found.merges = counts.pop("copies", 0), counts.total()
    found.launches += found.merges + found.copies
    return found


DOCUMENTS = documents([100, 28, 60, 68], window=(50, None))
LAYERS: dict[tuple[str, int, bool, Any], tuple[int, int, int]] = {
    # (schedule, ranks, keeps, mask): merges, launches and views of a layer's forward and backward
    ("ulysses", 4, False, None): (0, 9, 3),
    ("ulysses", 4, True, None): (0, 9, 11),
    ("ulysses", 8, True, None): (0, 9, 19),
    ("zigzag", 4, False, None): (6, 11, 19),
    ("zigzag", 8, False, None): (18, 27, 70),
    ("all_gather", 4, False, None): (4, 7, 12),
    ("ring", 4, False, None): (4, 7, 5),
    ("usp", 4, False, None): (9, 17, 26),
    ("zigzag", 4, False, DOCUMENTS): (4, 9, 24),
    ("ulysses", 4, True, DOCUMENTS): (0, 9, 11),
}


def plan_of(schedule: str, n: int, keep: bool, mask: Any, tokens: int = 64) -> Plan:
    options = ModeOptions(inner_size=2)
    plan = build_plan(schedule, n, n * tokens if mask is None else mask, options)
    return keep_received(plan) if keep else plan


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: "-".join(map(str, case)))
def test_a_layer_is_few_operations(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results in one part are not merged, and what depends on shapes alone is not computed again."""
    found = counted(Layer(plan_of(*case), 1).both, monkeypatch)
    merges, launches, views = LAYERS[case]
    assert found.merges <= merges and found.launches <= launches and found.views <= views, found


PREFILLS = {
    ("pass_kv", 4): (1, 2, 11),
    ("pass_q", 4): (1, 5, 17),
    ("pass_q", 8): (3, 11, 34),
    ("one_hop", 8): (3, 11, 34),
}
"""Merges, launches and views of one layer with 256 new tokens after 1,024 cached ones."""


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_layer_of_a_prefill_is_few_operations(case: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    name, n = case
    manager = CacheManager(n, 512, 16)
    session = manager.open()
    manager.append({session: 1024})
    layer = Layer(Batch(n, manager.slots[0], manager.append({session: 256})).plan(name), 1)
    found = counted(lambda: layer.forward().result(Kind.OUT), monkeypatch)
    merges, launches, views = PREFILLS[case]
    assert found.merges <= merges and found.launches <= launches and found.views <= views, found


@pytest.mark.parametrize(("schedule", "n"), [("ulysses", 4), ("ulysses", 8), ("all_gather", 4), ("zigzag", 4)])
def test_exchanges_without_overlap_are_read_in_the_peers_memory(
    schedule: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over peer memory, a layer of Ulysses packs, pulls and unpacks in one launch each. Other modes read the last
    results of backward in the senders' memory."""
    layer = Layer(plan_of(schedule, n, schedule == "ulysses", None), 1, peers=True)
    found = counted(lambda: (layer.transport.events.clear(), layer.both()), monkeypatch)
    events = Counter(layer.transport.events)
    assert events["acquire"] == events["release"]
    if schedule == "ulysses":
        assert (events["acquire"], events["start"]) == (4, 0), "to and from the heads, forward and backward"
        assert found.merges == 0 and found.launches == found.copies <= 9, (found, found.copies)
    else:
        assert events["acquire"] == 1 and events["start"] == events["wait"] > 0


def addresses(x: Tensor) -> set[int]:
    """Return the addresses of all elements."""
    at = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        at += (torch.arange(size) * stride).view(-1, *[1] * (x.ndim - dim - 1))
    return set((x.data_ptr() + x.element_size() * at).view(-1).tolist())


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("schedule", MODES)
def test_batched_copies_are_independent(schedule: str, peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel makes all copies concurrently: none writes what another one reads or writes. The plan stays right."""
    known: dict[Any, Any] = {}

    def copy(copier: BatchedCopy, roots: Sequence[Tensor], moving: int, make: Any) -> None:
        pairs, written, inside = make(), set[int](), [*map(addresses, roots)]
        for (into, source), of in pairs:
            targets = addresses(into)
            assert into.shape == source.shape and into.dtype == source.dtype and len(targets) == into.numel()
            assert targets <= inside[of[0]] - written and addresses(source) <= inside[of[1]]
            written |= targets
        assert not any(addresses(source) & written for (_, source), _ in pairs)
        geometry = tuple((x.stride(), x.data_ptr() % 16) for x in roots[:moving])
        plan = launches(pairs, roots, moving)
        assert known.setdefault((copier, geometry), plan) == plan

    monkeypatch.setattr(BatchedCopy, "copy", copy)
    for keep in (False, True):
        for mask in (None, documents([9, 3, 20], window=(7, None))):
            plan = plan_of(schedule, 4, keep, mask, tokens=8)
            for rank in (0, 3):
                layer = Layer(plan, rank, peers)
                layer.both()
                Layer(plan_of(schedule, 4, keep, None, tokens=12), rank, runtime=layer.runtime).both()  # memory moves
                layer.both()
    assert any(len(launch.pairs) > 1 for found, _ in known.values() for launch in found)


def test_the_first_messages_start_behind_the_first_kernel_call_and_later_ones_before() -> None:
    layer = Layer(plan_of("ring", 4, False, full(64)), 1)
    run = layer.forward()
    events = [event for event in layer.transport.events if event != "mark"]
    assert events == ["kernel", "start", *["wait", "start", "kernel"] * 2, "wait", "kernel"]
    layer.transport.events.clear()
    layer.backward(*run.result(Kind.OUT), run.kept)
    events = [event for event in layer.transport.events if event != "mark"]
    assert events == ["kernel", "start", *["wait", "start", "kernel"] * 3, "wait", "start", "wait"]


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("schedule", ["ring", "zigzag", "helper", "ulysses"])
def test_without_overlap_messages_are_awaited_immediately(schedule: str, peers: bool) -> None:
    """All other operations are the same."""
    plan, events = build_plan(schedule, 4, 256), []
    for overlap in (True, False):
        transport = Silent(plan.n, peers)
        kernel = NoAttention(transport.events)
        Layer(plan, 1, runtime=Runtime(kernel, transport, BufferPool(CPU), overlap=overlap)).both()  # type: ignore[arg-type]
        events.append(transport.events)
    on, off = events
    assert Counter(on) == Counter(off) and ("start" in off) == (not peers or schedule != "ulysses")
    assert all(after == "wait" for each, after in pairwise(off) if each == "start")
    assert on != off or schedule == "ulysses"  # which computes nothing beside messages


def test_rows_that_runs_share_are_the_same_tensors_until_memory_grows() -> None:
    layer = Layer(plan_of("zigzag", 4, False, None, tokens=16), 1)
    received = layer.transport.received

    def passes(layer: Layer) -> list[list[Tensor]]:
        received.clear()
        layer.both()
        return list(received)

    passes(layer)  # allocates the memory of backward
    first, again = passes(layer), passes(layer)
    assert any(first) and all(x is y for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))
    longer = Layer(plan_of("zigzag", 4, False, None, tokens=64), 1, runtime=layer.runtime)
    passes(longer)
    larger = {x.untyped_storage().data_ptr() for each in passes(longer) for x in each}
    after = {x.untyped_storage().data_ptr() for each in passes(layer) for x in each}
    assert after == larger, "memory that the pool has replaced"


def test_memory_that_the_pool_replaces_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward needs more than forward, and longer sequences more than those before, whose passes stay prepared."""
    get, held = BufferPool.get, list[StorageWeakRef]()

    def noted(pool: BufferPool, name: Any, *what: Any) -> Tensor:
        before, found = pool.generation, get(pool, name, *what)
        if name == "held" and pool.generation > before:
            assert all(former.expired() for former in held)
            held.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(BufferPool, "get", noted)
    gc.disable()  # no cycle may keep it
    try:
        layers: list[Layer] = []
        for tokens in (16, 64, 256):
            plan = plan_of("ulysses", 2, False, None, tokens=tokens)
            layers.append(Layer(plan, 1, runtime=layers[0].runtime if layers else None))
            layers[-1].transport.received = deque(maxlen=0)
            for _ in range(2):
                layers[-1].both()
    finally:
        gc.enable()
    assert len(held) == 6


def test_a_batch_opens_one_channel_over_peer_memory() -> None:
    """All its layers use the first one's."""
    manager = CacheManager(4, 512, 16)
    session, runtime, channels = manager.open(), None, 0
    for number in range(1, 4):
        plan = Batch(4, manager.slots[0], manager.append({session: 100 * number})).plan("pass_q")
        layer = Layer(plan, 1, True, runtime)
        for _ in range(3):
            layer.forward()
        runtime, channels = layer.runtime, layer.transport.channels
        assert channels == number
