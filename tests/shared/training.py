"""Tiny runs of the real `Trainer` for tests: corpus, configuration, several runs in one spawn, and what each saw."""

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config import Config, validate
from megatron_longctx.mcore import checkpoint, groups, model
from megatron_longctx.mcore.corpus import Corpus, Document, join_shards, write_corpus, write_shard
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import save_config
from megatron_longctx.training.loop import StepResult, Trainer
from megatron_longctx.training.recorded import Curves, RecordedTrainer
from megatron_longctx.training.recorded import record as record_run
from megatron_longctx.training.run_folder import RunFolder

Gradients = dict[str, Tensor]

# Small and quick to learn: a few steps move the loss, so equal curves mean something.
TINY: Mapping[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 64,
    "model.rope_base": 1000.0,
    "model.init_std": 0.08,  # sharp enough that attention, and the positions in it, matter from the first step
    "model.implementation": "local",
    "data.seq_length": 96,
    "data.workers": 0,
    "optim.lr": 3e-3,
    "optim.min_lr": 3e-4,
    "optim.warmup_steps": 2,
    "train.steps": 20,
    "train.precision": "fp32",
    "train.device": "cpu",
    "train.save": False,
    "logging.wandb": "disabled",
}

# As GPT-2: what makes `TINY` differ from Llama in every kind of layer.
GPT2: Mapping[str, Any] = {
    "model.num_kv_heads": 4,
    "model.normalization": "layernorm",
    "model.activation": "gelu",
    "model.position_embedding": "learned",
    "model.bias": True,
    "model.tie_embeddings": True,
}

# As DeepSeek: what makes attention of `TINY` multi-latent.
LATENTS: Mapping[str, Any] = {
    "model.kv_lora_rank": 24,
    "model.qk_head_dim": 12,
    "model.qk_pos_emb_head_dim": 8,
    "model.v_head_dim": 16,
    "model.num_kv_heads": 4,
    "model.qk_norm": True,
}


