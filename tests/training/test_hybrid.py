"""`model.builder=hybrid`: Megatron's `HybridModel` trains as its `GPTModel` does, from and to the same checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.version import RELEASE
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training import preflight, recorded
from megatron_longctx.training.run_folder import RunFolder
from tests.shared.training import LATENTS, Job, record_all, run_jobs, tiny_config, tiny_corpus

CP, TP, PP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline"))
HYBRID = {"model.builder": "hybrid"}
only_019 = pytest.mark.skipif(RELEASE < (0, 19), reason="HybridModel is new in Megatron-Core 0.19")
STEPS = {"train.steps": 3, "data.mask_eod_loss": True}
KEPT = {"recompute.mode": "attention_output", "recompute.head_chunk_tokens": 26, "recompute.mlp_tile_tokens": 20}
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_ffn_hidden_size": 32,
    "model.moe_layer_freq": "[0,1]",
    "model.moe_aux_loss_coeff": 0.02,
}
RESUMED = {"train.save": True, "optim.warmup_steps": 0, "optim.decay_style": "constant"}
MODELS: dict[str, dict[str, Any]] = {
    "rope": STEPS,
    # As Gemma and gpt-oss: learned sinks, windows in every second layer, norms behind attention and MLP, tied.
    "windows": {**STEPS, "model.window": 9, "model.window_pattern": 2, "model.sinks": "learnable",
                "model.post_norms": True, "model.qk_norm": True, "model.tie_embeddings": True},
    "experts packed": {**STEPS, **EXPERTS, "data.packing": "best_fit"},
    "latents": {**STEPS, **LATENTS},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2": ("rope", {CP: 2}),
    "tp2 recompute": ("windows", {TP: 2, "recompute.mode": "layer"}),
    "pp2": ("rope", {PP: 2, **KEPT}),
    "experts cp2": ("experts packed", {CP: 2, "recompute.mode": "attention_output+offload"}),
    "latents cp2": ("latents", {CP: 2, "parallelism.schedule": "all_gather"}),
}


def _folder(name: str) -> str:
    return name.replace(" ", "-")


@only_019
def test_losses_and_gradients_are_those_of_the_gpt(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    gpt = run_distributed(record_all, 1, tmp_path, MODELS, (0, 2))[0]
    # Both builders draw the same weights on one rank; the cases load those of the GPT.
    alone = {f"hybrid {name}": {**settings, **HYBRID} for name, settings in MODELS.items()}
    cases = {
        name: {**MODELS[model], **settings, **HYBRID, "train.init_from": str(tmp_path / _folder(model))}
        for name, (model, settings) in CASES.items()
    }
    found = run_distributed(record_all, 1, tmp_path, alone, (0, 2))[0]
    found |= run_distributed(record_all, 2, tmp_path, cases, (0, 2))[0]
    for name, curves in found.items():
        model = CASES[name][0] if name in CASES else name.removeprefix("hybrid ")
        assert curves.losses == pytest.approx(gpt[model].losses, rel=1e-5), name
        assert curves.losses[-1] < curves.losses[0] - 0.05, "flat curves would be equal anyway"
        for step in (0, 2):
            errors = recorded.gradient_errors(tmp_path / _folder(name), tmp_path / _folder(model), step)
            assert errors and max(errors.values()) < 2e-5, (name, step, errors)


def _resume(rank: int, root: Path, name: str, starts: list[tuple[str, int]]) -> list[float]:
    """Return the losses of a run that starts anew with each of these builders, up to the step beside it."""
    losses: list[float] = []
    for builder, stop in starts:
        changes = {"train.steps": stop, "model.builder": builder, CP if builder == "hybrid" else TP: 2}
        settings = {**MODELS["experts packed"], **RESUMED, **changes}
        record = run_jobs(rank, [Job(tiny_config(root, name, settings))])[0]
        assert record.first_step == len(losses) and record.last_step == stop
        losses += record.losses
    return losses


@only_019
def test_a_run_goes_on_with_the_other_model(tmp_path: Path) -> None:
    """Weights, moments and steps of the optimizer come from the other model's checkpoint, at other parallel sizes."""
    tiny_corpus(tmp_path / "corpus")
    expected = run_distributed(_resume, 2, tmp_path, "straight", [("gpt", 6)])[0]
    found = run_distributed(_resume, 2, tmp_path, "both", [("gpt", 2), ("hybrid", 4), ("gpt", 6)])[0]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(RELEASE >= (0, 19), reason="Megatron-Core 0.19 has HybridModel")
def test_the_older_release_refuses_it_before_any_rank_starts(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"model.builder=hybrid: expected gpt with Megatron-Core 0.16"):
        preflight.check(tiny_config(tmp_path, "hybrid", HYBRID), 1)


def _serve(rank: int, root: Path) -> list[bool]:
    """Return, for both builders, whether inference has a GPT of the saved weights."""
    config = tiny_config(root, "saved", {**STEPS, **RESUMED})
    run_jobs(rank, [Job(config)])
    found = []
    for builder in ("gpt", "hybrid"):
        settings = dataclasses.replace(config, model=dataclasses.replace(config.model, builder=builder))
        collection = groups.from_config(settings.parallelism, 1)
        sequence = build_sequence(settings, collection.cp)
        gpt, _ = load_model(settings, collection, sequence, RunFolder.of(config).checkpoints)
        groups.destroy()
        found.append(type(gpt) is GPTModel and float(gpt.output_layer.weight.norm()) > 0)
    return found


def test_inference_takes_the_run_of_either(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    assert run_distributed(_serve, 1, tmp_path)[0] == [True, True]
