"""FLOPs compared with numbers computed by hand, and peaks of devices whose names contain one another."""

import pytest

from megatron_longctx.config import ModelConfig, names
from megatron_longctx.planner.flops import StepFlops, Work, peak_tflops, performance, training_flops

LLAMA3_8B = ModelConfig(
    name="llama3_8b",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
)


def _causal(model: ModelConfig, length: int, batch: int) -> Work:
    """Return the work of whole causal sequences."""
    pairs = model.num_layers * batch * (length * (length + 1) // 2)
    return Work(batch * length, pairs, batch * length**2)


def test_llama3_8b_at_8k_by_hand() -> None:
    # Forward per token and layer: QKV 2*4096*128*48 = 50_331_648, output 2*4096*4096 = 33_554_432,
    # SwiGLU 6*4096*14336 = 352_321_536: together 436_207_616, times 32 layers = 13_958_643_712.
    # LM head 2*4096*128256 = 1_050_673_152. Without attention: 15_009_316_864 per token.
    # Attention per token: 32 layers * 2*8192*32*128 = 2_147_483_648 causal, twice that dense.
    # Step: 3 * 8192 tokens * (15_009_316_864 + attention).
    flops = training_flops(LLAMA3_8B, 128256, _causal(LLAMA3_8B, 8192, 1))
    assert flops == StepFlops(causal=421_645_529_382_912, dense=474_422_087_516_160)


def test_gelu_has_two_matrices_and_head_dim_need_not_follow_the_hidden_size() -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=10,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_hidden_size=30,
        activation="gelu",
    )
    # T=6 tokens (batch 2, length 3): QKV 2*6*10*8*4 = 3840, output 2*6*16*10 = 1920, MLP 2*6*2*10*30 = 7200,
    # head 2*6*10*50 = 6000, attention causal 2*6*3*16 = 576.
    flops = training_flops(model, 50, _causal(model, 3, 2))
    assert flops == StepFlops(
        causal=3 * (3840 + 1920 + 7200 + 6000 + 576), dense=3 * (3840 + 1920 + 7200 + 6000 + 1152)
    )


def test_documents_and_windows_count_visible_pairs() -> None:
    model = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, num_kv_heads=1, ffn_hidden_size=8)
    # Documents of 3 and 2 tokens: 6 + 3 visible pairs. In the second layer the window is one token: 5 + 3. In 2 layers
    # of 5 tokens a query's own key is one of 10 pairs: 17 - 5 = 12, times 4*2*8 = 768; dense 2*25, 3200.
    packed = training_flops(model, 10, Work(5, 9 + 8, 25))
    assert packed.dense - packed.causal == 3 * (3200 - 768)
    # Two documents of equal length have half the pairs of a whole sequence, in this convention.
    halves = Work(8, 2 * (4 * 5 // 2) * 2, 64)
    linear = training_flops(model, 10, Work(8, 8, 0)).dense
    whole = training_flops(model, 10, _causal(model, 8, 1))
    assert 2 * (training_flops(model, 10, halves).causal - linear) == whole.causal - linear


def test_performance_divides_by_devices_and_seconds() -> None:
    record = performance(StepFlops(causal=4 * 10**14, dense=6 * 10**14), 8000, 0.5, 4, peak_tflops=1000.0)
    assert record == {
        names.STEP_S: 0.5,
        names.TOKENS_PER_S: 16000.0,
        names.TOKENS_PER_S_PER_GPU: 4000.0,
        names.TFLOPS_PER_GPU: pytest.approx(200.0),
        names.MFU_CAUSAL_PCT: pytest.approx(20.0),
        names.MFU_DENSE_PCT: pytest.approx(30.0),
        names.MFU_FP8_PCT: None,
    }


def test_performance_without_a_peak_has_no_mfu() -> None:
    record = performance(StepFlops(causal=10**12, dense=10**12), 10, 1.0, 1, peak_tflops=None)
    assert record[names.MFU_CAUSAL_PCT] is None and record[names.MFU_DENSE_PCT] is None
    assert record[names.TFLOPS_PER_GPU] == 1.0


def test_performance_refuses_an_unmeasured_step() -> None:
    with pytest.raises(ValueError, match=r"step_s=0\.0"):
        performance(StepFlops(1, 1), 10, 0.0, 1, None)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_known_devices(name: str, peak: float) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize("name", [None, "", "NVIDIA GeForce GT 710", "NVIDIA H2000"])
def test_unknown_devices_have_no_peak(name: str | None) -> None:
    assert peak_tflops(name) is None


def test_override_wins() -> None:
    assert peak_tflops("NVIDIA H100 PCIe", 700.0) == 700.0
    assert peak_tflops(None, 1.5) == 1.5
