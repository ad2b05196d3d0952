"""Random masks in every mode on any number of ranks, in threads of one process, against dense attention.

`pytest tests/core/attention --hypothesis-profile=long` runs many more examples, and other ones every time.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_longctx.core.kernels import AttentionKernel, KernelRequest, choose_kernel
from megatron_longctx.core.kernels.interface import BlockInputs
from megatron_longctx.core.layout import LAYOUTS
from megatron_longctx.core.plans import (
    MODES,
    KernelCall,
    KernelSupport,
    Mask,
    ModeOptions,
    Plan,
    backward,
    build_plan,
    find_mode,
    keep_received,
    recorder,
    recording,
)
from megatron_longctx.core.plans.mask import Document, documents
from megatron_longctx.core.plans.modes import outer_modes
from megatron_longctx.core.plans.slices import FAR, Slice
from megatron_longctx.testing.references import dense_attention, random_qkv, visible
from megatron_longctx.testing.tolerances import relative_error
from megatron_longctx.testing.verify import verify
from tests.core.plans.masks import pairs_of
from tests.shared.plans import helper_plan, one_sided_plan, tangled_plan
from tests.shared.threads import Inputs, attend

LONG = settings.get_current_profile_name() == "long"
EXAMPLES = 3000 if LONG else 45

PACKED = KernelSupport(packed=True, rectangles=True, windows=True)
KERNELS = {
    "bands": None,
    "packed": PACKED,
    "rectangles": KernelSupport(rectangles=True, windows=True),
    "packed squares": KernelSupport(packed=True),
    "squares": KernelSupport(),
    "short": PACKED._replace(longest_causal=7),
}
"""The calls that a test kernel takes; None for this project's kernels, which take any."""


class Literal(AttentionKernel):
    """A kernel that refuses calls outside its `takes`, and reads only the rows of a call's segments."""

    def __init__(self, takes: KernelSupport) -> None:
        super().__init__()
        self.takes = takes

    def why_not(self, request: KernelRequest) -> None:
        return None

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        _, _, v, scores = self._scores(inputs)
        lse = scores.logsumexp(-1)
        probs = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        return (probs @ v).permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        q, k, v, scores = self._scores(inputs)
        grad, probs = grad_out.permute(1, 2, 0, 3), (scores - lse.permute(1, 2, 0)[..., None]).exp()
        dscores = probs * (grad @ v.mT - (grad * out.permute(1, 2, 0, 3)).sum(-1, True)) * inputs.scale
        shared = k.shape[0], inputs.k.shape[2], -1, *k.shape[2:3]  # sums over the query heads of each KV head
        dk, dv = (x.view(*shared, x.shape[-1]).sum(2).permute(2, 0, 1, 3) for x in (dscores.mT @ q, probs.mT @ grad))
        return (dscores @ k).permute(2, 0, 1, 3), dk, dv

    def _scores(self, inputs: BlockInputs) -> tuple[Tensor, ...]:
        """q, k, v `[b, h, s, d]` and scores `[b, h, s, t]`."""
        seen = _seen(inputs.call, self.takes, inputs.q.shape[0], inputs.k.shape[0])
        groups = inputs.q.shape[2] // inputs.k.shape[2]
        q, k, v = inputs.q, *(x.repeat_interleave(groups, 2) for x in (inputs.k, inputs.v))
        used = seen.any(1), seen.any(0), seen.any(0)
        q, k, v = (
            torch.where(u[:, None, None, None], x, 0).permute(1, 2, 0, 3) for u, x in zip(used, (q, k, v), strict=True)
        )
        return q, k, v, (q @ k.mT * inputs.scale).masked_fill(~seen, -torch.inf)


@functools.lru_cache(maxsize=4096)
def _seen(call: KernelCall, takes: KernelSupport, queries: int, keys: int) -> Tensor:
    """Return which queries of a call see which keys. Refuse a call that the kernel does not take."""
    assert takes.packed or len(call.segments) == 1
    assert call.right in (0, FAR) and call.left >= 0 and (call.left == FAR or takes.windows)
    spans, q_stop, k_stop = [(0, 0)] * queries, 0, 0
    for q0, q1, k0, k1 in call.segments:
        assert q_stop <= q0 < q1 <= queries and k_stop <= k0 < k1 <= keys, "ascending segments without overlap"
        q_stop, k_stop = q1, k1
        assert call.full or q1 - q0 == k1 - k0 or takes.rectangles
        assert call.right == FAR or q1 - q0 <= k1 - k0, "every query sees a key"
        for query in range(q0, q1):
            faced = query + k1 - q1
            spans[query] = max(k0, faced - call.left), min(k1, faced + call.right + 1)
    first, stop = torch.tensor(spans).T[:, :, None]
    key = torch.arange(keys)
    return (first <= key) & (key < stop)


