"""FP8 products in TransformerEngine's layers: their settings, their scales in reruns and checkpoints, their end.

Megatron-Core opens TransformerEngine's `autocast` around its layers (`fp8_utils.get_fp8_context`), with a group of all
tensor-, context- and data-parallel ranks that share amaxes. All ranks of a pipeline stage therefore have the same
delayed scales. Attention, norms, the router, the embedding and the LM head compute in the model's precision.

With `train.fp8_param`, weights of products are FP8 tensors of TransformerEngine. The distributed optimizer quantizes
them after each step from its main parameters, and it begins these with the values that the weights had before.

For inference, products of local layers have FP8 weights of their own (`quantize_layers`).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import get_fp8_recipe, is_float8tensor, post_all_gather_processing
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from ..config import Config, TrainConfig
from ..core.errors import refuse
from ..inference.fp8 import MULTIPLE, Fp8Weight

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
        "fp8_param": train.fp8_param,
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


def fp8_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's parameters that are FP8 tensors of TransformerEngine, by their names; see `train.fp8_param`."""
    return {name: each for name, each in model.named_parameters() if is_float8tensor(each)}


def gather_parameters(model: DistributedDataParallel) -> None:
    """Gather now what other ranks have updated of the parameters, in place of the next forward pass.

    Megatron-Core 0.16 leaves the transposes of FP8 weights, which backward reads, as they were before this gather.
    """
    model.start_param_sync(force_sync=True)
    if weights := list(fp8_weights(model).values()):
        post_all_gather_processing(weights)


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

    Layers forget those that they have, which are of other weights.

    Raises:
        ValueError: the checkpoint has other scales.
    """
    config = model.config
    for own in map(_scales, model.modules()):
        for name, x in own.items():
            x.fill_(name.startswith("scale"))
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


_LEAST_CAPABILITY = (8, 9)


def check_fp8(config: Config) -> None:
    """Refuse `inference.weights=fp8` for layers that it does not support; `load_model` makes `auto` local ones.

    Raises:
        ValueError: another kind of layer, or sizes of a rank that 16 does not divide.
    """
    model, tensor = config.model, config.parallelism.tensor_parallel_size
    if config.inference.weights != "fp8":
        return
    if model.implementation == "transformer_engine":
        remedy = "FP8 weights are those of Megatron's local layers: set it to local or auto."
        raise refuse("model.implementation", model.implementation, "local with inference.weights=fp8", remedy)
    heads, groups = model.num_attention_heads // tensor, max(1, model.num_kv_heads // tensor)
    sizes = {
        "model.hidden_size": model.hidden_size,
        "a rank's share of queries, keys and values": (heads + 2 * groups) * model.kv_channels,
        "a rank's share of attention's output": heads * model.kv_channels,
    }
    experts = model.num_moe_experts is not None
    if not (experts and all(model.expert_layers)):
        sizes["a rank's share of model.ffn_hidden_size"] = model.ffn_hidden_size // tensor
    if experts:
        sizes["a rank's share of an expert"] = model.expert_width // (1 if model.bias else tensor)
    for name, size in sizes.items():
        if size % MULTIPLE:
            expected = f"exact, because {name} is {size}, no multiple of {MULTIPLE}"
            raise refuse("inference.weights", "fp8", expected, "Set it to exact, or use fewer tensor-parallel ranks.")


def quantize_layers(gpt: GPTModel) -> None:
    """Replace the weights of all products in the model's layers by FP8 ones. It can no longer train or be saved.

    Raises:
        ValueError: a GPU without FP8, or a layer with weights of another kind.
    """
    device = next(gpt.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        expected = f"exact on {torch.cuda.get_device_name(device)}, which has no FP8"
        raise refuse("inference.weights", "fp8", expected, "Set it to exact.")
    for linear in gpt.decoder.layers.modules():
        if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
            weight = Fp8Weight.of(linear.weight)
            del linear.weight  # a parameter, whose memory is free before the next weight is quantized
            linear.weight = weight
            linear._forward_impl = _apply
    for name, parameter in gpt.decoder.layers.named_parameters():
        if parameter.ndim > 1 and ".router." not in name:
            expected = f"exact for a model with {name}, which is not a weight of a parallel layer"
            raise refuse("inference.weights", "fp8", expected, "Set it to exact.")


def _apply(input: Tensor, weight: Fp8Weight, bias: Tensor | None, **_: Any) -> Tensor:
    """Do what Megatron's functions of linear layers do, which are called with these names."""
    out = weight(input)
    return out if bias is None else out + bias


def stored_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights, quantized or not."""
    weights = [getattr(each, "weight", None) for each in model.modules()]
    quantized = sum(each.values.nbytes + each.scales.nbytes for each in weights if isinstance(each, Fp8Weight))
    return quantized + sum(each.nbytes for each in model.parameters())
