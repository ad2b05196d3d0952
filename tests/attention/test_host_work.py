"""What a pass costs the host: operations, each of which a GPU's driver has to be told of. Counted, not timed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.attention import accumulate
from megatron_longctx.attention.engine import Engine
from megatron_longctx.attention.executor import BackwardPass, ForwardPass
from megatron_longctx.attention.program import Program, compile_program, programs
from megatron_longctx.comm import BufferPool, Exchange, Outbox, PeerTransport
from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.inference.plan import Batch, build
from megatron_longctx.kernels import AttentionKernel
from megatron_longctx.kernels.moves import Mover
from megatron_longctx.schedules import Kind, PlanOptions, build_plan, keeping

CPU = torch.device("cpu")
BF16 = torch.bfloat16
VIEWS = ("slice", "view", "select", "permute", "detach", "as_strided", "expand", "unbind", "transpose", "narrow")
WITHOUT_LAUNCH = ("empty", *VIEWS)


class Counted(TorchDispatchMode):
    """Counts operations; `launches` are those that are neither views nor allocations, and merges."""

    def __init__(self) -> None:
        super().__init__()
        self.views = self.launches = self.merges = 0

    def __repr__(self) -> str:
        return f"{self.merges} merges among {self.launches} launches, {self.views} views"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        self.views += any(view in name for view in VIEWS)
        self.launches += not any(free in name for free in WITHOUT_LAUNCH)
        return function(*args, **(kwargs or {}))


class NoMessages:
    """A transport that moves nothing."""

    def __init__(self) -> None:
        self.received: list[list[Tensor]] = []

    def now(self) -> None:
        return None

    def start(self, sends: Any, receives: Any, after: Any = ()) -> Exchange:
        assert all(tensor.is_contiguous() for tensor, _ in (*sends, *receives))
        self.received.append([tensor for tensor, _ in receives])
        return Exchange()

    def wait(self, exchange: Exchange) -> None:
        pass


class NoAttention(AttentionKernel):
    """Results that lie as flash-attn's do, and nothing in them."""

    name = "none"

    def why_not(self, request: Any) -> None:
        return None

    def _forward(self, block: Any) -> tuple[Tensor, Tensor]:
        s, b, h, d = block.q.shape
        return torch.empty(b, s, h, d, dtype=BF16).permute(1, 0, 2, 3), torch.empty(b, h, s).permute(2, 0, 1)

    def _backward(self, block: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.empty(x.shape, dtype=BF16) for x in (block.q, block.k, block.v))  # type: ignore[return-value]


def engine() -> Engine:
    """Over the transport and the kernel above."""
    return Engine(NoAttention(), NoMessages(), BufferPool(CPU))  # type: ignore[arg-type]


def attend(pair: tuple[Program, Program], engine: Engine, tokens: int) -> None:
    """Forward and backward of one layer."""
    q, k = (torch.empty(tokens, 1, heads, 8, dtype=BF16) for heads in (32, 16))
    forward = ForwardPass(pair[0], engine, {Kind.Q: (q,), Kind.KV: (k, k)}, 1.0)
    forward.run()
    out, lse = forward.output.finish()
    home = {Kind.Q_GRAD: (q, out, q, lse), Kind.KV: (k, k)}
    backward = BackwardPass(pair[1], engine, home, 1.0, tuple(forward.kept))
    backward.run()
    backward.gradients()


