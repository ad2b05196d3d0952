"""Training FLOPs of a GPT, and what they make of a measured step time.

Forward pass of one step, with T = batch · S tokens (S: sequence length), L layers, hidden size H, h query heads,
g key/value heads, head dimension d, MLP width F in M matrices (SwiGLU 3, GELU 2) and vocabulary V:

    projections  L · 2·T·H·d·(h + 2g)      query, key and value
                 L · 2·T·h·d·H             attention output
    attention    L · 4·T·S·h·d             dense convention: every query times every key (QKᵀ and PV)
                 L · 2·T·S·h·d             causal convention: half of it, S²/2 pairs for each sequence
    MLP          L · 2·T·M·H·F
    LM head      2·T·H·V

A training step is 3 × forward (backward counts twice). Embedding look-ups, norms, RoPE and softmax are left out, and
recomputation is not counted: the resulting percentage is MFU, not HFU. At long context the two conventions differ by
almost 2×, so both are always reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_longctx import names
from megatron_longctx.config import ModelConfig

FORMULA = (
    "3 * (L*(2*T*H*d*(h + 2*g) + 2*T*h*d*H + A + 2*T*M*H*F) + 2*T*H*V), "
    "A = 2*T*S*h*d (causal) or 4*T*S*h*d (dense), M = 3 (swiglu) or 2 (gelu); recomputation not counted"
)
_MLP_MATRICES = {"swiglu": 3, "gelu": 2}


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one training step over all devices, in both attention conventions."""

    causal: int
    dense: int


def training_flops(model: ModelConfig, vocab_size: int, seq_length: int, batch: int) -> StepFlops:
    """FLOPs of one training step (forward and backward); the module's docstring states the formula.

    Args:
        model: shape of the GPT.
        vocab_size: rows of the LM head as trained, padding included.
        seq_length: tokens of one sequence, over all context-parallel ranks.
        batch: sequences in one step, over all data-parallel ranks.

    Raises:
        ValueError: a size below 1, or an activation whose MLP is not known.
    """
    for name, value in (("vocab_size", vocab_size), ("seq_length", seq_length), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1. Give the size that is trained.")
    if model.activation not in _MLP_MATRICES:
        known = ", ".join(_MLP_MATRICES)
        raise ValueError(f"model.activation={model.activation}: expected one of {known}. Set model.activation.")
    tokens, hidden, dim = batch * seq_length, model.hidden_size, model.kv_channels
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    projections = 2 * tokens * hidden * dim * (heads + 2 * kv_heads) + 2 * tokens * heads * dim * hidden
    mlp = 2 * tokens * _MLP_MATRICES[model.activation] * hidden * model.ffn_hidden_size
    head = 2 * tokens * hidden * vocab_size
    attention_half = 2 * tokens * seq_length * heads * dim
    linear = model.num_layers * (projections + mlp) + head
    return StepFlops(
        causal=3 * (linear + model.num_layers * attention_half),
        dense=3 * (linear + model.num_layers * 2 * attention_half),
    )


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
