"""A stand-in for the FP8 state of TransformerEngine, which needs a GPU: delayed scales, `autocast` and reruns.

It has the names, the order of updates and the rules of its `quantization` and `distributed`. Values are rounded to FP8
by torch. `install` makes it importable.
"""

import contextlib
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

STEPS = 64  # of the amax history
LIMITS = {"fwd": (torch.float8_e4m3fn, 448.0), "bwd": (torch.float8_e5m2, 57344.0)}


class FP8GlobalStateManager:
    quantization_state: Any

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = SimpleNamespace(is_first_fp8_module=False, enabled=False, recipe=None, layers=[])
        cls.updates: list[str] = []

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.quantization_state.enabled)

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.quantization_state.recipe or "the default"

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        state = cls.quantization_state
        first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return bool(first)

    @classmethod
    def update(cls, way: str) -> None:
        """Compute scales by the largest amax of the history, and begin the next amax."""
        cls.updates.append(way)
        for layer in cls.quantization_state.layers:
            scales = layer.fp8_meta[f"scaling_{way}"]
            amax = scales.amax_history.amax(0)
            scales.scale.copy_(torch.where(amax > 0, LIMITS[way][1] / amax, scales.scale))
            scales.amax_history.copy_(scales.amax_history.roll(-1, 0))
            scales.amax_history[0] = 0


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    state = FP8GlobalStateManager.quantization_state
    before = state.enabled, state.recipe, state.is_first_fp8_module
    state.enabled, state.recipe, state.is_first_fp8_module = enabled, recipe, not before[0]
    yield
    state.enabled, state.recipe, state.is_first_fp8_module = before
    if enabled and not before[0] and torch.is_grad_enabled():
        FP8GlobalStateManager.update("fwd")


class activation_recompute_forward:
    _is_first_fp8_module: ClassVar[list[bool]] = []
    phase: str | None = None

    def __init__(self, activation_recompute: bool, recompute_phase: bool) -> None:
        self._phase = None if not activation_recompute else "again" if recompute_phase else "first"

    def __enter__(self) -> None:
        cls, state = activation_recompute_forward, FP8GlobalStateManager.quantization_state
        cls.phase = self._phase
        if self._phase == "again":
            state.is_first_fp8_module = cls._is_first_fp8_module.pop(0)
        elif self._phase == "first":
            cls._is_first_fp8_module.append(state.is_first_fp8_module)

    def __exit__(self, *_: Any) -> None:
        activation_recompute_forward.phase = None


class Quantized(torch.nn.Module):
    """A layer whose input, and gradient of it, are rounded to FP8 by delayed scales inside `autocast`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.fp8_meta = inner, {}
        self._stash: deque[tuple[Tensor, Tensor]] = deque()

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        if "scaling_fwd" not in self.fp8_meta:
            for way, count in (("fwd", 3), ("bwd", 2)):
                scales = SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(STEPS, count))
                self.fp8_meta[f"scaling_{way}"] = scales

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(self.fp8_meta)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or not len(state), "a pickle is not loaded"

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **_: Any) -> Any:
        own = {"_extra_state": self.get_extra_state()}
        inner = self.inner.sharded_state_dict(f"{prefix}inner.", sharded_offsets, metadata)  # type: ignore[operator]
        return inner | make_sharded_tensors_for_checkpoint(own, prefix, None, sharded_offsets)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        state, region = FP8GlobalStateManager.quantization_state, activation_recompute_forward
        if not state.enabled:
            return self.inner(x, *args, **kwargs)
        self.init_fp8_meta_tensors(None)
        scales = self.fp8_meta["scaling_fwd"]
        now = scales.scale.clone(), scales.amax_history.clone()
        if region.phase == "again":
            for own, saved in zip((scales.scale, scales.amax_history), self._stash.popleft(), strict=True):
                own.copy_(saved)
        else:
            if self not in state.layers:
                state.layers.append(self)
            if region.phase == "first":
                self._stash.append(now)
        first = state.is_first_fp8_module and torch.is_grad_enabled()
        out = self.inner(_Round.apply(x, self, first), *args, **kwargs)
        if torch.is_grad_enabled() and region.phase != "again":
            state.is_first_fp8_module = False
        if region.phase == "again":
            scales.scale.copy_(now[0])
            scales.amax_history.copy_(now[1])
        return out

    def round(self, x: Tensor, way: str) -> Tensor:
        scales, (dtype, limit) = self.fp8_meta[f"scaling_{way}"], LIMITS[way]
        scales.amax_history[0, 0] = torch.maximum(scales.amax_history[0, 0], x.abs().max())
        return (x * scales.scale[0]).clamp(-limit, limit).to(dtype).to(x.dtype) / scales.scale[0]


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantized, first: bool) -> Tensor:
        ctx.layer, ctx.first = layer, first
        return layer.round(x, "fwd")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = ctx.layer.round(grads[0], "bwd")
        if ctx.first:
            FP8GlobalStateManager.update("bwd")
        return grad, None, None


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the stand-in importable in this process, with a state of its own."""
    FP8GlobalStateManager.reset()
    activation_recompute_forward._is_first_fp8_module.clear()
    parts = {
        "quantization": {"autocast": autocast, "FP8GlobalStateManager": FP8GlobalStateManager},
        "distributed": {"activation_recompute_forward": activation_recompute_forward},
    }
    pytorch = ModuleType("transformer_engine.pytorch")
    for name, content in parts.items():
        module = ModuleType(f"transformer_engine.pytorch.{name}")
        vars(module).update(content)
        setattr(pytorch, name, module)
        patch.setitem(sys.modules, module.__name__, module)
    package = ModuleType("transformer_engine")
    package.pytorch = pytorch  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "transformer_engine", package)
    patch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
