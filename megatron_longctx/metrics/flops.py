"""Training FLOPs of a GPT, and what they make of a measured step time.

Forward pass of one step, with T tokens in sequences of S (with packed documents, S is the length of a pack), L layers,
hidden size H, h query heads, g key/value heads, head dimension d of queries and keys and e of values (d but with
latents), MLP width F in M matrices (SwiGLU 3, GELU 2), vocabulary V, and P visible pairs of a query and a key, summed
over layers:

    projections  L · 2·T·A                 A = H·d·h + H·d·2g of queries, keys and values, and h·e·H of the output; with
                                           latents of c and q elements, r of d turned by RoPE and n not turned,
                                           A = H·(c + r + q) + q·h·d + c·h·(n + e) + h·e·H, and H·h·d where q is none
    attention    L · 2·T·S·h·(d + e)       dense convention: every query times every key (QKᵀ and PV)
                 (2·P - L·T)·h·(d + e)     causal convention: visible pairs, a query's own key counted half, so that
                                           a whole causal sequence has S²/2; documents and windows have fewer
    MLP          2·T·M·H·F in a dense layer; in one of E experts 2·T·H·(M·(k·W + U) + E), of width W each, of which a
                 token goes through k, and of shared ones of width U
    LM head      2·T·H·V

A training step is 3 × forward (backward counts twice). Embedding look-ups, norms, RoPE and softmax are left out, and
recomputation is not counted: the resulting percentage is MFU, not HFU. At long context the two conventions differ by
almost 2×, so both are always reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import names
from ..config import ModelConfig

FORMULA = (
    "3 * (2*T*L*A + 2*T*H*(D*M*F + X*(M*(k*W + U) + E)) + C + 2*T*H*V), "
    "A = H*d*(h + 2*g) + h*e*H (latents: H*(c + r + q) + (q or H)*h*d + c*h*(n + e) + h*e*H), "
    "D dense layers, X of E experts of width W, k of them active, and U of shared ones, "
    "C = (2*P - L*T)*h*(d + e) (causal; P visible pairs of all layers, L*T*(S + 1)/2 without documents and windows) "
    "or 2*L*T*S*h*(d + e) (dense), M = 3 (gated MLPs) or 2 (gelu); recomputation not counted"
)


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one training step over all devices, in both attention conventions."""

    causal: int
    dense: int


@dataclass(frozen=True)
class Work:
    """What is computed on. tokens: of all sequences. pairs: visible ones of a query and a key, of all sequences and
    layers. dense_pairs: every query with every key of its sequence, in one layer."""

    tokens: int
    pairs: int
    dense_pairs: int

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.dense_pairs + other.dense_pairs)


def training_flops(model: ModelConfig, vocab_size: int, work: Work) -> StepFlops:
    """FLOPs of one training step (forward and backward); the module's docstring states the formula.

    Args:
        model: shape of the GPT.
        vocab_size: rows of the LM head as trained, padding included.
        work: of the step, over all context- and data-parallel ranks.
    """
    tokens, hidden, layers = work.tokens, model.hidden_size, model.num_layers
    channels = model.num_attention_heads * (model.kv_channels + model.value_channels)
    mlps = 2 * tokens * hidden * sum(_mlp_width(model, experts) for experts in model.expert_layers)
    head = 2 * tokens * hidden * vocab_size
    linear = 2 * tokens * layers * model.attention_weights + mlps + head
    return StepFlops(
        causal=3 * (linear + (2 * work.pairs - layers * tokens) * channels),
        dense=3 * (linear + 2 * layers * work.dense_pairs * channels),
    )


def _mlp_width(model: ModelConfig, experts: bool) -> int:
    """Columns of all matrices that a token goes through in a layer's MLP, a dense one or one of experts."""
    matrices = model.fc1_columns + 1
    if not experts:
        return matrices * model.ffn_hidden_size
    active = model.moe_router_topk * model.expert_width + (model.moe_shared_expert_intermediate_size or 0)
    return matrices * active + (model.num_moe_experts or 0)


def performance(
    flops: StepFlops, tokens: int, step_s: float, num_devices: int, peak_tflops: float | None
) -> dict[str, float | None]:
    """The `perf/…` metrics of one step, keyed by `names`.

    Args:
        flops: of the step, over all devices.
        tokens: trained in the step, over all devices.
        step_s: wall-clock seconds of the step.
        num_devices: GPUs (or CPU ranks) that shared the step.
        peak_tflops: dense peak of one device in TFLOP/s; None when unknown, and both MFU values are then None.

    `perf/tflops_per_gpu` counts in the causal convention.

    Raises:
        ValueError: `step_s` or `num_devices` is not positive.
    """
    if step_s <= 0 or num_devices < 1:
        raise ValueError(f"step_s={step_s}, num_devices={num_devices}: expected both above 0. Measure a whole step.")
    per_device = step_s * num_devices
    causal_tflops, dense_tflops = flops.causal / per_device / 1e12, flops.dense / per_device / 1e12
    return {
        names.STEP_S: step_s,
        names.TOKENS_PER_S: tokens / step_s,
        names.TOKENS_PER_S_PER_GPU: tokens / per_device,
        names.TFLOPS_PER_GPU: causal_tflops,
        names.MFU_CAUSAL_PCT: None if peak_tflops is None else 100 * causal_tflops / peak_tflops,
        names.MFU_DENSE_PCT: None if peak_tflops is None else 100 * dense_tflops / peak_tflops,
    }
