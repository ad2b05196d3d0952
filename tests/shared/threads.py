"""All ranks of a group as threads of one process: plans run with real tensors, without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_longctx.core.attention.execute import Runtime
from megatron_longctx.core.attention.function import AttentionFunction, Passes, shapes_of
from megatron_longctx.core.attention.kv_format import KVFormat
from megatron_longctx.core.comm import BufferPool, Exchange
from megatron_longctx.core.kernels import AttentionKernel
from megatron_longctx.core.plans import Plan, Recording, Target
from megatron_longctx.core.plans.plan import NUM_FIELDS
from megatron_longctx.testing.distributed import PATIENCE_S
from megatron_longctx.testing.references import shard, unshard

T = TypeVar("T")

_POISON = 0xFF
"""Of four or eight such bytes as a float: not a number."""


class Inputs(NamedTuple):
    """Of a whole sequence: q `[S, b, h, d]`, k `[S, b, g, d]`, v `[S, b, g, e]`, grad_out `[S, b, h, e]`, sink
    `[h]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    sink: Tensor | None = None


def attend(
    plan: Plan,
    inputs: Inputs,
    scale: float,
    kernel: Callable[[], AttentionKernel],
    over_peers: bool = False,
    kv: KVFormat | None = None,
    overlap: bool = True,
) -> dict[str, Tensor]:
    """out, dq, dk, dv (and dsink) of a plan, of the whole sequence; without gradients where no input wants any.

    Args:
        kernel: makes every rank's. over_peers: see `Target`. kv: how keys and values travel; None for as they are.
        overlap: see `Runtime`.
    """
    ranks = ThreadedRanks(plan.n, over_peers)

    def of_rank(rank: int) -> dict[str, Tensor]:
        q, k, v, grad_out = (shard(x, plan.queries, rank) for x in inputs[:4])
        sink = None if inputs.sink is None else inputs.sink.detach().requires_grad_(inputs.sink.requires_grad)
        transport = ranks.transport(rank) if plan.n > 1 else None
        runtime = Runtime(kernel(), transport, BufferPool(q.device), overlap=overlap)
        shapes = shapes_of(q, k, v, kv)
        target = Target(shapes.workload, runtime.kernel.takes, over_peers)
        passes = Passes(plan, target, rank, shapes, runtime)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
        out = AttentionFunction.apply(*leaves, sink, passes, scale)  # type: ignore[no-untyped-call]
        found = {"out": out.detach()}
        if out.requires_grad:
            names = ("dq", "dk", "dv") if sink is None else ("dq", "dk", "dv", "dsink")
            wanted = leaves if sink is None else [*leaves, sink]
            found |= dict(zip(names, torch.autograd.grad(out, wanted, grad_out), strict=True))
        return found

    found = ranks.run(of_rank)
    whole = {name: unshard([each[name] for each in found], plan.queries) for name in found[0] if name != "dsink"}
    sinks = [each["dsink"] for each in found if "dsink" in each]
    return whole | ({"dsink": torch.stack(sinks).sum(0)} if sinks else {})


class ThreadedRanks:
    """The ranks of a group. over_peers: see `Target`."""

    def __init__(self, n: int, over_peers: bool = False) -> None:
        self.n, self.over_peers = n, over_peers
        self._mail: dict[tuple[int, int, int, int], list[_Sent]] = {}
        self._news = threading.Condition()
        self.failed: BaseException | None = None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work` gives for every rank, all at once; the first failure is raised."""
        with ThreadPoolExecutor(self.n) as pool:
            futures = [pool.submit(self._watched, work, rank) for rank in range(self.n)]
        if self.failed is not None:
            raise self.failed
        assert not self._mail, f"nobody wanted messages {list(self._mail)}"
        return [future.result() for future in futures]

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def post(self, key: tuple[int, int, int, int], sent: list[_Sent]) -> None:
        with self._news:
            self._mail[key] = sent
            self._news.notify_all()

    def collect(self, key: tuple[int, int, int, int]) -> list[_Sent]:
        with self._news:
            there = self._news.wait_for(lambda: key in self._mail or self.failed is not None, PATIENCE_S)
            if self.failed is not None or not there:
                raise RuntimeError(f"message {key} never came")
            return self._mail.pop(key)

    def _watched(self, work: Callable[[int], T], rank: int) -> T:
        try:
            with torch.inference_mode(False):
                return work(rank)
        except BaseException as error:
            with self._news:
                self.failed = self.failed or error
                self._news.notify_all()
            raise


class ThreadTransport:
    """One rank's messages: what is sent is read from where its send layout says that it lies."""

    def __init__(self, ranks: ThreadedRanks, rank: int) -> None:
        self.ranks, self.rank, self.over_peers = ranks, rank, ranks.over_peers
        self.passes = 0

    def record_event(self) -> None:
        return None

    def abort(self, error: BaseException, channel: ThreadChannel, sizes: Any) -> None:
        pass

    def channel(self, recording: Recording, num_bytes: int, memory: Any) -> ThreadChannel:
        assert recording.sends.num_bytes <= num_bytes
        return ThreadChannel(self, recording)


