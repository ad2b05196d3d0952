"""Training FLOPs of a GPT, peaks of GPUs, and the speed of a measured step.

`FORMULA` is of T tokens in sequences of S (of packs, if documents are packed), L layers with attention, hidden size H,
h query heads, g key/value heads, heads of d elements in queries and keys and e in values, MLPs of width F, and a
vocabulary of V. Latents have c elements for keys and q for queries; RoPE rotates r elements of a head, and n others
not. A recurrent layer of n value heads has A = H·(its columns) + n·e·H, with Kimi Delta Attention e·n·(d + e) more, and
three products of a token with its state, or two in Mamba-2; its convolution and its pairs count as 0. In C's causal
convention a query's own key counts half, so that a whole causal sequence has S²/2 pairs; the dense one has every query
times every key. At long context the two differ by almost 2×, so both are always reported.

Backward counts twice. Embedding look-ups, norms, RoPE and softmax are not counted, nor is recomputation: the resulting
percentage is MFU, not HFU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ModelConfig, names

FORMULA = (
    "3 * (2*T*L*A + 2*T*H*(D*M*F + X*(M*(k*W + U) + E)) + C + 2*T*H*V), "
    "A = H*d*(h + 2*g) + h*e*H (latents: H*(c + r + q) + (q or H)*h*d + c*h*(n + e) + h*e*H), "
    "D dense layers, X of E experts of width W, k of them active, and U of shared ones, "
    "recurrent layers: A and 6*n*d*e (Mamba-2: 4*n*d*e) for attention, "
    "C = (2*P - L*T)*h*(d + e) (causal; P visible pairs of all layers, L*T*(S + 1)/2 without documents and windows) "
    "or 2*L*T*S*h*(d + e) (dense), M = 3 (gated MLPs) or 2 (gelu); recomputation not counted"
)
# Dense bf16/fp16 peaks in TFLOP/s by the makers' data sheets: without sparsity, at the boost clock. Keys are words that
# a device name must contain ("H20" is not in "NVIDIA H200"). The first match counts, so variants precede families.
_PEAKS = {
    "GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "B100": 1750.0,
    "GH200": 989.0, "H200 NVL": 835.0, "H200": 989.0,
    "H100 PCIE": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800 PCIE": 756.0, "H800": 989.0, "H20": 148.0,
    "A100": 312.0, "A800": 312.0, "A40": 149.7, "A30": 165.0, "A10": 125.0,
    "L40S": 362.0, "L40": 181.0, "L4": 121.0, "V100": 125.0,
}  # fmt: skip


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one training step on all devices, in both attention conventions."""

    causal: int
    dense: int


@dataclass(frozen=True)
class Work:
    """The amount of data that a step processes."""

    tokens: int  # of all sequences
    pairs: int  # visible pairs of a query and a key, of all sequences and layers
    dense_pairs: int  # of every query and every key of its sequence, in one layer

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.dense_pairs + other.dense_pairs)


def training_flops(model: ModelConfig, vocab_size: int, work: Work) -> StepFlops:
    """Return the FLOPs of one training step, forward and backward, by `FORMULA`.

    Args:
        vocab_size: rows of the LM head as trained, padding included.
        work: of the step, over all context- and data-parallel ranks.
    """
    tokens = work.tokens
    layers = model.num_layers - sum(model.recurrent_layers)  # with attention
    channels = model.num_attention_heads * (model.kv_channels + model.value_channels)
    linear = tokens * (sum(map(sum, layer_flops(model))) + head_flops(model, vocab_size))
    return StepFlops(
        causal=3 * (linear + (2 * work.pairs - layers * tokens) * channels),
        dense=3 * (linear + 2 * layers * work.dense_pairs * channels),
    )


def layer_flops(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the forward FLOPs of a token in every layer, without attention: in products that `train.fp8` is about,
    and in routers, gates and recurrences."""
    found, rule = [], (2 if "M" in model.mixers else 3) * (model.linear_key_head_dim or 0) * model.recurrent_columns[1]
    for experts, recurrent in zip(model.expert_layers, model.recurrent_layers, strict=True):
        width, routed = model.ffn_hidden_size, 0
        if experts:
            width = model.moe_router_topk * model.expert_width + (model.moe_shared_expert_intermediate_size or 0)
            routed = (model.num_moe_experts or 0) + model.moe_shared_expert_gate
        mixer = model.recurrent_weights if recurrent else model.attention_weights
        products = mixer + model.hidden_size * (model.fc1_columns + 1) * width
        found.append((2 * products, 2 * (model.hidden_size * routed + rule * recurrent)))
    return found


def head_flops(model: ModelConfig, vocab_size: int) -> int:
    """Return the forward FLOPs of a token in the LM head."""
    return 2 * model.hidden_size * vocab_size


def imbalance(model: ModelConfig, vocab_size: int, work: Sequence[Work]) -> float:
    """Return the share by which the busiest of several replicas computes more than the average, e.g. 0.05."""
    flops = [training_flops(model, vocab_size, each).causal for each in work]
    return max(flops) * len(flops) / sum(flops) - 1 if any(flops) else 0.0


def peak_tflops(device_name: str | None, override: float | None = None) -> float | None:
    """Return the dense bf16/fp16 peak of one device in TFLOP/s, or None if it is not known.

    It is not the peak for fp32 training, for which users set `logging.peak_tflops`.

    Args:
        device_name: as `torch.cuda.get_device_name()` returns it, e.g. `NVIDIA H100 80GB HBM3`; None on CPU.
        override: `logging.peak_tflops`, returned if given.
    """
    if override is not None or device_name is None:
        return override
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((peak for required, peak in _PEAKS.items() if words.issuperset(required.split())), None)


def performance(
    flops: StepFlops, tokens: int, step_s: float, num_devices: int, peak_tflops: float | None, fp8: bool = False
) -> dict[str, float | None]:
    """Return the `perf/…` metrics of one step, keyed by `names`. `perf/tflops_per_gpu` uses the causal convention.

    Raises ValueError: `step_s` or `num_devices` is not positive.

    Args:
        flops: of the step, over all devices.
        tokens: trained in the step, over all devices.
        step_s: wall-clock seconds of the step.
        num_devices: GPUs (or CPU ranks) that shared the step.
        peak_tflops: dense peak of one device in TFLOP/s, of bf16 also with FP8; with None, the MFU values are None.
        fp8: whether products are in FP8, whose peak is twice that of bf16. Attention and the LM head are not, so 100%
            of it cannot be reached.
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
        names.MFU_FP8_PCT: None if peak_tflops is None or not fp8 else 50 * causal_tflops / peak_tflops,
    }
