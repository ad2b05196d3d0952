"""Peaks of memory that training runs on GPUs had, from `analysis/results/`, beside what the memory model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_longctx.config import Config
from megatron_longctx.memory import Job, predict
from megatron_longctx.memory.shapes import Workload, published_bytes
from megatron_longctx.schedules import backward_plan

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
_FIRST = "llama3_8b_128k_cp8_h200"
_LATER = ("llama3_8b_training_h200_x4", "llama3_8b_512k_cp4_h200", "llama3_8b_recompute_h200_x4")


@dataclass(frozen=True)
class Peak:
    """measured: GiB of live tensors on rank 0, with what peers read, which the allocator does not know of; of the first
    runs, what the code of today would hold besides is added."""

    config: Config
    measured: float

    @property
    def name(self) -> str:
        config = self.config
        layers = "TE layers" if config.model.implementation == "transformer_engine" else "layers"
        return (
            f"{config.model.num_layers} {layers}, {config.data.seq_length // 1024}K tokens, "
            f"CP {config.parallelism.context_parallel_size}, {config.recompute.mode}"
        )

    @property
    def job(self) -> Job:
        config = self.config
        batch = config.train.global_batch_size // config.train.micro_batch_size
        return Job(config, config.model.vocab_size or 0, batch if config.parallelism.context_parallel_size == 1 else 1)

    @property
    def predicted(self) -> float:
        """GiB."""
        return predict(self.job).num_bytes / GIB


def recorded_peaks() -> Iterator[Peak]:
    """Of all recorded runs."""
    for result in (_FIRST, *_LATER):
        for run in json.loads((RESULTS / f"{result}.json").read_text())["runs"]:
            parts = {name: type(getattr(Config(), name))(**values) for name, values in run["config"].items()}
            measured = run["medians"]["mem/peak_active_gib"]
            if result == _FIRST:
                # Before attention's messages went through peer memory, and before Megatron's fused cross-entropy, which
                # holds every logit once more in fp32.
                parts["attention"] = replace(parts["attention"], transport="p2p")
                config = replace(Config(), **parts)
                measured += 4 * Peak(config, 0).job.tokens * (config.model.vocab_size or 0) / GIB
            else:
                config = replace(Config(), **parts)
                measured += _read_by_peers(Peak(config, 0).job) / GIB
            yield Peak(config, measured)


def _read_by_peers(job: Job) -> int:
    if job.plan.n == 1:
        return 0
    workload = Workload.of(job.config)
    return 2 * max(published_bytes(plan, workload) for plan in (job.plan, backward_plan(job.plan)))
