"""Megatron-Core 0.19's `HybridModel` of a GPT's blocks: a layer `*` or `G` and a layer `-` or `E` for each of them.

Import this file only where `version.require_hybrid_model` has passed. A checkpoint has the names and shapes of a
`GPTModel`, so either model loads what the other has saved, and so do exports and inference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, sharded_state_dict_default

from .stack import halves, in_stack


def as_hybrid(gpt: TransformerConfig) -> TransformerConfig:
    """Return a GPT's configuration with two layers for each of its blocks, and the same initial weights."""
    experts = gpt.moe_layer_freq if gpt.num_moe_experts is not None else [0] * gpt.num_layers
    windows = [
        is_layer_window_attention(gpt.window_size, gpt.window_attn_skip_freq, number + 1)
        for number in range(gpt.num_layers)
    ]
    return replace(
        gpt,
        num_layers=2 * gpt.num_layers,
        is_hybrid_model=True,
        window_attn_skip_freq=[int(each) for window in windows for each in (window, False)],
        moe_layer_freq=[each for has_experts in experts for each in (0, has_experts)],
        linear_attention_freq=gpt.linear_attention_freq
        and [x for each in gpt.linear_attention_freq for x in (each, 0)],
        recompute_num_layers=gpt.recompute_num_layers and 2 * gpt.recompute_num_layers,
    )


def pattern(config: TransformerConfig) -> str:
    """Return `hybrid_layer_pattern` of a configuration by `as_hybrid`, with `|` between pipeline stages."""
    recurrent = (config.linear_attention_freq or [0] * config.num_layers)[::2]
    blocks = zip(recurrent, config.moe_layer_freq[1::2], strict=True)
    symbols = "".join("*G"[mixer] + "-E"[experts] for mixer, experts in blocks)
    stage = len(symbols) // config.pipeline_model_parallel_size
    return "|".join(symbols[first : first + stage] for first in range(0, len(symbols), stage))


def stack_spec(dense: ModuleSpec, experts: ModuleSpec | None, norm: type, recurrent: ModuleSpec) -> ModuleSpec:
    """Return the spec of a stack whose layers are the halves of a GPT's layers with context-parallel attention.

    Args:
        experts: the spec of layers with experts, whose attention is equal; None for dense models.
        norm: the final norm.
        recurrent: the spec of layers with a gated delta net.
    """
    attention, mlp = halves(dense)
    layers = HybridStackSubmodules(attention_layer=in_stack(attention), mlp_layer=mlp, gdn_layer=halves(recurrent)[0])
    if experts is not None:
        layers.moe_layer = halves(experts)[1]
    return ModuleSpec(HybridOfBlocks, params={"norm": norm}, submodules=layers)


class HybridOfBlocks(HybridStack):  # type: ignore[misc]
    """Megatron's stack with any final norm (its own needs TransformerEngine), and with checkpoints of a GPT."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: type, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return this stage's weights under the names of a GPT: both halves of a block have the block's number.

        As in Megatron's own block, layers that are all alike are slices of one tensor.
        """
        several = self.config.num_moe_experts is not None or self.config.linear_attention_freq is not None
        alike, blocks = not several, self.config.num_layers // 2
        whole: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            block = (layer.layer_number - 1) // 2
            own = f"{prefix}layers.{index}."
            part = layer.sharded_state_dict(own, [(0, block, blocks)] if alike else [], metadata)
            replace_prefix_for_sharding(part, own, f"{prefix}layers." if alike else f"{prefix}layers.{block}.")
            whole |= part
        if self.post_process:
            own = f"{prefix}final_norm."
            part = sharded_state_dict_default(self.final_norm, own, (), metadata, tp_group=self.tp_group)
            replace_prefix_for_sharding(part, own, f"{prefix}final_layernorm.")
            whole |= part
        return whole


class HybridGPT(HybridModel):  # type: ignore[misc]
    """Megatron's `HybridModel` with a GPT's checkpoints."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's dictionary without an empty entry that a GPT leaves out, too."""
        whole: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        whole.pop(f"{prefix}output_layer._extra_state", None)
        return whole
