"""Peaks of memory and times of steps in training runs on GPUs, from `analysis/results/`, beside their predictions."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_longctx.config import Config, workload_of
from megatron_longctx.core.plans import Kind
from megatron_longctx.planner.memory import Job, predict
from megatron_longctx.planner.memory.model import OFFLOAD
from megatron_longctx.planner.memory.shapes import attention_bytes
from megatron_longctx.planner.step_time import predicted_step_s
from megatron_longctx.training.compose import compose_config

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
EARLIER = ("llama3_8b_128k_cp8_h200",)
"""Runs before Megatron's fused cross-entropy, which holds every logit once more in fp32, and before peer memory:
predictions for today's code do not apply to them."""
RECORDED = (
    "llama3_8b_training_h200_x4",
    "llama3_8b_recompute_h200_x4",
    "te_layers_bits_h200",
    ONE_GPU := "training_one_h200",
)
STEPS = (
    "training_fp8_h200_x2", "training_dense_128k_h200_x2", "llama3_8b_training_h200_x4", "llama3_8b_recompute_h200_x4",
)  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """The peak of a run: GiB in torch's caching allocator on rank 0, without memory that peers read."""

    config: Config
    measured: float

    @property
    def name(self) -> str:
        config = self.config
        layers = "TE layers" if config.model.implementation == "transformer_engine" else "layers"
        first = ", first step" if config.train.steps == 1 else ""
        return (
            f"{config.model.num_layers} {layers}, {config.data.seq_length // 1024}K tokens, "
            f"CP {config.parallelism.context_parallel_size}, {config.recompute.mode}{first}"
        )

    @property
    def job(self) -> Job:
        config = self.config
        batch = config.train.global_batch_size // config.train.micro_batch_size
        return Job(config, config.model.vocab_size or 0, batch if config.parallelism.context_parallel_size == 1 else 1)

    @property
    def predicted(self) -> float:
        """The predicted GiB in the allocator."""
        return predict(self.job).allocated_bytes / GIB


@dataclass(frozen=True)
class AttentionPeak:
    """The peak of a mode's forward and backward alone, over peer memory.

    `measured` is in bytes in the allocator, without q, k, v and the gradient of the output, as the benchmark wrote it.
    """

    name: str
    config: Config
    measured: int

    @property
    def predicted(self) -> int:
        job, workload = Job(self.config, 1), workload_of(self.config)
        backward = attention_bytes(job).backward
        sizes = {kind: job.tokens * workload.token_bytes(kind) for kind in Kind}
        if not job.passes[2].isdisjoint((Kind.Q_GRAD, Kind.KV)):
            return backward - 2 * sizes[Kind.Q] - sizes[Kind.KV]
        return backward - sizes[Kind.GRAD] + sizes[Kind.OUT]  # of its arguments it reads only the gradient


def attention_peaks() -> Iterator[AttentionPeak]:
    """Yield the peaks of recorded passes whose memory today's code predicts.

    They are passes since fea8452 that are too long to be replayed from graphs, whose memory is not counted in this way.
    Modes that merge partial results are excluded: fewer of these waited to be merged when the modes were recorded.
    """
    llama = compose_config(["model=llama3_8b", "attention.transport=peer"])
    for ranks in (4, 2):
        result = f"attention_peers_h200_x{ranks}"
        for cell in json.loads((RESULTS / f"{result}.json").read_text())["measurements"]:
            name, length = cell["name"], cell["length"]
            current = cell.get("commit", "fea8452").startswith(("fea8452", "7d5fdb3"))
            if not (current and cell.get("ours") and cell.get("peak_bytes") and length // ranks > 4096):
                continue
            if name.split()[0] in ("zigzag", "all_gather") or "head_chunks" in name:
                continue
            alone = name.startswith("one device")  # over the number of tokens with the FLOPs of one rank
            config = replace(
                llama,
                model=replace(llama.model, num_kv_heads=int(cell["heads"].split(":")[1])),
                data=replace(llama.data, seq_length=int(length / ranks**0.5) if alone else length),
                parallelism=replace(
                    llama.parallelism,
                    context_parallel_size=1 if alone else ranks,
                    schedule="zigzag" if alone else name.split()[0],
                ),
            )
            yield AttentionPeak(f"{ranks} GPUs, {length} tokens, {cell['heads']}, {name}", config, cell["peak_bytes"])


def recorded_peaks(results: tuple[str, ...] = RECORDED) -> Iterator[Peak]:
    """Yield the peaks of these results, except for early runs with offload, which kept layer inputs on the device.

    Settings that no longer exist are ignored.
    """
    for result in results:
        for run in json.loads((RESULTS / f"{result}.json").read_text())["runs"]:
            config = recorded_config(run)
            if result in EARLIER:  # recorded when there was only one transport
                config = replace(config, attention=replace(config.attention, transport="p2p"))
            if config.recompute.mode == OFFLOAD and result != ONE_GPU:
                continue
            yield Peak(config, run["medians"]["mem/peak_active_gib"])


def recorded_steps(result: str) -> Iterator[tuple[str, float]]:
    """Yield the names of a result's runs from 32K tokens on, without baselines, and by how many per cent their steps
    are predicted longer than they took."""
    for run in json.loads((RESULTS / f"{result}.json").read_text())["runs"]:
        config, ranks = recorded_config(run), int(result[-1])
        if config.data.seq_length >= 32768 and not run["config"]["attention"].get("baseline"):
            par = replace(config.parallelism, cluster="h200_x8_pull")
            job = Job(replace(config, parallelism=par), config.model.vocab_size or 0, ranks // par.model_parallel_size)
            seconds = predicted_step_s(job)
            assert seconds is not None
            yield run["name"], 100 * (seconds / run["medians"]["perf/step_s"] - 1)


def recorded_config(run: dict[str, Any]) -> Config:
    """Return the configuration of a recorded run without settings that no longer exist."""
    parts = {name: _known(type(getattr(Config(), name)), values) for name, values in run["config"].items()}
    return replace(Config(), **parts)


def _known(part: type, values: dict[str, Any]) -> Any:
    """Return a recorded part of a configuration without settings that no longer exist."""
    names = {field.name for field in fields(part)}
    return part(**{name: value for name, value in values.items() if name in names})
