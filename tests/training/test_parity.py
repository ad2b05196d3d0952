"""Losses, gradient norms and gradients of each parallel size and mode equal those of one rank."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.training.recorded import gradient_errors
from tests.shared.training import GPT2, LATENTS, Job, Record, recorded, tiny_config, tiny_corpus

FP32 = 1e-5
BF16_TIMES_SINGLE = 2.0
LATER = {12: 8, 3: 2}

CP, TP, PP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline"))
SCHEDULE, BOUND = "parallelism.schedule", "parallelism.max_buffer_tokens"
BOUNDED = {SCHEDULE: "all_gather", BOUND: 25}
SHARDED, UNSHARDED = {"optim.distributed": True}, {"optim.distributed": False}
KEPT = {"recompute.mode": "attention_output", "recompute.head_chunk_tokens": 26, "recompute.mlp_tile_tokens": 20}
OFFLOADED = {"recompute.mode": "attention_output+offload", "recompute.head_chunk_tokens": 7}

# The settings of the single rank. Each case adds parallel sizes to one of these. Masked losses (one token after each
# end of document) make the ranks' shares of the loss unequal even if their lengths are equal.
SHORT = {"train.steps": 3, "optim.warmup_steps": 0}
YARN = {"model.rope_scaling.kind": "yarn", "model.rope_scaling.factor": 4.0, "model.rope_scaling.original_length": 32}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {**SHORT, "data.mask_eod_loss": True},
    "bf16": {"data.mask_eod_loss": True, "train.steps": 12, "train.precision": "bf16"},
    "mha uneven": {**SHORT, "model.num_kv_heads": 4, "data.seq_length": 101, "data.mask_eod_loss": True,
                   "train.micro_batch_size": 2, "train.global_batch_size": 4},
    "mqa recompute": {**SHORT, "model.num_kv_heads": 1, "data.seq_length": 67, "recompute.mode": "layer",
                      "train.micro_batch_size": 3, "train.global_batch_size": 3},
    "gpt2": {**SHORT, **GPT2, "data.seq_length": 70, "train.micro_batch_size": 1, "train.global_batch_size": 2},
    # In units of two tokens (TP=2 with sequence parallelism) the zigzag pieces of 102 are 24, 26, 26 and 26.
    "mix": {**SHORT, "data.seq_length": 102, "data.mask_eod_loss": True,
            "train.micro_batch_size": 2, "train.global_batch_size": 4},
    # As gpt-oss and Gemma. Sinks are sharded, in checkpoints (which merge gradients here) and in the gradient norm.
    "windows": {**SHORT, "data.seq_length": 102, "model.window": 9, "model.window_pattern": 2,
                "model.sinks": "learnable", "model.window_rope_base": 100.0, **YARN, "model.activation": "geglu",
                "model.zero_centered_norms": True, "model.qk_norm": True, "model.post_norms": True,
                "model.scale_embedding": True, "model.attention_scale": 0.3,
                "train.micro_batch_size": 2, "train.global_batch_size": 4},
    # As DeepSeek. Packs have one sequence of several documents, and Megatron's MLA drops their batch dimension.
    "latents": {**SHORT, **LATENTS, **YARN, "model.attention_scale": 0.3, "data.seq_length": 102,
                "model.q_lora_rank": 20, "train.micro_batch_size": 2, "train.global_batch_size": 4},
    "latents packed": {**SHORT, **LATENTS, **YARN, "data.seq_length": 102, "data.packing": "best_fit",
                       "model.q_lora_rank": 20, "recompute.mode": "layer", "train.global_batch_size": 2},
    # Only a few ranks hold ends of documents, and some ranks hold one or two tokens.
    "few tokens": {**SHORT, "data.seq_length": 19, "train.global_batch_size": 2, "data.mask_eod_loss": True},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A parallel run, which is compared with one rank's run of the same model."""

    name: str
    model: str
    world: int
    settings: dict[str, Any] = field(default_factory=dict)


# tests/core/attention tests that attention and its gradients are exact in every mode. Here every layout is in one case,
# and one case is about one fact: sharding affects losses, positions and gradients in the same way at every size.
CASES = [
    Case("bf16 cp2", "bf16", 2, {CP: 2}),
    Case("mha uneven cp2", "mha uneven", 2, {CP: 2}),
    Case("tp2", "mix", 2, {TP: 2, **SHARDED}),
    Case("pp2", "mix", 2, {PP: 2, **UNSHARDED}),
    Case("dp2", "mix", 2, SHARDED),
    Case("mqa recompute cp3 ring", "mqa recompute", 3, {CP: 3, SCHEDULE: "ring"}),
    Case("gpt2 cp3 bounded", "gpt2", 3, {CP: 3, **BOUNDED}),
    Case("cp4 tasp", "gqa", 4, {CP: 4, SCHEDULE: "tasp"}),
    Case("cp4 usp", "gqa", 4, {CP: 4, SCHEDULE: "usp"}),
    Case("tp2 cp2 all_gather without sequence parallelism", "mix", 4,
         {TP: 2, CP: 2, SCHEDULE: "all_gather", "parallelism.sequence_parallel": False, **UNSHARDED}),
    # Ranks of one stage hold 51 and 50 tokens: stages exchange unequal shapes.
    Case("pp2 cp2 uneven", "mha uneven", 4, {PP: 2, CP: 2}),
    Case("pp2 cp2 attention_output", "mix", 4, {PP: 2, CP: 2, **SHARDED, **OFFLOADED}),
    Case("dp2 cp2 attention_output", "mix", 4, {CP: 2, **SHARDED, **KEPT, SCHEDULE: "helper"}),
    Case("gpt2 tp2 cp2 attention_output", "gpt2", 4, {TP: 2, CP: 2, **KEPT}),
    Case("windows tp2 cp2", "windows", 4, {TP: 2, CP: 2, **SHARDED, **KEPT}),
    Case("latents cp3 striped", "latents", 3, {CP: 3, SCHEDULE: "ring", "parallelism.layout": "striped", **KEPT}),
    Case("latents cp4 ulysses", "latents", 4, {CP: 4, SCHEDULE: "ulysses"}),
    Case("latents packed tp2 cp2", "latents packed", 4, {TP: 2, CP: 2, **OFFLOADED}),
    Case("few tokens cp8", "few tokens", 8, {CP: 8}),
    Case("tp2 pp2 cp2", "mix", 8, {TP: 2, PP: 2, CP: 2, **SHARDED}),
]  # fmt: skip
BF16_CASES = [case for case in CASES if case.model == "bf16"]
FP32_CASES = [case for case in CASES if case.model != "bf16"]

