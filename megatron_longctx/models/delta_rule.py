"""Linear recurrences over a sequence that ranks share in contiguous sections: gated delta rules, and Mamba-2's.

A head's state S is a matrix `[k, v]`. A token decays it by exp(g), adds its value under its key, and reads the state
with its query. The delta rule adds only what the state does not hold for the key yet (Gated Delta Networks,
arXiv:2412.06464); g is one number, or with Kimi Delta Attention one for each row of S (arXiv:2510.26692). Mamba-2 adds
the whole value (state space duality, arXiv:2405.21060):

    S <- exp(g) S;  S <- S + beta key (value - S^T key)^T  or  S <- S + key value^T;  out = S^T query

Outputs and the last state are affine in the state that enters a section: out = own + queries S, last = own + T S. So
no rank waits for the one before it. For the delta rule, every rank computes its section once, with v + k columns of
values in place of v: from a zero state with its values, and from the identity with zeros. So the same kernel gives
`queries` and T. Without the correction, both are products of decays, and T is one number. Ranks gather (last, T) of
all, `k (v + k)` or `k (v + 1)` numbers a head, multiply those before them, and add `queries S`. Autograd does the same
backwards, and its gather sums in place of collecting.

For n ranks, a rank computes up to (v + k) / v times the delta rule, k v multiplications a token for `queries S` and up
to n k k v for the states, and sends k (v + k) numbers a head. A serial loop would take n times the rule instead.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..config.model import DELTA_RULE_CHUNK as CHUNK
from ..core.kernels.no_grad import first_order

Kernel = Callable[..., tuple[Tensor, Tensor]]
"""Computes a recurrence for the lengths of documents, which add up to s > 0, the state before the first of them,
`[b, h, k, v]` (others start from zeros), q, k `[b, s, h, k]`, v `[b, s, h, v]`, g `[b, s, h]` in fp32 and, by the delta
rule alone, beta of the same kind; the delta rule's g may be `[b, s, h, k]`. It returns the outputs `[b, s, h, v]` in
v's dtype, and the state after the last token."""


