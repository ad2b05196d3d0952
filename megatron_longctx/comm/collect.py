"""Small values that every rank has to know."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """The sum of every rank's `values`, in place; as they are where there is no group. Collective."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values
