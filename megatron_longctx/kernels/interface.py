"""What an attention kernel is: one call forward, one call backward, and an honest answer to "can you do this?".

Shapes (token first): `s` queries, `t` keys, `b` batch, `h` query heads, `g` KV heads (g divides h), `d` head dim of
queries and keys, `e` of values and outputs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_longctx.kernels.no_grad import no_grad
from megatron_longctx.schedules.kernel_calls import KernelCall, Segment, Takes
from megatron_longctx.schedules.mask import FAR

PROVIDERS: dict[str, type["AttentionKernel"]] = {}
"""By name."""

_MOST_PREPARED = 512
"""Calls that a kernel has prepared at once; those used last stay."""


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel is asked to support, known before any tensor exists.

    v_head_dim: of values and outputs; None for that of queries and keys. windows: whether some queries see only the
    nearest keys. packed: whether calls have several segments, or shapes that do not come again (documents, prompts):
    a kernel that cannot take segments serves them one by one.

    Raises:
        ValueError: the sizes are not positive, or `num_kv_heads` does not divide `num_heads`.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    deterministic: bool = False
    v_head_dim: int | None = None
    windows: bool = False
    packed: bool = False

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def __post_init__(self) -> None:
        for field in ("head_dim", "num_heads", "num_kv_heads", "value_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a positive number; give 1 or more.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head must serve the same number of query heads."
            )


class BlockInputs(NamedTuple):
    """What forward and backward of one call share: q `[s,b,h,d]`, k `[t,b,g,d]`, v `[t,b,g,e]`.

    prepared: what `AttentionKernel.prepare` has made for the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    call: KernelCall
    scale: float
    prepared: Any = None


class CallKind(NamedTuple):
    """What of a call a kernel may be compiled for, beside heads and dtype. packed: segments, and not one of all rows.
    left, right: whether its window ends there."""

    packed: bool
    left: bool
    right: bool

    @classmethod
    def of(cls, call: KernelCall, rows: tuple[int, int]) -> "CallKind":
        """rows: queries and keys of its tensors."""
        whole = call.segments == (Segment(0, rows[0], 0, rows[1]),)
        return cls(not whole, call.left != FAR, call.right != FAR)

    @property
    def example(self) -> KernelCall:
        """A small call of this kind, of as many queries as keys; longer than the tiles of kernels."""
        ends = [(0, 512), (512, 1024)] if self.packed else [(0, 1024)]
        segments = tuple(Segment(*each, *each) for each in ends)
        return KernelCall(segments, 128 if self.left else FAR, 0 if self.right else FAR)

    def __str__(self) -> str:
        mask = "window" if self.left else "causal" if self.right else "full"
        return f"{mask}, packed" if self.packed else mask


def dense_call(queries: int, keys: int, causal: bool = False) -> KernelCall:
    """All queries against all keys; or causally, the last query facing the last key."""
    return KernelCall((Segment(0, queries, 0, keys),), FAR, 0 if causal else FAR)


