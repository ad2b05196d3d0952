"""What the kernel tests share: random blocks, fp64 attention written out, and the error rule.

Given as one fixture, since test folders are not packages.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Case:
    """One block: sizes s, t, b, h, g, d and the mask."""

    s: int
    t: int
    b: int
    h: int
    g: int
    d: int
    causal: bool

    @property
    def scale(self) -> float:
        # Not the usual 1/sqrt(d), so that a kernel that ignores the argument is found.
        return 0.8 / self.d**0.5


class KernelMath:
    """The tests' own arithmetic, independent of the package."""

    # Below these relative errors a result is as good as its dtype gets, whatever torch's own call achieves.
    floor: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 5e-7,
        torch.bfloat16: 1e-3,
        torch.float16: 2e-4,
    }

    @staticmethod
    def tensors(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v, grad_out; k and v are strided views of one `[t, 2, b, g, d]` buffer."""
        gen = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(device, dtype)

        q, kv = draw(case.s, case.b, case.h, case.d), draw(case.t, 2, case.b, case.g, case.d)
        return q, kv[:, 0], kv[:, 1], draw(case.s, case.b, case.h, case.d)

    @staticmethod
    def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) in fp64, differentiable."""
        q, k, v = q.double(), k.double(), v.double()
        repeat = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
        if causal:
            visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
        out = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v)
        return out, scores.logsumexp(-1).permute(2, 0, 1)

    @classmethod
    def truth(cls, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> dict[str, Tensor]:
        """out, lse, dq, dk, dv of the whole block in fp64."""
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out, lse = cls.naive(*leaves, case.causal, case.scale)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.double())
        return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    @staticmethod
    def torch_own(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> dict[str, Tensor]:
        """out, dq, dk, dv by torch's scaled_dot_product_attention in the tensors' own dtype."""
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        heads_first = [x.permute(1, 2, 0, 3) for x in leaves]
        out = F.scaled_dot_product_attention(*heads_first, is_causal=case.causal, scale=case.scale, enable_gqa=True)
        out = out.permute(2, 0, 1, 3)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    @staticmethod
    def error(found: Tensor, truth: Tensor) -> float:
        """Relative Frobenius error."""
        return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))

    @classmethod
    def check(cls, found: dict[str, Tensor], truth: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """Every result is at most twice as far from the truth as torch's own call of the same precision."""
        for name, expected in truth.items():
            result = found[name]
            assert result.shape == expected.shape, name
            assert torch.isfinite(result).all(), name
            if name == "lse":
                assert (result.double() - expected).abs().max() < (1e-10 if result.dtype == torch.float64 else 2e-3)
                continue
            allowed = max(2 * cls.error(own[name], expected), cls.floor[result.dtype])
            # A gradient that is zero in exact arithmetic (one key) is all rounding: compare with grad_out's size, 1.
            if expected.norm() < 1e-9:
                assert result.double().abs().max() < 0.05, name
                continue
            assert cls.error(result, expected) <= allowed, (name, cls.error(result, expected), allowed)

    @staticmethod
    def run(kernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, case: Case) -> dict[str, Tensor]:
        """The kernel's forward, then its backward from its own out and lse."""
        args = {"causal": case.causal, "scale": case.scale}
        out, lse = kernel.forward(q, k, v, **args)
        assert out.dtype == q.dtype
        assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
        dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, **args)
        assert (dq.dtype, dk.dtype, dv.dtype) == (q.dtype, k.dtype, v.dtype)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    @staticmethod
    def run_in_blocks(kernel, merge, q, k, v, grad_out, case: Case, cuts: list[int]) -> dict[str, Tensor]:
        """The same through key blocks (and, if causal, query blocks): merged forward, summed backward.

        `cuts` are block edges from 0 to t. Accumulators are fp32, or fp64 for fp64 inputs.
        """
        acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(q.shape, dtype=acc, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
        blocks = [slice(a, b) for a, b in pairwise(cuts)]
        pairs = [
            (rows, cols, rows == cols)
            for rows in (blocks if case.causal else [slice(0, case.s)])
            for cols in blocks
            if not case.causal or cols.start <= rows.start
        ]
        pairs = [(rows, cols, case.causal and same) for rows, cols, same in pairs]
        for rows, cols, causal in pairs:
            part = kernel.forward(q[rows], k[cols], v[cols], causal=causal, scale=case.scale)
            merge(out[rows], lse[rows], *part)
        whole = out.to(q.dtype)
        grads = {
            name: torch.zeros(x.shape, dtype=acc, device=q.device) for name, x in (("dq", q), ("dk", k), ("dv", v))
        }
        for rows, cols, causal in pairs:
            args = (grad_out[rows], q[rows], k[cols], v[cols], whole[rows], lse[rows])
            dq, dk, dv = kernel.backward(*args, causal=causal, scale=case.scale)
            grads["dq"][rows] += dq
            grads["dk"][cols] += dk
            grads["dv"][cols] += dv
        return {"out": whole, "lse": lse, **{name: grad.to(q.dtype) for name, grad in grads.items()}}


@pytest.fixture(scope="session")
def kernel_math() -> type[KernelMath]:
    return KernelMath


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    return Case
