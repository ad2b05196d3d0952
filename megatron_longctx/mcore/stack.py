"""Specs of Megatron's stacks: a layer for attention and another for the MLP, in the order of a pattern of symbols.

Megatron-Core 0.19's `HybridModel` and 0.16's `MambaModel` have such specs. The symbols are `*` attention, `+` MLA,
`-` MLP, `E` experts, and others such as `M` (Mamba), which are refused here.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from megatron.core.transformer import ModuleSpec

from ..core.errors import refuse
from .version import copy_spec

_LayerCopy = Callable[[ModuleSpec], ModuleSpec]
_KEPT = ("mlp_layer", "mtp_block_spec")
_OF_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_OF_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


def is_stack(spec: ModuleSpec) -> bool:
    """Whether a spec is of a stack, and not of a layer."""
    return hasattr(spec.submodules, "attention_layer")


def with_layers(stack: ModuleSpec, attention: _LayerCopy, experts: _LayerCopy) -> ModuleSpec:
    """Return a copy of a stack's spec without unsupported layers, and with what two functions return for layers of
    attention and of experts."""
    stack = copy_spec(stack)
    changes = {
        "attention_layer": lambda layer: in_stack(attention(layer)),
        "mla_layer": lambda layer: in_stack(attention(layer)),
        "moe_layer": experts,
    }
    for part in fields(stack.submodules):
        layer = getattr(stack.submodules, part.name)
        if layer is not part.default and part.name not in _KEPT:
            change = changes.get(part.name, lambda _, name=part.name: ModuleSpec(_Refused, params={"kind": name}))
            setattr(stack.submodules, part.name, change(layer))
    return stack


class _Refused:
    """A layer that `HybridModel` cannot have here: building it raises ValueError."""

    def __init__(self, kind: str, **_: Any) -> NoReturn:
        remedy = (
            "Its kernel needs the tokens of a sequence in order on a rank, or exchanges them in Megatron's own zigzag "
            "layout. Use a pattern without it; gated delta nets that do not are those of the key model.pattern."
        )
        raise refuse("hybrid_layer_pattern", kind, "layers *, +, - and E with context-parallel attention", remedy)


def in_stack(layer: ModuleSpec) -> ModuleSpec:
    """Mark the attention of a spec made by `spec.with_context_parallel` as part of a stack without unsupported layers.

    Only there core attention accepts Megatron's `is_hybrid_model`.
    """
    core = layer.submodules.self_attention.submodules.core_attention
    core.params = {**core.params, "in_stack": True}
    return layer


def halves(layer: ModuleSpec) -> tuple[ModuleSpec, ModuleSpec]:
    """Return the specs of a stack's two layers that compute together what a transformer layer computes."""
    attention, mlp = copy_spec(layer), copy_spec(layer)
    empty = type(layer.submodules)()
    for half, left_out in ((attention, _OF_MLP), (mlp, _OF_ATTENTION)):
        for name in left_out:
            setattr(half.submodules, name, getattr(empty, name))
    return attention, mlp
