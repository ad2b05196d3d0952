"""The gradients of a model in DDP, between backward and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from .experts import numbered

_LAYERS = "decoder.layers."


def named_parameters(models: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """This rank's parameters, to which DDP gives `main_grad`, by names that count layers over all pipeline
    stages, and experts over all ranks."""
    (gpt,) = unwrap_model(list(models))
    before = gpt.decoder.layers[0].layer_number - 1
    found = {}
    for name, parameter in gpt.named_parameters():
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{before + int(number)}.{rest}"
            name = numbered(name, getattr(gpt.decoder.layers[int(number)].mlp, "local_expert_indices", [0])[0])
        found[name] = parameter
    return found


def whole_gradients(
    models: Sequence[DistributedDataParallel], groups: ProcessGroupCollection, distributed: bool
) -> dict[str, Tensor]:
    """A copy of the gradients of this rank's parameters, reduced over data- and context-parallel ranks. All call it.

    distributed: whether the optimizer is; each of these ranks has then reduced one piece of each bucket.
    """
    if distributed:
        for model in models:
            for buffers, group in (
                (model.buffers, groups.dp_cp),
                (model.expert_parallel_buffers, groups.expt_dp),
            ):
                for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                    pieces = bucket.grad_data.chunk(group.size())
                    dist.all_gather(list(pieces), pieces[group.rank()].clone(), group=group)
    return {name: x.main_grad.clone() for name, x in named_parameters(models).items()}
