"""References for sharded attention: dense attention written out, and sequences cut and joined by a layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.kernels import AttentionKernel, dense_call
from ..core.layout import Layout

_MAX_SCORES = 2**22


def random_qkv(
    length: int, b: int, h: int, g: int, d: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, e: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of the output for a whole sequence, the same in every process.

    Args:
        e: the head dimension of values and outputs; 0 for `d`.
    """
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
    """Return whether a query sees a key, bool `[S, S]`, for the mask `core.plans.mask.documents` of these arguments."""
    document = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
    first: list[int] = []  # position of a document's first token
    continues = torch.eye(len(lengths), dtype=torch.bool)  # whether one document is or continues another
    for number in range(len(lengths)):
        parent = -1 if parents is None else parents[number]
        first.append(first[parent] + lengths[parent] if parent >= 0 else 0)
        if parent >= 0:
            continues[number] |= continues[parent]
    within = torch.cat([torch.arange(0), *map(torch.arange, lengths)])  # each token's index in its document
    position = within + torch.tensor(first, dtype=torch.long)[document]
    distance = position[:, None] - position[None, :]
    seen = continues[document[:, None], document[None, :]]
    if window[0] is not None:
        seen &= distance <= window[0]
    if window[1] is not None:
        seen &= -distance <= window[1]
    if causal:
        in_prefix = within < torch.tensor([0] * len(lengths) if prefixes is None else prefixes)[document]
        seen &= (distance >= 0) | ((document[:, None] == document[None, :]) & in_prefix[None, :])
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
    """Return out, dq, dk, dv, and dsink with sinks, of attention over a whole sequence by plain matrix products.

    A few query heads are computed at a time, or one if sequences are long, so that few score matrices are in memory.

    Args:
        q: `[S, b, h, d]`. k: `[S, b, g, d]`. v: `[S, b, g, e]`. grad_out: `[S, b, h, e]`.
        dtype: precision of the computation.
        seen: bool `[S, S]`, whether a query sees a key; None for the mask that `causal` selects.
        sink: `[h]`, a logit per head that takes part in every softmax and has no value.
    """
    length, batch, h, d = q.shape
    group_size, device = h // k.shape[2], q.device
    scale = d**-0.5 if scale is None else scale
    shapes = {"out": grad_out.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    shapes |= {} if sink is None else {"dsink": sink.shape}
    results = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    if seen is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        seen = seen.tril() if causal else seen
    heads_at_once = max(1, _MAX_SCORES // max(1, batch * length**2))
    for first in range(0, h, heads_at_once):
        heads = torch.arange(first, min(h, first + heads_at_once), device=device)
        kv_heads = heads // group_size
        leaves = [_heads_first(x[:, :, some], dtype) for x, some in ((q, heads), (k, kv_heads), (v, kv_heads))]
        leaves += [] if sink is None else [sink.detach()[heads].to(dtype).requires_grad_()]
        with torch.enable_grad():
            scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(~seen.to(device), -torch.inf)
            if sink is not None:
                scores = torch.cat((scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)), 3)
            weights = scores.softmax(-1)[..., :length].nan_to_num(0)  # the output of a query that sees nothing is 0
            out = weights @ leaves[2]
        grads = torch.autograd.grad(out, leaves, grad_out[:, :, heads].to(dtype).permute(1, 2, 0, 3))
        results["out"][:, :, heads] = out.detach().permute(2, 0, 1, 3)
        for name, some, grad in zip(("dq", "dk", "dv"), (heads, kv_heads, kv_heads), grads, strict=False):
            results[name].index_add_(2, some, grad.permute(2, 0, 1, 3))
        if sink is not None:
            results["dsink"][heads] = grads[3]
    return results


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn `[S, b, h, d]` into a leaf `[b, h, S, d]`."""
    return x.detach().to(dtype).permute(1, 2, 0, 3).contiguous().requires_grad_()


def kernel_attention(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: bool, scale: float | None = None
) -> dict[str, Tensor]:
    """Return the same by one call of `kernel` over the whole sequence, whose error bounds that of sharded attention."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = dense_call(q.shape[0], k.shape[0], causal)
    out, lse = kernel.forward(q, k, v, call, scale=scale)
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, call, scale=scale)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def shard(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the rows (tokens) of `x` that `rank` holds, in slot order."""
    return x[torch.tensor(list(layout.tokens(rank)), dtype=torch.long, device=x.device)]


def unshard(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return the whole sequence from the shards of all ranks."""
    order = torch.tensor([token for rank in range(layout.n) for token in layout.tokens(rank)], dtype=torch.long)
    whole = torch.cat(list(shards))
    return torch.empty_like(whole).index_copy_(0, order.to(whole.device), whole)
