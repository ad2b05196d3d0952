"""Replacements that Megatron-Core needs on a machine without a CUDA device; 0.16 and 0.19 need the same.

Megatron-Core names the device "cuda" in many files. `apply()` maps those names to the CPU, so the same model, schedule,
optimizer and checkpoint code runs in tests and on laptops. Nothing changes on import, and nothing changes if a CUDA
device exists.

`apply()` replaces functions of torch and Megatron for the whole process instead of pushing a `TorchFunctionMode`. A
mode belongs to one thread (autograd moves deeply nested recomputation to another one) and costs a little on every
operation; a replaced function works in every thread and costs only where it is called.

Model configurations on CPU still need `use_cpu_initialization=True` and every fusion switched off
(`bias_activation_fusion`, `bias_dropout_fusion`, `masked_softmax_fusion`, `apply_rope_fusion`,
`gradient_accumulation_fusion`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import version

_CPU = torch.device("cpu")

# Factories that Megatron calls with device="cuda", with torch.cuda.current_device(), or with pin_memory=True.
_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like"),
)


def apply() -> bool:
    """Make Megatron-Core usable without CUDA. Call this before building groups or models; later calls do nothing.

    Returns:
        True if the replacements are active after the call, False if a CUDA device exists.
    """
    if torch.cuda.is_available():
        return False
    _adjust()
    return True


@functools.cache
def _adjust() -> None:
    stream = _StreamOrEvent()
    _replace(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda device=None: None,
        set_device=lambda device: None,
        # The dispatcher of experts copies sizes on a side stream, and Megatron's inference times with events.
        Stream=_StreamOrEvent,
        Event=_StreamOrEvent,
        current_stream=lambda device=None: stream,
        stream=contextlib.nullcontext,
    )
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    _replace(
        torch.Tensor,
        cuda=lambda self, *args, **kwargs: self,
        pin_memory=lambda self, *args, **kwargs: self,
        to=_on_cpu(torch.Tensor.to),
        type=_cuda_type_names(torch.Tensor.type),  # optimizers sort parameters and check gradients by its string
        record_stream=lambda self, stream: None,
    )
    _adjust_rng()
    from megatron.core.transformer.moe import token_dispatcher

    # Sizes of what experts exchange are read on the host.
    _replace(token_dispatcher, maybe_move_tensor_to_cpu=_to_numpy)
    # tensor_parallel/mappings.py gathers the tokens of sharded experts in unequal parts, which gloo does not support.
    _replace(dist, all_gather=_uneven_all_gather(dist.all_gather))
    version.complete_without_transformer_engine()


def _adjust_rng() -> None:
    """Let the tracked generator of `tensor_parallel/random.py` be the CPU's default generator."""
    from megatron.core.tensor_parallel import random as mcore_random

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        assert not graph_safe, "graph-safe random states exist on CUDA only"
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        assert not graph_safe, "graph-safe random states exist on CUDA only"
        torch.set_rng_state(new_state)

    # CudaRNGStatesTracker, checkpoint() and CheckpointWithoutOutput use these, so dropout under recomputation repeats
    # exactly.
    _replace(mcore_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    _replace(torch.cuda, get_rng_state=get_state, manual_seed=torch.default_generator.manual_seed)
    # The tracker warns that the CPU's state has changed, which is now the purpose.
    logging.getLogger(mcore_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.msg)


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_gather)
    def wrapper(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({each.shape for each in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        outputs[dist.get_rank(group)].copy_(tensor)
        for rank, output in enumerate(outputs):
            dist.broadcast(output, group=group, group_src=rank)
        return None

    return wrapper


class _StreamOrEvent:
    """A stream or an event of CPU work, which has finished when the call that started it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, other: Any = None) -> None:
        pass

    synchronize = wait_stream = wait_event = wait

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def record_event(self, event: _StreamOrEvent | None = None) -> _StreamOrEvent:
        event = event or _StreamOrEvent()
        event.record()
        return event

    def elapsed_time(self, end_event: _StreamOrEvent) -> float:
        """Return the milliseconds from this event's recording to that of `end_event`."""
        return (end_event._recorded_s - self._recorded_s) * 1000.0


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)  # without an accelerator, torch has no allocator of pinned memory
        return function(*map(_cpu, args), **{key: _cpu(value) for key, value in kwargs.items()})

    return wrapper


def _cpu(value: Any) -> Any:
    """Return the CPU in the place of a CUDA device, and any other value unchanged."""
    named = value.type if isinstance(value, torch.device) else value
    return _CPU if isinstance(named, str) and named.startswith("cuda") else value


def _cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # Only a call without a dtype returns a string: "torch.FloatTensor" becomes "torch.cuda.FloatTensor".
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_
