"""Partial results coming together."""

import random

import pytest
import torch

from megatron_longctx.attention import accumulate
from megatron_longctx.attention.accumulate import MergedOutput, Sum, accumulation_dtype
from megatron_longctx.kernels import KernelRequest, choose, merge_partials

KERNEL = choose("reference", KernelRequest("cpu", torch.float32, 4, 2, 1))


def block(q, k, v, rows, columns):
    return KERNEL.forward(q[rows], k[columns], v[columns], causal=False, scale=0.5)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2, heads, 4, generator=generator) for heads in (2, 1, 1)]


def test_accumulators_are_fp32_or_fp64():
    assert [accumulation_dtype(x) for x in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == [
        *[torch.float32] * 3,
        torch.float64,
    ]


def test_one_partial_over_all_queries_is_handed_through(tensors):
    q, k, v = tensors
    output = MergedOutput(q)
    out, lse = block(q, k, v, slice(0, 6), slice(0, 6))
    output.add(0, out, lse)
    found = output.finish()
    assert found[0] is out and found[1] is lse


def test_a_borrowed_partial_is_never_kept(tensors):
    q, k, v = tensors
    output, total = MergedOutput(q), Sum(q)
    out, lse = block(q, k, v, slice(0, 6), slice(0, 6))
    lent = out.clone(), lse.clone()
    output.add(0, *lent, borrowed=True)
    total.add(0, lent[0], borrowed=True)
    output.settle()
    total.settle()
    for tensor in lent:
        tensor.fill_(torch.nan)
    found_out, found_lse = output.finish()
    torch.testing.assert_close(found_out, out)
    torch.testing.assert_close(found_lse, lse)
    assert torch.equal(total.finish(), out)


@pytest.mark.parametrize("first_whole", [True, False])
def test_partials_merge_to_attention_over_all_keys(tensors, first_whole):
    q, k, v = tensors
    whole = block(q, k, v, slice(0, 6), slice(0, 6))
    output = MergedOutput(q)
    parts = [(slice(0, 6), slice(0, 2)), (slice(2, 6), slice(2, 6)), (slice(0, 2), slice(2, 6))]
    kept = []
    for rows, columns in parts if first_whole else parts[::-1]:
        partial = block(q, k, v, rows, columns)
        kept.append((partial[0], partial[0].clone()))
        output.add(rows.start, *partial)
    for found, expected in zip(output.finish(), whole, strict=True):
        torch.testing.assert_close(found, expected)
    assert all(torch.equal(now, before) for now, before in kept), "a kernel's own result was written to"


def test_what_is_accumulated_stays_where_nothing_is_added(tensors, monkeypatch):
    """Many pieces, rows by rows: those that get nothing are not read and written again."""
    q, k, v = tensors
    passed: list[tuple[int, int]] = []

    def merge(partials, out, lse):
        passed.append((len(out), len(partials)))
        merge_partials(partials, out, lse)

    pieces = [
        (rows, block(q, k, v, rows, slice(column, column + 1)))
        for rows in (slice(0, 3), slice(3, 5), slice(5, 6))
        for column in range(6)
    ]
    output, all_rows = MergedOutput(q), MergedOutput(q)
    for rows, (out, lse) in pieces:
        nothing = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        nothing[0][rows], nothing[1][rows] = out, lse
        all_rows.add(0, *nothing)
    wanted = all_rows.finish()
    monkeypatch.setattr(accumulate, "merge_partials", merge)
    for rows, piece in pieces:
        output.add(rows.start, *piece)
    for ours, whole, truth in zip(output.finish(), wanted, block(q, k, v, slice(0, 6), slice(0, 6)), strict=True):
        # Not the same bits everywhere: processors take the ends of arrays by other instructions than their middles.
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, truth)
    assert passed == [(6, 4), (5, 4), (2, 4), (3, 4), (1, 4), (6, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_added_in_any_order(tensors, seed):
    """Long pieces before short ones within them, later rows before earlier ones."""
    q, k, v = tensors
    pieces = [(rows, slice(key, key + 1)) for key in range(6) for rows in (slice(0, key), slice(key, 6))]
    random.Random(seed).shuffle(pieces)
    output = MergedOutput(q)
    for rows, columns in pieces:
        output.add(rows.start, *block(q, k, v, rows, columns))
    for found, expected in zip(output.finish(), block(q, k, v, slice(0, 6), slice(0, 6)), strict=True):
        torch.testing.assert_close(found, expected)


def test_queries_without_keys(tensors):
    q, k, v = tensors
    output = MergedOutput(q)
    output.add(2, *block(q, k, v, slice(2, 6), slice(0, 6)))
    out, lse = output.finish()
    assert (out[:2] == 0).all() and (lse[:2] == -torch.inf).all()
    assert torch.isfinite(lse[2:]).all()
    out, lse = MergedOutput(q[:0]).finish()
    assert out.shape == (0, 2, 2, 4) and lse.shape == (0, 2, 2)


def test_many_small_parts_lose_nothing_in_bf16():
    """4096 parts of 2^-8 beside a 1: summed in bf16, every one of them would be rounded away."""
    like = torch.zeros(2, 1, 1, 3, dtype=torch.bfloat16)
    total = Sum(like)
    total.add(0, torch.ones_like(like))
    for _ in range(4096):
        total.add(1, torch.full((1, 1, 1, 3), 2.0**-9, dtype=torch.bfloat16))
    found = total.finish()
    assert found.dtype == torch.bfloat16
    assert found.squeeze().tolist() == [[1.0] * 3, [9.0] * 3]


def test_a_single_share_is_handed_through_and_never_written_to():
    like = torch.zeros(3, 1, 1, 2)
    share = torch.ones_like(like)
    total = Sum(like)
    total.add(0, share)
    assert total.finish() is share
    total.add(1, torch.ones(2, 1, 1, 2))
    assert total.finish().squeeze().tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert (share == 1).all()
    assert (Sum(like).finish() == 0).all()


def tiles(order):
    """A head each of an output of 5 tokens: (heads, out, lse), in bf16 and fp32."""
    return [(slice(head, head + 1), torch.randn(5, 2, 1, 4).bfloat16(), torch.randn(5, 2, 1)) for head in order]


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("order", [list(range(9)), [8, 0, 3, 5, 1, 7, 2, 6, 4]], ids=["in order", "as they come"])
def test_parts_of_the_heads_go_to_their_places_unchanged(order, lasting):
    output = MergedOutput(torch.empty(5, 2, 9, 4, dtype=torch.bfloat16))
    total = Sum(torch.empty(5, 2, 9, 4, dtype=torch.bfloat16))
    parts = tiles(order)
    for heads, out, lse in parts:
        output.add(0, out, lse, heads, borrowed=True)
        total.add(0, out, heads, borrowed=True)
        output.settle(lasting)
        total.settle(lasting)
        if not lasting:
            assert (output._merged is None, total._sum is None) == (False, False)
    found, found_lse = output.finish()
    for heads, out, lse in parts:
        assert torch.equal(found[:, :, heads], out) and torch.equal(found_lse[:, :, heads], lse)
        assert torch.equal(total.finish()[:, :, heads], out)
    assert (output._merged is None) == (total._sum is None) == lasting, "an accumulator is for what overlaps"


@pytest.mark.parametrize("more", ["overlaps", "is of some tokens"])
def test_parts_of_the_heads_wait_no_longer_once_another_comes_that(more):
    """Six heads of seven, and then one that there is already; the seventh stays empty."""
    q = torch.empty(5, 2, 7, 4, dtype=torch.bfloat16)
    output, total, parts = MergedOutput(q), Sum(q), tiles(list(range(6)))
    rows = slice(0, 5) if more == "overlaps" else slice(2, 4)
    out, lse = torch.randn(5, 2, 1, 4)[rows].bfloat16(), torch.randn(5, 2, 1)[rows]
    for heads, value, its_lse in [*parts, (slice(0, 1), out, lse)]:
        output.add(rows.start if value is out else 0, value, its_lse, heads)
        total.add(rows.start if value is out else 0, value, heads)
    found, found_lse = output.finish()
    for heads, value, its_lse in parts[1:]:
        assert torch.equal(found[:, :, heads], value) and torch.equal(found_lse[:, :, heads], its_lse)
    assert (found[:, :, 6] == 0).all() and (found_lse[:, :, 6] == -torch.inf).all()
    first = parts[0][1].float()
    first[rows] += out.float()
    torch.testing.assert_close(total.finish()[:, :, :1], first.bfloat16())
    torch.testing.assert_close(found_lse[rows, :, :1], torch.logaddexp(parts[0][2][rows], lse))


def test_some_heads_alone_leave_the_others_empty():
    output, parts = MergedOutput(torch.empty(5, 2, 7, 4, dtype=torch.bfloat16)), tiles([0, 1, 2, 4, 5, 6])
    for heads, out, lse in parts:
        output.add(0, out, lse, heads)
    found, found_lse = output.finish()
    assert (found[:, :, 3] == 0).all() and (found_lse[:, :, 3] == -torch.inf).all()
    assert all(torch.equal(found[:, :, heads], out) for heads, out, _ in parts)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [4, 0, 3, 1, 2]])
def test_what_takes_copies_only_is_finished_by_them(order):
    """And by nothing else: lent memory is read by the copies."""
    like = torch.empty(5, 2, len(order), 4, dtype=torch.bfloat16)
    output, total, parts = MergedOutput(like), Sum(like), tiles(order)
    for heads, out, lse in parts:
        output.add(0, out, lse, heads, borrowed=True)
        total.add(0, out, heads, borrowed=True)
    for into, source in (*output.place(), *total.place()):
        into.copy_(source)
    wanted = [(heads, out.clone(), lse.clone()) for heads, out, lse in parts]
    for _, out, lse in parts:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
    found, found_lse = output.finish()
    for heads, out, lse in wanted:
        assert torch.equal(found[:, :, heads], out) and torch.equal(found_lse[:, :, heads], lse)
        assert torch.equal(total.finish()[:, :, heads], out)
    assert output.finish()[0] is found and not output.place() and not total.place(), "once"


@pytest.mark.parametrize("why", ["overlap", "of some tokens", "a head is missing", "in fp32", "alone"])
def test_what_takes_more_than_copies_is_not_placed(why):
    like = torch.empty(5, 2, 3, 4, dtype=torch.bfloat16)
    output, total, parts = MergedOutput(like), Sum(like), tiles([0, 1, 2])
    if why == "overlap":
        parts.append(parts[0])
    elif why == "of some tokens":
        parts[1] = (parts[1][0], *(field[:4] for field in parts[1][1:]))
    elif why == "a head is missing":
        parts.pop()
    elif why == "in fp32":
        parts[1] = parts[1][0], parts[1][1].float(), parts[1][2]
    else:
        parts = [(slice(0, 3), torch.cat([part[1] for part in parts], 2), torch.cat([part[2] for part in parts], 2))]
    for heads, out, lse in parts:
        output.add(0, out, lse, heads)
        total.add(0, out, heads)
    assert not output.place() and not total.place()
    summed = torch.zeros(5, 2, 3, 4)
    for heads, out, _ in parts:
        summed[: len(out), :, heads] += out
    torch.testing.assert_close(total.finish(), summed.bfloat16())
    assert (output.finish()[0] is parts[0][1]) == (why == "alone")