def precision(x: Tensor) -> torch.dtype:
    """Return the precision inside: at least fp32, and fp64 on CPUs, whose results are the reference of all others."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_cuda else torch.float64


def chunked(lengths: Sequence[int], state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a recurrence in torch, in chunks of 64 tokens: a `Kernel` for any device.

    Within a chunk the corrections solve a triangular system. Documents need no loop: their ends are masks. Backward
    keeps the arguments alone, and computes the chunks again.
    """
    return _Chunked.apply(lengths, state, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: Sequence[int], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.lengths = lengths
        ctx.save_for_backward(*inputs)
        return _chunked(lengths, *inputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return None, *torch.autograd.grad(_chunked(ctx.lengths, *inputs), inputs, grads)


def _chunked(
    lengths: Sequence[int], state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, wide = q.shape[1], precision(q)
    documents = torch.arange(len(lengths), device=q.device).repeat_interleave(torch.tensor(lengths, device=q.device))
    missing = -tokens % CHUNK  # further tokens of the last document, which change nothing
    documents = functional.pad(documents, (0, missing), value=len(lengths) - 1).view(-1, CHUNK)

    def chunks(x: Tensor) -> Tensor:
        x = functional.pad(x.to(wide), (*(0, 0) * (x.ndim - 2), 0, missing)).view(len(x), -1, CHUNK, *x.shape[2:])
        return x.movedim(3, 1)  # [b, h, chunks, tokens, ...]

    q, k, new, g = (chunks(x) for x in (q, k, v, g))
    g = (g if g.ndim == k.ndim else g.unsqueeze(-1)).cumsum(-2)  # of one channel, or of each
    before = functional.pad(documents[:-1, -1:], (0, 0, 1, 0))  # the document in which the previous chunk ends
    enters, leaves = ((documents == other).to(wide).unsqueeze(-1) for other in (before, documents[:, -1:]))
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()
    decay = (g - g.mT).masked_fill(~same, -torch.inf).exp() if g.shape[-1] == 1 else None

    def products(left: Tensor) -> Tensor:
        return left @ k.mT * decay if decay is not None else _decayed(left, k, g).masked_fill(~same, 0)

    reach, last = g.exp() * enters, g[..., -1:, :]
    correction = None
    if beta is not None:
        beta = chunks(beta).unsqueeze(-1)
        system = products(beta * k).tril(-1) + torch.eye(CHUNK, dtype=wide, device=q.device)
        right = torch.cat((beta * new, beta * k * reach), dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new, correction = torch.split(solved, [new.shape[-1], k.shape[-1]], dim=-1)
    within, queries = products(q), q * reach
    keys, carried = k * (last - g).exp() * leaves, reach[..., -1, :].unsqueeze(-1)
    state, outputs = state.to(wide), []
    for i in range(len(documents)):
        stored = new[:, :, i] if correction is None else new[:, :, i] - correction[:, :, i] @ state
        outputs.append(queries[:, :, i] @ state + within[:, :, i] @ stored)
        state = carried[:, :, i] * state + keys[:, :, i].mT @ stored
    return torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2).to(v.dtype), state


def _decayed(left: Tensor, right: Tensor, g: Tensor) -> Tensor:
    """Return the products of rows i of `left` and j <= i of `right`, whose channels decay by exp(g_i - g_j), else 0.

    Blocks of 1, 2, 4 ... tokens are joined in pairs. Between two blocks, both of a pair of tokens are decayed to the
    end of the first block: no exponent is above 0, and no tensor has the channels of every pair.

    Args:
        left, right, g: `[..., CHUNK, k]`; g is the sum of the logarithms of decays up to each token.
    """
    found, size = (left * right).sum(-1)[..., None, None], 1
    while size < CHUNK:
        rows, columns, sums = (x.view(*x.shape[:-2], -1, 2, size, x.shape[-1]) for x in (left, right, g))
        before, after = sums.unbind(-3)
        end = before[..., -1:, :]
        below = (rows[..., 1, :, :] * (after - end).exp()) @ (columns[..., 0, :, :] * (end - before).exp()).mT
        first, second = found.view(*found.shape[:-3], -1, 2, size, size).unbind(-3)
        found = torch.cat((functional.pad(first, (0, size)), torch.cat((below, second), dim=-1)), dim=-2)
        size *= 2
    return found.squeeze(-3)


class Section(NamedTuple):
    """What a section's tokens compute without the state that enters it.

    out: `[b, s, h, v]`, from a zero state. queries: `[b, f, h, k]` of the f tokens of the first document, by which the
    entering state is read; None if no state enters. last: `[b, h, k, v + k]`, the state after the last token from a
    zero state, and beside it T, by which the entering state is multiplied; `[b, h, k, v + 1]` without a correction,
    where every row has its number. In fp32 or wider.
    """

    out: Tensor
    queries: Tensor | None
    last: Tensor


def section(
    lengths: Sequence[int], continues: bool, kernel: Kernel, *inputs: Tensor, state: Tensor | None = None
) -> Section:
    """Compute a rank's section; it exchanges nothing.

    Args:
        lengths: of the parts of documents in this section.
        continues: whether the first one began in an earlier section.
        inputs: q, k, v, g and, by the delta rule alone, beta, as for a `Kernel`, but s may be 0.
        state: from which the first one goes on if it began in no earlier section; None for zeros.
    """
    q, k, v, g, *beta = inputs
    (batch, _, heads, rows), columns, wide = k.shape, v.shape[-1], precision(q)
    zeros = torch.zeros(batch, heads, rows, columns, dtype=wide, device=q.device)
    if not continues and lengths:
        out, last = kernel(lengths, zeros if state is None else state, *inputs)
        return Section(out, None, functional.pad(last, (0, rows if beta else 1)))
    unchanged = torch.eye(rows, dtype=wide, device=q.device) if beta else zeros.new_ones(rows, 1)
    states = torch.cat((zeros, unchanged.expand(batch, heads, -1, -1)), dim=-1)
    if not lengths:
        return Section(v, None, states)
    first, *others = lengths
    if not beta:
        out, last = kernel(lengths, zeros, *inputs)
        reach = g[:, :first].to(wide).cumsum(1).exp()
        factor = reach[:, -1] * (not others)
        return Section(
            out,
            (q[:, :first] * reach.unsqueeze(-1)).to(q.dtype),
            torch.cat((last, factor.view(batch, heads, 1, 1).expand(-1, -1, rows, -1)), dim=-1),
        )
    parts = [torch.split(x, [first, sum(others)], dim=1) for x in inputs]
    head, tail = ([part[i] for part in parts] for i in (0, 1))
    head[2] = functional.pad(head[2], (0, rows))
    both, last = kernel([first], states, *head)
    out, queries = torch.split(both, [columns, rows], dim=-1)
    if others:
        rest, last = kernel(others, zeros, *tail)
        out, last = torch.cat((out, rest), dim=1), functional.pad(last, (0, rows))
    return Section(out, queries, last)


def finish(own: Section, lasts: Tensor, first: int, rank: int) -> Tensor:
    """Return a section's outputs, `[b, s, h, v]`.

    Args:
        lasts: `Section.last` of all ranks, stacked in the first dimension.
        first: the rank on which this section's first document begins.
    """
    if own.queries is None:
        return own.out
    state = joined(lasts[first:rank], own.out.shape[-1])
    tokens = own.queries.shape[1]
    read = torch.einsum("bshk,bhkv->bshv", own.queries.to(state.dtype), state)
    head, tail = torch.split(own.out, [tokens, own.out.shape[1] - tokens], dim=1)
    return torch.cat(((head + read).to(head.dtype), tail), dim=1)


def joined(lasts: Tensor, columns: int) -> Tensor:
    """Return the state `[b, h, k, v]` after sections of a document, the first of which begins it.

    `lasts` are their `Section.last`, stacked in the first dimension, and `columns` is v.
    """
    state, *later = lasts.unbind(0)
    state = state[..., :columns]
    for last in later:
        factor = last[..., columns:]
        state = last[..., :columns] + (factor * state if factor.shape[-1] == 1 else factor @ state)
    return state


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute a recurrence for a token of each of b sequences; return the outputs `[b, h, v]` and the states after it.

    Args:
        state: the states before it, `[b, h, k, v]` in fp32.
        q, k, v, g, beta: as for a `Kernel`, without s.
    """
    q, k, new = (x.to(state.dtype) for x in (q, k, v))
    state = (g if g.ndim == k.ndim else g.unsqueeze(-1)).exp().unsqueeze(-1) * state
    if beta is not None:
        new = beta.unsqueeze(-1) * (new - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def convolved(x: Tensor, before: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return causal convolutions of every channel of `x` `[s, b, c]`, which do not reach beyond a document's beginning.

    Backward keeps the tokens alone, not a masked copy of them for every tap.

    Args:
        before: the taps - 1 tokens before the first, `[taps - 1, b, c]`; any values where there are none.
        weight: `[c, taps]`; the last tap is the token itself.
        positions: of the tokens in their documents, int64 `[s]`.
    """
    return _Convolution.apply(torch.cat((before, x)), weight, positions)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(whole, weight, positions)
        taps, tokens, total, positions = weight.shape[1], len(positions), whole.new_zeros(()), positions.view(-1, 1, 1)
        for tap in range(taps):
            product = whole[tap : tap + tokens].to(precision(whole)) * weight[:, tap]
            total = total + product.masked_fill(positions < taps - 1 - tap, 0)
        return total.to(whole.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        whole, weight, positions = ctx.saved_tensors
        taps, tokens, wide, positions = weight.shape[1], len(positions), precision(whole), positions.view(-1, 1, 1)
        grad_whole = torch.zeros_like(whole, dtype=wide)
        grad_weight = torch.empty_like(weight, dtype=wide)
        for tap in range(taps):
            grad = grads[0].to(wide).masked_fill(positions < taps - 1 - tap, 0)
            grad_whole[tap : tap + tokens] += grad * weight[:, tap]
            grad_weight[:, tap] = (grad * whole[tap : tap + tokens]).sum((0, 1))
        return grad_whole.to(whole.dtype), grad_weight.to(weight.dtype), None


@dataclass(frozen=True)
class Place:
    """Where a rank's section lies in a sequence of documents."""

    documents: Sequence[int]  # the first token of each, in order
    bounds: Sequence[int]  # the first token of every rank, and the length of the sequence
    rank: int

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths of the parts of documents in this section."""
        start, stop = self.bounds[self.rank : self.rank + 2]
        inside = [each for each in self.documents if start < each < stop]
        return [after - own for own, after in pairwise([start, *inside, stop]) if after > own]

    @property
    def continues(self) -> bool:
        """Whether this section's first document began on an earlier rank."""
        return self._continued[self.rank]

    @property
    def leaves(self) -> bool:
        """Whether this section's last document goes on on a later rank."""
        return self.last_rank > self.rank

    @property
    def middle(self) -> bool:
        """Whether this section is a part of one document that began before it and ends after it."""
        return len(self.lengths) == 1 and self.continues and self.leaves

    @property
    def chained(self) -> bool:
        """Whether any section may be such a part: two sections in a row continue a document."""
        return any(map(all, pairwise(self._continued)))

    @property
    def exchanges(self) -> bool:
        """Whether a document goes on from one rank to another; otherwise ranks need nothing of each other."""
        return any(self._continued)

    @cached_property
    def _continued(self) -> list[bool]:
        begins = {*self.documents}
        return [own < after and own not in begins for own, after in pairwise(self.bounds)]

    @property
    def whole(self) -> bool:
        """Whether every rank has tokens."""
        return all(own < after for own, after in pairwise(self.bounds))

    @cached_property
    def before(self) -> int:
        """How many tokens of this section's first document earlier ranks hold."""
        return self.bounds[self.rank] - self.documents[bisect_right(self.documents, self.bounds[self.rank]) - 1]

    @cached_property
    def first_rank(self) -> int:
        """The rank on which this section's first document began."""
        return self._owner(self.bounds[self.rank] - self.before)

    @cached_property
    def last_rank(self) -> int:
        """The rank on which this section's last document ends."""
        after = bisect_left(self.documents, self.bounds[self.rank + 1])
        stop = self.documents[after] if after < len(self.documents) else self.bounds[-1]
        return self._owner(stop - 1)

    def tail_rows(self, size: int) -> list[int]:
        """Return where the `size` tokens before this section are among the last `size` rows of rank after rank.

        The rows of a rank with fewer tokens begin with other values. Before the sequence's beginning, any row is named.
        """
        start = self.bounds[self.rank]
        owners = [(token, self._owner(token)) for token in range(max(0, start - size), start)]
        rows = [(owner + 1) * size - (self.bounds[owner + 1] - token) for token, owner in owners]
        return [0] * (size - len(rows)) + rows

    def _owner(self, token: int) -> int:
        return bisect_right(self.bounds, token) - 1
