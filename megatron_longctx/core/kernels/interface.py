"""The interface of attention kernels: one call forward, one call backward, and why a request is not supported.

Tensors are token first: `s` queries, `t` keys, `b` batch, `h` query heads, `g` KV heads (g divides h), `d` head dim of
queries and keys, `e` head dim of values and outputs.

A reason for refusing a request is one sentence with the value and the accepted values. Its function returns None if
there is no objection, so that `or` chains reasons and the first one counts. No reason synchronizes with the device or
allocates memory on it.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..plans.kernel_calls import KernelCall, KernelSupport, Segment
from ..plans.slices import FAR
from .no_grad import no_grad

PROVIDERS: dict[str, type["AttentionKernel"]] = {}
"""The providers, keyed by name."""

_MAX_PREPARED = 512
"""The number of calls whose preparation a kernel keeps, least recently used first out."""


@dataclass(frozen=True)
class KernelRequest:
    """The properties of calls that a kernel must support.

    v_head_dim: head dim of values and outputs; None for that of queries and keys. windows: whether some queries see
    only the nearest keys. packed: whether calls have several segments or shapes that do not recur (documents, prompts);
    a kernel that does not take segments runs them one by one. The numbers are those of checked tensors or settings.
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


class BlockInputs(NamedTuple):
    """The inputs of one call: q `[s, b, h, d]`, k `[t, b, g, d]`, v `[t, b, g, e]`. prepared: by `prepare`."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: KernelCall
    scale: float
    prepared: Any = None


class CallKind(NamedTuple):
    """The properties of a call, besides heads and dtype, for which a kernel may be compiled.

    packed: whether the call has segments other than one of all rows. left, right: whether its window has a bound there.
    """

    packed: bool
    left: bool
    right: bool

    @classmethod
    def of(cls, call: KernelCall, rows: tuple[int, int]) -> "CallKind":
        """Return the kind of a call over tensors of `rows` (queries, keys)."""
        return cls(call.segments != dense_call(*rows).segments, call.left != FAR, call.right != FAR)

    @property
    def example(self) -> KernelCall:
        """A small call of this kind over 1,024 queries and keys, which is longer than the tiles of kernels."""
        ends = [(0, 512), (512, 1024)] if self.packed else [(0, 1024)]
        segments = tuple(Segment(*each, *each) for each in ends)
        return KernelCall(segments, 128 if self.left else FAR, 0 if self.right else FAR)

    def __str__(self) -> str:
        mask = "window" if self.left else "causal" if self.right else "full"
        return f"{mask}, packed" if self.packed else mask


def dense_call(queries: int, keys: int, causal: bool = False) -> KernelCall:
    """Return the call of all queries over all keys; if causal, the last query faces the last key."""
    return KernelCall((Segment(0, queries, 0, keys),), FAR, 0 if causal else FAR)


class AttentionKernel(ABC):
    """Attention of some queries over some keys.

    A provider declares `takes` and implements `why_not`, `_forward` and `_backward`. This class handles what all
    providers need: shape checks, calls without queries or keys, strides that kernels cannot read, and scales that are
    not positive.
    """

    name: ClassVar[str]
    takes: KernelSupport = KernelSupport()
    speed: ClassVar[dict[str, int]] = {}
    """Priority for `auto`, keyed by device type: `auto` tries the highest first, and skips providers without one."""
    compiles: ClassVar[bool] = False
    """Whether the first call of each `CallKind` compiles a kernel."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PROVIDERS[cls.name] = cls

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._prepared = lru_cache(maxsize=_MAX_PREPARED)(self.prepare)

    @abstractmethod
    def why_not(self, request: KernelRequest) -> str | None:
        """Return None if `request` is supported, else one plain sentence: the value and the accepted values."""

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Any:
        """Return what the provider needs on the device for a call over `rows` (queries, keys); None for nothing."""
        return None

    @no_grad
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, *, scale: float) -> tuple[Tensor, Tensor]:
        """Compute attention of these queries over these keys alone.

        Args:
            q: `[s, b, h, d]`, any strides.
            k: `[t, b, g, d]`, v: `[t, b, g, e]`, any strides, the dtype and device of q; `g` divides `h`.
            call: which rows see which; one that `takes` allows.
            scale: factor of the scores before the softmax.

        Returns:
            out `[s, b, h, e]` in q's dtype and lse `[s, b, h]`, the natural log of the summed exponentials of the
            scaled scores: fp32, or fp64 if q is fp64. The provider chooses their strides. Queries without keys get out
            0 and lse -inf.

        Raises ValueError: shapes, dtypes or devices disagree, or this kernel does not take the call.
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
        """Compute this call's part of the gradients; the parts of all calls of a query add up to its gradient.

        Args:
            grad_out, out: `[s, b, h, e]`; `out` is the GLOBAL result of these queries over all their keys, not this
                call's. Dtype of q (another float dtype is converted, which costs a copy).
            q, k, v, call, scale: as given to `forward`.
            lse: `[s, b, h]`, the GLOBAL log-sum-exp. Cheapest as a view of contiguous `[b, h, s]` storage.

        Returns:
            dq, dk, dv in the shapes and dtype of q, k, v. Accumulate them over calls in fp32. Rows that see nothing
            get 0.

        Raises ValueError: as `forward`, or `grad_out`, `out` or `lse` do not fit q.
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
        if scale <= 0:  # the queries were multiplied by this factor
            dq = dq * (0 if scale == 0 else -1)
        return dq, dk, dv

    @abstractmethod
    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Compute `forward` of a checked call with at least one query and one key."""

    @abstractmethod
    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Compute dq, dk, dv of a checked call with at least one query and one key."""

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> BlockInputs | None:
        """Return the checked inputs with readable strides and a positive scale, or None if there is nothing to do."""
        check_tensors(q, k, v)
        if call.segments and (call.segments[-1].q_stop > q.shape[0] or call.segments[-1].k_stop > k.shape[0]):
            raise ValueError(
                f"a call of queries {call.q_span} and keys {call.k_span}, with {q.shape[0]} queries and {k.shape[0]} "
                "keys: expected a call over their rows."
            )
        if not self.takes.packed and call.segments:
            whole = (Segment(0, q.shape[0], 0, k.shape[0]),)
            if call.segments != whole:
                raise ValueError(
                    f"segments {call.segments}: expected {whole}, one of all rows, in a call of {self.name}."
                )
        if q.numel() == 0 or k.numel() == 0:
            return None
        prepared = self._prepared(call, (q.shape[0], k.shape[0]), q.device)
        if scale <= 0:  # fused kernels mask with -inf and take maxima before they scale, which would give NaN
            q, scale = (q * 0, 1.0) if scale == 0 else (-q, -scale)
        return BlockInputs(readable(q), readable(k), readable(v), call, scale, prepared)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exps and of sums: fp64 for fp64 inputs, to keep their precision, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(x: Tensor) -> Tensor:
    """Return `x`, copied only if fused kernels would misread its strides.

    They step through the head dim by 1, and autograd returns expanded (stride 0) gradients, e.g. of a plain sum.
    """
    strides = x.stride()
    if strides[-1] == 1 and 0 not in strides:
        return x
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, strides, strict=True))
    return x.contiguous() if expanded or strides[-1] != 1 else x


