"""What Megatron's TransformerConfig asks of core attention and of RoPE: done here, or refused; never ignored.

Most fields are the business of Megatron's layers around core attention, which work token by token.
`tests/mcore/test_settings.py` has every field in a list, and fails where Megatron gains one.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from ..errors import refuse
from ..schedules.mask import Window

_NO_HANDLE = "Unset it; no kernel here gives the logits' maxima."
_NEIGHBOURS = "Unset it: it shifts tokens as Megatron's own zigzag holds them."
REFUSED: dict[str, tuple[Any, str]] = {
    "experimental_attention_variant": (None, "These are other kinds of attention; unset it."),
    "mtp_num_layers": (None, _NEIGHBOURS),
    "is_hybrid_model": (False, "State-space layers exchange tokens as Megatron's own zigzag holds them."),
    "hybrid_context_parallel": (False, "It packs sequences, which have no plan; unset it."),
    "mrope_section": (None, "Tokens have one position here; unset it."),
    "fused_single_qkv_rope": (False, "RoPE is applied in core attention; unset it."),
    "flash_decode": (False, "It goes past core attention; unset it."),
    "batch_invariant_mode": (False, "Plans merge in an order that depends on lengths; unset it."),
    "fp8_dot_product_attention": (False, "Attention is computed in the model's precision; unset it."),
    "fp8_multi_head_attention": (False, "Attention is computed in the model's precision; unset it."),
    "use_kitchen_attention": (False, "Attention is computed in the model's precision; unset it."),
    "qk_clip": (False, _NO_HANDLE),
    "log_max_attention_logit": (False, _NO_HANDLE),
}
"""By field, the only value that is served, and what to do about others."""


def refuse_unless_served(config: TransformerConfig, deterministic: bool) -> None:
    """Raise ValueError for a setting whose numbers would not be Megatron's.

    Args:
        deterministic: whether attention's kernels are.
    """
    for name, (served, remedy) in REFUSED.items():
        value = getattr(config, name, served)
        if value != served:
            expected = "null" if served is None else served
            raise refuse(name, value, f"{expected} with context-parallel attention", remedy)
    if config.deterministic_mode and not deterministic:
        remedy = "Give ContextParallelAttention deterministic=True, too."
        raise refuse("deterministic_mode", True, "False with kernels that need not be deterministic", remedy)


def layer_window(config: TransformerConfig, layer_number: int) -> Window:
    """Tokens that a layer sees before and after each: all, or `window_size`, as `window_attn_skip_freq` says by
    Megatron's own rule. layer_number: from 1, of all stages. Megatron means all by a number below 0."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None, None
    before, after = config.window_size
    return None if before < 0 else before, None if after < 0 else after


def skips_rope(config: TransformerConfig, layer_number: int) -> bool:
    """Whether `no_rope_freq` leaves queries and keys of this layer as they are. layer_number: from 1, of all stages."""
    skips = config.no_rope_freq
    return bool(skips and skips[layer_number - 1])
