"""What FP8 refuses: keys beside it, sizes of products, inference, and devices."""

from dataclasses import replace

import pytest
import torch

from megatron_longctx.config import Config, TrainConfig, names, token_unit
from megatron_longctx.config.environment import facts
from megatron_longctx.config.gpus import other_nodes
from megatron_longctx.planner import memory
from megatron_longctx.planner.flops import StepFlops, performance
from megatron_longctx.training import preflight
from megatron_longctx.training.compose import compose_config, override_config

LLAMA = ("model=llama3_8b", "train.device=cuda", "train.fp8=tensorwise")


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        compose_config([*dict.fromkeys((*LLAMA, *words))])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.precision=fp32", "train.precision=fp32: expected bf16"),
        ("train.device=cpu", "train.device=cpu: expected auto or cuda"),
        ("model.implementation=local", "model.implementation=local: expected auto or transformer_engine with"),
        ("model.builder=hybrid", "model.builder=hybrid: expected gpt"),
        ("reduction.down_projection=int8", "reduction.down_projection=int8: expected none"),
        ("train.fp8=delayed recompute.mlp_tile_tokens=512", "recompute.mlp_tile_tokens=512: expected null with"),
        ("train.fp8=delayed model.num_moe_experts=4", "model.num_moe_experts=4: expected null with"),
        ("train.fp8=delayed train.bf16_layers_at_end=1", "train.bf16_layers_at_end=1: expected 0 with"),
        ("train.fp8=none train.fp8_param=true", "train.fp8_param=True: expected false with train.fp8=none. Set"),
        ("train.fp8=mxfp8 train.fp8_param=true", "train.fp8_param=True: expected false with train.fp8=mxfp8. Set"),
        ("train.fp8_param=true optim.distributed=false", "optim.distributed=False: expected true with train.fp8_param"),
        ("train.fp8_param=true optim.states_on_host=true", "optim.states_on_host=True: expected false with"),
        ("train.fp8_param=true recompute.mlp_tile_tokens=512", "recompute.mlp_tile_tokens=512: expected null with"),
        ("train.fp8_param=true model.num_moe_experts=4", "model.num_moe_experts=4: expected null with train.fp8_param"),
        ("train.fp8=none train.bf16_layers_at_start=1", "train.bf16_layers_at_start=1: expected 0 with"),
        ("train.bf16_layers_at_start=32", "train.bf16_layers_at_start=32: expected at most 31,"),
        ("train.bf16_layers_at_start=16 train.bf16_layers_at_end=16", "fewer than model.num_layers=32 together"),
        (
            "parallelism.pipeline_parallel_size=4 train.bf16_layers_at_end=9",
            "train.bf16_layers_at_end=9: expected at most 8,",
        ),
        (
            "data.seq_length=4104",
            "data.seq_length=4104: expected a multiple of 16 for each sequence with train.fp8=tensorwise. Nearest: "
            "4096 or 4112.",
        ),
        ("train.fp8=mxfp8 data.seq_length=4112", "a multiple of 32 for each sequence with train.fp8=mxfp8."),
        (
            "parallelism.tensor_parallel_size=2 data.seq_length=4112",
            "expected a multiple of 16 x parallelism.tensor_parallel_size=2 for each sequence",
        ),
        ("recompute.mlp_tile_tokens=100", "recompute.mlp_tile_tokens=100: expected a multiple of 16 for each sequence"),
        ("recompute.mlp_tile_tokens=32 train.micro_batch_size=4 train.global_batch_size=4", "Nearest: 64."),
        ("recompute.mlp_tile_tokens=100 train.micro_batch_size=2 train.global_batch_size=2", "Nearest: 96 or 128."),
        ("model.ffn_hidden_size=14344", "model.ffn_hidden_size / tensor_parallel_size=14344: expected a multiple"),
        ("model=gpt2 model.num_attention_heads=64 model.num_kv_heads=2", "queries, keys and values / tensor_parallel"),
        ("model=tiny_mla model.kv_lora_rank=72", "model.kv_lora_rank=72: expected a multiple of 16"),
        ("model=tiny_moe model.moe_ffn_hidden_size=72", "model.moe_ffn_hidden_size / expert_tensor_parallel_size=72"),
    ],
)  # fmt: skip
def test_refusals(words: str, message: str) -> None:
    assert message in refusal(*words.split())


def test_ranks_get_whole_blocks_of_tokens() -> None:
    sizes = ("parallelism.tensor_parallel_size=2", "parallelism.context_parallel_size=2")
    assert token_unit(compose_config([*LLAMA, *sizes])) == 32
    assert token_unit(compose_config([*LLAMA, *sizes, "parallelism.sequence_parallel=false"])) == 16
    assert token_unit(compose_config(["model=llama3_8b", "train.fp8=mxfp8"])) == 32
    assert token_unit(compose_config(["model=llama3_8b", *sizes])) == 2


