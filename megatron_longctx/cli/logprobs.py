"""The `logprobs` verb: log-probability and entropy of every learned token of rollouts, from a run's checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import Config, validate
from ..config.progress import Progress
from ..core.errors import refuse
from ..core.plans.mask import documents
from ..mcore.corpus import check_corpus, check_tokenizer
from ..mcore.data import TrainingBatch, check_packs
from ..mcore.losses import LossesByPosition, losses_config
from ..mcore.tokenizer import build_tokenizer
from ..serving.inference_job import InferenceJob, build_job, split_arguments, start
from ..training import auto

logger = logging.getLogger(__name__)

OWN_WORDS = ("checkpoint", "iteration", "data", "out")


def logprobs(words: Sequence[str]) -> None:
    """Run the verb: `checkpoint=RUN data=PREFIX out=FILE.jsonl`, `iteration=N`, and settings over the run's."""
    job = job_of(words)
    job.options[1].parent.mkdir(parents=True, exist_ok=True)
    start(job, _compute)


def job_of(words: Sequence[str]) -> InferenceJob:
    """Return the job of `logprobs`, checked as far as one process can. Nothing is written."""
    own, settings = split_arguments(words, OWN_WORDS)
    job = build_job(own, settings, adapted=losses_config)
    out = Path(own.get("out", ""))
    if out.suffix != ".jsonl" or out.exists():
        raise refuse("out", out, "a new file that ends in .jsonl", "Name it with out=FILE.jsonl.")
    prefix = own.get("data", job.config.data.prefix)
    data = replace(job.config.data, prefix=prefix, format="rollouts", packing="best_fit", split="100,0,0")
    if len(data.datasets) != 1:
        raise refuse("data", prefix, "one dataset", "Name one with data=PREFIX.")
    train = replace(job.config.train, objective="sft", clip_low=0.2, clip_high=0.2, kl_coeff=0.0)
    config, _ = auto.resolve_schedule(replace(job.config, data=data, train=train))
    validate(config, training=False)
    check_corpus(config.data)
    check_packs(config)
    if config.train.check_data:
        check_tokenizer(config.data, build_tokenizer(data.tokenizer, data.tokenizer_path))
    return replace(job, config=config, options=(config, out))


def _compute(job: InferenceJob, groups: Any) -> None:
    """Compute, on every rank. Rank 0 writes the file, which gets its name when it is complete."""
    config, out = job.options
    assert isinstance(config, Config)
    partial, count, writes = out.with_suffix(".partial"), 0, dist.get_rank() == 0
    with partial.open("w") if writes else nullcontext() as file, Progress("computing", 0, "packs", writes) as progress:
        model = LossesByPosition(config, groups, job.checkpoints, job.iteration)
        for batch, values in progress.each(model.logprobs()):
            if file is not None:
                found = list(branches(batch, values[:, 0].tolist()))
                file.writelines(json.dumps(branch) + "\n" for branch in found)
                count += len(found)
    if writes:
        partial.rename(out)
        logger.info("%s: the log-probabilities of %s branches", out, f"{count:,}")


def branches(batch: TrainingBatch, values: Sequence[Sequence[float]]) -> Iterator[dict[str, list[Any]]]:
    """Yield the tokens of every branch of a pack of trees, and their values; None for those not learned.

    `values` are log-probabilities of the pack's labels, and entropies of their predictions.
    """
    parents = batch.parents or (-1,) * len(batch.lengths)
    places = documents(batch.lengths, parents=parents).documents
    tokens, counts = batch.tokens[0].tolist(), batch.loss_mask[0].tolist()
    for leaf in sorted({*range(len(places))} - {*parents}):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        steps = [at for node in path for at in range(*places[node][:2])]
        learned = [at if counts[at] else None for at in steps[:-1]]
        if any(at is not None for at in learned):  # the last token has no label
            found = ([None, *(None if at is None else each[at] for at in learned)] for each in values)
            yield {"tokens": [tokens[at] for at in steps], **dict(zip(("logprobs", "entropy"), found, strict=True))}
