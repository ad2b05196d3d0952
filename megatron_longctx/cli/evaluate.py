"""The `eval` verb, which computes a run's losses of long texts by position.

The verb `logprobs` computes the log-probability and entropy of every learned token of rollouts.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import Config, validate
from ..config.environment import environment
from ..config.progress import Progress
from ..core.errors import refuse
from ..core.plans.mask import documents
from ..inference.loss_ranges import JSON, TABLES, Results
from ..inference.session import check_length
from ..mcore import checkpoint
from ..mcore.corpus import check_corpus, check_tokenizer
from ..mcore.data import TrainingBatch, check_packs, check_samples
from ..mcore.losses import LossesByPosition, losses_config, with_seq_length
from ..mcore.tokenizer import build_tokenizer
from ..serving.inference_job import InferenceJob, build_job, split_arguments, start
from ..training import auto, forks, preflight

logger = logging.getLogger(__name__)

OWN_WORDS = ("checkpoint", "iteration", "lengths", "samples", "data", "out")
_MAX_LENGTH, _MAX_COUNT = 10**9, 10**6
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Evaluation:
    """What the ranks evaluate: sequences of a part of `data.split`."""

    lengths: tuple[int, ...]
    samples: int
    out: Path
    results: Results
    part: int


def evaluate(words: Sequence[str]) -> None:
    """Run the verb: `checkpoint=RUN`, its own words (`docs/evaluation.md`), and settings that override the run's."""
    job = forks.checked(job_of, words)
    job.options.out.mkdir(parents=True, exist_ok=True)
    start(job, _evaluate)


def job_of(words: Sequence[str]) -> InferenceJob:
    """Return the job of `evaluate`, checked as far as one process can. Nothing is written."""
    own, settings = split_arguments(words, OWN_WORDS)
    job = with_iteration(build_job(own, settings, adapted=losses_config))
    lengths, samples = sizes_of(own, job.config)
    results = Results(*described(job, own, lengths, samples))
    config, part, results.text = _with_text(job.config, own.get("data"), lengths, samples)
    evaluation = _Evaluation(lengths, samples, folder_of(own), results, part)
    return replace(job, config=config, options=evaluation)


def with_iteration(job: InferenceJob) -> InferenceJob:
    """Name the job's checkpoint: a run may write others meanwhile."""
    return job if job.iteration is not None else replace(job, iteration=checkpoint.latest(job.checkpoints))


def sizes_of(own: Mapping[str, str], config: Config) -> tuple[tuple[int, ...], int]:
    """Return the lengths and the number of samples that an evaluation's words ask for."""
    lengths = numbers(own, "lengths", (config.data.seq_length,), 1, _MAX_LENGTH)
    check_length("lengths", max(lengths), config.inference.max_model_len)
    (samples,) = numbers(own, "samples", (8,), 1, _MAX_COUNT, one=True)
    return lengths, samples


def numbers(
    own: Mapping[str, str], key: str, default: tuple[Number, ...], least: float, most: float, one: bool = False
) -> tuple[Number, ...]:
    """Return the distinct numbers of a word, in order, of the type of its default. With `one`, refuse several."""
    if key not in own:
        return default
    try:
        found = tuple(dict.fromkeys(type(default[0])(value) for value in own[key].split(",")))
        if not all(least <= value <= most for value in found) or (one and len(found) > 1):
            raise ValueError
    except ValueError:
        what = "a number" if one else "numbers separated by commas, each"
        expected = f"{what} from {least:,} to {most:,}"
        raise refuse(key, own[key], expected, f"For example {key}={','.join(map(str, default))}.") from None
    return found


def folder_of(own: Mapping[str, str]) -> Path:
    """Return the folder of an evaluation's files. Refuse one that has those of an earlier evaluation."""
    out = Path(own["out"]) if "out" in own else Path(own["checkpoint"], "eval")
    if (out / JSON).exists() or (out.exists() and not out.is_dir()):
        raise refuse("out", out, f"a folder without {JSON} of an earlier evaluation", "Name another with out=FOLDER.")
    return out


def described(
    job: InferenceJob, own: Mapping[str, str], lengths: Sequence[int], samples: int
) -> tuple[str, dict[str, Any]]:
    """Return the title of an evaluation, and what its JSON says about it."""
    par, run = job.config.parallelism, Path(own["checkpoint"])
    sizes = f"CP={par.context_parallel_size}, TP={par.tensor_parallel_size}, {job.config.train.precision}"
    about = {
        "run": str(run),
        "iteration": job.iteration,
        "words": dict(own),
        "lengths": list(lengths),
        "samples": samples,
        "config": job.config.as_dict(),
        "environment": environment(),
    }
    return f"{run.resolve().name}, iteration {job.iteration} ({sizes})", about


