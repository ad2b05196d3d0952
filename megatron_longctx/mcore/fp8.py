"""FP8 products in TransformerEngine's layers: their settings, their scales in reruns and checkpoints, their end.

Megatron-Core opens TransformerEngine's `autocast` around its layers (`fp8_utils.get_fp8_context`), with a group of all
tensor-, context- and data-parallel ranks that share amaxes. All ranks of a pipeline stage therefore have the same
delayed scales. Attention, norms, the router, the embedding and the LM head compute in the model's precision.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor

from ..config import TrainConfig
from ..core.errors import refuse

_AMAX_UPDATES = 1024  # TransformerEngine's own default; Megatron's is the last alone, after which an outlier saturates
_STATE = "_extra_state"


def fp8_settings(train: TrainConfig) -> dict[str, Any]:
    """Return Megatron's settings of FP8; none without it. Formats are TransformerEngine's defaults of each recipe."""
    if train.fp8 == "none":
        return {}
    start, end = train.bf16_layers_at_start, train.bf16_layers_at_end
    return {
        "fp8": "hybrid" if train.fp8 in ("delayed", "tensorwise") else "e4m3",
        "fp8_recipe": train.fp8,
        "fp8_amax_history_len": _AMAX_UPDATES,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": start + end > 0,
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }


class Rerun:
    """The FP8 state of a function that runs without a graph in forward, and with one in backward.

    The second run quantizes as the first: with its recipe and, if scales are delayed, with its scales. Its own amaxes
    are dropped, because the first run has recorded them (`transformer_engine.pytorch.distributed.checkpoint`). Unlike
    there, its end updates no scales, and only products of the layer that forward began with update backward's scales.

    enabled: whether the model has FP8; without it nothing is done.
    """

    def __init__(self, enabled: Any) -> None:
        self._enabled = bool(enabled)
        self._recipe: Any = None  # None: outside `autocast`, as in layers that stay in bf16
        self._is_first = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """The context of the run without a graph."""
        te = _transformer_engine() if self._enabled else None
        if te is None or not te.state.is_fp8_enabled():
            yield
            return
        self._recipe = te.state.get_fp8_recipe()
        with te.region(activation_recompute=True, recompute_phase=False):
            yield
        te.region._is_first_fp8_module.pop()
        self._is_first = te.state.is_first_fp8_module()  # false from now on, until `autocast` ends

    @contextmanager
    def again(self) -> Iterator[None]:
        """The context of the run with a graph."""
        if self._recipe is None:
            yield
            return
        te = _transformer_engine()
        # The region takes the first entry. TransformerEngine appends one in the order of forward.
        te.region._is_first_fp8_module.insert(0, self._is_first)
        with (
            torch.no_grad(),  # so that the end of autocast does not update scales
            te.autocast(enabled=True, recipe=self._recipe),
            te.region(activation_recompute=True, recompute_phase=True),
            torch.enable_grad(),
        ):
            yield


def require_fp8(fp8: str) -> None:
    """Raise ValueError unless TransformerEngine has what `Rerun` and checkpoints use of it."""
    te = _transformer_engine(load=True)
    if not hasattr(te.state, "quantization_state"):
        expected = "none with this TransformerEngine, which is older than 2.15"
        raise refuse("train.fp8", fp8, expected, "Install a newer one: pip install -U 'transformer-engine[pytorch]'.")


def reset() -> None:
    """Let TransformerEngine forget all layers and process groups, so that a second trainer begins anew."""
    if (te := _transformer_engine()) is not None:
        te.state.reset()
        te.region._is_first_fp8_module.clear()


def take_scales(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Replace the state of layers with delayed scales by a dictionary of tensors, in a model's sharded state.

    TransformerEngine's own state is a pickle with classes, which readers of checkpoints refuse for good reason.
    """
    for name, layer in model.named_modules():
        if (key := f"{name}.{_STATE}") in state and (scales := _scales(layer)):
            state[key].data = {part: x.cpu() for part, x in scales.items()}


def give_scales(model: Any, state: dict[str, Any]) -> None:
    """Copy the scales that `take_scales` has put into a model's state to layers with delayed scales, if it has these.

    Raises:
        ValueError: the checkpoint has other scales.
    """
    config = model.config
    for key, saved in state.items():
        if not (key.endswith(f".{_STATE}") and isinstance(saved, Mapping)):
            continue
        state[key] = None
        if not (config.fp8 and config.fp8_recipe == "delayed"):
            continue
        layer = model.get_submodule(key.removesuffix(f".{_STATE}"))
        layer.fp8_meta |= {"recipe": (recipe := get_fp8_recipe(config)), "num_gemms": 1}
        layer.init_fp8_meta_tensors(recipe)
        own = _scales(layer)
        sizes, expected = ({name: tuple(x.shape) for name, x in each.items()} for each in (saved, own))
        if sizes != expected:
            remedy = "Load the run's weights alone, with train.init_from."
            raise refuse(key, sizes, f"{expected}, as in this TransformerEngine", remedy)
        for name, x in own.items():
            x.copy_(saved[name])


def _scales(layer: Any) -> dict[str, Tensor]:
    """Return a layer's delayed scales and their histories of amaxes, forward and backward; none without them."""
    states = {way: getattr(layer, "fp8_meta", {}).get(f"scaling_{way}") for way in ("fwd", "bwd")}
    return {
        f"{part}_{way}": getattr(state, part)
        for way, state in states.items()
        for part in ("scale", "amax_history")
        if hasattr(state, "amax_history")
    }


def _transformer_engine(load: bool = False) -> Any:
    """Return what is used of TransformerEngine; None if nothing has imported it, unless `load`."""
    if not load and "transformer_engine.pytorch" not in sys.modules:
        return None
    from transformer_engine.pytorch import distributed, quantization

    region = distributed.activation_recompute_forward
    return SimpleNamespace(autocast=quantization.autocast, state=quantization.FP8GlobalStateManager, region=region)
