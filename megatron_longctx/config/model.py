"""The keys `model.*`: the shape of a GPT, with its mixtures of experts, latent attention and RoPE scaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .bounds import choice, number, text

MAX_TOKENS = 10**9  # of a sequence
DELTA_RULE_CHUNK = 64  # tokens that a recurrent layer computes at once
# The keys of recurrent layers, which have Megatron's names, and those of published models with gated delta nets.
RECURRENT_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
# The keys of multi-latent attention. A model has it if the first is not null.
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass(frozen=True)
class RopeScaling:
    """linear: positions are divided by `factor`. ntk: the base grows so that the slowest pair turns `factor` times
    slower. llama3: slow pairs do, fast ones stay, with a ramp between wavelengths. yarn: the same with a ramp between
    pairs, and queries and keys are stretched. Defaults are as in the `transformers` package."""

    # how RoPE is extended beyond original_length
    kind: str = choice("none", ("none", "linear", "ntk", "llama3", "yarn"))
    factor: float = number(1.0, 1, 1e6)  # factor of the extension
    original_length: int | None = number(None, 1, 10**9)  # tokens before scaling; required by llama3 and yarn
    # llama3: pairs that rotate fewer times than this in `original_length` are scaled fully.
    low_freq_factor: float = number(1.0, 0, 1e6, above=True)
    # llama3: pairs that rotate more often than this are not scaled
    high_freq_factor: float = number(4.0, 0, 1e6, above=True)
    beta_fast: float = number(32.0, 0, 1e6, above=True)  # yarn: pairs that rotate more often than this are not scaled.
    beta_slow: float = number(1.0, 0, 1e6, above=True)  # yarn: pairs that rotate fewer times than this are scaled fully
    # yarn: factor for cosines and sines; null: 0.1 ln(factor) + 1, the paper's rule.
    attention_factor: float | None = number(None, 0, 1e6, above=True)
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a GPT. `vocab_size: null` is the tokenizer's, rounded up to a multiple of `vocab_multiple`."""

    name: str = text("tiny")  # name shown in tables and W&B
    num_layers: int = number(4, 1, 10_000)  # transformer layers
    hidden_size: int = number(128, 1, 10**6)  # width of the residual stream
    num_attention_heads: int = number(4, 1, 10**5)  # query heads
    num_kv_heads: int = number(2, 1, 10**5)  # key/value heads; fewer than query heads: grouped-query attention
    head_dim: int | None = number(None, 1, 10**5)  # null: hidden_size / num_attention_heads
    ffn_hidden_size: int = number(384, 1, 10**7)  # width inside the MLP
    # entries of the embedding; null: the tokenizer's, rounded up to vocab_multiple
    vocab_size: int | None = number(None, 1, 10**7)
    vocab_multiple: int = number(128, 1, 10**6)  # a tokenizer's vocabulary is rounded up to a multiple of this
    normalization: str = choice("rmsnorm", ("rmsnorm", "layernorm"))  # type of all norms
    norm_epsilon: float = number(1e-5, 1e-20, 1)  # smaller values are 0 in fp32, or close to it
    zero_centered_norms: bool = False  # weights of norms are stored minus 1
    qk_norm: bool = False  # norms of queries and keys, per head; with latents, norms of the latents
    post_norms: bool = False  # norms after attention and after the MLP, before the residual is added
    # geglu: gated by the tanh form of gelu; swiglu_oai: as in gpt-oss
    activation: str = choice("swiglu", ("swiglu", "gelu", "geglu", "swiglu_oai"))
    attention_scale: float | None = number(None, 0, 1e6, above=True)  # Factor for the scores; null: 1 / sqrt(head_dim).
    # attention's output is multiplied by the sigmoid of gates, one per element, computed beside the queries
    attention_output_gate: bool = False
    scale_embedding: bool = False  # multiply embeddings by sqrt(hidden_size), rounded to the model's precision
    # rotary, or a learned table of data.seq_length entries
    position_embedding: str = choice("rope", ("rope", "learned"))
    rope_base: float = number(500_000.0, 1, 1e15)  # RoPE's base (theta)
    rotary_percent: float = number(1.0, 0, 1, above=True)  # share of a head's elements, from the first, that it rotates
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    # Number of previous tokens that a token sees; null: all. Every window_pattern-th layer sees all of them.
    window: int | None = number(None, 1, MAX_TOKENS)
    window_pattern: int | None = number(None, 2, 10_000)  # every k-th layer sees all tokens; null: none does
    # RoPE's base in layers with a window, where RoPE is not scaled; null: as in other layers.
    window_rope_base: float | None = number(None, 1, 1e15)
    # A logit per head that is part of every softmax but has no value: none, 0 (off_by_one), or learnable.
    sinks: str = choice("none", ("none", "off_by_one", "learnable"))
    bias: bool = False  # bias in all linear layers except the output layer
    qkv_bias: bool = False  # bias of queries, keys and values if the other layers have none
    tie_embeddings: bool = False  # the LM head shares the embedding's weights
    init_std: float = number(0.02, 1e-6, 10)  # standard deviation of initial weights
    # Layers around attention: auto (TransformerEngine's on GPUs if installed, else Megatron's local layers)
    implementation: str = choice("auto", ("auto", "local", "transformer_engine"))
    # Megatron's class: GPTModel, or the HybridModel of Megatron-Core 0.19 with the same weights and checkpoints
    builder: str = choice("gpt", ("gpt", "hybrid"))
    # Two of Megatron's symbols for each layer, repeated until num_layers: * (attention), G (gated delta net), K (Kimi
    # Delta Attention) or M (Mamba-2), then - (MLP) or E (experts). null: attention in every layer.
    pattern: str | None = text(
        None,
        "pairs of * (attention), G (gated delta net), K (Kimi Delta Attention) or M (Mamba-2), and - (MLP) or E "
        "(experts); other layers are not supported",
        r"([*GKM][-E])+",
        max_bytes=20_000,
        example="*-",
    )
    # with G or K: heads of queries and keys; with M: groups of B and C
    linear_num_key_heads: int | None = number(None, 1, 10**5)
    # with G, K or M: heads, each with its own state; a multiple of linear_num_key_heads
    linear_num_value_heads: int | None = number(None, 1, 10**5)
    # with G or K: elements of a query or key; with M: of B or C
    linear_key_head_dim: int | None = number(None, 1, 10**5)
    # with G, K or M: elements of a head; with K also the rank of two projections, so linear_num_key_heads divides it
    linear_value_head_dim: int | None = number(None, 1, 10**5)
    linear_conv_kernel_dim: int = number(4, 2, 64)  # with G, K or M: tokens that the short convolution reads

    # Multi-latent attention and mixtures of experts have Megatron's fields, under its names.

    # Elements of the latent from which a token's keys and values are computed (MLA, as in DeepSeek). null: no MLA.
    kv_lora_rank: int | None = number(None, 1, 10**6)
    q_lora_rank: int | None = number(None, 1, 10**6)  # with kv_lora_rank: elements of the queries' latent; null: none
    # with kv_lora_rank: elements of a query or key that RoPE does not rotate
    qk_head_dim: int | None = number(None, 1, 10**5)
    # With kv_lora_rank: elements of a query or key that RoPE rotates, after the others; the elements of
    # keys are the same for all heads.
    qk_pos_emb_head_dim: int | None = number(None, 2, 10**5)
    v_head_dim: int | None = number(None, 1, 10**5)  # with kv_lora_rank: elements of a value

    num_moe_experts: int | None = number(None, 2, 10_000)  # experts per layer; null: all MLPs are dense
    moe_ffn_hidden_size: int | None = number(None, 1, 10**7)  # width inside one expert; null: ffn_hidden_size
    moe_router_topk: int = number(2, 1, 10_000)  # experts per token
    # One layer of experts in each moe_layer_freq, the first one; or a list of all layers, 1 with experts and 0 dense.
    moe_layer_freq: str = text(
        "1",
        "at least 1 and at most 10,000, or a list such as [0,1,1]",
        r"[1-9][0-9]{0,3}|10000|\[[01](, ?[01])*\]",
        max_bytes=10_000,
    )
    # number of first layers without experts; moe_layer_freq counts from the layer after them
    moe_first_dense_layers: int = number(0, 0, 10_000)
    # Width of the MLP that every token uses in addition to its experts, of all shared experts together. null: none.
    moe_shared_expert_intermediate_size: int | None = number(None, 1, 10**7)
    moe_shared_expert_gate: bool = False  # the shared MLP's output is multiplied by the sigmoid of a gate
    moe_router_pre_softmax: bool = False  # weights are the softmax over all experts instead of over the chosen ones
    # Factor for the weights of experts; null: 1.
    moe_router_topk_scaling_factor: float | None = number(None, 0, 1e6, above=True)
    # How experts are kept equally busy: by a loss over each micro-batch (aux_loss) or over each sequence
    # (seq_aux_loss).
    moe_router_load_balancing_type: str = choice("aux_loss", ("none", "aux_loss", "seq_aux_loss"))
    moe_aux_loss_coeff: float = number(0.01, 0, 1e6)  # weight of the load-balancing loss
    # weight of a loss that keeps router logits small; null: no such loss
    moe_z_loss_coeff: float | None = number(None, 0, 1e6, above=True)
    moe_router_dtype: str | None = choice(None, ("fp32", "fp64"))  # precision of the router; null: the model's

    @property
    def fc1_columns(self) -> int:
        """Columns of an MLP's first matrix per unit of its width: 2 if the MLP is gated."""
        return 1 if self.activation == "gelu" else 2

    @property
    def widest_window(self) -> tuple[int | None, int | None]:
        """The window of the layers that see most."""
        return (None, None) if self.window is None or self.window_pattern is not None else (self.window, 0)

    @property
    def layer_windows(self) -> dict[tuple[int | None, int | None], int]:
        """The number of layers with attention by window: tokens before and after one that it sees, None for all."""
        every = 1 if self.window is None else self.window_pattern or MAX_TOKENS
        layers = (layer for layer, recurrent in enumerate(self.recurrent_layers, 1) if not recurrent)
        return Counter((self.window, 0) if layer % every else (None, None) for layer in layers)

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
    def rope_channels(self) -> int:
        """Elements of a head's query or key that RoPE rotates."""
        return self.qk_pos_emb_head_dim or round(self.kv_channels * self.rotary_percent)

    @property
    def kv_latent_channels(self) -> int:
        """Elements that MLA computes per token for all keys and values: their latent, and what RoPE rotates of keys."""
        return self.kv_lora_rank + (self.qk_pos_emb_head_dim or 0) if self.kv_lora_rank is not None else 0

    @property
    def down_weights(self) -> int:
        """Weights of a layer's projections from hidden states to latents."""
        return self.hidden_size * (self.kv_latent_channels + (self.q_lora_rank or 0))

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's projections of queries, keys, values, gates and the output."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        out = heads * self.value_channels * hidden
        if self.kv_lora_rank is None:
            gates = heads * self.attention_output_gate
            return hidden * self.kv_channels * (heads + gates + 2 * self.num_kv_heads) + out
        up = self.kv_lora_rank * heads * ((self.qk_head_dim or 0) + self.value_channels)
        return self.down_weights + (self.q_lora_rank or hidden) * heads * self.kv_channels + up + out

    @property
    def mixers(self) -> str:
        """The symbol in `pattern` of what mixes the tokens in every layer."""
        repeated = (self.pattern or "*-")[::2]
        return "".join(repeated[layer % len(repeated)] for layer in range(self.num_layers))

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        """For every layer, whether it is recurrent, without attention."""
        return tuple(each != "*" for each in self.mixers)

    @property
    def recurrent(self) -> bool:
        """Whether any layer is recurrent, so that ranks hold contiguous tokens."""
        return any(self.recurrent_layers)

    @property
    def recurrent_columns(self) -> tuple[int, int]:
        """Columns of a recurrent layer's convolution, and of its values of all heads."""
        values = (self.linear_num_value_heads or 0) * (self.linear_value_head_dim or 0)
        return 2 * (self.linear_num_key_heads or 0) * (self.linear_key_head_dim or 0) + values, values

    @property
    def recurrent_numbers(self) -> int:
        """Columns of a recurrent layer's projection besides: two gates of a head's delta rule, or one, or a step."""
        return (2 if "G" in self.mixers else 1) * (self.linear_num_value_heads or 0)

    @property
    def recurrent_rows(self) -> int:
        """All columns of a recurrent layer's projection. With K, gates and decays have the columns of low ranks."""
        mixed, values = self.recurrent_columns
        gates = 2 * (self.linear_value_head_dim or 0) if "K" in self.mixers else values
        return mixed + gates + self.recurrent_numbers

    @property
    def recurrent_up_weights(self) -> int:
        """Weights of K's projections from low ranks to the decays and gates of all heads."""
        sizes = (self.linear_key_head_dim or 0) + (self.linear_value_head_dim or 0)
        return ("K" in self.mixers) * (self.linear_num_value_heads or 0) * sizes * (self.linear_value_head_dim or 0)

    @property
    def recurrent_weights(self) -> int:
        """Weights of a recurrent layer's projections."""
        return self.hidden_size * (self.recurrent_rows + self.recurrent_columns[1]) + self.recurrent_up_weights

    @property
    def expert_width(self) -> int:
        """The width of one expert's MLP."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For every layer, whether its MLP is a mixture of experts."""
        if self.num_moe_experts is None:
            return (False,) * self.num_layers
        if self.moe_layer_freq.startswith("["):
            return tuple(each == "1" for each in self.moe_layer_freq if each in "01")
        first, interval = self.moe_first_dense_layers, int(self.moe_layer_freq)
        return tuple(layer >= first and (layer - first) % interval == 0 for layer in range(self.num_layers))


def layer_list(expert_layers: Iterable[bool]) -> str:
    """Return `ModelConfig.expert_layers` as a value of `moe_layer_freq`."""
    return f"[{','.join(str(int(experts)) for experts in expert_layers)}]"