def _with_text(config: Config, prefix: str | None, lengths: Sequence[int], samples: int) -> tuple[Config, int, str]:
    """Return the configuration with the text, which is checked, the part of it, and its description.

    The text is the dataset `prefix`, or the run's validation or training text.
    """
    config, _ = auto.resolve_schedule(config)
    data, part = config.data, 1
    if prefix is not None:
        data, part, text = replace(data, prefix=prefix, split="100,0,0"), 0, prefix
    elif data.has_validation_split:
        text = f"the second part ({data.split}) of {data.prefix}"
    else:
        data, part = replace(data, split="100,0,0"), 0
        text = f"{data.prefix}, on which the run was trained"
        logger.warning("data.split=%s has no second part: losses are from %s. Set data=PREFIX.", data.split, text)
    config = replace(config, data=replace(data, seq_length=1))
    _check_data(config)
    for length in lengths:
        preflight.check_mode(config, length, "lengths")
        check_samples(with_seq_length(config, length), part, samples, "samples")
    text = f"{text}, {samples} sequences of each length, data.packing={data.packing}"
    return replace(config, data=data), part, text


def _check_data(config: Config) -> None:
    validate(config, training=False)
    check_corpus(config.data)
    if config.train.check_data:
        check_tokenizer(config.data, build_tokenizer(config.data.tokenizer, config.data.tokenizer_path))


def _evaluate(job: InferenceJob, groups: Any) -> None:
    """Evaluate, on every rank. Rank 0 writes the results after every length."""
    evaluation: _Evaluation = job.options
    results, writes = evaluation.results, dist.get_rank() == 0
    with Progress("loading the checkpoint", told=writes):
        model = LossesByPosition(job.config, groups, job.checkpoints, job.iteration, evaluation.part)
    for length in evaluation.lengths:
        begin = time.perf_counter()
        results.losses.append(model(length, evaluation.samples))
        results.complete = length == evaluation.lengths[-1]
        if writes:
            results.write(evaluation.out)
            mean, seconds = results.losses[-1].mean, time.perf_counter() - begin
            logger.info("%s tokens: a loss of %.5f (%.1f s)", f"{length:,}", mean, seconds)
    if writes:
        print((evaluation.out / TABLES).read_text(encoding="utf-8"))


def logprobs(words: Sequence[str]) -> None:
    """Run the verb: `checkpoint=RUN data=PREFIX out=FILE.jsonl`, `iteration=N`, and settings over the run's."""
    job = forks.checked(logprobs_job, words)
    job.options.parent.mkdir(parents=True, exist_ok=True)
    start(job, _compute)


def logprobs_job(words: Sequence[str]) -> InferenceJob:
    """Return the job of `logprobs`, checked as far as one process can. Nothing is written."""
    own, settings = split_arguments(words, ("checkpoint", "iteration", "data", "out"))
    job = build_job(own, settings, adapted=losses_config)
    out = Path(own.get("out", ""))
    if out.suffix != ".jsonl" or out.exists():
        raise refuse("out", own.get("out", ""), "a new file that ends in .jsonl", "Name it with out=FILE.jsonl.")
    prefix = own.get("data", job.config.data.prefix)
    data = replace(job.config.data, prefix=prefix, format="rollouts", packing="best_fit", split="100,0,0")
    if len(data.datasets) != 1:
        raise refuse("data", prefix, "one dataset", "Name one with data=PREFIX.")
    train = replace(job.config.train, objective="sft", clip_low=0.2, clip_high=0.2, kl_coeff=0.0)
    config, _ = auto.resolve_schedule(replace(job.config, data=data, train=train))
    _check_data(config)
    check_packs(config)
    return replace(job, config=config, options=out)


def _compute(job: InferenceJob, groups: Any) -> None:
    """Compute, on every rank. Rank 0 writes the file, which gets its name when it is complete."""
    out: Path = job.options
    part, count, writes = out.with_suffix(".partial"), 0, dist.get_rank() == 0
    with part.open("w") if writes else nullcontext() as file, Progress("computing", 0, "packs", writes) as progress:
        model = LossesByPosition(job.config, groups, job.checkpoints, job.iteration)
        for batch, values in progress.each(model.logprobs()):
            if file is not None:
                found = list(branches(batch, values[:, 0].tolist()))
                file.writelines(json.dumps(branch) + "\n" for branch in found)
                count += len(found)
    if writes:
        part.rename(out)
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
