"""The optimizer's part of a checkpoint.

The distributed optimizer. Every rank writes and reads its own part of every parameter. In memory order this part is a
range of the parameter's values; in the parameter's shape it is a few boxes, and each box is a shard of the whole
tensor. Megatron's own ``fully_reshardable`` form gathers whole parameters instead, 12 bytes per parameter in the host
memory of every rank. The files are the same.

torch's Adam, which is used without TransformerEngine and Apex. Megatron-Core cannot describe it before its first step,
does not expect ``step`` among the states of a parameter, and loads ONE ``step`` tensor, which every parameter would
then advance. Fused Adams count steps per group and need nothing here.
"""

import functools
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from .fp8 import fp8_weights
from .optimizer import host_states, parts_of
from .version import match_groups_by_kind

_KINDS, _OF_EXPERTS = ("wd_mult", "lr_mult", "is_decoupled_lr"), "is_expert_parallel"
# Settings in parameter groups that the run, and not the checkpoint, decides.
_HYPERPARAMETERS = ("max_lr", "min_lr", "betas", "eps")


def kind(optimizer: MegatronOptimizer | None) -> str | None:
    """Return the name of the optimizer's state layout. A checkpoint loads only into the same layout."""
    if optimizer is None:
        return None
    parts = parts_of(optimizer)
    if any(isinstance(part, DistributedOptimizer) for part in parts):
        return "distributed"
    plain = "fp32" if all(isinstance(part, FP32Optimizer) for part in parts) else "bf16"
    return plain if len(parts) == 1 else f"{plain}, experts apart"


def prepare(optimizer: MegatronOptimizer) -> None:
    """Prepare an optimizer for its ``sharded_state_dict``.

    Distributed optimizers get `state_shards`. torch's Adam gets zero moments and step 0 for parameters not stepped yet.
    """
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            part.sharded_param_state_fully_reshardable = functools.partial(state_shards, part)
        if (states := host_states(part)) is not None:
            states.synchronize()
    steps: list[float] = []
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32, device=_step_device(group, parameter)),
                        exp_avg=torch.zeros_like(parameter.data),
                        exp_avg_sq=torch.zeros_like(parameter.data),
                    )
        steps += [float(state["step"]) for state in adam.state.values()]
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer) and steps and not part.optimizer.state:
            part.state_dict = functools.partial(_state_dict_without_parameters, part, steps[0])


def _state_dict_without_parameters(part: DistributedOptimizer, step: float) -> dict[str, Any]:
    """Replace ``DistributedOptimizer.state_dict``, which with torch's Adam reads the step from a parameter.

    A pipeline stage without expert layers has none in the optimizer of experts.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
    return {"optimizer": {"param_groups": [{**group, "step": step} for group in groups]}}


def state_shards(
    optimizer: DistributedOptimizer, model_part: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return views of the state itself, in place of ``DistributedOptimizer.sharded_param_state_fully_reshardable``.

    model_part: the model's sharded state dictionary.
    """
    del is_loading, metadata
    sharded, _ = extract_sharded_tensors_and_factories(model_part)
    by_parameter = {id(entry.data): entry for entry in nested_values(sharded)}
    on_host = host_states(optimizer)
    shards: dict[int, dict[str, list[ShardedTensor]]] = {}
    for number, (parameter, span, state) in enumerate(_own_state(optimizer)):
        shards[number] = {}
        for key, flat in state.items():
            if key != "step":  # steps are in the parameter groups
                values = flat if on_host is None else on_host.values(flat)
                prefix = f"optimizer.state.{key}."
                shards[number][key] = list(_shards(prefix, values, span, by_parameter[id(parameter)]))
    return shards


def take_weights(optimizer: MegatronOptimizer | None, model: torch.nn.Module, model_part: dict[str, Any]) -> None:
    """Replace FP8 weights in a sharded state to save by this rank's part of their main parameters, in bf16.

    A checkpoint then has the weights that it has without `train.fp8_param`.
    """
    taken = {id(weight): (name, model_part.pop(name)) for name, weight in fp8_weights(model).items()}
    assert optimizer is not None or not taken, "weights in FP8 are saved with the optimizer that has their values"
    for parameter, span, state in _main_parameters(optimizer, taken):
        name, sharding = taken[id(parameter)]
        model_part[name] = list(_shards("", state["param"].to(parameter.dtype), span, sharding))


def read_unrounded(model: torch.nn.Module, model_part: dict[str, Any]) -> None:
    """Let FP8 weights in a sharded state be read into bf16 tensors: 0.19 would read them into the weights."""
    for name, weight in fp8_weights(model).items():
        model_part[name].data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@torch.no_grad()
def give_weights(optimizer: MegatronOptimizer, model: torch.nn.Module, loaded: dict[str, Any]) -> None:
    """Copy the weights of a checkpoint to the main parameters of FP8 weights, which have rounded them."""
    given = {id(weight): loaded[name] for name, weight in fp8_weights(model).items()}
    for parameter, span, state in _main_parameters(optimizer, given):
        state["param"].copy_(given[id(parameter)].flatten()[span.start : span.end])


