"""What an attention kernel is: one block forward, one block backward, and an honest answer to "can you do this?".

Shapes (token first): `s` queries, `t` keys, `b` batch, `h` query heads, `g` KV heads (g divides h), `d` head dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.no_grad import no_grad
from megatron_longctx.kernels.planned import PlannedShapes


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel is asked to support, known before any tensor exists.

    varying: the numbers of queries and keys differ from pass to pass, as those of prompts do, so that what a kernel
    prepares for a shape is used a few times only.

    Raises:
        ValueError: the sizes are not positive, or `num_kv_heads` does not divide `num_heads`.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    deterministic: bool = False
    varying: bool = False

    def __post_init__(self) -> None:
        for field in ("head_dim", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a positive number; give 1 or more.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head must serve the same number of query heads."
            )


@dataclass(frozen=True)
class Block:
    """The inputs that forward and backward of one block share: q `[s,b,h,d]`, k and v `[t,b,g,d]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float


class AttentionKernel(ABC):
    """Attention of one (queries x keys) block.

    A provider implements `why_not`, `_forward` and `_backward`. What every provider needs alike lives here, once: shape
    checks, blocks without queries or keys, strides no kernel can read, and scales that are not positive.
    """

    name: ClassVar[str]

    def __init__(self, *, deterministic: bool = False, varying: bool = False) -> None:
        """As in the request; `why_not` says whether the provider can be `deterministic`."""
        self.deterministic = deterministic
        self.varying = varying

    @abstractmethod
    def why_not(self, request: KernelRequest) -> str | None:
        """None when `request` is supported, else one plain sentence: the value and what would be accepted."""

    def planned(self, num_heads: int, head_dim: int) -> PlannedShapes | None:
        """Into which shapes large blocks of so many query heads are best cut; None where any shape is as good."""
        return None

    @no_grad
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of these queries over these keys alone.

        Args:
            q: `[s, b, h, d]`, any strides.
            k, v: `[t, b, g, d]`, any strides, the dtype and device of q; `g` divides `h`.
            causal: query i sees keys j <= i; needs s == t. Otherwise every query sees every key.
            scale: factor of the scores before the softmax.

        Returns:
            out `[s, b, h, d]` in q's dtype and lse `[s, b, h]`, the natural log of the summed exponentials of the
            scaled scores: fp32, or fp64 where q is fp64. Strides of both are the provider's own. Without keys:
            out 0, lse -inf.

        Raises:
            ValueError: shapes, dtypes or devices disagree, or `causal` with s != t.
        """
        check_block(q, k, v, causal)
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q))
        q, scale, _ = _positive(q, scale)
        return self._forward(Block(readable(q), readable(k), readable(v), causal, scale))

    @no_grad
    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's share of the gradients; shares of all key blocks of a query add up to its whole gradient.

        Args:
            grad_out, out: `[s, b, h, d]`; `out` is the GLOBAL result of these queries over all their keys, not this
                block's. q's dtype (another float dtype is converted, which costs a copy).
            q, k, v, causal, scale: as given to `forward`.
            lse: `[s, b, h]`, the GLOBAL log-sum-exp. Cheapest as a view of contiguous `[b, h, s]` storage.

        Returns:
            dq, dk, dv in the shapes and dtype of q, k, v. Accumulate them over blocks in fp32. 0 without keys.

        Raises:
            ValueError: as `forward`, or `grad_out`, `out` or `lse` do not fit q.
        """
        check_block(q, k, v, causal)
        for name, tensor, shape in (("grad_out", grad_out, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with this q it must be {tuple(shape)}.")
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        q, scale, factor = _positive(q, scale)
        block = Block(readable(q), readable(k), readable(v), causal, scale)
        grads = (readable(grad_out.to(q.dtype)), readable(out.to(q.dtype)), lse.to(lse_dtype(q)))
        dq, dk, dv = self._backward(block, *grads)
        return dq if factor == 1 else dq * factor, dk, dv

    @abstractmethod
    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """`forward` of a checked block with at least one query and one key."""

    @abstractmethod
    def _backward(self, block: Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of a checked block with at least one query and one key."""


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """(queries, scale) of the same scores with a scale above 0, and what the queries were multiplied by: -1, 0 or 1.

    Fused kernels mask with -inf and seek maxima before they scale: another sign gives them NaN.
    """
    if not scale <= 0:
        return q, scale, 1
    return (q * 0, 1.0, 0) if scale == 0 else (-q, -scale, -1)


def lse_dtype(q: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, so that double precision survives; else fp32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def readable(x: Tensor) -> Tensor:
    """`x`, copied only where its strides are ones fused kernels misread.

    They step through the head dim by 1, and autograd hands out expanded (stride 0) gradients, e.g. of a plain sum.
    """
    strides = x.stride()
    if strides[-1] == 1 and 0 not in strides:
        return x
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, strides, strict=True))
    return x.contiguous() if expanded or strides[-1] != 1 else x


def check_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise ValueError unless q `[s,b,h,d]` and k, v `[t,b,g,d]` form one attention block."""
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q [s, b, h, d], k and v [t, b, g, d]"
        )
    (s, batch, heads, head_dim), (t, kv_batch, kv_heads, kv_head_dim) = q.shape, k.shape
    if (batch, head_dim) != (kv_batch, kv_head_dim):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head dim; they must be equal.")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: the first must be a multiple of the second.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; convert them to one."
        )
    if causal and s != t:
        raise ValueError(
            f"causal=True with {s} queries and {t} keys: the diagonal is defined for equal numbers only; "
            "split the block into a square causal part and full parts."
        )
