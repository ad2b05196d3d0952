"""The distributed optimizer's state as it lies on the ranks: each writes and reads its own part of every parameter.

A rank holds a run of a parameter's values, in the order of its memory. In the parameter's shape that is a few boxes,
each of which is saved, or read in place, as a shard of the whole. Megatron's own form for any parallel sizes
(``fully_reshardable``) gathers 12 bytes a parameter into the host memory of every rank to get whole parameters;
what lies on disk is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import DistributedOptimizer

from .optimizer_host import host_states

Shards = dict[int, dict[str, list[ShardedTensor]]]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes, in order, that values `begin` to `end` of a tensor of this shape fill, in row-major order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], begin - before, end - before):
        yield (row, *offsets), (1, *sizes)


def own_state(optimizer: DistributedOptimizer) -> list[tuple[torch.nn.Parameter, Any, dict[str, torch.Tensor]]]:
    """Of every parameter of which this rank has a part: the parameter, which of its values, and their state, flat."""
    return [
        (parameter, ranges["param"], optimizer._get_main_param_and_optimizer_states(parameter))
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    ]


def state_shards(
    optimizer: DistributedOptimizer, model_part: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> Shards:
    """In the place of ``DistributedOptimizer.sharded_param_state_fully_reshardable``: views of the state itself.

    Args:
        model_part: the model's sharded state dictionary.
    """
    del is_loading, metadata
    sharded, _ = extract_sharded_tensors_and_factories(model_part)
    by_parameter = {id(entry.data): entry for entry in nested_values(sharded)}
    return {
        number: {
            key: list(_shards(key, flat, span.start, span.end, by_parameter[id(parameter)], parameter))
            for key, flat in ((key, _values(optimizer, flat)) for key, flat in state.items() if key != "step")
        }  # steps are in the parameter groups
        for number, (parameter, span, state) in enumerate(own_state(optimizer))
    }


def _values(optimizer: DistributedOptimizer, state: torch.Tensor) -> torch.Tensor:
    states = host_states(optimizer)
    return state if states is None else states.values(state)


def _shards(
    name: str, flat: torch.Tensor, begin: int, end: int, sharding: Any, parameter: torch.Tensor
) -> Iterator[ShardedTensor]:
    """Of values `begin` to `end` of this rank's parameter."""
    parts = sharding.build() if isinstance(sharding, ShardedTensorFactory) else [sharding]
    for part in nested_values(parts):
        assert part.data.is_contiguous() and part.flattened_range is None, part
        start = part.data.storage_offset() - parameter.storage_offset()
        size, prepended = part.data.numel(), part.prepend_axis_num
        done = max(begin, start)
        for offsets, sizes in boxes(part.local_shape, done - start, min(end, start + size) - start):
            values = flat[done - begin : done - begin + math.prod(sizes)]
            done += math.prod(sizes)
            inside = zip(part.global_offset[prepended:], offsets, strict=True)
            shape = (*(1 for _ in range(prepended)), *sizes)
            yield ShardedTensor(
                key=f"optimizer.state.{name}.{part.key}",
                data=values.detach().view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=part.global_shape,
                global_offset=(*part.global_offset[:prepended], *map(sum, inside)),
                axis_fragmentations=None,  # no regular grid
                replica_id=(*part.replica_id[:2], 0),  # data-parallel ranks have different values
            )
