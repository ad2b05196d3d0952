"""How Megatron slices packs. Imported before the doors, which 0.16 must not import before process groups exist."""

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


def share(lengths: Sequence[int], rank: int, world: int) -> Tensor:
    """Return a rank's tokens by TransformerEngine's `thd_get_partitioned_indices`, or by its definition without it."""
    stops = torch.tensor([0, *lengths]).cumsum(0).int()
    if importlib.util.find_spec("transformer_engine") is not None:
        importlib.import_module("transformer_engine.pytorch")  # it loads the other one
        tex = importlib.import_module("transformer_engine_torch")
        found: Tensor = tex.thd_get_partitioned_indices(stops.cuda(), int(stops[-1]), world, rank)
        return found.long()
    tokens: list[int] = []
    for start, length in zip(stops.tolist(), lengths, strict=False):
        chunk = length // (2 * world)
        for number in (rank, 2 * world - 1 - rank):
            tokens += range(start + chunk * number, start + chunk * (number + 1))
    return torch.tensor(tokens)