def counted(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What `work` costs once everything of its kind has been done before. A merge is one launch, as on a GPU."""
    counts: Counter[str] = Counter()
    for name in ("merge_partials", "sum_partials"):
        monkeypatch.setattr(accumulate, name, lambda *_, name=name: counts.update([name]))
    with torch.no_grad():
        work()
        work()
        counts.clear()
        with Counted() as found:
            work()
    found.merges = counts.total()
    found.launches += found.merges
    return found


MODES = {
    # (schedule, ranks, chunks of the heads, keeps): merges, launches, views of a layer's forward and backward
    ("ulysses", 4, 1, False): (4, 33, 180),
    ("ulysses", 4, 1, True): (4, 18, 110),
    ("ulysses", 8, 1, True): (8, 22, 150),
    ("ulysses", 4, 2, True): (8, 36, 225),
    ("zigzag", 4, 1, False): (8, 13, 40),
    ("zigzag", 8, 1, False): (20, 29, 85),
    ("all_gather", 4, 1, False): (4, 8, 35),
    ("ring", 4, 1, False): (8, 11, 20),
    ("usp", 4, 1, False): (9, 33, 185),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode)))
def test_a_layer_is_few_operations(mode: tuple[str, int, int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results in one part are not merged on their way; what depends on shapes alone is not worked out again."""
    schedule, n, chunks, keep = mode
    plan = build_plan(schedule, n, 64 * n, True, PlanOptions(inner_size=2, head_chunks=chunks))
    pair, on = programs(keeping(plan) if keep else plan, 1), engine()
    found = counted(lambda: attend(pair, on, 64), monkeypatch)
    merges, launches, views = MODES[mode]
    assert found.merges <= merges and found.launches <= launches and found.views <= views, found


@pytest.mark.parametrize(("schedule", "n"), [("ulysses", 4), ("ulysses", 8), ("all_gather", 4), ("zigzag", 4)])
def test_what_is_waited_for_at_once_is_copied_at_once(schedule: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over peer memory a layer of Ulysses packs, pulls, publishes and puts side by side in one launch each; others
    read the results that end a pass where the senders have them."""
    moved: list[tuple[Any, int]] = []
    monkeypatch.setattr(Mover, "move", lambda _, key, pairs: moved.append((key, len(pairs))) if pairs else None)
    plan, peers = build_plan(schedule, n, 64 * n), Peers()
    pair = programs(keeping(plan) if schedule == "ulysses" else plan, 1)
    on = Engine(NoAttention(), peers, BufferPool(CPU))
    found = counted(lambda: (moved.clear(), attend(pair, on, 64))[1], monkeypatch)
    forward, backward = peers.boxes
    if schedule == "ulysses":
        # Rank 1's parts of the heads for others lie on both sides of its own.
        assert [pairs for _, pairs in moved] == [6, 2 * n + 1, 4, 2 * n, 2, n, 4, 2, 3 * n]
        assert found.launches == found.merges == 0, found
        assert forward.met == backward.met == 3 * 2, "in three layers, what comes first and what goes back last"
    else:
        assert (forward.met, backward.met) == (0, 3), "the results that end backward"


def addresses(x: Tensor) -> set[int]:
    """Of all elements."""
    at = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        at += (torch.arange(size) * stride).view(-1, *[1] * (x.ndim - dim - 1))
    return set((x.data_ptr() + x.element_size() * at).view(-1).tolist())


@pytest.mark.parametrize("over_peers", [False, True])
@pytest.mark.parametrize("mode", [*MODES, ("ulysses", 8, 2, False), ("helper", 4, 1, False)], ids=str)
def test_what_is_copied_together_may_be_copied_in_any_order(
    mode: tuple[str, int, int, bool], over_peers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel makes all copies beside each other: none writes what another one reads or writes."""
    several = 0

    def move(_: Mover, key: Any, pairs: Any) -> None:
        nonlocal several
        several += len(pairs) > 1
        written: set[int] = set()
        for into, source in pairs:
            assert into.shape == source.shape and into.dtype == source.dtype, key
            targets = addresses(into)
            assert len(targets) == into.numel() and not targets & written, key
            written |= targets
        assert not any(addresses(source) & written for _, source in pairs), key

    monkeypatch.setattr(Mover, "move", move)
    schedule, n, chunks, keep = mode
    plan = build_plan(schedule, n, 8 * n, True, PlanOptions(inner_size=2, head_chunks=chunks))
    on = Engine(NoAttention(), Peers(), BufferPool(CPU)) if over_peers else engine()
    for rank in (0, n - 1):
        attend(programs(keeping(plan) if keep else plan, rank), on, 8)
    assert several or schedule not in ("ulysses", "usp")


PREFILLS = {
    ("pass_kv", 4): (2, 2, 25),
    ("pass_q", 4): (2, 5, 30),
    ("pass_q", 8): (3, 11, 45),
    ("one_hop", 8): (3, 11, 45),
}
"""Merges, launches and views of one layer of 256 new tokens after 1,024 cached ones."""


@pytest.mark.parametrize("mode", PREFILLS, ids=lambda mode: f"{mode[0]}-{mode[1]}")
def test_a_layer_of_a_prefill_is_few_operations(mode: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    name, n = mode
    ledger = CacheLedger(n, 512, 16)
    session = ledger.open()
    ledger.append({session: 1024})
    plan = build(name, Batch(n, ledger.slots_per_rank, ledger.append({session: 256})))
    program, on = compile_program(plan, 1), engine()
    cache = torch.zeros(ledger.slots_per_rank, 2, 1, 16, 8, dtype=BF16)
    q = torch.zeros(plan.batch.num_rows(1), 1, 32, 8, dtype=BF16)

    def layer() -> None:
        run = ForwardPass(program, on, {Kind.Q: (q,), Kind.KV: (cache,)}, 1.0)
        run.run()
        run.output.finish()

    found = counted(layer, monkeypatch)
    merges, launches, views = PREFILLS[mode]
    assert found.merges <= merges and found.launches <= launches and found.views <= views, found


class Peers(PeerTransport):
    """Peer memory that nobody reads, and how often a kind of pass was made known to others."""

    def __init__(self) -> None:
        self.mailboxes = 0
        self.boxes: list[Any] = []

    def now(self) -> None:  # type: ignore[override]
        return None

    def mailbox(self, outbox: Outbox) -> Any:
        self.mailboxes += 1
        memory = torch.empty(outbox.num_bytes, dtype=torch.uint8)

        def region(name: Any, shape: Any, dtype: torch.dtype) -> Tensor:
            size = torch.Size(shape).numel() * dtype.itemsize
            return memory[outbox.regions[name] :][:size].view(dtype).view(shape)

        def meet(step: int, receives: Any) -> list[Tensor]:
            box.met += 1
            return [torch.empty_like(tensor) for tensor, _ in receives]

        box = SimpleNamespace(
            begin=lambda: 0,
            region=region,
            start=lambda *_: Exchange(),
            wait=lambda _: None,
            meets=lambda _: True,
            meet=meet,
            read=lambda _: None,
            met=0,
        )
        self.boxes.append(box)
        return box


def test_ranks_meet_once_for_a_batch_over_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its layers go by what was agreed on for the first; another batch is agreed on anew."""
    monkeypatch.setattr(accumulate, "merge_partials", lambda *_: None)
    ledger = CacheLedger(4, 512, 16)
    session = ledger.open()
    peers = Peers()
    on = Engine(NoAttention(), peers, BufferPool(CPU))
    for number in range(1, 4):
        plan = build("pass_q", Batch(4, ledger.slots_per_rank, ledger.append({session: 100 * number})))
        program = compile_program(plan, 1)
        q = torch.zeros(plan.batch.num_rows(1), 1, 32, 8, dtype=BF16)
        for _ in range(3):  # layers
            cache = torch.zeros(ledger.slots_per_rank, 2, 1, 16, 8, dtype=BF16)
            run = ForwardPass(program, on, {Kind.Q: (q,), Kind.KV: (cache,)}, 1.0)
            run.run()
            run.output.finish()
        assert peers.mailboxes == number


def test_rows_of_buffers_are_the_same_tensors_until_the_buffers_grow() -> None:
    on = engine()
    received = on.transport.received  # type: ignore[union-attr]
    pair, longer = (programs(build_plan("zigzag", 4, 4 * tokens), 1) for tokens in (16, 64))

    def pass_over(pair: tuple[Program, Program], tokens: int) -> list[list[Tensor]]:
        received.clear()
        attend(pair, on, tokens)
        return list(received)

    pass_over(pair, 16)  # until backward has all its buffers
    first, again = pass_over(pair, 16), pass_over(pair, 16)
    assert all(x is y for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))
    larger = {x.untyped_storage().data_ptr() for each in pass_over(longer, 64) for x in each}
    after = {x.untyped_storage().data_ptr() for each in pass_over(pair, 16) for x in each}
    assert after == larger, "memory that the pool no longer has"


def test_what_was_worked_out_goes_with_its_program() -> None:
    on = engine()
    for tokens in (16, 32, 16):
        attend(programs(build_plan("zigzag", 4, 4 * tokens), 1), on, tokens)
    gc.collect()
    assert not on.kinds and not on.pool.derived


def test_kept_slots_are_every_pass_s_own() -> None:
    on, pair = engine(), programs(keeping(build_plan("ulysses", 4, 64)), 1)
    q, k = (torch.zeros(16, 1, heads, 8, dtype=BF16) for heads in (32, 16))
    runs = [ForwardPass(pair[0], on, {Kind.Q: (q,), Kind.KV: (k, k)}, 1.0) for _ in range(2)]
    for run in runs:
        run.run()
    kept = [{x.untyped_storage().data_ptr() for x in run.kept} for run in runs]
    assert kept[0].isdisjoint(kept[1])
