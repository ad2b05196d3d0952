"""The first call of a run compiles the kernels of all later calls."""

import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.function import Passes, call_kinds, shapes_of
from megatron_longctx.core.kernels import PROVIDERS, CallKind
from megatron_longctx.core.kernels.interface import BlockInputs
from megatron_longctx.core.kernels.packed import Segments
from megatron_longctx.core.kernels.providers.fa4 import Fa4Kernel
from megatron_longctx.core.plans import MODES, ModeOptions, Target, build_plan, keep_received
from megatron_longctx.core.plans.mask import Window, documents
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.testing.references import random_qkv
from tests.core.kernels.packed_stand_ins import RowsKernel

LENGTH, PLAIN, NEAR = 192, (None, None), (17, 0)
Seen = set[tuple[str, CallKind, tuple[int, int]]]


class Compiled(RowsKernel):
    """A kernel that records the kinds of calls, passes and heads for which it would be compiled."""

    compiles: ClassVar[bool] = True
    seen: ClassVar[Seen] = set()

    def _note(self, what: str, inputs: BlockInputs, packed: Segments | None) -> None:
        alone = packed is None
        kind = CallKind.of(inputs.call, (inputs.q.shape[alone], inputs.k.shape[alone]))
        assert kind.packed is not alone
        self.seen.add((what, kind, (inputs.q.shape[-2], inputs.k.shape[-2])))

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("forward", inputs, packed)
        return super()._forward_rows(inputs, packed)

    def _backward_rows(self, inputs: BlockInputs, packed: Segments | None, *given: Any) -> tuple[torch.Tensor, ...]:
        self._note("backward", inputs, packed)
        return super()._backward_rows(inputs, packed, *given)


@pytest.mark.parametrize("windows", [{PLAIN}, {PLAIN, NEAR}])
def test_the_first_call_compiles_the_kinds_of_all_packs(windows: set[Window], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "compiled", Compiled)
    monkeypatch.setattr(Compiled, "seen", set())
    attention = ContextParallelAttention(kernel="compiled")
    sequence = ShardedSequence(attention, LENGTH)
    sequence.windows |= windows
    sequence.announce(packs=True)
    q, k, v, grad = random_qkv(LENGTH, 1, 4, 2, 8, torch.float32)
    attention.forward(q, k, v, mask=documents([64] * 3))
    first = set(Compiled.seen)
    causal = {CallKind(packed, False, True) for packed in (False, True)}
    near = {CallKind(packed, True, True) for packed in (False, True)} if NEAR in windows else set()
    assert first == {(what, kind, (4, 2)) for what in ("forward", "backward") for kind in causal | near}
    for lengths in ([LENGTH], [100, 92], [2] * (LENGTH // 2)):
        for window in windows:
            out = attention(q.requires_grad_(), k, v, mask=documents(lengths, window=window))
            torch.autograd.grad(out, q, grad)
    assert Compiled.seen == first


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_packs_over_ranks_need_no_other_kinds(name: str, keep: bool) -> None:
    n, draw = 4, random.Random(0)
    q, k, v, _ = random_qkv(LENGTH // n, 1, 8, 4, 32, torch.bfloat16)
    shapes, runtime = shapes_of(q, k, v), SimpleNamespace(kernel=Fa4Kernel())

    def of(lengths: list[int], rank: int, window: Window, varied: bool) -> set[Any]:
        plan = build_plan(name, n, documents(lengths, window=window), ModeOptions())
        plan = keep_received(plan) if keep else plan
        return call_kinds(Passes(plan, Target(shapes.workload, Fa4Kernel.takes), rank, shapes, runtime), varied)  # type: ignore[arg-type]

    for window in (PLAIN, NEAR):
        warm = of([LENGTH], 1, window, True) | of([LENGTH // 16] * 16, 1, window, True)
        plain = of([LENGTH], 1, window, False)
        assert plain <= warm and {each.backward for each in plain} == {False, True}
        for _ in range(20):
            cuts = sorted(draw.sample(range(1, LENGTH), draw.randrange(0, 12)))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
            for rank in range(n):
                assert of(lengths, rank, window, False) <= warm, (lengths, rank, window)


def test_long_documents_on_one_rank_need_no_other_kinds() -> None:
    """Deterministic backward passes cut them into blocks, some of them full."""
    kernel = Fa4Kernel(deterministic=True)
    q, k, v, _ = (torch.empty(LENGTH, 1, heads, 32, device="meta") for heads in (4, 2, 2, 4))
    shapes, runtime = shapes_of(q, k, v), SimpleNamespace(kernel=kernel)

    def of(lengths: list[int], varied: bool) -> set[Any]:
        plan = build_plan("zigzag", 1, documents(lengths))
        return call_kinds(Passes(plan, Target(shapes.workload, kernel.takes), 0, shapes, runtime), varied)  # type: ignore[arg-type]

    long = of([50_000, 100, 70_000], False)
    assert {each.kind.right for each in long if each.backward} == {True, False}
    assert long <= of([100] * 10, True)
