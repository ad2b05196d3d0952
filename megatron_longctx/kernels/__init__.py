"""Attention of some queries over some keys, forward and backward, on whatever kernel is at hand.

The room knows tensors of one process: no ranks, no process groups, no plans. Layout is token first: q `[s, b, h, d]`,
k `[t, b, g, d]` and v `[t, b, g, e]` with g KV heads dividing h query heads (never expanded), out `[s, b, h, e]`, lse
`[s, b, h]` (natural log).

- `choose("auto", KernelRequest(...))` gives an `AttentionKernel`; `available(...)` says why the others were not taken.
- `kernel.forward` gives one call's (out, lse); `merge_partials` joins results over disjoint keys in one pass.
- `kernel.backward` takes the GLOBAL (out, lse) and gives one call's share of the gradients; `sum_partials` adds them.
- Beside them: `paged` attention of decode, `quantize_kv` (keys and values in 8 bits), `rotate` (RoPE), `batched_copy`.

To add a provider: one new file in `providers/` with a subclass of `AttentionKernel` or `PackedKernel` (`name`, `takes`,
`why_not`, `_forward`, `_backward`, and a `speed` if `auto` may take it).
"""

from megatron_longctx.kernels.interface import PROVIDERS, AttentionKernel, CallKind, KernelRequest, dense_call
from megatron_longctx.kernels.partials import Partial, merge_partials, sum_partials
from megatron_longctx.kernels.registry import auto_order, available, choose