@dataclass(frozen=True)
class Case:
    """One problem.

    doc_args: arguments of `documents`. over_peers: see `Target`. kernel: see
    `KERNELS`. sizes: heads, KV heads, head dims of keys and of values, batch. near: see `nearby`. layout: see
    `build_plan`.
    """

    n: int
    doc_args: dict[str, Any]
    options: ModeOptions
    sizes: tuple[int, int, int, int, int]
    sinks: tuple[float, ...]
    over_peers: bool
    kernel: str
    keep: bool
    near: bool
    layout: str


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of `documents` for up to 120 tokens."""
    count, longest = draw(st.sampled_from([(1, 120), (1, 24), (2, 50), (3, 40), (5, 24), (12, 10), (60, 2)]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    causal, before = (
        draw(st.sampled_from([True, True, True, False])),
        st.sampled_from([None, None, 0, 1, 3, 8, 31, 500]),
    )
    window = draw(before), draw(st.sampled_from([None, None, 0, 2, 500]))
    doc_args: dict[str, Any] = {"lengths": lengths, "causal": causal, "window": window}
    kind = draw(st.sampled_from(["plain", "plain", "prefixes", "tree", "chain", "both"][: None if count < 60 else 3]))
    if kind in ("prefixes", "both") and causal:
        doc_args["prefixes"] = [draw(st.integers(0, length)) for length in lengths]
    if kind in ("tree", "both"):
        doc_args["parents"] = [draw(st.integers(-1, number - 1)) for number in range(count)]
    if kind == "chain":  # without `causal`, block-causal
        doc_args["parents"] = [number - 1 for number in range(count)]
    return doc_args


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    n, doc_args = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8])), draw(masks())
    inner = draw(st.sampled_from([None, *(k for k in range(1, n + 1) if n % k == 0)]))
    options = ModeOptions(
        max_buffer_tokens=draw(st.sampled_from([None, None, 2, 8, 31])),
        inner_size=inner,
        outer_schedule=draw(st.sampled_from(outer_modes())),
        rounds=draw(st.sampled_from([None, 1, 5])),
    )
    parts = {"ulysses": n, "usp": options.resolve_inner_size(n)}.get(name, 1)
    g = draw(st.sampled_from([parts, 2 * parts if parts < 5 else parts, 1]))
    h = draw(st.sampled_from([1, 2, 3] if max(g, parts) < 5 else [1])) * max(g, parts)
    kernel = draw(st.sampled_from(["packed", "bands", *KERNELS]))
    d, e = draw(st.sampled_from([(4, 4), (4, 4), (6, 4), (4, 12)]))
    if doc_args["window"] != (None, None) and kernel.endswith("squares"):
        kernel = "rectangles"  # squares take no windows
    return Case(
        n, doc_args, options, (h, g, d, e, draw(st.sampled_from([1, 2]))),
        sinks=draw(st.sampled_from([(), (3.0, -9.0, 0.0, 12.0)])),
        over_peers=draw(st.booleans()),
        kernel=kernel,
        keep=draw(st.booleans()),
        near=draw(st.booleans()),
        layout=draw(st.sampled_from(["auto", *LAYOUTS] if MODES[name].takes_any_layout else ["auto"])),
    )  # fmt: skip


@contextmanager
def nearby(few: int | None) -> Iterator[None]:
    """Apply from `few` rows on what otherwise applies from thousands of rows on, to test it on small problems."""
    with ExitStack() as stack:
        for module, limit in ((recorder, "LONG_RUN"), (recording, "_GAP"), (backward, "LEAST_TOKENS")) if few else ():
            stack.enter_context(mock.patch.object(module, limit, few))
        yield


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    """Let torch fill new memory with NaN, to detect reads of memory that was not written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", MODES)
def test_every_mode_is_dense_attention_of_the_mask(name: str) -> None:
    @settings(max_examples=EXAMPLES, derandomize=not LONG, deadline=None, database=None)
    @given(cases(name))
    def check(case: Case) -> None:
        check_case(name, case)

    check()


