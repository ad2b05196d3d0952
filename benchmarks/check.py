"""Whether results are right: a short problem of the same kind, against dense attention written out in fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .cases import Case

_ABOUT_TOKENS = 2048
_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-3}
"""Relative errors (Frobenius) above which results are wrong."""


def short(case: Case, n: int) -> Case:
    """The case, or one whose documents and window are so much shorter that about 2,048 tokens are left, in multiples
    that packages take on `n` ranks."""
    factor, unit = case.length / _ABOUT_TOKENS, math.lcm(16, 2 * n)
    if factor <= 1:
        return case
    lengths = tuple(max(1, round(length / factor / unit)) * unit for length in case.documents)
    return replace(case, documents=lengths, window=case.window and max(1, round(case.window / factor)))


def wrong(errors: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Also where one is NaN."""
    return not all(error <= _LIMITS[dtype] for error in errors.values())


def dense(case: Case, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """out, dq, dk and dv of `case.inputs`, in fp64, by what the case's words mean and not by its mask."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    device = q.device
    token = torch.arange(case.length, device=device)
    lengths = torch.tensor(case.documents, device=device)
    document = torch.repeat_interleave(torch.arange(len(case.documents), device=device), lengths)
    behind = token[:, None] - token
    seen = document[:, None] == document
    if case.causal:
        seen &= behind >= 0
    if case.window:
        seen &= behind.abs() <= case.window
    out, shared = torch.empty_like(q), case.num_heads // case.num_kv_heads
    for head in range(case.num_kv_heads):  # scores of few heads at a time
        of_head = slice(head * shared, (head + 1) * shared)
        scores = torch.einsum("shd,td->hst", q[:, 0, of_head], k[:, 0, head]) * case.head_dim**-0.5
        part = torch.einsum("hst,td->shd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[:, 0, head])
        torch.autograd.backward(part, inputs[3][:, 0, of_head].double())
        with torch.no_grad():
            out[:, 0, of_head] = part
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
