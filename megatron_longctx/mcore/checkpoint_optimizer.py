"""What loading Megatron's optimizers needs besides their own ``load_state_dict``.

With torch's Adam (no TransformerEngine, no Apex) Megatron-Core, 0.19 as well, cannot describe an optimizer that has not
stepped, does not expect ``step`` when it copies a parameter's state, and gives ONE ``step`` tensor to all parameters,
so that the step would advance once per parameter. Fused Adams keep the step per group and pass through unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from .checkpoint_shards import own_state, state_shards
from .optimizer_host import host_states, parts_of
from .version import match_groups_by_kind

# Settings that live in the parameter groups and would otherwise be taken from the checkpoint.
_KINDS, _OF_EXPERTS = ("wd_mult", "lr_mult", "is_decoupled_lr"), "is_expert_parallel"
_HYPERPARAMETERS = ("max_lr", "min_lr", "betas", "eps")


def kind(optimizer: MegatronOptimizer | None) -> str | None:
    """Name of the optimizer's state layout: checkpoints load only into the same one. None for no optimizer."""
    if optimizer is None:
        return None
    parts = parts_of(optimizer)
    if any(isinstance(part, DistributedOptimizer) for part in parts):
        return "distributed"
    plain = "fp32" if all(isinstance(part, FP32Optimizer) for part in parts) else "bf16"
    return plain if len(parts) == 1 else f"{plain}, experts apart"


def prepare(optimizer: MegatronOptimizer) -> None:
    """Before its ``sharded_state_dict`` is asked for: distributed parts give their own shards (``checkpoint_shards``);
    torch's Adam gets zero moments and step 0 for parameters that it has not stepped yet."""
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            part.sharded_param_state_fully_reshardable = functools.partial(state_shards, part)
        if (states := host_states(part)) is not None:
            states.settle()
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32, device=_step_device(group, parameter)),
                        exp_avg=torch.zeros_like(parameter.data),
                        exp_avg_sq=torch.zeros_like(parameter.data),
                    )
    steps = [float(entry["step"]) for adam in _torch_adams(optimizer) for entry in adam.state.values()]
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer) and steps and not part.optimizer.state:
            part.state_dict = functools.partial(_described, part, steps[0])


def _described(part: DistributedOptimizer, step: float) -> dict[str, Any]:
    """In the place of ``DistributedOptimizer.state_dict``, which with torch's Adam wants a parameter: a pipeline stage
    without layers of experts has none for the optimizer of these."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
    return {"optimizer": {"param_groups": [{**group, "step": step} for group in groups]}}


def load(optimizer: MegatronOptimizer, loaded: Any) -> None:
    """Load what ``dist_checkpointing.load`` returned for this optimizer's sharded state dictionary; the run's own
    settings of each parameter group stay.

    Args:
        optimizer: whose ``sharded_state_dict(is_loading=True)`` guided the load.
        loaded: the loaded dictionary; by position if several optimizers are chained.
    """
    parts = parts_of(optimizer)
    own = [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in optimizer.param_groups]
    groups = _saved_groups(loaded)
    with match_groups_by_kind():
        for index, part in enumerate(parts):
            _load_part(part, loaded if len(parts) == 1 else loaded.get(index, {}), groups)
    if isinstance(optimizer, ChainedOptimizer) and len(parts) > 1:
        optimizer._synchronize_steps()
    for adam in _torch_adams(optimizer):
        _separate_steps(adam)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def _load_part(optimizer: MegatronOptimizer, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    if isinstance(optimizer, DistributedOptimizer):
        _load_distributed(optimizer, groups)
        return
    if isinstance(optimizer.optimizer, torch.optim.Adam):
        # Megatron leaves a step of 0 out of the checkpoint; torch refuses a state without a step.
        state.get("optimizer", state)["state"].setdefault("common_step", torch.zeros(()))
    optimizer.load_state_dict(state)


def _saved_groups(loaded: Any) -> list[dict[str, Any]]:
    """Settings of all saved parameter groups. Experts have an optimizer of their own where expert-parallel ranks share
    them: with the tensors that this optimizer asks for lie the settings of as many as there were.

    All that is saved gets the step, in place. It is rank 0's, which counts none for what it has no parameters of, as a
    pipeline stage without layers of experts.
    """
    saved = [loaded, *(loaded[key] for key in loaded if isinstance(key, int))]
    inner = [state.get("optimizer", state) for state in saved]
    groups = [group for each in inner for group in each.get("param_groups", ())]
    for name, places in (("step", groups), ("common_step", [each["state"] for each in inner if "state" in each])):
        counted = next((place[name] for place in places if name in place), None)
        for place in places if counted is not None else ():
            place.setdefault(name, counted)
    return groups


def _like(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of the same parameters, be they of experts or not where there was no such difference."""
    same = [each for each in saved if all(each.get(key) == group.get(key) for key in _KINDS)]
    same.sort(key=lambda each: each[_OF_EXPERTS] != group[_OF_EXPERTS])
    return {**same[0], _OF_EXPERTS: group[_OF_EXPERTS]}


def _load_distributed(optimizer: DistributedOptimizer, groups: list[dict[str, Any]]) -> None:
    """The state itself has been read in place, unless the inner optimizer now makes tensors of its own."""
    read, states = own_state(optimizer), host_states(optimizer)
    if states is not None:
        states.leave()
    settings = [_like(group, groups) for group in optimizer.optimizer.param_groups]
    optimizer.load_state_dict({"optimizer": {"param_groups": settings}})
    with torch.no_grad():
        for (parameter, _, values), (_, _, now) in zip(read, own_state(optimizer), strict=True):
            step = {"step": now["step"]} if "step" in now else {}
            if states is None:
                optimizer._set_main_param_and_optimizer_states(parameter, values | step)
                continue
            for key in values.keys() - {"param", "step"}:
                states.replace(values[key], now[key])


def _separate_steps(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            entries = adam.state[parameter]
            entries["step"] = entries["step"].to(_step_device(group, parameter)).clone()


def _step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where torch's Adam expects its step: with the parameter only if a CUDA graph or fused kernel reads it."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer
