"""One device alone, with as many FLOPs as each of several has: every fast kernel that `auto` may take."""

from __future__ import annotations

from functools import partial

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.kernels import auto_order

from ..cases import Case
from ..measure import Contender, Made


def contenders(n: int, device_type: str) -> list[Contender]:
    """Beside `n` ranks."""
    one = "one GPU" if device_type == "cuda" else "one CPU"
    kernels = [kernel for kernel in auto_order(device_type) if kernel != "reference"]
    return [Contender(f"{one}, {kernel}", partial(_alone, n, kernel), ours=True) for kernel in kernels]


def _alone(n: int, kernel: str, case: Case) -> Made:
    share, attention = case.share(n), ContextParallelAttention(kernel=kernel)
    return Made(lambda q, k, v: attention(q, k, v, mask=share.mask), range(share.length), share)