Runs = dict[str, Record]


def _folder(name: str) -> str:
    return name.replace(" ", "-")


def _job(root: Path, name: str, model: str, settings: dict[str, Any], **options: Any) -> Job:
    config = tiny_config(root, _folder(name), {**MODELS[model], **settings})
    return Job(config, gradients_at=(0, LATER[config.train.steps]), **options)


def _reference_jobs(root: Path) -> dict[str, Job]:
    staged = {case.model for case in CASES if PP in case.settings}
    jobs = {name: _job(root, name, name, {}, save_start=name in staged) for name in MODELS}
    # The reference for bf16 is an fp32 run from the same, rounded weights: its error is smaller by five digits.
    jobs["bf16 in fp32"] = _job(root, "bf16 in fp32", "bf16", {"train.precision": "fp32"}, round_weights=True)
    return jobs


def _parallel_job(root: Path, case: Case) -> Job:
    # Each pipeline stage draws its weights from a separate stream: load those of the single rank.
    start = root / _folder(case.model) / "checkpoints" if PP in case.settings else None
    return _job(root, case.name, case.model, case.settings, start_from=start)


@pytest.fixture(scope="module")
def runs(root: Path) -> Runs:
    tiny_corpus(root / "corpus")
    found: Runs = recorded(1, _reference_jobs(root))
    # New ranks for each case: the threads of earlier groups stay and slow later cases down.
    for case in CASES:
        found |= recorded(case.world, {case.name: _parallel_job(root, case)})
    assert all(record.error is None for record in found.values())
    return found


@pytest.mark.parametrize("name", [*MODELS, "bf16 in fp32"])
def test_the_single_rank_learns(runs: Runs, name: str) -> None:
    losses = runs[name].losses
    assert len(losses) == MODELS.get(name, MODELS["bf16"])["train.steps"]
    assert losses[-1] < losses[0] - 0.2, "flat curves would be equal anyway"
    assert all(float(torch.linalg.vector_norm(g)) > 0 for g in runs[name].gradients[0].values())


@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: _folder(case.name))
def test_fp32_runs_agree(root: Path, runs: Runs, case: Case) -> None:
    run, single = runs[case.name], runs[case.model]
    assert run.losses == pytest.approx(single.losses, rel=FP32, abs=0)
    assert run.grad_norms == pytest.approx(single.grad_norms, rel=FP32, abs=0)
    assert run.learning_rates == single.learning_rates
    for step in (0, 2):
        errors = gradient_errors(root / _folder(case.name), root / _folder(case.model), step)
        assert len(errors) == len(single.gradients[step]) and max(errors.values()) < FP32, f"step {step}: {errors}"


def _rms_error(values: list[float], reference: list[float]) -> float:
    differences = torch.tensor(values, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    return float(differences.square().mean().sqrt())


@pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: _folder(case.name))
def test_the_bf16_error_is_close_to_that_of_one_rank(root: Path, runs: Runs, case: Case) -> None:
    run, single, exact = runs[case.name], runs["bf16"], runs["bf16 in fp32"]
    # Over all steps: in one step, the single rank's error may be small by chance.
    for of_run, of_single, reference in (
        (run.losses, single.losses, exact.losses),
        (run.grad_norms, single.grad_norms, exact.grad_norms),
    ):
        own = _rms_error(of_single, reference)
        assert 1e-6 < own < 0.1, "the rounding of bf16"
        # Fewer numbers than gradients, so their errors vary more.
        assert _rms_error(of_run, reference) < 1.5 * BF16_TIMES_SINGLE * own
    for step in (0, 8):
        errors, own = (gradient_errors(root / _folder(of), root / "bf16-in-fp32", step) for of in (case.name, "bf16"))
        assert all(error < BF16_TIMES_SINGLE * own[name] for name, error in errors.items()), (step, errors, own)


def test_parameters_are_gathered_behind_forward_where_they_are_sharded() -> None:
    """`tests/mcore/test_overlap.py` shows that this changes no bit."""
    assert [tiny_config(Path(), "x", given).overlap_param_gather for given in (SHARDED, UNSHARDED)] == [True, False]
