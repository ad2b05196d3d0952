"""A rank's part of a sequence: the numbers of its tokens, their rows of a tensor, and all ranks' rows together."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import all_gather_rows, gather_objects
from ..errors import refuse
from ..layout import Layout
from ..plans import Mask

_COMPARED: WeakSet[Any] = WeakSet()
"""The attentions whose ranks have compared a batch."""


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a mesh, which must have one dimension."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names or ()
        raise refuse("group", f"a mesh of {group.ndim} dimensions {names}", "one of 1", 'Choose one: mesh["cp"].')
    return group.get_group()


def token_numbers(layout: Layout, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the numbers in the sequence of a rank's tokens, int64 `[s]`, in the order of its local tensors."""
    spans = [torch.arange(each.start, each.stop, each.step, device=device) for each in layout.spans[rank]]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)


def shard(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Return a rank's tokens of a tensor that has the whole sequence in `dim`."""
    _check_tokens(x, dim, layout.length, "those of the whole sequence")
    return x.index_select(dim, token_numbers(layout, rank, x.device))


def gather(x: Tensor, layout: Layout, group: dist.ProcessGroup | None, rank: int, dim: int) -> Tensor:
    """Return the tokens of all ranks in the order of the sequence, from each rank's own. Collective."""
    if x.requires_grad and torch.is_grad_enabled():
        raise refuse("x", "a tensor that requires gradients", "one without", "Pass x.detach(): none would flow back.")
    own = layout.num_tokens(rank)
    _check_tokens(x, dim, own, f"those of rank {rank}")
    rows = x.movedim(dim, 0)
    most = max(map(layout.num_tokens, range(layout.n)))
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[:own] = rows
    parts = all_gather_rows(group, padded.flatten()).view(layout.n, *padded.shape)
    whole = rows.new_empty(layout.length, *rows.shape[1:])
    for each in range(layout.n):
        whole[token_numbers(layout, each, x.device)] = parts[each, : layout.num_tokens(each)]
    return whole.movedim(0, dim)


def _check_tokens(x: Tensor, dim: int, tokens: int, which: str) -> None:
    if x.shape[dim] != tokens:
        expected = f"{tokens} tokens in dimension {dim}, {which}"
        raise refuse("x", f"a tensor {list(x.shape)}", expected, "Give the mask of this sequence, or another dim.")


def checksum(tokens: Tensor) -> int:
    """Return a number that depends on all integers of `[b, S]` and on their places; of other numbers, only on S."""
    places = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
    return int(places[-1:].sum() if tokens.is_floating_point() or tokens.ndim != 2 else (tokens * places).sum())


@_disable_dynamo
def check_equal_batches(attention: Any, mask: Mask, content: Callable[[], object]) -> None:
    """Refuse a batch of which ranks have different ones. Collective; only an attention's first batch is compared.

    content: returns what the tokens of equal batches have in common, such as their `checksum`.
    """
    if attention in _COMPARED:
        return
    found = gather_objects(attention._group_to_send(), (mask.documents, mask.slices, content()))
    if any(each != found[0] for each in found):
        remedy = "Give all ranks of the attention's group the same one, as from a sampler of the groups."
        what = "documents" if any(each[:2] != found[0][:2] for each in found) else "tokens"
        raise refuse("batch", f"other {what} on some ranks", "one whole batch, equal on all ranks", remedy)
    _COMPARED.add(attention)
