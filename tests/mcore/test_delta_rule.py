"""Linear recurrences over ranks: outputs and gradients are those of the definition, whatever ranks hold."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore.delta_kernels import gated_delta_rule
from megatron_longctx.mcore.pack import Pack
from megatron_longctx.models.delta_rule import Place, chunked, convolved, finish, section

BATCH, HEADS, KEY, VALUE, TAPS = 2, 3, 8, 5, 4


def _inputs(tokens: int, kind: str) -> list[Tensor]:
    """Return q, k, v, g, and for delta rules beta. Decays of channels are between 1 and exp(-20) a token."""
    dtype = torch.float64
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(BATCH, tokens, HEADS, size, dtype=dtype) for size in (KEY, KEY, VALUE))
    g, beta = -torch.rand(BATCH, tokens, HEADS, dtype=dtype), torch.rand(BATCH, tokens, HEADS, dtype=dtype)
    if kind == "channels":
        g = -20 * torch.rand(BATCH, tokens, HEADS, KEY, dtype=dtype) ** 4
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [x.requires_grad_() for x in (q * KEY**-0.5, k, v, g, beta)[: 4 if kind == "state space" else None]]


def _recurrence(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor) -> Tensor:
    """Compute a recurrence token by token, as the formulas in the module's docstring say."""
    outputs, begins = [], {0, *accumulate(lengths)}
    for i in range(q.shape[1]):
        if i in begins:
            state = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=q.dtype)
        state = g[:, i].view(BATCH, HEADS, -1, 1).exp() * state
        added = v[:, i]
        for strength in beta:
            added = strength[:, i, :, None] * (added - torch.einsum("bhkv,bhk->bhv", state, k[:, i]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], added)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(outputs, dim=1)


def _over_ranks(inputs: Sequence[Tensor], lengths: Sequence[int], sizes: Sequence[int]) -> Tensor:
    documents, bounds = [0, *accumulate(lengths)][:-1], [0, *accumulate(sizes)]
    places = [Place(documents, bounds, rank) for rank in range(len(sizes))]
    owns = [
        section(where.lengths, where.continues, chunked, *(x[:, first:stop] for x in inputs))
        for where, (first, stop) in zip(places, pairwise(bounds), strict=True)
    ]
    for own, where in zip(owns, places, strict=True):
        assert len(where.lengths) < 2 or not own.last[..., VALUE:].any(), "no state passes the end of a document"
    lasts = torch.stack([own.last for own in owns])
    return torch.cat(
        [finish(own, lasts, where.first_rank, where.rank) for own, where in zip(owns, places, strict=True)], dim=1
    )


CASES = {
    "one rank": ([150], [150]),
    "one rank, documents": ([1, 1, 70, 63, 64, 1], [200]),
    "a document over all ranks": ([150], [50, 70, 30]),
    "empty ranks": ([3, 90], [0, 40, 0, 0, 53, 0]),
    "documents of one token": ([1, 1, 1, 80, 1, 1, 30, 1], [2, 2, 30, 60, 21, 1]),
    "ends at ends": ([40, 40, 40], [40, 40, 40]),
    "fewer tokens than taps": ([9, 2], [1, 1, 1, 2, 3, 3]),
}


@pytest.mark.parametrize("kind", ["delta rule", "channels", "state space"])
@pytest.mark.parametrize("case", CASES)
def test_sections_compute_what_the_recurrence_does(case: str, kind: str) -> None:
    lengths, sizes = CASES[case]
    inputs = _inputs(sum(lengths), kind)
    grad = torch.randn(BATCH, sum(lengths), HEADS, VALUE, dtype=torch.float64)
    expected, found = _recurrence(lengths, *inputs), _over_ranks(inputs, lengths, sizes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_places_say_between_which_ranks_a_document_goes_on(case: str) -> None:
    lengths, sizes = CASES[case]
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    bounds = [0, *accumulate(sizes)]
    for rank, (first, stop) in enumerate(pairwise(bounds)):
        place = Place([0, *accumulate(lengths)][:-1], bounds, rank)
        assert place.whole == all(sizes)
        if first < stop:
            before = [token for token in range(first) if document[token] == document[first]]
            after = [token for token in range(stop, len(document)) if document[token] == document[stop - 1]]
            assert (place.before, place.continues) == (len(before), bool(before))
            assert place.first_rank == owner[min(before, default=first)]
            assert place.last_rank == owner[max(after, default=stop - 1)]


@pytest.mark.gpu
def test_the_kernels_of_fla_core_compute_what_the_chunks_do() -> None:
    pytest.importorskip("fla")
    torch.manual_seed(0)
    sizes = ((2, 64), (2, 64), (4, 128))
    q, k, v = (torch.randn(2, 300, *each, device="cuda", dtype=torch.bfloat16) for each in sizes)
    g, beta = -torch.rand(2, 300, 4, device="cuda"), torch.rand(2, 300, 4, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    lengths = (100, 1, 199)
    found = gated_delta_rule(*inputs, Pack(ContextParallelAttention(None), lengths), None)
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=2) for x in (q, k))
    expected = chunked(lengths, torch.zeros(2, 4, 64, 128, device="cuda"), q / 8, k, *inputs[2:])[0]
    grad = torch.randn_like(expected)
    grads = (torch.autograd.grad(each, inputs, grad) for each in (found, expected))
    for own, other in ((found, expected), *zip(*grads, strict=True)):
        assert (own - other).float().norm() < 0.01 * other.float().norm()


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_stays_within_documents_and_reads_other_ranks(case: str) -> None:
    lengths, sizes = CASES[case]
    bounds, begins = [0, *accumulate(sizes)], [0, *accumulate(lengths)]
    torch.manual_seed(1)
    x = torch.randn(sum(lengths), BATCH, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, TAPS, dtype=torch.float64, requires_grad=True)
    positions = torch.cat([torch.arange(length) for length in lengths])
    before = torch.cat(
        [torch.nn.functional.pad(part, (0, 0, 0, 0, TAPS - 1, 0))[len(part) :] for part in x.split(sizes)]
    )
    parts = []
    for rank, (first, stop) in enumerate(pairwise(bounds)):
        rows = torch.tensor(Place(begins[:-1], bounds, rank).tail_rows(TAPS - 1))
        parts.append(convolved(x[first:stop], before[rows], weight, positions[first:stop]))
    whole = [
        torch.nn.functional.conv1d(part.movedim(0, 2), weight[:, None], padding=TAPS - 1, groups=6)[..., : len(part)]
        for part in x.split(lengths)
    ]
    found, expected = torch.cat(parts), torch.cat(whole, dim=2).movedim(2, 0)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(each, (x, weight), grad) for each in (found, expected)), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other)
