"""Recurrent layers: runs at any parallel sizes are those of one rank, and what cannot run is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.config.gpus import other_nodes
from megatron_longctx.mcore.version import RELEASE
from megatron_longctx.planner.flops import Work, training_flops
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training import preflight, recorded
from tests.shared.training import LATENTS, changed, record_all, tiny_config, tiny_corpus

CP, TP, PP, EP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline", "expert_model"))
LAYOUT, SCHEDULE, RECOMPUTE = "parallelism.layout", "parallelism.schedule", "recompute.mode"
HYBRID: dict[str, Any] = {
    "model.pattern": "G-*-",
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 8,
    "model.linear_value_head_dim": 6,
    "model.attention_output_gate": True,
    "model.rotary_percent": 0.5,
    SCHEDULE: "helper",
}
PLAIN_HEADS = {"model.attention_output_gate": False, "model.rotary_percent": 1.0}
STEPS = {"train.steps": 5, "optim.warmup_steps": 0}
EXPERTS = {"model.pattern": "GE*-", "model.num_moe_experts": 4, "model.moe_layer_freq": "[1,0]"}
SHARED = {"model.moe_shared_expert_intermediate_size": 16, "model.moe_shared_expert_gate": True}
PACKED = {"data.packing": "best_fit", "data.mask_eod_loss": True}
KIMI = {"model.pattern": "K-*-", "train.steps": 10}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**HYBRID, **STEPS},
    "packed": {**HYBRID, **STEPS, **PACKED},
    "experts": {**HYBRID, **STEPS, **EXPERTS, **SHARED},
    "mamba packed": {**HYBRID, **STEPS, **PACKED, "model.pattern": "*-M-"},
    "kimi packed": {**HYBRID, **STEPS, **KIMI, **PACKED},
}
BUILDER = {"model.builder": "hybrid"} if RELEASE >= (0, 19) else {}
# Experts, pipelines and odd numbers of ranks are the same for all kinds of recurrent layers.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp2 kept": (2, "packed", {CP: 2, RECOMPUTE: "attention_output+offload", **BUILDER}),
    "cp2 ep2": (2, "experts", {CP: 2, EP: 2, **BUILDER}),
    "cp6": (6, "dense", {CP: 6, RECOMPUTE: "layer", SCHEDULE: "ring"}),
    "tp2 cp3": (6, "packed", {CP: 3, TP: 2}),
    "cp3 pp2": (6, "packed", {CP: 3, PP: 2, **BUILDER}),
    "mamba cp2 kept": (2, "mamba packed", {CP: 2, RECOMPUTE: "attention_output", **BUILDER}),
    "mamba tp2 cp3": (6, "mamba packed", {CP: 3, TP: 2, RECOMPUTE: "layer"}),
    "kimi cp2 kept": (2, "kimi packed", {CP: 2, RECOMPUTE: "attention_output", **BUILDER}),
    "kimi tp2 cp3": (6, "kimi packed", {CP: 3, TP: 2, RECOMPUTE: "layer"}),
}


def test_losses_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    alone = run_distributed(record_all, 1, tmp_path, MODELS, (0, 4))[0]
    found: dict[str, recorded.Curves] = {}
    for world in (2, 6):
        jobs = {
            name: {**MODELS[model], **settings, "train.init_from": str(tmp_path / model.replace(" ", "-"))}
            for name, (ranks, model, settings) in CASES.items()
            if ranks == world
        }
        found |= run_distributed(record_all, world, tmp_path, jobs, (0, 4))[0]
    for name, curves in found.items():
        model = CASES[name][1]
        assert curves.losses == pytest.approx(alone[model].losses, rel=1e-6), name
        assert curves.losses[-1] < curves.losses[0] - 0.3, "flat curves would be equal anyway"
        for step, most in ((0, 1e-6), (4, 1e-4)):  # steps of fp32 lie between
            errors = recorded.gradient_errors(
                tmp_path / name.replace(" ", "-"), tmp_path / model.replace(" ", "-"), step
            )
            assert any("conv_weight" in key for key in errors)
            # The four numbers of a decay are sums over tokens that cancel.
            scaled = {key: error / (5 if "decay" in key else 1) for key, error in errors.items()}
            assert max(scaled.values()) < most, (name, step, errors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.pattern": "D-*-"}, "model.pattern=D-[*]-: expected null or pairs of"),
        ({"model.pattern": "G-M-"}, "model.pattern=G-M-: expected one kind of recurrent layers"),
        ({"model.pattern": "K-G-"}, "model.pattern=K-G-: expected one kind of recurrent layers"),
        ({"model.pattern": "K-*-", "model.linear_value_head_dim": 7}, "heads=2: expected a divisor of .*head_dim=7"),
        ({"model.pattern": "G-G-*-"}, "a number of layers, now 3, that divides model.num_layers=2"),
        ({"model.pattern": "GE*-"}, "model.pattern=GE[*]-: expected E in layers with experts and - in others: --"),
        ({"model.linear_key_head_dim": None}, "model.linear_key_head_dim=None: expected a number with model.pattern"),
        ({"model.pattern": "*-*-"}, "model.linear_num_key_heads=2: expected null with model.pattern"),
        ({"model.rotary_percent": 0.3}, "model.rotary_percent=0.3: expected a share of the 8 elements of a head"),
        ({"model.rotary_percent": 0.125}, "model.head_dim=8: expected an even head dimension with rope, and an even"),
        ({"model.moe_shared_expert_gate": True}, "model.moe_shared_expert_gate=True: expected false"),
        ({"model.linear_num_key_heads": 3}, "model.linear_num_key_heads=3: expected a divisor of"),
        ({CP: 2, SCHEDULE: "zigzag"}, "parallelism.schedule=zigzag: .* Set parallelism.schedule=helper"),
        ({CP: 2, LAYOUT: "balanced"}, "parallelism.layout=balanced: expected auto or contiguous with model.pattern"),
        ({TP: 2, "model.linear_num_key_heads": 1}, "tensor_parallel_size=2: .*model.linear_num_key_heads=1"),
        ({**LATENTS, **PLAIN_HEADS}, "model.kv_lora_rank=24: expected null with model.pattern"),
        ({"data.format": "rollouts", "data.packing": "best_fit"}, "data.format=rollouts: expected documents"),
    ],
)
def test_settings_that_recurrent_layers_exclude_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, "refused", {**HYBRID, **settings})


def test_packs_are_contiguous(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {**HYBRID, CP: 2, "data.packing": "best_fit"})
    assert (config.layout, config.parallelism.layout) == ("contiguous", "auto")


@pytest.mark.parametrize(("kind", "gates", "products"), [("G", 24 + 2 * 4, 3), ("M", 24 + 4, 2), ("K", 2 * 6 + 4, 3)])
def test_flops_of_a_recurrent_layer_grow_with_tokens_alone(
    tmp_path: Path, kind: str, gates: int, products: int
) -> None:
    model = tiny_config(tmp_path, "run", {**HYBRID, "model.pattern": f"{kind}-{kind}-"}).model
    projections, rule, mlp = 32 * (2 * 2 * 8 + 2 * 24 + gates), products * 4 * 8 * 6, 3 * 32 * 64
    projections += 6 * 4 * (8 + 6) * (kind == "K")
    flops = training_flops(model, 128, Work(tokens=100, pairs=0, dense_pairs=10_000))
    assert flops.causal == flops.dense == 6 * 100 * (2 * (projections + rule + mlp) + 32 * 128)
    mixed = replace(model, pattern=f"{kind}-*-", num_layers=4)
    assert (model.layer_windows, mixed.layer_windows) == ({}, {(None, None): 2})


@pytest.mark.parametrize(
    ("triton", "capability", "packages", "refused"),
    [
        ("3.6.0", (9, 0), ("fla",), True),
        ("3.7.0", (9, 0), ("fla",), True),
        ("3.4.0", (9, 0), ("fla",), True),
        ("3.3.1", (9, 0), ("fla",), False),
        ("3.7.1", (9, 0), ("fla",), False),
        ("3.6.0", (10, 0), ("fla",), False),
        ("3.6.0", (9, 0), ("fla", "tilelang"), False),
    ],
)
def test_wrong_gradients_of_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    triton: str,
    capability: tuple[int, int],
    packages: tuple[str, ...],
    refused: bool,
) -> None:
    config = tiny_config(tmp_path, "run", {**HYBRID, "train.precision": "bf16"})
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(preflight, "version", lambda name: triton)
    monkeypatch.setattr(preflight, "version_of", lambda name: "0.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with other_nodes(8):
        preflight.check_delta_kernels(config, "cuda")
    preflight.check_delta_kernels(config, "cuda", backward=False)
    if not refused:
        preflight.check_delta_kernels(config, "cuda")
        monkeypatch.setattr(preflight, "version_of", lambda name: "0.7.1")
        two = changed(config, {"parallelism.context_parallel_size": 2})
        with pytest.raises(ValueError, match=r"null over 2 ranks with fla-core 0.7.1.*fla-core==0.6.0"):
            preflight.check_delta_kernels(two, "cuda")
        preflight.check_delta_kernels(config, "cuda", backward=False)
        with pytest.raises(ValueError, match=r"model.linear_key_head_dim=264: expected 256 or less.*deterministic"):
            preflight.check_delta_kernels(changed(config, {"model.linear_key_head_dim": 264}), "cuda", backward=False)
        return
    with pytest.raises(ValueError, match=f"model.pattern=G-.*null on Hopper with Triton {triton}.*triton>=3.7.1"):
        preflight.check_delta_kernels(config, "cuda")
