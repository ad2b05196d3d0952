"""Attention of one block of queries over one block of keys, forward and backward, on whatever kernel is at hand.

The room knows tensors of one process: no ranks, no process groups, no plans. Layout is token first: q `[s, b, h, d]`,
k and v `[t, b, g, d]` with g KV heads dividing h query heads (never expanded), out like q, lse `[s, b, h]` (natural
log).

- `choose("auto", KernelRequest(...))` gives an `AttentionKernel`; `available(...)` says why the others were not taken.
- `kernel.forward` gives one block's (out, lse); `merge_partials` joins results over disjoint keys, several in one pass,
  `merge_into` one after another.
- `kernel.backward` takes the GLOBAL (out, lse) and gives one block's share of the gradients; `sum_partials` adds them.
- `quantize` (a module) packs tensors into 8 or 4 bits for messages, unpacks and sums them; `rotate` (a module) is RoPE.

To add a provider: one new file with a subclass of `AttentionKernel` (`name`, `why_not`, `_forward`, `_backward`; the
base class checks shapes and handles blocks without queries or keys), one entry in `registry.PROVIDERS`, a place in
`registry.AUTO_ORDER` if `auto` may take it, and its name in the list at the top of
`tests/kernels/test_kernel_providers.py` (CPU) or `tests/kernels/test_kernels_gpu.py`.
"""

from megatron_longctx.kernels.interface import AttentionKernel, KernelRequest
from megatron_longctx.kernels.merge import merge_into, merge_into_torch
from megatron_longctx.kernels.partials import MOST as MOST_PARTIALS
from megatron_longctx.kernels.partials import Partial, merge_partials, sum_partials
from megatron_longctx.kernels.registry import AUTO_ORDER, PROVIDERS, available, choose

__all__ = [
    "AUTO_ORDER",
    "MOST_PARTIALS",
    "PROVIDERS",
    "AttentionKernel",
    "KernelRequest",
    "Partial",
    "available",
    "choose",
    "merge_into",
    "merge_into_torch",
    "merge_partials",
    "sum_partials",
]
