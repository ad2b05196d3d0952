"""Sharded attention against dense attention in fp64, by every schedule, on up to 8 ranks over gloo.

One set of processes for each number of ranks runs all its cases; the comparison happens here, so that a wrong result
on one rank leaves no other waiting.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.context_parallel import Attend
from megatron_longctx.attention.engine import Engine
from megatron_longctx.attention.program import programs
from megatron_longctx.comm import BufferPool, P2PTransport
from megatron_longctx.kernels import KernelRequest, choose
from megatron_longctx.layout import build_layout
from megatron_longctx.schedules import SCHEDULES, Plan, PlanOptions, verify
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.plans import helper_plan, one_sided_plan, tangled_plan
from megatron_longctx.testing.references import dense_attention, kernel_attention, random_qkv, shard, unshard
from megatron_longctx.testing.tolerances import assert_as_good_as, relative_error

# Modes that share heads among ranks have tests of their own: not every number of ranks fits them.
WHOLE_HEADS = tuple(name for name, mode in SCHEDULES.items() if not mode.splits_heads)

WORLDS = (1, 2, 3, 4, 5, 6, 8)
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (3, 1)}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    schedule: str
    length: int
    causal: bool
    heads: str = "GQA"
    b: int = 2
    kernel: str = "reference"
    dtype: torch.dtype = torch.float64
    bound: int | None = None

    @property
    def plain(self) -> Case:
        """The same problem, whatever the schedule."""
        return replace(self, schedule="", bound=None)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, g = HEADS[self.heads]
        return random_qkv(self.length, self.b, h, g, 8, self.dtype, seed=self.length)


def lengths(n: int) -> tuple[int, ...]:
    """Divides into 2n pieces; does not; fewer tokens than ranks."""
    return 4 * n, 4 * n + 3, max(n - 1, 1)


def exact_cases(n: int) -> list[Case]:
    """Every mode, length and mask, with each kind of heads and batch (n=2), each kind once, or the kinds by turns."""
    some = [("MHA", 1), ("GQA", 2), ("MQA", 2)]
    cases = []
    for schedule in WHOLE_HEADS:
        for i, (length, causal) in enumerate(product(lengths(n), (True, False))):
            kinds = list(product(HEADS, (1, 2))) if n == 2 else some if n in (3, 4, 8) else some[i % 3 :][:1]
            cases += [Case(schedule, length, causal, heads, b) for heads, b in kinds]
    cases += [Case("all_gather", 4 * n + 3, causal, bound=bound) for causal in (True, False) for bound in (2, 6)]
    return cases + [Case(schedule, 0, True) for schedule in WHOLE_HEADS]


def rounded_cases(n: int) -> list[Case]:
    return [
        Case(schedule, length, causal, "GQA", 2, "cpu", dtype)
        for schedule, length, causal, dtype in product(
            WHOLE_HEADS, (16 * n, 16 * n + 5, max(n - 1, 1)), (True, False), (torch.float32, torch.bfloat16)
        )
    ]


def attend(attention: Any, case: Case, rank: int) -> dict[str, Tensor]:
    """This rank's shards of out, dq, dk, dv."""
    layout = attention.layout(case.length)
    *leaves, grad_out = (shard(x, layout, rank) for x in case.tensors())
    q, k, v = (x.requires_grad_() for x in leaves)
    out = attention(q, k, v, length=case.length, causal=case.causal)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


