"""Multi-latent attention (MLA): the keys `model.kv_lora_rank`, `model.q_lora_rank` and sizes of heads beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import refuse
from .bounds import check_is, number

if TYPE_CHECKING:
    from .tree import Config, ModelConfig

_SIZES = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentKeys:
    """Megatron's fields, under its names."""

    if TYPE_CHECKING:  # ModelConfig has them
        hidden_size: int
        num_attention_heads: int
        num_kv_heads: int
        head_dim: int | None

    # Elements of the latent from which a token's keys and values are computed (MLA, as in DeepSeek). null: no
    # MLA.
    kv_lora_rank: int | None = number(None, 1, 10**6)
    q_lora_rank: int | None = number(None, 1, 10**6)  # with kv_lora_rank: elements of the queries' latent; null: none
    # with kv_lora_rank: elements of a query or key that RoPE does not rotate
    qk_head_dim: int | None = number(None, 1, 10**5)
    # With kv_lora_rank: elements of a query or key that RoPE rotates, after the others; all heads share those of
    # the keys.
    qk_pos_emb_head_dim: int | None = number(None, 2, 10**5)
    v_head_dim: int | None = number(None, 1, 10**5)  # with kv_lora_rank: elements of a value

    @property
    def latent(self) -> bool:
        """Whether attention is MLA."""
        return self.kv_lora_rank is not None

    @property
    def kv_channels(self) -> int:
        """Elements of a head's query or key."""
        if self.latent:
            return (self.qk_head_dim or 0) + (self.qk_pos_emb_head_dim or 0)
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_channels(self) -> int:
        """Elements of a head's value."""
        return self.v_head_dim or self.kv_channels

    @property
    def down_weights(self) -> int:
        """Elements of a layer's products that make latents."""
        shared = self.kv_lora_rank + (self.qk_pos_emb_head_dim or 0) if self.kv_lora_rank is not None else 0
        return self.hidden_size * (shared + (self.q_lora_rank or 0))

    @property
    def attention_weights(self) -> int:
        """Elements of a layer's projections of queries, keys, values and the output."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        out = heads * self.value_channels * hidden
        if self.kv_lora_rank is None:
            return hidden * self.kv_channels * (heads + 2 * self.num_kv_heads) + out
        up = self.kv_lora_rank * heads * ((self.qk_head_dim or 0) + self.value_channels)
        return self.down_weights + (self.q_lora_rank or hidden) * heads * self.kv_channels + up + out

    @property
    def rope_channels(self) -> int:
        """Elements of a head's query or key that RoPE turns."""
        return self.qk_pos_emb_head_dim or self.kv_channels


def check_latent(model: ModelConfig) -> None:
    """Refuse keys of MLA that say nothing without others, or that it has no place for.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    if not model.latent:
        remedy = "Set model.kv_lora_rank: without latents nothing reads it."
        for name in ("q_lora_rank", *_SIZES):
            check_is(f"model.{name}", getattr(model, name), None, "with model.kv_lora_rank=null", remedy)
        return
    beside = f"with model.kv_lora_rank={model.kv_lora_rank}"
    for name in _SIZES:
        if getattr(model, name) is None:
            raise refuse(f"model.{name}", None, f"a number {beside}", "DeepSeek has 128, 64 and 128.")
    size = model.qk_pos_emb_head_dim
    if size is not None and size % 2:
        raise refuse("model.qk_pos_emb_head_dim", size, "an even number", "RoPE turns pairs.")
    heads = model.num_attention_heads
    for name, served, remedy in (
        ("head_dim", None, "qk_head_dim, qk_pos_emb_head_dim and v_head_dim say the sizes of heads."),
        ("num_kv_heads", heads, "Every query head has keys and values of its own, made of the latent."),
        ("position_embedding", "rope", "Megatron's MLA turns queries and keys in any case."),
        ("window_rope_base", None, "All layers turn alike."),
        ("bias", False, "Megatron's MLA has no biases of queries, keys and values."),
        ("qkv_bias", False, "Megatron's MLA has no biases of queries, keys and values."),
    ):
        check_is(f"model.{name}", getattr(model, name), served, beside, remedy)


def check_latent_parallelism(config: Config) -> None:
    """Refuse what Megatron's MLA does not run with.

    Raises:
        ValueError: as `check_latent`.
    """
    model, par = config.model, config.parallelism
    if not model.latent:
        return
    beside = f"with model.kv_lora_rank={model.kv_lora_rank}"
    check_is("attention.baseline", config.attention.baseline, None, beside, "It is compared without latents.")
    if par.tensor_parallel_size > 1:
        beside = "with model.kv_lora_rank and parallelism.tensor_parallel_size > 1"
        remedy = "Megatron's gradients of MLA are wrong without it."
        check_is("parallelism.sequence_parallel", par.sequence_parallel, True, beside, remedy)
    shared = (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
    for name, size in (("model.kv_lora_rank + qk_pos_emb_head_dim", shared), ("model.q_lora_rank", model.q_lora_rank)):
        if size is not None and size % par.tensor_parallel_size:
            expected = f"a divisor of {name} = {size}"
            remedy = "Tensor-parallel ranks share the products that make latents."
            raise refuse("parallelism.tensor_parallel_size", par.tensor_parallel_size, expected, remedy)