def check_case(name: str, case: Case) -> None:
    mask = documents(**case.doc_args)
    h, g, d, e, batch = case.sizes
    whole = random_qkv(mask.length, batch, h, g, d, torch.float64, seed=mask.length, e=e)
    sink = torch.tensor([case.sinks[i % len(case.sinks)] for i in range(h)]).double() if case.sinks else None
    expected = dense_attention(*whole, scale=0.4, seen=visible(**case.doc_args), sink=sink)
    mode = find_mode(name, case.n, case.options)
    mode.check_heads(case.n, h, g)
    with nearby(4 if case.near else None):
        plan = build_plan(mode, case.n, mask, layout=case.layout)
        plan = keep_received(plan) if case.keep else plan
        wants = [x.requires_grad_() for x in whole[:3]]
        inputs = Inputs(*wants, whole[3], None if sink is None else sink.requires_grad_())
        takes = KERNELS[case.kernel]
        request = KernelRequest("cpu", torch.float64, d, h, g, v_head_dim=e)

        def kernel() -> AttentionKernel:
            return choose_kernel("auto", request) if takes is None else Literal(takes)

        found = attend(plan, inputs, 0.4, kernel, case.over_peers)
    assert found.keys() == expected.keys()
    for key, truth in expected.items():
        for head in range(truth.shape[-2] if truth.ndim > 1 else 1):  # heads with large sinks are small
            part = (..., head, slice(None)) if truth.ndim > 1 else ...
            error = relative_error(found[key][part], truth[part])
            note(f"{key} of head {head} is {error} off")
            assert error < 1e-9


# As in MagiAttention's tests: ranges with overlapping queries, each between two diagonals; and consecutive ones, full,
# causal, inverse causal and bi-causal. `documents` makes no such masks.
SLICES = {
    "overlapping queries": [
        (0, 64, 0, 96, 0, 32), (0, 64, 128, 160, 96, 128), (64, 160, 64, 128, -64, -16),
        (64, 160, 160, 210, 16, 75), (160, 210, 0, 50, -160, -160), (160, 210, 160, 210, -16, 0),
    ],
    "consecutive": [
        (0, 50, 0, 50, -FAR, FAR), (50, 105, 50, 105, -FAR, 0), (105, 160, 105, 160, 0, FAR),
        (160, 240, 100, 210, -60, -30),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("name", MODES)
def test_masks_of_any_slices(name: str, kind: str) -> None:
    slices = tuple(found for each in SLICES[kind] if (found := Slice(*each).tight()))
    length = slices[-1].q_stop
    mask = Mask(length, slices, (Document(0, length, 0),))
    whole = random_qkv(length, 1, 4, 4, 8, torch.float64)
    seen = torch.from_numpy(pairs_of(slices, length, length) > 0)
    expected = dense_attention(*whole, seen=seen)
    inputs = Inputs(*(x.requires_grad_() for x in whole[:3]), whole[3])
    request = KernelRequest("cpu", torch.float64, 8, 4, 4, windows=True)
    kernel = functools.partial(choose_kernel, "auto", request)  # some queries see nothing
    found = attend(build_plan(name, 4, mask, ModeOptions()), inputs, 8**-0.5, kernel)
    assert all(relative_error(found[key], truth) < 1e-11 for key, truth in expected.items())


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize(
    "plan", [helper_plan(2, 37), helper_plan(3, 35), one_sided_plan(10), tangled_plan(36)], ids=lambda plan: plan.name
)
def test_plans_that_send_queries_and_results(plan: Plan, peers: bool) -> None:
    """They use kinds of moves that no mode uses yet."""
    verify(plan)
    whole = random_qkv(plan.mask.length, 2, 4, 2, 8, torch.float64, e=12)
    sink = torch.tensor([8.0, -3.0, 0.0, 12.0], dtype=torch.float64)
    expected = dense_attention(*whole, causal=plan.name != "one-sided", sink=sink)
    inputs = Inputs(*(x.requires_grad_() for x in whole[:3]), whole[3], sink.requires_grad_())
    for each in (plan, keep_received(plan)):
        found = attend(each, inputs, 8**-0.5, lambda: Literal(PACKED), peers)
        assert found.keys() == expected.keys()
        assert all(relative_error(found[key], truth) < 1e-11 for key, truth in expected.items())


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_results_are_the_same_without_overlap(name: str, peers: bool) -> None:
    plan = build_plan(name, 4, documents([41, 23], window=(30, 0)), ModeOptions(inner_size=2))
    whole = random_qkv(64, 1, 8, 4, 8, torch.float32)
    inputs = Inputs(*(x.requires_grad_() for x in whole[:3]), whole[3])
    found, other = (
        attend(plan, inputs, 8**-0.5, lambda: Literal(PACKED), peers, overlap=overlap) for overlap in (True, False)
    )
    assert all(torch.equal(found[key], other[key]) for key in ("out", "dq", "dk", "dv"))