class Ranks:
    """What one rank does in one spawn. Attention objects are kept: cases share buffers, as layers do."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank, self.n = rank, n
        self._made: dict[Any, ContextParallelAttention] = {}

    def attention(self, case: Case) -> ContextParallelAttention:
        key = (case.schedule, case.kernel, case.bound)
        if key not in self._made:
            self._made[key] = ContextParallelAttention(
                dist.group.WORLD, schedule=case.schedule, kernel=case.kernel, options=PlanOptions(case.bound)
            )
        return self._made[key]

    def case(self, case: Case) -> dict[str, Tensor]:
        return attend(self.attention(case), case, self.rank)

    def by_hand(self, plan: Plan, case: Case) -> dict[str, Tensor]:
        """A plan that is no mode of `SCHEDULES`, through the executor's own parts."""
        h, g = HEADS[case.heads]
        kernel = choose(case.kernel, KernelRequest("cpu", case.dtype, 8, h, g))
        engine = Engine(kernel, P2PTransport(dist.group.WORLD, CPU), BufferPool(CPU))
        *leaves, grad_out = (shard(x, plan.layout, self.rank) for x in case.tensors())
        q, k, v = (x.requires_grad_() for x in leaves)
        out = Attend.apply(q, k, v, programs(plan, self.rank), engine, 8**-0.5)
        # A gradient with strides of its own, which messages cannot take as it lies.
        strided = grad_out.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), strided)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    def in_flight(self, schedule: str) -> dict[str, bool]:
        """Several calls before their backwards, which come in any order; layer upon layer."""
        first = Case(schedule, 4 * self.n + 3, True)
        second = Case(schedule, 4 * self.n, False, "MHA", 1)
        attention = self.attention(first)
        alone = [self.case(case) for case in (first, second)]
        found = {}
        for order in ((0, 1), (1, 0)):
            calls = []
            for case in (first, second):
                layout = attention.layout(case.length)
                *leaves, grad_out = (shard(x, layout, self.rank) for x in case.tensors())
                leaves = [x.requires_grad_() for x in leaves]
                out = attention(*leaves, length=case.length, causal=case.causal)
                calls.append((leaves, out, grad_out))
            for i in order:
                leaves, out, grad_out = calls[i]
                grads = torch.autograd.grad(out, leaves, grad_out)
                same = [torch.equal(out, alone[i]["out"])]
                same += [torch.equal(x, alone[i][name]) for x, name in zip(grads, ("dq", "dk", "dv"), strict=True)]
                found[f"call {i} of order {order}"] = all(same)
        return found

    def stacked(self, schedule: str) -> dict[str, Tensor]:
        """Two layers: the queries of the second are the output of the first."""
        case = Case(schedule, 4 * self.n + 3, True)
        attention = self.attention(case)
        *leaves, grad_out = (shard(x, attention.layout(case.length), self.rank) for x in case.tensors())
        q, k, v = (x.requires_grad_() for x in leaves)
        hidden = attention(q, k, v, length=case.length)
        out = attention(hidden, v, k, length=case.length)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    def reuse(self, schedule: str) -> dict[str, int]:
        """Bytes held by buffers after one call forward and backward, after more, and after a longer sequence."""
        attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, kernel="reference")
        case = Case(schedule, 4 * self.n + 3, True)
        held = {}
        for name in ("first", "second", "third"):
            attend(attention, case, self.rank)
            ((_, pool),) = attention._links.values()
            held[name] = pool.num_bytes
        attend(attention, replace(case, length=2 * self.n), self.rank)
        held["shorter"] = pool.num_bytes
        attend(attention, replace(case, length=8 * self.n + 6), self.rank)
        held["longer"] = pool.num_bytes
        return held

    def repeats(self, schedule: str) -> bool:
        """Bit-equal results from run to run."""
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(schedule, 16 * self.n + 5, True, "GQA", 2, "cpu", dtype)
            first, second = self.case(case), self.case(case)
            if not all(torch.equal(first[name], second[name]) for name in first):
                return False
        return True

    def gradients_of_all_kinds(self, schedule: str) -> dict[str, bool]:
        """Expanded, strided and missing gradients; strided inputs; no gradient at all."""
        case = Case(schedule, 4 * self.n + 3, True)
        attention = self.attention(case)
        q, k, v, grad_out = (shard(x, attention.layout(case.length), self.rank) for x in case.tensors())
        call = functools.partial(attention, length=case.length)
        plain = attend(attention, case, self.rank)

        def leaves() -> list[Tensor]:
            return [x.clone().requires_grad_() for x in (q, k, v)]

        summed = leaves()
        call(*summed).sum().backward()
        ones = leaves()
        call(*ones).backward(torch.ones_like(q))
        strided = leaves()
        call(*strided).backward(grad_out.transpose(0, 2).contiguous().transpose(0, 2))
        packed = torch.cat((q, k, v), dim=2).requires_grad_()  # one tensor, as a fused projection gives it
        h, g = q.shape[2], k.shape[2]
        from_packed = call(*packed.split((h, g, g), dim=2))
        from_packed.backward(grad_out)
        given = leaves()
        call(*given, result=attention.forward(q, k, v, length=case.length)).backward(grad_out)
        only_v = [q.clone(), k.clone(), v.clone().requires_grad_()]
        call(*only_v).backward(grad_out)
        with torch.no_grad():
            without = call(*leaves())
        plain_grads = [plain[name] for name in ("dq", "dk", "dv")]
        assert packed.grad is not None
        return {
            "a sum": all(torch.equal(x.grad, y.grad) for x, y in zip(summed, ones, strict=True)),
            "a strided gradient": all(torch.equal(x.grad, y) for x, y in zip(strided, plain_grads, strict=True)),
            "a given result": all(torch.equal(x.grad, y) for x, y in zip(given, plain_grads, strict=True)),
            "packed inputs": torch.equal(packed.grad, torch.cat(plain_grads, dim=2)),
            "packed output": torch.equal(from_packed, plain["out"]),
            "only one input": torch.equal(only_v[2].grad, plain["dv"]) and only_v[0].grad is None,
            "no gradient": torch.equal(without, plain["out"]) and not without.requires_grad,
            "a second scale": not q.numel() or not torch.equal(call(q, k, v, scale=0.1), plain["out"]),
            "the default scale": torch.equal(call(q, k, v, scale=8**-0.5), plain["out"]),
        }

    def refusals(self, schedule: str) -> dict[str, str]:
        case = Case(schedule, 4 * self.n + 3, True)
        attention = self.attention(case)
        q, k, v, _ = (shard(x, attention.layout(case.length), self.rank) for x in case.tensors())
        more = torch.cat((q, q[:1]))

        def refused(**change: Any) -> str:
            try:
                attention(**{"q": q, "k": k, "v": v, "length": case.length, **change})
            except ValueError as error:
                return str(error)
            return "not refused"

        other = ContextParallelAttention(dist.group.WORLD, schedule=schedule, kernel="cudnn")
        try:
            other(q, k, v, length=case.length)
            kernel = "not refused"
        except ValueError as error:
            kernel = str(error)
        return {
            "one token too many": refused(q=more, k=more[:, :, :2], v=more[:, :, :2]),
            "another length": refused(length=case.length + 2 * self.n),
            "too few dimensions": refused(q=q[..., 0]),
            "keys and values differ": refused(v=v[..., :4]),
            "batches differ": refused(k=k[:, :1], v=v[:, :1]),
            "heads do not divide": refused(q=q[:, :, :3]),
            "negative length": refused(length=-1),
            "kernel": kernel,
        }


