"""What sharded attention is compared with: dense attention written out, and sequences cut and joined by a layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import AttentionKernel, dense_call
from ..layout import Layout

_MOST_SCORES = 2**22


def random_qkv(
    length: int, b: int, h: int, g: int, d: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, e: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output for a whole sequence, alike in every process that asks. e: the head
    dimension of values and outputs, if it is another one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        return torch.randn(length, b, heads, size, generator=generator, dtype=torch.float32).to(device, dtype)

    return draw(h, d), draw(g, d), draw(g, e or d), draw(h, e or d)


def visible(
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    prefixes: Sequence[int] | None = None,
    parents: Sequence[int] | None = None,
) -> Tensor:
    """What `schedules.mask.documents` of the same arguments means, token by token: bool `[S, S]`, whether a query sees
    a key."""
    document = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
    first: list[int] = []  # by document, the position of its first token
    above = torch.eye(len(lengths), dtype=torch.bool)  # whether a document is another one, or continues it
    for number in range(len(lengths)):
        parent = -1 if parents is None else parents[number]
        first.append(first[parent] + lengths[parent] if parent >= 0 else 0)
        if parent >= 0:
            above[number] |= above[parent]
    within = torch.cat([torch.arange(0), *map(torch.arange, lengths)])  # each token's place in its document
    position = within + torch.tensor(first, dtype=torch.long)[document]
    behind = position[:, None] - position[None, :]
    seen = above[document[:, None], document[None, :]]
    if window[0] is not None:
        seen &= behind <= window[0]
    if window[1] is not None:
        seen &= -behind <= window[1]
    if causal:
        of_prefix = within < torch.tensor([0] * len(lengths) if prefixes is None else prefixes)[document]
        seen &= (behind >= 0) | ((document[:, None] == document[None, :]) & of_prefix[None, :])
    return seen


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    causal: bool = True,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    seen: Tensor | None = None,
    sink: Tensor | None = None,
) -> dict[str, Tensor]:
    """out, dq, dk, dv of attention over a whole sequence by plain matrix products in `dtype`, and dsink of sinks.

    Computed some query heads at a time, one where sequences are long, so that memory holds few score matrices.

    Args:
        q: `[S, b, h, d]`. k: `[S, b, g, d]`. v: `[S, b, g, e]`. grad_out: `[S, b, h, e]`.
        seen: bool `[S, S]`, whether a query sees a key; None for what `causal` says.
        sink: `[h]`, a logit per head that takes part in every softmax and has no value.
    """
    length, batch, h, d = q.shape
    groups, device = h // k.shape[2], q.device
    scale = d**-0.5 if scale is None else scale
    found = {"out": torch.zeros(grad_out.shape, dtype=dtype, device=device)}
    found |= {
        "d" + name: torch.zeros(x.shape, dtype=dtype, device=device) for name, x in (("q", q), ("k", k), ("v", v))
    }
    found |= {} if sink is None else {"dsink": torch.zeros(h, dtype=dtype, device=device)}
    if seen is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        seen = seen.tril() if causal else seen
    some_heads = max(1, _MOST_SCORES // max(1, batch * length**2))
    for first in range(0, h, some_heads):
        heads = torch.arange(first, min(h, first + some_heads), device=device)
        shared = heads // groups
        leaves = [_heads_first(x[:, :, some], dtype) for x, some in ((q, heads), (k, shared), (v, shared))]
        leaves += [] if sink is None else [sink.detach()[heads].to(dtype).requires_grad_()]
        with torch.enable_grad():
            scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(~seen.to(device), -torch.inf)
            if sink is not None:
                scores = torch.cat((scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)), 3)
            weights = scores.softmax(-1)[..., :length].nan_to_num(0)  # a query that sees nothing gets nothing
            out = weights @ leaves[2]
        grads = torch.autograd.grad(out, leaves, grad_out[:, :, heads].to(dtype).permute(1, 2, 0, 3))
        found["out"][:, :, heads] = out.detach().permute(2, 0, 1, 3)
        for name, some, grad in zip(("dq", "dk", "dv"), (heads, shared, shared), grads, strict=False):
            found[name].index_add_(2, some, grad.permute(2, 0, 1, 3))
        if sink is not None:
            found["dsink"][heads] = grads[3]
    return found


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[S, b, h, d]` to a leaf `[b, h, S, d]`."""
    return x.detach().to(dtype).permute(1, 2, 0, 3).contiguous().requires_grad_()


def kernel_attention(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float | None = None,
) -> dict[str, Tensor]:
    """The same by one call of `kernel` over the whole sequence: the error that sharding is measured by."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = dense_call(q.shape[0], k.shape[0], causal)
    out, lse = kernel.forward(q, k, v, call, scale=scale)
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, call, scale=scale)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def shard(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows (tokens) of `x` that `rank` holds, in slot order."""
    return x[torch.tensor(list(layout.tokens(rank)), dtype=torch.long, device=x.device)]


def unshard(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """The whole sequence from what every rank holds."""
    order = torch.tensor([token for rank in range(layout.n) for token in layout.tokens(rank)], dtype=torch.long)
    whole = torch.cat(list(shards))
    return torch.empty_like(whole).index_copy_(0, order.to(whole.device), whole)