def tiny_corpus(prefix: Path, documents: int = 40, seed: int = 0) -> Corpus:
    """Write a learnable byte-level corpus: short documents of made-up words."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 6))) for _ in range(12)]
    texts = [[" ".join(source.choices(words, k=source.randint(5, 40)))] for _ in range(documents)]
    return write_corpus(texts, prefix, build_tokenizer("byte-level"))


def write_documents(documents: Iterable[Document], prefix: Path, masked: bool = False) -> Corpus:
    """Write documents of byte-level tokens, as one shard."""
    tokenizer = build_tokenizer("byte-level")
    with TemporaryDirectory() as folder:
        shard = Path(folder, "shard")
        return join_shards({shard: write_shard(documents, shard, tokenizer, masked)}, prefix, tokenizer, masked)


def tiny_config(root: Path, name: str, settings: Mapping[str, Any] | None = None) -> Config:
    """A validated configuration of run `name` in `root`, over `root/corpus`; `settings` are dotted keys.

    Raises:
        ValueError: a key that `Config` does not have, or a value that it refuses.
    """
    where = {"data.prefix": str(root / "corpus"), "run.root": str(root), "run.name": name}
    return changed(Config(), {**TINY, **where, **(settings or {})})


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """A validated copy of `config` with other values under some dotted keys.

    Raises:
        ValueError: as `tiny_config`.
    """
    result = with_values(config, settings)
    validate(result)
    return result


def with_values(config: Any, settings: Mapping[str, Any]) -> Any:
    """A copy of a configuration, or of a part of it, with other values under some dotted keys; nothing is checked.

    Raises:
        ValueError: a key that it does not have.
    """
    known, by_name = {f.name for f in dataclasses.fields(config)}, {}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name not in known:
            raise ValueError(f"{key}: expected a key of the configuration.")
        if rest:
            inside.setdefault(name, {})[rest] = value
        else:
            by_name[name] = value
    for name, values in inside.items():
        by_name[name] = with_values(by_name.get(name, getattr(config, name)), values)
    return dataclasses.replace(config, **by_name)


@dataclass(frozen=True)
class Job:
    """One run of the real trainer.

    Args:
        config: of the run; its folder is made.
        gradients_at: steps, counted from 0, whose gradients are written into the run's folder.
        start_from: weights of this checkpoint directory (its latest) take the place of the fresh ones.
        save_start: write a checkpoint of step 0 into the run's folder first.
        round_weights: round the initial weights to bf16.
        stop_in: the step, counted from 0, in which the last rank gets a stop signal.
        fails: record an error of the project (ValueError, ArithmeticError) that every rank raises. Without it an error
            ends the rank, and with it the test: the other ranks might wait for ever.
        before_optimizer: called with the trainer in every step between backward and the optimizer; for faults.
    """

    config: Config
    gradients_at: tuple[int, ...] = ()
    start_from: Path | None = None
    save_start: bool = False
    round_weights: bool = False
    stop_in: int | None = None
    fails: bool = False
    before_optimizer: Callable[[Trainer], None] | None = None


@dataclass
class Record:
    """What one rank saw of a run.

    gradients: reduced; only where neither tensors nor layers are divided between ranks.
    """

    first_step: int = 0
    last_step: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    error: str | None = None


class RecordingTrainer(RecordedTrainer):
    """The recorded trainer, with a job's own start and faults."""

    def __init__(self, job: Job) -> None:
        folder = RunFolder.of(job.config)
        if dist.get_rank() == 0:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            save_config(job.config, folder.resolved)
        dist.barrier()
        self.job = job
        super().__init__(job.config, folder, job.gradients_at)
        self.record = Record(self.step, losses=self.curves.losses, grad_norms=self.curves.grad_norms)
        self._set_weights()

    def _before_optimizer_step(self) -> None:
        super()._before_optimizer_step()
        job = self.job
        if self.step in job.gradients_at and self.groups.tp.size() * self.groups.pp.size() == 1:
            self.record.gradients[self.step] = self.gradients()
        if job.before_optimizer is not None:
            job.before_optimizer(self)
        if self.step == job.stop_in and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(self) -> Record:
        """Train; groups are gone afterwards."""
        try:
            self.train()
        except (ValueError, ArithmeticError) as error:
            if not self.job.fails:
                raise
            self.record.error = f"{type(error).__name__}: {error}"
        self.record.last_step = self.step
        groups.destroy()
        return self.record

    def _one_step(self) -> StepResult:
        result = super()._one_step()
        self.record.learning_rates.append(result.lr)
        return result

    def _set_weights(self) -> None:
        job = self.job
        if job.start_from is not None:
            checkpoint.load(job.start_from, self._weights())
        if job.round_weights:
            for parameter in self.models[0].parameters():
                parameter.data.copy_(parameter.data.bfloat16())
        if job.start_from is not None or job.round_weights:
            self.optimizer.reload_model_params()
        if job.save_start:
            self._save()

    def _weights(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(
            self.models, None, None, fingerprint=model.fingerprint(self.config, self.vocab_size)
        )


def record_all(rank: int, root: Path, jobs: Mapping[str, dict[str, Any]], steps: Collection[int]) -> dict[str, Curves]:
    """Worker for `run_distributed`: the curves of runs by name, whose folders have `-` for spaces. See `record`."""
    found = {}
    for name, settings in jobs.items():
        config = tiny_config(root, name.replace(" ", "-"), settings)
        found[name] = record_run(rank, config, steps, keep_weights=config.train.init_from is None)
        groups.destroy()
    return found


def run_jobs(rank: int, jobs: Sequence[Job]) -> list[Record]:
    """Worker for `run_distributed`: several runs, one after the other."""
    return [run_job(job) for job in jobs]


def recorded(world: int, jobs: Mapping[str, Job]) -> dict[str, Record]:
    """What rank 0 recorded of runs in one spawn, by name, after a look at whether the other ranks saw the same."""
    first, *others = run_distributed(run_jobs, world, list(jobs.values()))
    for records in others:
        for name, record, expected in zip(jobs, records, first, strict=True):
            same = dataclasses.replace(record, gradients={}) == dataclasses.replace(expected, gradients={})
            assert same, f"{name}: the ranks disagree"
    return dict(zip(jobs, first, strict=True))


def run_job(job: Job) -> Record:
    """One run in the joined process group; an expected refusal by the constructor is recorded, too."""
    try:
        trainer = RecordingTrainer(job)
    except ValueError as error:
        if not job.fails:
            raise
        groups.destroy()
        return Record(error=f"{type(error).__name__}: {error}")
    return trainer.run()