def _run(rank: int, n: int) -> dict[str, Any]:
    ranks = Ranks(rank, n)
    found: dict[str, Any] = {"cases": {case: ranks.case(case) for case in (*exact_cases(n), *rounded_cases(n))}}
    found["by hand"] = {key: ranks.by_hand(*key) for key in hand_made(n)}
    for schedule in WHOLE_HEADS:
        for name in ("in_flight", "stacked", "reuse", "repeats", "gradients_of_all_kinds", "refusals"):
            found[name, schedule] = getattr(ranks, name)(schedule)
    return found


def hand_made(n: int) -> list[tuple[Plan, Case]]:
    plans = {
        2: [helper_plan(2, 8), helper_plan(2, 37), one_sided_plan(10)],
        3: [helper_plan(3, 35), tangled_plan(12), tangled_plan(36)],
    }
    return [
        (plan, Case("", plan.layout.length, plan.causal, heads, 2, kernel, dtype))
        for plan in plans.get(n, [])
        for heads in HEADS
        for kernel, dtype in (("reference", torch.float64), ("cpu", torch.float32), ("cpu", torch.bfloat16))
    ]


@functools.cache
def _attempt(n: int) -> list[dict[str, Any]] | Exception:
    try:
        return run_distributed(_run, n, n)
    except Exception as error:
        return error


def results(n: int) -> list[dict[str, Any]]:
    """What every rank of `n` found, by rank; run once, also when it fails."""
    found = _attempt(n)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def truth(plain: Case) -> dict[str, Tensor]:
    return dense_attention(*plain.tensors(), plain.causal)


@functools.cache
def own(plain: Case) -> dict[str, Tensor]:
    h, g = HEADS[plain.heads]
    kernel = choose(plain.kernel, KernelRequest("cpu", plain.dtype, 8, h, g))
    return kernel_attention(kernel, *plain.tensors(), plain.causal)


def check(shards: list[dict[str, Tensor]], layout: Any, case: Case) -> None:
    found = {name: unshard([s[name] for s in shards], layout) for name in shards[0]}
    expected = truth(case.plain)
    if case.dtype is not torch.float64:
        assert_as_good_as(found, own(case.plain), expected, case)
        return
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        assert relative_error(found[name], value) < 1e-12, f"{case}: {name}"


