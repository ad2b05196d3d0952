"""A rank's part of a sequence: the numbers of its tokens, their rows of a tensor, and all ranks' rows together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import all_gather_rows
from ..errors import refuse
from ..layout import Layout


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