class AttentionKernel(ABC):
    """Attention of some queries over some keys.

    A provider implements `why_not`, `_forward` and `_backward` and says what it `takes`. What every provider needs
    alike lives here, once: shape checks, calls without queries or keys, rows between segments, and strides no kernel
    can read, and scales that are not positive.
    """

    name: ClassVar[str]
    takes: Takes = Takes()
    speed: ClassVar[dict[str, int]] = {}
    """By type of device, its place in the order of `auto`: the highest comes first; without one it is not taken."""
    compiles: ClassVar[bool] = False
    """Whether a kernel is compiled when the first call of a `CallKind` comes."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PROVIDERS[cls.name] = cls

    def __init__(self, *, deterministic: bool = False) -> None:
        """As in the request; `why_not` says whether the provider can be `deterministic`."""
        self.deterministic = deterministic
        self._prepared = lru_cache(maxsize=_MOST_PREPARED)(self.prepare)

    @abstractmethod
    def why_not(self, request: KernelRequest) -> str | None:
        """None when `request` is supported, else one plain sentence: the value and what would be accepted."""

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Any:
        """What the provider needs on the device for a call over so many queries and keys; None for nothing."""
        return None

    @no_grad
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of these queries over these keys alone.

        Args:
            q: `[s, b, h, d]`, any strides.
            k: `[t, b, g, d]`, v: `[t, b, g, e]`, any strides, the dtype and device of q; `g` divides `h`.
            call: which rows see which; one that `takes` allows.
            scale: factor of the scores before the softmax.

        Returns:
            out `[s, b, h, e]` in q's dtype and lse `[s, b, h]`, the natural log of the summed exponentials of the
            scaled scores: fp32, or fp64 where q is fp64. Strides of both are the provider's own. Queries without keys:
            out 0, lse -inf.

        Raises:
            ValueError: shapes, dtypes or devices disagree, or a call that this kernel does not take.
        """
        inputs = self._inputs(q, k, v, call, scale)
        if inputs is None:
            return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q.dtype))
        return self._forward(inputs)

    @no_grad
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: KernelCall, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """This call's share of the gradients; shares of all calls of a query add up to its whole gradient.

        Args:
            grad_out, out: `[s, b, h, e]`; `out` is the GLOBAL result of these queries over all their keys, not this
                call's. q's dtype (another float dtype is converted, which costs a copy).
            q, k, v, call, scale: as given to `forward`.
            lse: `[s, b, h]`, the GLOBAL log-sum-exp. Cheapest as a view of contiguous `[b, h, s]` storage.

        Returns:
            dq, dk, dv in the shapes and dtype of q, k, v. Accumulate them over calls in fp32. 0 where nothing is seen.

        Raises:
            ValueError: as `forward`, or `grad_out`, `out` or `lse` do not fit q.
        """
        of_out = (*q.shape[:3], v.shape[-1])
        for name, tensor, shape in (("grad_out", grad_out, of_out), ("out", out, of_out), ("lse", lse, q.shape[:3])):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with this q it must be {tuple(shape)}.")
        inputs = self._inputs(q, k, v, call, scale)
        if inputs is None:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dq, dk, dv = self._backward(
            inputs, readable(grad_out.to(q.dtype)), readable(out.to(q.dtype)), lse.to(sum_dtype(q.dtype))
        )
        factor = _positive(q, scale)[2] if scale <= 0 else 1
        return dq if factor == 1 else dq * factor, dk, dv

    @abstractmethod
    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """`forward` of a checked call with at least one query and one key."""

    @abstractmethod
    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """`backward` of a checked call with at least one query and one key: dq, dk, dv."""

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> BlockInputs | None:
        """Checked and readable; None where there is nothing to compute."""
        check_tensors(q, k, v)
        if call.segments and (call.segments[-1].q_stop > q.shape[0] or call.segments[-1].k_stop > k.shape[0]):
            raise ValueError(
                f"a call of queries {call.q_span} and keys {call.k_span}, with {q.shape[0]} queries and {k.shape[0]} "
                "keys: expected a call over their rows."
            )
        whole = (Segment(0, q.shape[0], 0, k.shape[0]),)
        if not self.takes.packed and call.segments not in ((), whole):
            raise ValueError(f"segments {call.segments}: expected {whole}, one of all rows, in a call of {self.name}.")
        if q.numel() == 0 or k.numel() == 0:
            return None
        prepared = self._prepared(call, (q.shape[0], k.shape[0]), q.device)
        q, scale, _ = _positive(q, scale)
        return BlockInputs(readable(q), readable(k), readable(v), call, scale, prepared)


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """(queries, scale) of the same scores with a scale above 0, and what the queries were multiplied by: -1, 0 or 1.

    Fused kernels mask with -inf and seek maxima before they scale: another sign gives them NaN.
    """
    if not scale <= 0:
        return q, scale, 1
    return (q * 0, 1.0, 0) if scale == 0 else (-q, -scale, -1)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of log-sum-exps and of what is added up: fp64 for fp64 inputs, so that double precision survives; else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(x: Tensor) -> Tensor:
    """`x`, copied only where its strides are ones fused kernels misread.

    They step through the head dim by 1, and autograd hands out expanded (stride 0) gradients, e.g. of a plain sum.
    """
    strides = x.stride()
    if strides[-1] == 1 and 0 not in strides:
        return x
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, strides, strict=True))
    return x.contiguous() if expanded or strides[-1] != 1 else x


def heads_first(x: Tensor) -> Tensor:
    """`[s, b, h, d]` seen as `[b, h, s, d]`, as the ATen ops take it; no copy."""
    return x.permute(1, 2, 0, 3)


def token_first(x: Tensor) -> Tensor:
    """`[b, h, s, d]` seen as `[s, b, h, d]`; no copy."""
    return x.permute(2, 0, 1, 3)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q `[s,b,h,d]`, k `[t,b,g,d]` and v `[t,b,g,e]` fit each other."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q [s, b, h, d], k [t, b, g, d] and "
            "v [t, b, g, e]."
        )
    (_, batch, heads, head_dim), (_, kv_batch, kv_heads, kv_head_dim) = q.shape, k.shape
    if (batch, head_dim) != (kv_batch, kv_head_dim):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head dim; they must be equal.")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: the first must be a multiple of the second.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; convert them to one."
        )