def _main_parameters(optimizer: MegatronOptimizer | None, wanted: Container[int]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what `_own_state` returns of the parameters with these ids."""
    for part in parts_of(optimizer) if wanted else ():
        yield from (each for each in _own_state(part) if id(each[0]) in wanted)


def _own_state(optimizer: DistributedOptimizer) -> list[tuple[torch.nn.Parameter, Any, dict[str, torch.Tensor]]]:
    """Return each parameter that this rank has a part of, the range of its values, and their flat states."""
    return [
        (parameter, ranges["param"], optimizer._get_main_param_and_optimizer_states(parameter))
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    ]


def _shards(prefix: str, flat: torch.Tensor, span: Any, sharding: Any) -> Iterator[ShardedTensor]:
    """Yield the shards, with a prefix before their key, of a span of the values of this rank's parameter."""
    parts, first = [sharding], sharding.data.storage_offset()
    if isinstance(sharding, ShardedTensorFactory):
        like = torch.empty(sharding.data.shape, device="meta")  # parts of an FP8 weight would be copies
        parts, first = sharding.build_fn(sharding.key, like, sharding.replica_id, None), 0
    for part in nested_values(parts):
        assert part.data.is_contiguous() and part.flattened_range is None, part
        start = part.data.storage_offset() - first
        size, prepended = part.data.numel(), part.prepend_axis_num
        done = max(span.start, start)
        for offsets, sizes in boxes(part.local_shape, done - start, min(span.end, start + size) - start):
            values = flat[done - span.start : done - span.start + math.prod(sizes)]
            done += math.prod(sizes)
            inside = zip(part.global_offset[prepended:], offsets, strict=True)
            shape = (*(1 for _ in range(prepended)), *sizes)
            yield ShardedTensor(
                key=f"{prefix}{part.key}",
                data=values.detach().view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=part.global_shape,
                global_offset=(*part.global_offset[:prepended], *map(sum, inside)),
                axis_fragmentations=None,  # not a regular grid
                replica_id=(*part.replica_id[:2], 0),  # data-parallel ranks have different values
            )


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes, in order, that hold values `begin` to `end` of a row-major tensor."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while begin < end:
        # The first axis along which a whole slice begins here and ends before `end`.
        axis = next(i for i, stride in enumerate(strides) if begin % stride == 0 and begin + stride <= end)
        offsets = tuple(begin // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min((end - begin) // strides[axis], shape[axis] - offsets[axis])
        yield offsets, (*(1 for _ in range(axis)), count, *shape[axis + 1 :])
        begin += count * strides[axis]


def load(optimizer: MegatronOptimizer, loaded: Any) -> None:
    """Load the result of ``dist_checkpointing.load``. The run's own settings of each parameter group stay.

    Args:
        optimizer: the one whose ``sharded_state_dict(is_loading=True)`` guided the load.
        loaded: keyed by index if several optimizers are chained.
    """
    parts = parts_of(optimizer)
    own = [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in optimizer.param_groups]
    groups = _saved_groups(loaded)
    with match_groups_by_kind():
        for index, part in enumerate(parts):
            state = loaded if len(parts) == 1 else loaded.get(index, {})
            if isinstance(part, DistributedOptimizer):
                _load_distributed(part, groups)
                continue
            if isinstance(part.optimizer, torch.optim.Adam):
                # Megatron leaves a step of 0 out of the checkpoint; torch refuses a state without a step.
                state.get("optimizer", state)["state"].setdefault("common_step", torch.zeros(()))
            part.load_state_dict(state)
    if isinstance(optimizer, ChainedOptimizer) and len(parts) > 1:
        optimizer._synchronize_steps()
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                state = adam.state[parameter]
                state["step"] = state["step"].to(_step_device(group, parameter)).clone()
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def _saved_groups(loaded: Any) -> list[dict[str, Any]]:
    """Return the settings of all saved parameter groups, and give every group and state the saved step, in place.

    Experts have a separate optimizer if expert-parallel ranks share them, so the checkpoint and this run can have
    different numbers of optimizers. The settings of all saved ones are loaded. Rank 0 saves them, without a step where
    it has no parameters, as on a pipeline stage without expert layers.
    """
    saved = [loaded, *(loaded[key] for key in loaded if isinstance(key, int))]
    inner = [state.get("optimizer", state) for state in saved]
    groups = [group for each in inner for group in each.get("param_groups", ())]
    for name, places in (("step", groups), ("common_step", [each["state"] for each in inner if "state" in each])):
        step = next((place[name] for place in places if name in place), None)
        for place in places if step is not None else ():
            place.setdefault(name, step)
    return groups


def _load_distributed(optimizer: DistributedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Load settings and steps. States have been read in place, unless the inner optimizer now allocates new tensors."""
    read, on_host = _own_state(optimizer), host_states(optimizer)
    if on_host is not None:
        on_host.offload()
    settings = []
    for group in optimizer.optimizer.param_groups:
        same = [each for each in groups if all(each.get(key) == group.get(key) for key in _KINDS)]
        # Prefer the saved group of experts for experts, and of other parameters for these; there may be one for both.
        saved = sorted(same, key=lambda each: each[_OF_EXPERTS] != group[_OF_EXPERTS])[0]
        settings.append({**saved, _OF_EXPERTS: group[_OF_EXPERTS]})
    optimizer.load_state_dict({"optimizer": {"param_groups": settings}})
    with torch.no_grad():
        for (parameter, _, values), (_, _, now) in zip(read, _own_state(optimizer), strict=True):
            if on_host is None:
                step = {"step": now["step"]} if "step" in now else {}
                optimizer._set_main_param_and_optimizer_states(parameter, values | step)
                continue
            for key in values.keys() - {"param", "step"}:
                on_host.replace(values[key], now[key])


def _step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Return where torch's Adam expects its step: with the parameter only if a CUDA graph or fused kernel reads it."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    return (part.optimizer for part in parts_of(optimizer) if isinstance(part.optimizer, torch.optim.Adam))
