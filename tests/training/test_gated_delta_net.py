"""`model.pattern` with gated delta nets: runs at any parallel sizes are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.version import RELEASE
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training import recorded
from tests.shared.training import tiny_config, tiny_corpus

CP, TP, PP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline"))
HYBRID: dict[str, Any] = {
    "model.pattern": "G-*-",
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 8,
    "model.linear_value_head_dim": 6,
    "parallelism.schedule": "helper",
    "train.steps": 10,
    "optim.warmup_steps": 0,
}
PACKED = {**HYBRID, "data.packing": "best_fit", "data.mask_eod_loss": True}
EXPERTS = {**HYBRID, "model.pattern": "GE*-", "model.num_moe_experts": 4, "model.moe_layer_freq": "[1,0]"}
MODELS = {"dense": HYBRID, "packed": PACKED, "experts": EXPERTS}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp2": (2, "dense", {CP: 2}),
    "cp2 packed": (2, "packed", {CP: 2}),
    "tp2": (2, "dense", {TP: 2}),
    "pp2": (2, "dense", {PP: 2}),
    "recompute": (2, "packed", {CP: 2, "recompute.mode": "attention_output", "recompute.head_chunk_tokens": 26}),
    "offload": (2, "dense", {CP: 2, "recompute.mode": "attention_output+offload"}),
    "layer": (2, "dense", {CP: 2, "recompute.mode": "layer"}),
    "ep2": (2, "experts", {CP: 2, "parallelism.expert_model_parallel_size": 2}),
    "cp3 packed": (3, "packed", {CP: 3}),
    "tp2 cp2": (4, "packed", {CP: 2, TP: 2}),
    "cp2 pp2": (4, "packed", {CP: 2, PP: 2}),
    "cp6": (6, "dense", {CP: 6}),
}


def _record(rank: int, root: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, recorded.Curves]:
    found = {}
    for name, settings in jobs.items():
        found[name] = recorded.record(rank, tiny_config(root, name.replace(" ", "-"), settings), (0, 9), True)
        groups.destroy()
    return found


def test_losses_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    alone = run_distributed(_record, 1, tmp_path, MODELS)[0]
    if RELEASE >= (0, 19):
        CASES.update({f"stack {name}": (n, model, {**more, "model.builder": "hybrid"})
                      for name, (n, model, more) in CASES.items() if name in ("cp2 packed", "pp2", "ep2")})
    for world in sorted({world for world, _, _ in CASES.values()}):
        jobs = {
            name: {**MODELS[model], **settings, "train.init_from": str(tmp_path / model)}
            for name, (ranks, model, settings) in CASES.items()
            if ranks == world
        }
        for name, curves in run_distributed(_record, world, tmp_path, jobs)[0].items():
            model = CASES[name][1]
            print(name, max(abs(a-b)/b for a,b in zip(curves.losses, alone[model].losses)))
            for step in (0, 9):
                errors = recorded.gradient_errors(tmp_path / name.replace(" ", "-"), tmp_path / model, step)
                print('   ', step, max(errors.items(), key=lambda x: x[1]))
    print(alone["dense"].losses, alone["packed"].losses)
