"""Shared code of the kernel tests: random blocks, fp64 attention written out, and the error rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_longctx.core.kernels import AttentionKernel, Partial, dense_call, merge_partials
from megatron_longctx.core.plans import KernelCall, Slice, kernel_calls
from tests.core.plans.masks import pairs_of

# Relative errors that the dtype itself allows, whatever torch's own call achieves.
FLOOR = {torch.float64: 1e-13, torch.float32: 5e-7, torch.bfloat16: 1e-3, torch.float16: 2e-4}
Tensors = tuple[Tensor, ...]
"""q, k, v and the gradient of out."""
Results = dict[str, Tensor]


@dataclass
class Case:
    """A call over q `[s, b, h, d]`, k `[t, b, g, d]` and v `[t, b, g, e]`.

    sees: whether the call is causal; or a call, or slices.
    """

    s: int
    t: int
    b: int
    h: int
    g: int
    d: int
    sees: bool | KernelCall | Sequence[Slice]
    e: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is None:  # not 1/sqrt(d), to detect kernels that ignore the argument
            self.scale = 0.8 / self.d**0.5

    @property
    def call(self) -> KernelCall:
        assert isinstance(self.sees, bool | KernelCall)
        return dense_call(self.s, self.t, self.sees) if isinstance(self.sees, bool) else self.sees

    def visible(self, device: torch.device) -> Tensor:
        """Return which query sees which key, bool `[s, t]`."""
        slices = self.call.slices if isinstance(self.sees, bool | KernelCall) else self.sees
        return torch.from_numpy(pairs_of(slices, self.s, self.t) > 0).to(device)


def tensors(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """Draw q, k, v and grad_out; k and v of one size are strided views of one `[t, 2, b, g, d]` buffer."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(device, dtype)

    e = case.e or case.d
    q, kv = draw(case.s, case.b, case.h, case.d), draw(case.t, 2, case.b, case.g, case.d)
    v = kv[:, 1] if e == case.d else draw(case.t, case.b, case.g, e)
    return q, kv[:, 0], v, draw(case.s, case.b, case.h, e)


def truth(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> Results:
    """Compute out, lse, dq, dk, dv of the whole block in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    repeat = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(repeat, 2) for x in leaves[1:])
    visible = case.visible(q.device)
    hidden = torch.finfo(torch.float64).min  # -inf would give NaN to rows that see nothing
    scores = (torch.einsum("sbhd,tbhd->bhst", leaves[0], keys) * case.scale).masked_fill(~visible, hidden)
    out = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1) * visible, values)
    lse = scores.detach().logsumexp(-1).masked_fill(~visible.any(-1), -torch.inf).permute(2, 0, 1)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.double())
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def torch_own(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> Results:
    """Compute out, dq, dk, dv by torch's scaled_dot_product_attention in the tensors' dtype, at a scale it supports."""
    scale = case.scale if case.scale is not None and case.scale > 0 else 0.3
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.permute(1, 2, 0, 3) for x in leaves]
    seen = {"is_causal": case.sees} if isinstance(case.sees, bool) else {"attn_mask": case.visible(q.device)}
    out = F.scaled_dot_product_attention(*heads_first, **seen, scale=scale, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def check(found: Results, case: Case, *of: Tensor) -> None:
    """Assert that every result is at most twice as far from the truth as torch's own call of the same precision."""
    own = torch_own(*of, case)
    for name, wanted in truth(*of, case).items():
        result = found[name]
        assert result.shape == wanted.shape, name
        if name == "lse":
            tolerance = 1e-10 if result.dtype == torch.float64 else 2e-3
            torch.testing.assert_close(result.double(), wanted, rtol=0, atol=tolerance)
            continue
        assert torch.isfinite(result).all(), name
        # A gradient that is zero in exact arithmetic (one key) is all rounding: compare it with grad_out's size, 1.
        if wanted.norm() < 1e-9:
            assert result.double().abs().max() < 0.05, name
            continue
        allowed = max(2 * error(own[name], wanted), FLOOR[result.dtype])
        assert error(result, wanted) <= allowed, (name, error(result, wanted), allowed)


def run(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> Results:
    """Run the kernel's forward, then its backward on its own out and lse."""
    assert case.scale is not None
    out, lse = kernel.forward(q, k, v, case.call, scale=case.scale)
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, case.call, scale=case.scale)
    assert (dq.dtype, dk.dtype, dv.dtype) == (q.dtype, k.dtype, v.dtype)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run_in_blocks(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case, cuts: Sequence[int]
) -> Results:
    """Run the same by blocks of queries and keys, cut at `cuts`, in calls that the kernel takes.

    Results are merged forward and summed backward in fp32, or fp64 for fp64 inputs.
    """
    assert case.scale is not None and not isinstance(case.sees, bool | KernelCall)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = *q.shape[:3], v.shape[-1]
    out = torch.zeros(shape, dtype=acc, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
    calls: list[tuple[slice, slice, KernelCall]] = []
    for (q0, q1), (k0, k1) in ((rows, columns) for rows in pairwise(cuts) for columns in pairwise(cuts)):
        for call in kernel_calls([x for each in case.sees if (x := each.cut(q0, q1, k0, k1))], kernel.takes):
            rows, columns = slice(*call.q_span), slice(*call.k_span)
            calls.append((rows, columns, call.moved(-rows.start, -columns.start)))
    for rows, columns, call in calls:
        found = kernel.forward(q[rows], k[columns], v[columns], call, scale=case.scale)
        merge_partials([Partial(0, 0, out, lse), Partial(rows.start, 0, *found)], out, lse)
    whole = out.to(q.dtype)
    grads = [torch.zeros(x.shape, dtype=acc, device=q.device) for x in (q, k, v)]
    for rows, columns, call in calls:
        of = (grad_out[rows], q[rows], k[columns], v[columns], whole[rows], lse[rows])
        found = kernel.backward(*of, call, scale=case.scale)
        for grad, where, part in zip(grads, (rows, columns, columns), found, strict=True):
            grad[where] += part
    return {"out": whole, "lse": lse, **{n: x.to(q.dtype) for n, x in zip(("dq", "dk", "dv"), grads, strict=True)}}
