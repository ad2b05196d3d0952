"""flash-attn's inner functions as ring-flash-attn calls them, on this project's kernels: the same ones for all.

By the signatures of flash-attn 2.7 and 2.8: callers read argument names from them and give everything by name; results
are (out, lse, softmax, rng_state), of which the last two are for dropout; backward writes into the buffers it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import AttentionKernel, KernelRequest, Partial, choose, merge_partials, sum_partials

Outputs = tuple[Tensor, Tensor, None, None]

# What else callers say, and the only values that can be served.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_softmax": False,
}


def functions(kernel: str) -> dict[str, Callable[..., Any]]:
    """The four functions by name, on the kernel called `kernel` (`auto`: the fastest usable one).

    `_flash_attn_forward` and `_flash_attn_backward` take q, out, dout, dq `[b, s, h, d]`, k, v, dk, dv `[b, t, g, d]`
    and softmax_lse `[b, h, s]` in fp32; the `_varlen_` forms, for a single sequence, the same without b. Any strides.
    `causal` with s < t is aligned at the end: the last query sees all keys.

    Raises:
        ValueError: from the functions: dropout, windows, biases or several sequences are asked for, `causal` with more
            queries than keys, or no kernel can serve.
    """

    chosen = functools.cache(functools.partial(choose, kernel))  # as our own modes choose: once, not in every call

    def of(q: Tensor, k: Tensor) -> AttentionKernel:
        return chosen(KernelRequest(q.device.type, q.dtype, q.shape[3], q.shape[2], k.shape[2]))

    # Plain functions, since callers look into their signatures.
    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **rest: Any
    ) -> Outputs:
        _only_plain(rest)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out, lse = _forward(of(q, k), (q, k, v), causal, softmax_scale)
        return out.transpose(0, 1), lse.permute(1, 2, 0), None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        causal: bool,
        **rest: Any,
    ) -> None:
        _only_plain(rest)
        dout, q, k, v, out, dq, dk, dv = (x.transpose(0, 1) for x in (dout, q, k, v, out, dq, dk, dv))
        given = (dout, q, k, v, out, softmax_lse.permute(2, 0, 1))
        _backward(of(q, k), given, (dq, dk, dv), causal, softmax_scale)

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **rest: Any
    ) -> Outputs:
        _only_plain(_only_one_sequence(q, k, rest))
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        out, lse = _forward(of(q, k), (q, k, v), causal, softmax_scale)
        return out.squeeze(1), lse.squeeze(1).t(), None, None

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        causal: bool,
        **rest: Any,
    ) -> None:
        _only_plain(_only_one_sequence(q, k, rest))
        dout, q, k, v, out, dq, dk, dv = (x.unsqueeze(1) for x in (dout, q, k, v, out, dq, dk, dv))
        given = (dout, q, k, v, out, softmax_lse.t().unsqueeze(1))
        _backward(of(q, k), given, (dq, dk, dv), causal, softmax_scale)

    made = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    return {function.__name__: function for function in made}


def _only_plain(rest: dict[str, Any]) -> None:
    for name, value in rest.items():
        if name not in _PLAIN or value != _PLAIN[name]:
            expected = f"{_PLAIN[name]}" if name in _PLAIN else f"one of {', '.join(_PLAIN)}"
            raise ValueError(f"{name}={value!r}: expected {expected}. These kernels serve plain attention only.")


def _only_one_sequence(q: Tensor, k: Tensor, rest: dict[str, Any]) -> dict[str, Any]:
    """`rest` without what says where sequences begin, which shapes and integers tell: the device is not waited for."""
    left = dict(rest)
    bounds = [left.pop(f"cu_seqlens_{x}") for x in "qk"]
    longest = tuple(left.pop(f"max_seqlen_{x}") for x in "qk")
    if any(len(bound) != 2 for bound in bounds) or longest != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"{len(bounds[0]) - 1} sequences of up to {longest} queries and keys: expected one that fills the "
            f"{q.shape[0]} and {k.shape[0]} rows. Give one sequence at a time."
        )
    return left


def _hidden(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many first keys every query sees, before those that a causal mask hides from some."""
    if causal and q.shape[0] > k.shape[0]:
        raise ValueError(
            f"causal=True with {q.shape[0]} queries and {k.shape[0]} keys: the first queries would see none. "
            "Give at least as many keys."
        )
    return k.shape[0] - q.shape[0] if causal else 0


def _forward(
    kernel: AttentionKernel, qkv: tuple[Tensor, Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Token first; one call, or one over the keys that all queries see, one along the diagonal, and their merge."""
    q, k, v = qkv
    first = _hidden(q, k, causal)
    if not first:
        return kernel.forward(q, k, v, causal=causal, scale=scale)
    parts = [
        kernel.forward(q, k[:first], v[:first], causal=False, scale=scale),
        kernel.forward(q, k[first:], v[first:], causal=True, scale=scale),
    ]
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(parts[0][1])
    merge_partials([Partial(0, 0, *part) for part in parts], out, lse)
    return out, lse


def _backward(
    kernel: AttentionKernel,
    given: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float,
) -> None:
    """Token first; `given`: dout, q, k, v and the global out and lse."""
    dout, q, k, v, out, lse = given
    dq, dk, dv = gradients
    first = _hidden(q, k, causal)
    shares = []
    for rows, diagonal in ((slice(first), False), (slice(first, None), causal)):
        if k[rows].shape[0]:
            share, dk_rows, dv_rows = kernel.backward(dout, q, k[rows], v[rows], out, lse, causal=diagonal, scale=scale)
            dk[rows], dv[rows] = dk_rows, dv_rows
            shares.append(Partial(0, 0, share))
    if len(shares) == 1:
        dq.copy_(shares[0].value)
    else:
        sum_partials(shares, dq)
