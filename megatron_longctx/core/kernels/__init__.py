"""Attention of some queries over some keys, forward and backward, on any available kernel.

This package works on tensors of one process: it knows no ranks, process groups or plans. Tensors are token first: q
`[s, b, h, d]`, k `[t, b, g, d]` and v `[t, b, g, e]`, where g KV heads divide h query heads and are never expanded; out
`[s, b, h, e]` and lse `[s, b, h]` (natural log).

- `choose_kernel("auto", KernelRequest(...))` returns an `AttentionKernel`; `available(...)` says why not others.
- `kernel.forward` returns (out, lse) of one call; `merge_partials` merges results over disjoint keys in one pass.
- `kernel.backward` takes the GLOBAL (out, lse) and returns one call's part of the gradients; `sum_partials` adds them.
- `CopySum` adds the gradients of copied keys.
- `batched_copy` makes many copies in one launch.

To add a provider, add one file to `providers/` with a subclass of `AttentionKernel` or `PackedKernel` (`name`, `takes`,
`why_not`, `_forward`, `_backward`, and a `speed` if `auto` may choose it).
"""

from . import providers
from .interface import (
    PROVIDERS,
    AttentionKernel,
    CallKind,
    KernelRequest,
    auto_order,
    available,
    choose_kernel,
    dense_call,
)
from .partials import CopySum, Partial, merge_partials, sum_partials