@pytest.fixture(params=WORLDS, ids=lambda n: f"{n} ranks", scope="module")
def n(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_exact_in_fp64(n, schedule):
    cases = [case for case in exact_cases(n) if case.schedule == schedule]
    assert len(cases) >= 6
    assert {case.heads for case in cases} == set(HEADS)
    for case in cases:
        layout = build_layout(SCHEDULES[schedule].layout, n, case.length)
        check([found["cases"][case] for found in results(n)], layout, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_as_good_as_one_device(n, schedule, dtype):
    cases = [case for case in rounded_cases(n) if (case.schedule, case.dtype) == (schedule, dtype)]
    assert len(cases) == 6
    for case in cases:
        layout = build_layout(SCHEDULES[schedule].layout, n, case.length)
        check([found["cases"][case] for found in results(n)], layout, case)


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n} ranks", indirect=True, scope="module")
def test_plans_in_which_queries_and_results_travel(n):
    for plan, case in hand_made(n):
        verify(plan)
        check([found["by hand"][plan, case] for found in results(n)], plan.layout, case)


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_calls_in_flight_do_not_disturb_each_other(n, schedule):
    for rank, found in enumerate(results(n)):
        answers = found["in_flight", schedule]
        assert len(answers) == 4
        assert all(answers.values()), f"rank {rank}: {answers}"


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_two_layers(n, schedule):
    case = Case(schedule, 4 * n + 3, True)
    leaves = [x.requires_grad_() for x in case.tensors()[:3]]
    q, k, v = leaves

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3)

    out = dense(dense(q, k, v), v, k)
    grads = torch.autograd.grad(out, leaves, case.tensors()[3])
    layout = build_layout(SCHEDULES[schedule].layout, n, case.length)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
        found = unshard([found["stacked", schedule][name] for found in results(n)], layout)
        assert relative_error(found, expected) < 1e-12, name


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_buffers_are_reused(n, schedule):
    for found in results(n):
        held = found["reuse", schedule]
        assert held["first"] == held["second"] == held["third"] == held["shorter"]
        assert held["longer"] > held["first"] if n > 1 else held["longer"] == 0


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_runs_are_bit_equal(n, schedule):
    assert all(found["repeats", schedule] for found in results(n))


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_gradients_and_inputs_of_all_kinds(n, schedule):
    for rank, found in enumerate(results(n)):
        wrong = [name for name, right in found["gradients_of_all_kinds", schedule].items() if not right]
        assert not wrong, f"rank {rank}"


@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_wrong_input_is_refused_on_every_rank(n, schedule):
    length = 4 * n + 3
    layout = build_layout(SCHEDULES[schedule].layout, n, length)
    longer = build_layout(SCHEDULES[schedule].layout, n, length + 2 * n)
    for rank, found in enumerate(results(n)):
        messages = found["refusals", schedule]
        s = layout.num_tokens(rank)
        where = f"since rank {rank} of {n} holds {s} of {length} tokens in the {layout.name} layout"
        expected = {
            "one token too many": f"q has shape ({s + 1}, 2, 4, 8): expected [{s}, b, heads, d], {where}",
            "another length": f"expected [{longer.num_tokens(rank)}, b, heads, d]",
            "too few dimensions": f"q has shape ({s}, 2, 4): expected [{s}, b, heads, d], {where}",
            "keys and values differ": f"k ({s}, 2, 2, 8), v ({s}, 2, 2, 4): expected equal batch and head dimension",
            "batches differ": f"q ({s}, 2, 4, 8), k ({s}, 1, 2, 8)",
            "heads do not divide": f"q ({s}, 2, 3, 8), k ({s}, 2, 2, 8)",
            "negative length": "length=-1: expected 0 tokens or more",
            "kernel": "kernel='cudnn' cannot be used here",
        }
        assert messages.keys() == expected.keys()
        for name, text in expected.items():
            assert text in messages[name], f"rank {rank}: {name}: {messages[name]}"


def test_one_rank_needs_no_process_group():
    attention = ContextParallelAttention(schedule="zigzag", kernel="reference")
    assert (attention.rank, attention.world) == (0, 1)
    for case in (Case("zigzag", 7, True), Case("zigzag", 7, False, "MQA"), Case("zigzag", 0, True)):
        check([attend(attention, case, 0)], attention.layout(case.length), case)
    ((transport, pool),) = attention._links.values()
    assert transport is None and pool.num_bytes == 0


def test_one_rank_computes_what_its_kernel_computes():
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("zigzag", 33, True, "GQA", 2, "cpu", dtype)
        found = attend(ContextParallelAttention(kernel="cpu"), case, 0)
        assert all(torch.equal(found[name], value) for name, value in own(case.plain).items())


def test_settings_reach_the_plan():
    attention = ContextParallelAttention(schedule="all_gather", options=PlanOptions(6, unit=2))
    assert attention.plan(8).name == "all_gather" and attention.plan(8, False).causal is False
    with pytest.raises(ValueError, match="length=7: expected a multiple of unit=2"):
        attention.layout(7)
    with pytest.raises(ValueError, match="schedule 'spiral': expected one of ring"):
        ContextParallelAttention(schedule="spiral")
    with pytest.raises(ValueError, match="kernel='warp' is unknown"):
        ContextParallelAttention(kernel="warp")(*random_qkv(4, 1, 2, 1, 8, torch.float32)[:3], length=4)
