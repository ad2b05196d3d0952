"""Attention on ranks that are processes, against dense attention in fp64, and in reduced precision against one device.

One set of processes for each number of ranks runs everything. Results are compared in the parent process, so that a
wrong result on one rank leaves no other waiting. test_masks has all kinds of masks, kernels and hosts, test_calls calls
of one rank.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.layout import Layout
from megatron_longctx.core.plans import MODES, Mask, ModeOptions, build_plan, find_mode
from megatron_longctx.core.plans.mask import causal, documents
from megatron_longctx.inference.quantize_kv import int8_kv
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard, unshard, visible
from megatron_longctx.testing.tolerances import assert_as_good_as, relative_error

WORLDS = (2, 3, 4)
FEW = ("zigzag", "ulysses", "all_gather")
SINKS = (8.0, -3.0, 0.0, 12.0)


@dataclass(frozen=True)
class Case:
    """One problem. heads: of queries and of keys. e: head dim of values."""

    schedule: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    e: int = 8
    sinks: bool = False
    batch: int = 2
    kernel: str = "reference"
    dtype: torch.dtype = torch.float64
    keep: bool | None = None
    parents: tuple[int, ...] | None = None

    @property
    def documents(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "causal": self.causal, "window": self.window, "parents": self.parents}

    @property
    def mask(self) -> Mask:
        return documents(**self.documents) if self.lengths != (0,) else causal(0)

    @property
    def plain(self) -> Case:
        """The same problem for any schedule."""
        return replace(self, schedule="", keep=None)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return random_qkv(self.mask.length, self.batch, *self.heads, 8, self.dtype, seed=self.mask.length, e=self.e)

    def sink(self) -> Tensor | None:
        return torch.tensor((SINKS * 8)[: self.heads[0]]).double() if self.sinks else None


def options(n: int) -> ModeOptions:
    return ModeOptions(inner_size={2: 2, 3: 3, 4: 2}.get(n, 1))


def cases(n: int) -> list[Case]:
    """Return, for each mode, causal and full attention and documents in a window with sinks and larger values; MHA, GQA
    and MQA; fewer tokens than ranks, and none; kept and fetched blocks; and lower precision."""
    mha, gqa, mqa = (2 * n, 2 * n), (2 * n, n), (n, 1)
    found = []
    for schedule in MODES:
        found += [
            Case(schedule, (4 * n + 3,), gqa),
            Case(schedule, (4 * n,), mha, causal=False, batch=1, keep=True),
            Case(schedule, (9, 1, 2 * n + 3), mqa, window=(6, None), e=12, sinks=True),
            Case(schedule, (9, 1, 2 * n + 3), gqa, window=(6, None), e=12, sinks=True, keep=True),
            Case(schedule, (9, 5, 7, 4, 6, 8), gqa, parents=(-1, 0, 1, 1, 0, 4), keep=schedule == "zigzag"),
            Case(schedule, (max(n - 1, 1),), mha),
            Case(schedule, (0,), mha),
        ]
        found += [Case(schedule, (16 * n + 5,), gqa, kernel="cpu", dtype=torch.bfloat16)]
        found += [Case(schedule, (16 * n,), gqa, causal=False, kernel="cpu", dtype=torch.float32)]
    return found


class Rank:
    """The work of one rank. Cases share attention objects, and so their buffers, as layers do."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank, self.n = rank, n
        self._attentions: dict[Any, ContextParallelAttention] = {}

    def attention(self, case: Case) -> ContextParallelAttention:
        key = case.schedule, case.kernel, case.keep
        if key not in self._attentions:
            self._attentions[key] = ContextParallelAttention(
                dist.group.WORLD,
                schedule=case.schedule,
                kernel=case.kernel,
                options=options(self.n),
                keep_received=case.keep,
            )
        return self._attentions[key]

    def shards(self, case: Case, layout: Layout) -> tuple[list[Tensor], Tensor]:
        *leaves, grad_out = (shard(x, layout, self.rank) for x in case.tensors())
        sink = case.sink()
        return [x.requires_grad_() for x in (*leaves, *(() if sink is None else (sink,)))], grad_out

    def call(self, case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
        attention = self.attention(case)
        leaves, grad_out = self.shards(case, attention.layout(case.mask))
        return leaves, attention(*leaves[:3], mask=case.mask, sink=(leaves[3:] or [None])[0]), grad_out

    def case(self, case: Case) -> dict[str, Tensor]:
        return gradients(*self.call(case))

    def in_flight(self, schedule: str, keep: bool | None) -> list[bool]:
        """Return whether calls are right whose backwards follow several forwards, in any order."""
        some = [
            Case(schedule, (4 * self.n + 3,), (2 * self.n, self.n), keep=keep),
            Case(schedule, (4 * self.n,), (2 * self.n, 2 * self.n), causal=False, batch=1, keep=keep),
            Case(schedule, (5, 4 * self.n), (2 * self.n, self.n), keep=keep),
        ]
        alone = [self.case(replace(case, keep=False)) for case in some]
        found = []
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            calls = [self.call(case) for case in some]
            for i in order:
                found.append(same(gradients(*calls[i]), alone[i]))
        return found

    def buffers(self, schedule: str) -> list[int]:
        """Return the buffers' bytes after each of four calls forward and backward, of these lengths."""
        self._attentions.clear()
        case, held = Case(schedule, (4 * self.n + 3,), (2 * self.n, self.n)), []
        for length in (4 * self.n + 3, 4 * self.n + 3, 2 * self.n, 8 * self.n + 6):
            self.case(replace(case, lengths=(length,)))
            (state,) = self.attention(case)._devices.values()
            held.append(state.pool.num_bytes)
        return held

    def gradients_of_all_kinds(self, schedule: str, keep: bool | None) -> dict[str, bool]:
        """Return what is right for expanded, strided and missing gradients, strided inputs and given results."""
        case = Case(schedule, (4 * self.n + 3,), (2 * self.n, self.n), sinks=True, keep=keep)
        attention = self.attention(case)
        (q, k, v, sink), grad_out = self.shards(case, attention.layout(case.mask))
        call = functools.partial(attention, mask=case.mask)
        plain = self.case(case)
        h, g = case.heads

        def leaves() -> list[Tensor]:
            return [x.detach().clone().requires_grad_() for x in (q, k, v, sink)]

        def found(work: Callable[..., Tensor], grad: Tensor = grad_out) -> dict[str, Tensor]:
            some = leaves()
            return gradients(some, work(*some[:3], sink=some[3]), grad)

        packed = torch.cat((q, k, v), dim=2).detach().requires_grad_()  # as a fused projection returns it
        from_packed = call(*packed.split((h, g, g), dim=2), sink=sink)
        (of_packed,) = torch.autograd.grad(from_packed, packed, grad_out)
        only_v = leaves()[2]
        (of_v,) = torch.autograd.grad(call(q.detach(), k.detach(), only_v, sink=sink.detach()), only_v, grad_out)
        again = self.call(case)
        torch.autograd.grad(again[1], again[0], grad_out, retain_graph=True)
        with torch.no_grad():
            without = call(*leaves()[:3], sink=sink)
        given = attention.forward(q, k, v, mask=case.mask, sink=sink)
        from_given = found(functools.partial(call, result=given))
        summed, ones = found(call, torch.ones(()).double().expand(grad_out.shape)), found(call, torch.ones_like(q))
        return {
            "a sum": same(summed, ones),
            "a strided gradient": same(found(call, grad_out.transpose(0, 2).contiguous().transpose(0, 2)), plain),
            "a given result": all(relative_error(from_given[name], x) < 1e-12 for name, x in plain.items()),
            "backward again": same(gradients(*again), plain),
            "packed inputs": torch.equal(of_packed, torch.cat([plain[name] for name in ("dq", "dk", "dv")], dim=2)),
            "packed output": torch.equal(from_packed.detach(), plain["out"]),
            "only one input": torch.equal(of_v, plain["dv"]),
            "no gradient": torch.equal(without, plain["out"]) and not without.requires_grad,
            "another scale": not q.numel() or not torch.equal(call(q, k, v, sink=sink, scale=0.1), plain["out"]),
            "the default scale": torch.equal(call(q, k, v, sink=sink, scale=8**-0.5), plain["out"]),
        }

    def saved(self, keep: bool | None) -> tuple[int, int]:
        """Return the bytes that autograd saves in a call of Ulysses, and those among them of the caller's tensors."""
        case = Case("ulysses", (64 * self.n,), (2 * self.n, 2 * self.n), batch=1, dtype=torch.float32, keep=keep)
        found: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            leaves, out, _ = self.call(case)
        own = {x.untyped_storage().data_ptr() for x in (*leaves, out)}
        return sum(found.values()), sum(size for pointer, size in found.items() if pointer in own)

    def int8(self, schedule: str) -> tuple[float, float, str]:
        """Return the errors of a call for inference and of one for training, and why gradients are refused."""
        attention = ContextParallelAttention(
            dist.group.WORLD, schedule=schedule, kernel="reference", kv_format=int8_kv, options=options(self.n)
        )
        mask, whole = causal(6 * self.n), random_qkv(6 * self.n, 2, self.n, self.n, 8, torch.float32)
        mine = [shard(x, attention.layout(mask), self.rank) for x in whole[:3]]
        exact = shard(dense_attention(*whole)["out"], attention.layout(mask), self.rank)
        errors = [
            relative_error(attention(*mine, mask=mask, inference=inference), exact) for inference in (True, False)
        ]
        try:
            attention(mine[0].requires_grad_(), *mine[1:], mask=mask, inference=True)
        except ValueError as error:
            return errors[0], errors[1], str(error)
        return errors[0], errors[1], "not refused"

    def after_its_group(self) -> tuple[bool, str]:
        """Whether a group ends when it is destroyed although its attention remains, and the error of a later call."""
        group = dist.new_group()
        attention, ended = ContextParallelAttention(group, kernel="reference"), weakref.ref(group)
        mask, whole = causal(4 * self.n), random_qkv(4 * self.n, 1, 2, 1, 8, torch.float32)
        q, k, v = (attention.shard(x, mask).requires_grad_() for x in whole[:3])
        attention(q, k, v, mask=mask).sum().backward()
        dist.destroy_process_group(group)
        del group
        try:
            attention(q, k, v, mask=mask)
        except RuntimeError as error:
            return ended() is None, str(error)
        return ended() is None, "no error"

    def wrong_refusals(self) -> list[str]:
        """Return what was expected of the error of wrong input, and the error that differs."""
        case = Case("zigzag", (4 * self.n + 3,), (4, 2))
        attention, sharing = self.attention(case), self.attention(replace(case, schedule="ulysses"))
        layout, longer = (attention.layout(4 * self.n + 3 + more) for more in (0, 2 * self.n))
        (q, k, v), _ = self.shards(case, layout)
        more, s = torch.cat((q, q[:1])), layout.num_tokens(self.rank)
        one_head = [x[:, :, :1] for x in self.shards(case, sharing.layout(case.mask))[0]]
        where = f"because rank {self.rank} of {self.n} holds {s} of {layout.length} tokens in the {layout.name} layout"
        wrong = []
        attention(q, k, v, mask=case.mask)  # later calls like it are known, and no others
        for text, call, change in (
            ("mask=[8, 8]: expected a Mask, or an int", attention, {"mask": [8, 8]}),
            ("sink=torch.float64 [3] on cpu: expected", attention, {"sink": q.new_zeros(3)}),
            (f"q has shape ({s + 1}, 2, 4, 8): expected [{s}, b, heads, d], {where}", attention,
             {"q": more, "k": more[:, :, :2], "v": more[:, :, :2]}),
            (f"expected [{longer.num_tokens(self.rank)}, b, heads, d]", attention, {"mask": longer.length}),
            (f"q has shape ({s}, 2, 4): expected [{s}, b, heads, d], {where}", attention, {"q": q[..., 0]}),
            (f"k ({s}, 2, 2, 8), v ({s}, 2, 1, 8): expected q [s, b, h, d]", attention, {"v": v[:, :, :1]}),
            (f"q ({s}, 2, 4, 8) and k ({s}, 1, 2, 8) differ in batch or head dim", attention,
             {"k": k[:, :1], "v": v[:, :1]}),
            ("3 query heads over 2 KV heads: expected a multiple of the KV heads", attention, {"q": q[:, :, :3]}),
            ("v torch.float32 on cpu; convert them to one", attention, {"v": v.float()}),
            ("query heads", sharing, dict(zip("qkv", one_head, strict=True))),
            ("kernel='cudnn' cannot be used here", self.attention(replace(case, kernel="cudnn")), {}),
        ):  # fmt: skip
            try:
                call(**{"q": q, "k": k, "v": v, "mask": case.mask, **change})
                wrong.append(f"{text}: not refused")
            except ValueError as error:
                wrong += [f"{text}: {error}"] if text not in str(error) else []
        return wrong


def gradients(leaves: list[Tensor], out: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dsink"), found, strict=False))}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def _run(number: int, n: int) -> dict[str, Any]:
    rank = Rank(number, n)
    found: dict[str, Any] = {"cases": [rank.case(case) for case in cases(n)]}
    found["again"] = [
        same(rank.case(case), found["cases"][i]) for i, case in enumerate(cases(n)) if case.kernel == "cpu"
    ]
    for schedule in FEW if n == 3 else ():  # what no number of ranks changes
        for keep in (False, True):
            found["in flight", schedule, keep] = rank.in_flight(schedule, keep)
            found["gradients", schedule, keep] = rank.gradients_of_all_kinds(schedule, keep)
    found["saved"] = [rank.saved(keep) for keep in (False, True, None)]
    found["int8"] = [rank.int8(schedule) for schedule in FEW]
    found["after its group"] = rank.after_its_group()
    found["refusals"] = rank.wrong_refusals()
    found["buffers"] = {schedule: rank.buffers(schedule) for schedule in MODES} if n == 3 else {}
    return found


@pytest.fixture(params=WORLDS, ids=lambda n: f"{n} ranks", scope="module")
def n(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(n: int) -> list[dict[str, Any]]:
    return run_distributed(_run, n, n)


@functools.cache
def truth(plain: Case) -> dict[str, Tensor]:
    return dense_attention(*plain.tensors(), seen=visible(**plain.documents), sink=plain.sink())


@functools.cache
def own(plain: Case) -> dict[str, Tensor]:
    """Compute it on one rank, in the same precision."""
    leaves = [x.requires_grad_() for x in plain.tensors()[:3]]
    out = ContextParallelAttention(kernel=plain.kernel)(*leaves, mask=plain.mask)
    return gradients(leaves, out, plain.tensors()[3])


def check(shards: list[dict[str, Tensor]], layout: Layout, case: Case) -> None:
    found = {name: unshard([s[name] for s in shards], layout) for name in shards[0] if name != "dsink"}
    if case.sinks:
        found["dsink"] = torch.stack([s["dsink"] for s in shards]).sum(0)
    expected = truth(case.plain)
    assert found.keys() == expected.keys()
    if case.dtype is not torch.float64:
        assert_as_good_as(found, own(case.plain), expected, case)
        return
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        for head in range(value.shape[-2] if value.ndim > 1 else 1):  # heads with large sinks are small
            part = (..., head, slice(None)) if value.ndim > 1 else ...
            assert relative_error(found[name][part], value[part]) < 1e-9, f"{case}: {name} of head {head}"


def test_every_mode_is_dense_attention(n: int, ranks: list[dict[str, Any]]) -> None:
    for i, case in enumerate(cases(n)):
        layout = build_plan(find_mode(case.schedule, n, options(n)), n, case.mask).queries
        check([found["cases"][i] for found in ranks], layout, case)


def test_runs_are_bit_equal(ranks: list[dict[str, Any]]) -> None:
    assert all(all(found["again"]) for found in ranks)


@pytest.mark.parametrize("n", [3], indirect=True)
@pytest.mark.parametrize("schedule", FEW)
def test_calls_in_flight_do_not_disturb_each_other(schedule: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for keep in (False, True):
            assert found["in flight", schedule, keep] == [True] * 9


@pytest.mark.parametrize("n", [3], indirect=True)
@pytest.mark.parametrize("schedule", MODES)
def test_buffers_are_reused_and_grow_only_for_more_tokens(schedule: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        first, second, shorter, longer = found["buffers"][schedule]
        assert first == second == shorter < longer


@pytest.mark.parametrize("n", [3], indirect=True)
@pytest.mark.parametrize("schedule", FEW)
def test_gradients_and_inputs_of_all_kinds(schedule: str, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        for keep in (False, True):
            wrong = [name for name, right in found["gradients", schedule, keep].items() if not right]
            assert not wrong, f"rank {rank}, keep={keep}"


def test_ulysses_keeps_received_blocks_instead_of_its_own(n: int, ranks: list[dict[str, Any]]) -> None:
    tensor, lse = 64 * 2 * n * 8 * 4, 64 * 2 * n * 4  # one of a rank's q, k, v, out
    for found in ranks:
        fetched, kept, auto = found["saved"]
        assert fetched == (4 * tensor + lse, 4 * tensor)
        assert kept == auto == (4 * tensor + lse, 0)


def test_keys_and_values_are_sent_in_8_bits_only_in_inference(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for rounded, trained, refused in found["int8"]:
            assert 1e-4 < rounded < 0.02 and trained < 1e-5
            assert "kv_format=given: expected none in a call with gradients" in refused


def test_a_group_ends_when_it_is_destroyed_although_its_attention_remains(ranks: list[dict[str, Any]]) -> None:
    """Otherwise gloo's threads run until Python has shut down, where one that frees a message aborts the process."""
    for ended, error in (found["after its group"] for found in ranks):
        assert ended and "the process group of this attention was destroyed" in error


def test_wrong_input_is_refused_on_every_rank(n: int, ranks: list[dict[str, Any]]) -> None:
    assert [found["refusals"] for found in ranks] == [[]] * n