def test_inference_has_no_fp8() -> None:
    trained = compose_config([*LLAMA, "train.bf16_layers_at_end=2", "train.fp8_param=true"])
    plain = replace(trained.train, fp8="none", fp8_param=False, bf16_layers_at_end=0)
    assert override_config(trained, [], training=False).train == plain
    with pytest.raises(ValueError, match=r"train\.fp8=blockwise: expected none in inference, which computes in"):
        override_config(compose_config(["model=llama3_8b"]), ["train.fp8=blockwise"], training=False)


@pytest.mark.parametrize(
    ("fp8", "capability", "expected"),
    [
        ("delayed", (8, 0), "a recipe of this GPU, of compute capability 8.0. delayed needs 8.9 (Ada) or later."),
        ("blockwise", (8, 9), "blockwise needs 9.0 (Hopper) or later."),
        ("mxfp8", (9, 0), "mxfp8 needs 10.0 (Blackwell) or later, below 12.0."),
        ("mxfp8", (12, 0), "mxfp8 needs 10.0 (Blackwell) or later, below 12.0."),
        ("tensorwise", (8, 9), None),
        ("blockwise", (9, 0), None),
    ],
)  # fmt: skip
def test_devices(monkeypatch: pytest.MonkeyPatch, fp8: str, capability: tuple[int, int], expected: str | None) -> None:
    config = Config(train=TrainConfig(fp8=fp8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=f"train.fp8={fp8}: expected none on CPUs"):
        preflight._check_fp8(config, "cpu")
    with pytest.raises(ValueError, match=f"train.fp8={fp8}: expected none without TransformerEngine"):
        monkeypatch.setattr(preflight, "uses_transformer_engine", lambda model: False)
        preflight._check_fp8(config, "cuda")
    monkeypatch.setattr(preflight, "uses_transformer_engine", lambda model: True)
    monkeypatch.setattr(preflight, "require_fp8", lambda fp8: None)
    with other_nodes(8):
        preflight._check_fp8(config, "cuda")
    if expected is None:
        preflight._check_fp8(config, "cuda")
        return
    with pytest.raises(ValueError) as caught:
        preflight._check_fp8(config, "cuda")
    assert expected in str(caught.value)


def test_utilization_names_both_peaks() -> None:
    record = performance(StepFlops(causal=4 * 10**14, dense=6 * 10**14), 8000, 0.5, 4, 1000.0, fp8=True)
    assert record[names.MFU_CAUSAL_PCT] == 20.0 and record[names.MFU_FP8_PCT] == 10.0
    assert performance(StepFlops(1, 1), 1, 1.0, 1, None, fp8=True)[names.MFU_FP8_PCT] is None


@pytest.mark.parametrize("fp8", ["delayed", "tensorwise"])
def test_memory_counts_inputs_and_weights_in_fp8(fp8: str) -> None:
    config = compose_config(["model=llama3_8b", "parallelism=cp2", "data.seq_length=4096", "model.num_layers=2"])
    plain, quantized = (
        memory.predict(memory.Job(replace(config, train=replace(config.train, fp8=kind)), 128256))
        for kind in ("none", fp8)
    )
    terms = {term.name: term.num_bytes for term in quantized.resident}
    layer = 4096 * (4096 * 2 + 2 * 1024 + 3 * 14336 + 2)  # weights, with two norms
    assert terms["weights in FP8"] == 2 * 2 * layer
    # Two inputs of the hidden size and one of the MLP's width take a byte less, and delayed keeps attention's output.
    saved = 2048 * (2 * 4096 + 14336 - (4096 if fp8 == "delayed" else 0)) * 2
    loss, less = (next(phase for phase in each.phases if phase.name == "loss") for each in (plain, quantized))
    assert loss.num_bytes - less.num_bytes == saved


def test_memory_of_weights_in_fp8_alone() -> None:
    words = ("model=llama3_8b", "parallelism=cp2", "train.fp8=tensorwise", "train.bf16_layers_at_end=1")
    config = compose_config([*words, "data.seq_length=4096", "model.num_layers=4"])
    predictions = [
        memory.predict(memory.Job(replace(config, train=replace(config.train, fp8_param=alone)), 128256))
        for alone in (False, True)
    ]
    copies, alone = ({term.name: term.num_bytes for term in each.resident} for each in predictions)
    in_fp8 = 3 * 4096 * (4096 * 2 + 2 * 1024 + 3 * 14336 + 2)
    assert copies.pop("weights") - alone.pop("weights") == 2 * in_fp8
    assert copies == alone
    before, after = (next(phase for phase in each.phases if phase.name == "optimizer step") for each in predictions)
    assert after.num_bytes - before.num_bytes == pytest.approx(2 * in_fp8 / 2, rel=1e-6)  # two ranks share them


def test_runs_are_tagged_by_their_recipe() -> None:
    assert facts(Config(train=TrainConfig(fp8="delayed")).as_dict(), {})["precision"] == "bf16 FP8 delayed"
    assert facts(Config().as_dict(), {})["precision"] == "bf16"