def heads_first(x: Tensor) -> Tensor:
    """Return the view `[b, h, s, d]` of `[s, b, h, d]`, the order of ATen's ops."""
    return x.permute(1, 2, 0, 3)


def token_first(x: Tensor) -> Tensor:
    """Return the view `[s, b, h, d]` of `[b, h, s, d]`."""
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
        raise ValueError(
            f"{heads} query heads over {kv_heads} KV heads: expected a multiple of the KV heads: each serves "
            "equally many query heads. Change the number of either."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; convert them to one."
        )


logger = logging.getLogger(__name__)

_logged: set[KernelRequest] = set()


def auto_order(device_type: str) -> list[str]:
    """Return the providers that `auto` tries on a type of device, fastest first."""
    speeds = {name: provider.speed.get(device_type, 0) for name, provider in PROVIDERS.items()}
    return sorted((name for name, speed in speeds.items() if speed), key=lambda name: -speeds[name])


def available(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Return every provider's name, with None if it supports `request`, else with the reason why it does not."""
    return [(name, each(deterministic=request.deterministic).why_not(request)) for name, each in PROVIDERS.items()]


def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """Return the kernel called `name`; for "auto", the first of `auto_order` that supports `request`.

    "auto" logs its choice, and which providers it skipped and why, once per request and process.

    Raises ValueError: `name` is unknown, or does not support `request`; the message lists what does.
    """
    auto = name == "auto"
    if not auto and name not in PROVIDERS:
        raise ValueError(f"kernel={name!r} is unknown; expected 'auto' or one of {', '.join(PROVIDERS)}.")
    names = auto_order(request.device_type) if auto else [name]
    if not names:
        expected = " or ".join(map(repr, sorted({device for each in PROVIDERS.values() for device in each.speed})))
        raise ValueError(
            f"kernel='auto' knows no kernels for device_type={request.device_type!r}; expected {expected}."
        )
    skipped: list[str] = []
    for each in names:
        kernel = PROVIDERS[each](deterministic=request.deterministic)
        reason = kernel.why_not(request)
        if reason is None:
            if auto and request not in _logged:
                _logged.add(request)
                logger.info("attention kernel: %s%s", each, "".join(f"; not {line}" for line in skipped))
            return kernel
        skipped.append(f"{each} ({reason})")
    problem = f"found none for {request}: {'; '.join(skipped)}" if auto else f"cannot be used here: {reason}"
    usable = [each for each, reason in available(request) if reason is None]
    remedy = f"Usable for this request: {', '.join(usable)}; or 'auto' to take the fastest."
    if not usable:
        remedy = "No kernel supports this request: change its device, dtype or head dim."
    raise ValueError(f"kernel={name!r} {problem}. {remedy}")


def wrong_device(request: KernelRequest, *accepted: str) -> str | None:
    """Refuse a device type that is not one of `accepted`, or has no device on this machine."""
    if request.device_type not in accepted:
        return f"device_type={request.device_type!r} is not supported, only {' or '.join(map(repr, accepted))}"
    if request.device_type == "cuda" and not torch.cuda.is_available():
        return "device_type='cuda' was requested, but torch sees no CUDA device"
    return None


def wrong_dtype(request: KernelRequest, *accepted: torch.dtype) -> str | None:
    """Refuse a dtype that is not one of `accepted`."""
    if request.dtype in accepted:
        return None
    return f"dtype={request.dtype} is not supported, only {', '.join(map(str, accepted))}"


def wrong_gpu(request: KernelRequest, *, least: tuple[int, int]) -> str | None:
    """Refuse all but CUDA GPUs of compute capability `least` or later, in bf16 or fp16."""
    reason = wrong_device(request, "cuda")
    if reason is None and torch.version.hip is not None:  # its ops of the same names have other limits and layouts
        reason = f"torch is a ROCm build ({torch.version.hip}), only CUDA is supported"
    if reason is None and (actual := torch.cuda.get_device_capability()) < least:
        reason = f"compute capability {actual[0]}.{actual[1]} is not supported, only {least[0]}.{least[1]} and later"
    return reason or wrong_dtype(request, torch.bfloat16, torch.float16)


def wrong_head_dim(request: KernelRequest, *, multiple: int, most: int) -> str | None:
    """Refuse a head dim that is not a multiple of `multiple`, or larger than `most`."""
    if request.head_dim % multiple == 0 and request.head_dim <= most:
        return None
    return f"head_dim={request.head_dim} is not supported, only multiples of {multiple} up to {most}"


def wrong_value_dim(request: KernelRequest) -> str | None:
    """Refuse values whose head dim is not that of queries and keys."""
    if request.value_dim == request.head_dim:
        return None
    return f"v_head_dim={request.value_dim} is not supported, only that of queries and keys ({request.head_dim})"
