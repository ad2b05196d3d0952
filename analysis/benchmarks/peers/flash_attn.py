"""flash-attn's inner functions as ring-flash-attn calls them, on this project's kernels, so that all use the same.

They follow flash-attn 2.7 and 2.8: callers pass everything by name; results are (out, lse, softmax, rng_state), with
the last two for dropout; backward writes into the buffers that it receives.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_longctx.core.kernels import AttentionKernel, KernelRequest, choose_kernel, dense_call
from megatron_longctx.core.plans import KernelCall, Segment
from megatron_longctx.core.plans.slices import FAR

Outputs = tuple[Tensor, Tensor, None, None]


def functions(kernel: str) -> dict[str, Callable[..., Any]]:
    """Return the four functions by name, on the kernel named `kernel` (`auto`: the fastest usable one).

    `_flash_attn_forward` and `_flash_attn_backward` take q, out, dout, dq `[b, s, h, d]`, k, v, dk, dv `[b, t, g, d]`
    and softmax_lse `[b, h, s]` in fp32. The `_varlen_` forms take the same without b, and `cu_seqlens_q` and `_k` on
    the host. Ends are aligned: the last query of a sequence sees up to its last key.

    Raises:
        ValueError: by the functions, if no kernel can be used.
    """
    kernels = _Kernels(functools.cache(functools.partial(choose_kernel, kernel)))  # once, as for this package's modes

    # Plain functions, because callers inspect their signatures.
    def _flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Outputs:
        out, lse = kernels.forward([x.transpose(0, 1) for x in (q, k, v)], rest)
        return out.transpose(0, 1), lse.permute(1, 2, 0), None, None

    def _flash_attn_backward(softmax_lse: Tensor, **rest: Any) -> None:
        kernels.backward(lambda name: rest[name].transpose(0, 1), softmax_lse.permute(2, 0, 1), rest)

    def _flash_attn_varlen_forward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Outputs:
        out, lse = kernels.forward([x.unsqueeze(1) for x in (q, k, v)], rest)
        return out.squeeze(1), lse.squeeze(1).t(), None, None

    def _flash_attn_varlen_backward(softmax_lse: Tensor, **rest: Any) -> None:
        kernels.backward(lambda name: rest[name].unsqueeze(1), softmax_lse.t().unsqueeze(1), rest)

    all_four = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    return {function.__name__: function for function in all_four}


class _Kernels:
    """Calls the kernels that `choose` returns. Tensors are token first."""

    def __init__(self, choose: Callable[[KernelRequest], AttentionKernel]) -> None:
        self._choose = choose

    def forward(self, qkv: Sequence[Tensor], rest: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        outs = [
            kernel.forward(q[rows], k[keys], v[keys], call, scale=rest["softmax_scale"])
            for kernel, call, rows, keys in self._calls(q, k, rest)
        ]
        out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*outs, strict=True))
        return out, lse

    def backward(self, tensor: Callable[[str], Tensor], lse: Tensor, rest: dict[str, Any]) -> None:
        dout, q, k, v, out, dq, dk, dv = map(tensor, ("dout", "q", "k", "v", "out", "dq", "dk", "dv"))
        for kernel, call, rows, keys in self._calls(q, k, rest):
            dq[rows], dk[keys], dv[keys] = kernel.backward(
                dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], call, scale=rest["softmax_scale"]
            )

    def _calls(
        self, q: Tensor, k: Tensor, rest: dict[str, Any]
    ) -> Iterator[tuple[AttentionKernel, KernelCall, slice, slice]]:
        """Yield one call for all sequences, or one per sequence if the kernel does not support packs."""
        assert not rest.get("dropout_p") and rest.get("alibi_slopes") is None
        bounds = (rest.get("window_size_left", -1), 0 if rest["causal"] else rest.get("window_size_right", -1))
        left, right = (FAR if bound < 0 else bound for bound in bounds)
        starts = [rest[f"cu_seqlens_{x}"].tolist() for x in "qk"] if "cu_seqlens_q" in rest else []
        call = dense_call(q.shape[0], k.shape[0])._replace(left=left, right=right)
        if starts:
            edges = zip(starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False)
            call = call._replace(segments=tuple(Segment(*each) for each in edges if each[1] > each[0]))
        request = KernelRequest(
            q.device.type, q.dtype, q.shape[3], q.shape[2], k.shape[2],
            windows=left != FAR or right not in (0, FAR), packed=len(call.segments) > 1,
        )  # fmt: skip
        kernel = self._choose(request)
        if kernel.takes.packed:
            yield kernel, call, slice(None), slice(None)
            return
        for q0, q1, k0, k1 in call.segments:
            whole = (Segment(0, q1 - q0, 0, k1 - k0),)
            yield kernel, call._replace(segments=whole), slice(q0, q1), slice(k0, k1)