class ThreadChannel:
    """The messages of a pass. Memory that nothing was written to holds no number."""

    generation = 0

    def __init__(self, transport: ThreadTransport, recording: Recording) -> None:
        self._transport, self._recording = transport, recording
        self._memory = torch.empty(recording.sends.num_bytes, dtype=torch.uint8)
        self._number = self._step = 0
        self._lent: list[Tensor] = []

    def begin(self) -> int:
        self._transport.passes += 1
        self._number = self._transport.passes
        self._memory.fill_(_POISON)
        return 0

    def memory(self) -> Tensor:
        return self._memory

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        left = iter(passed)
        me, sends = self._transport.rank, self._recording.sends
        going: dict[int, list[_Sent]] = {}
        for message in sends.messages[step]:
            region = sends.regions[message.region] if message.region >= 0 else None
            spans = region.spans(message.start, message.block.tokens) if region else ()
            if message.passed:
                fields = [_bytes(next(left)) for _ in range(NUM_FIELDS[message.block.kind])]
            else:
                fields = [self._memory[at : at + size] for at, size in spans]
            sent = going.setdefault(message.peer, [])
            sent += (_Sent(span, field.clone()) for span, field in zip_longest(spans, fields))
        for peer, sent in going.items():
            self._transport.ranks.post((self._number, step, me, peer), sent)
        for tensor in receives:
            _bytes(tensor).fill_(_POISON)
        self._step = step
        return Exchange(tensors=tuple(receives))

    def wait(self, exchange: Exchange) -> None:
        me, receives = self._transport.rank, self._recording.receives[self._step]
        coming = {
            peer: iter(self._transport.ranks.collect((self._number, self._step, peer, me)))
            for peer in dict.fromkeys(each.peer for each in receives)
        }
        into = iter(exchange.tensors)
        for each in receives:
            for span, _ in zip_longest(each.spans, range(NUM_FIELDS[each.block.kind])):
                sent = next(coming[each.peer])
                assert span in (None, sent.span), f"rank {me} would read {each.block} where its sender has it not"
                _bytes(next(into)).copy_(sent.rows)

    def acquire(self, step: int, receives: Sequence[Tensor]) -> list[Tensor]:
        self._lent = [torch.empty(tuple(x.shape), dtype=x.dtype) for x in receives]
        self.wait(self.start(step, (), self._lent, ()))
        return self._lent

    def release(self, step: int) -> None:
        for tensor in self._lent:
            _bytes(tensor).fill_(_POISON)
        self._lent = []


class _Sent(NamedTuple):
    """A field of a message. span: (offset, bytes) of it in the sender's memory; None for what has no place there."""

    span: tuple[int, int] | None
    rows: Tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
