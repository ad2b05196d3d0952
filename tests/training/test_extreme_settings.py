"""Settings at the limits of their ranges train one step to finite weights, all in one process."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_longctx.config import Config, keys_of
from megatron_longctx.config.bounds import Number
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import Job, RecordingTrainer, tiny_config, tiny_corpus

BOUNDS = {name: key.bounds for name, key in keys_of(Config).items()}
# Keys tested at both ends: floats, and others that keep the model small. Only one step: its weights may be extreme.
BOTH_ENDS = (
    *("model.norm_epsilon", "model.rope_base", "model.init_std", "optim.weight_decay", "optim.clip_grad", "optim.eps"),
    *("train.seed", "parallelism.timeout_s", "logging.peak_tflops"),
)
OTHERS: tuple[Mapping[str, Any], ...] = (
    {"optim.lr": 100.0, "optim.min_lr": 100.0},
    {"optim.lr": 0.0, "optim.min_lr": 0.0},
    {"optim.beta1": 0.0, "optim.beta2": 0.0},
    {"optim.beta1": math.nextafter(1, 0), "optim.beta2": math.nextafter(1, 0)},
    {"optim.decay_steps": 10**9, "optim.warmup_steps": 10**9 - 1, "train.steps": 10**9},
    {"model.head_dim": 2},
    {"model.head_dim": 1, "model.position_embedding": "learned"},
    {"model.num_attention_heads": 1, "model.num_kv_heads": 1, "model.hidden_size": 2, "model.ffn_hidden_size": 1},
    {"model.vocab_size": 512, "model.vocab_multiple": 10**6},
    {"model.vocab_multiple": 1},
    {"data.seq_length": 1},
    {"data.split": ".5,.5,0"},
    {"data.mask_eod_loss": True, "train.global_batch_size": 7},
    {"train.global_batch_size": 400, "data.seq_length": 32, "train.micro_batch_size": 400},  # several passes
    {"recompute.mode": "attention_output", "recompute.head_chunk_tokens": 1, "recompute.mlp_tile_tokens": 1},
    {"recompute.mode": "layer", "recompute.head_chunk_tokens": 10**9, "recompute.mlp_tile_tokens": 10**9},
    {"train.save": True, "train.save_interval": 1, "train.keep_checkpoints": 1},
    {"logging.profile_step": 10**9},
    {"run.name": "naïve ☃ 'x' #{a}"},
    {"run.name": "x" * 200},
)

ONE_STEP = {"optim.warmup_steps": 0, "train.steps": 1}


def samples() -> list[Mapping[str, Any]]:
    found = list(OTHERS)
    for name in BOTH_ENDS:
        bounds = BOUNDS[name]
        assert isinstance(bounds, Number)
        minimum = math.nextafter(bounds.minimum, bounds.maximum) if bounds.above else bounds.minimum
        found += [{name: minimum}, {name: bounds.maximum}]
    return found


def settings_of(job: Job) -> Mapping[str, Any]:
    return samples()[int(job.config.run.root.rpartition("run")[2])]


def trained_one_step(rank: int, jobs: Sequence[Job]) -> list[tuple[float, bool]]:
    """Return each job's loss, and whether all weights are finite after the step."""
    found = []
    for job in jobs:
        try:
            trainer = RecordingTrainer(job)
            record = trainer.run()
        except Exception as error:
            raise RuntimeError(f"with {settings_of(job)}") from error
        weights = unwrap_model(trainer.models)[0].parameters()
        found.append((record.losses[0], all(bool(torch.isfinite(weight).all()) for weight in weights)))
    return found


def test_settings_at_their_limits_train_to_finite_weights(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    jobs = [
        Job(tiny_config(tmp_path, "one-step", {**ONE_STEP, "run.root": f"{tmp_path}/run{i}", **values}), stop_in=0)
        for i, values in enumerate(samples())
    ]
    (found,) = run_distributed(trained_one_step, 1, jobs)
    for values, (loss, finite) in zip(samples(), found, strict=True):
        assert math.isfinite(loss) and finite, values
