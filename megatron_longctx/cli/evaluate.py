"""The `eval` verb, which evaluates a run's checkpoint on long texts: losses by position, needles, and RULER's tasks.

The verb `logprobs` computes the log-probability and entropy of every learned token of rollouts.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import Config, validate
from ..config.environment import environment
from ..config.progress import Progress
from ..core.errors import refuse
from ..core.plans.mask import documents
from ..inference.engine import LongContextEngine
from ..inference.evaluation import DEPTHS, TASKS, Haystack, Question, make_questions, score
from ..inference.evaluation.results import JSON, TABLES, Results
from ..inference.sampling import Sampling
from ..inference.session import check_length
from ..mcore import checkpoint
from ..mcore.corpus import check_corpus, check_tokenizer
from ..mcore.data import TrainingBatch, check_packs, check_samples
from ..mcore.inference import inference_config
from ..mcore.losses import LossesByPosition, losses_config, with_seq_length
from ..mcore.tokenizer import build_tokenizer, detokenize
from ..models.chat import Chat, load_chat
from ..serving.inference_job import InferenceJob, build_job, check_memory, open_engine, split_arguments, start
from ..training import auto, preflight

logger = logging.getLogger(__name__)

LOSSES = "loss_by_position"
OWN_WORDS = (
    *("checkpoint", "iteration", "tasks", "lengths", "samples", "depths", "seed"),
    *("data", "haystack", "chat", "out"),
)
_MAX_LENGTH, _MAX_COUNT = 10**9, 10**6
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Evaluation:
    """What the ranks evaluate."""

    lengths: tuple[int, ...]
    samples: int
    out: Path
    results: Results
    losses: Config | None = None  # for losses by position; None without them
    part: int = 0  # of `data.split`, for losses
    questions: tuple[Question, ...] = ()
    chat: bool = False  # whether questions are formatted as chats


def evaluate(words: Sequence[str]) -> None:
    """Run the verb: `checkpoint=RUN`, its own words (`docs/evaluation.md`), and settings that override the run's."""
    job = job_of(words)
    job.options.out.mkdir(parents=True, exist_ok=True)
    start(job, _evaluate)


def job_of(words: Sequence[str]) -> InferenceJob:
    """Return the job of `evaluate`, checked as far as one process can. Nothing is written."""
    own, settings = split_arguments(words, OWN_WORDS)
    tasks = _tasks(own.get("tasks"))
    with_questions = [task for task in tasks if task != LOSSES]
    job = build_job(own, settings, adapted=inference_config if with_questions else losses_config)
    job = replace(job, iteration=checkpoint.latest(job.checkpoints) if job.iteration is None else job.iteration)
    run = Path(own["checkpoint"])
    lengths = _numbers(own, "lengths", (job.config.data.seq_length,), 1, _MAX_LENGTH)
    check_length("lengths", max(lengths), job.config.inference.max_model_len)
    (samples,) = _numbers(own, "samples", (8,), 1, _MAX_COUNT, one=True)
    out = _folder(own.get("out"), run)
    evaluation = _Evaluation(lengths, samples, out, _no_results(run, job, own, lengths, samples))
    if LOSSES in tasks:
        training = job if not with_questions else build_job(own, settings, adapted=losses_config)
        evaluation = _with_losses(evaluation, training.config, own.get("data"))
    elif "data" in own:
        raise refuse("data", own["data"], f"{LOSSES} among the tasks", "Add it to tasks, or leave data out.")
    if with_questions:
        prompts = _questions(with_questions, evaluation, own, job.config)
        evaluation = replace(evaluation, questions=prompts, chat=_boolean(own, "chat"))
        inference = replace(job.config.inference, cache_tokens=job.config.inference.cache_tokens or max(lengths))
        job = replace(job, config=replace(job.config, inference=inference))
        check_memory(job)
    elif unused := [word for word in ("haystack", "chat", "depths", "seed") if word in own]:
        raise refuse(unused[0], own[unused[0]], "a task with questions", f"Set tasks={LOSSES},needle, or leave it out.")
    return replace(job, options=evaluation)


def _tasks(value: str | None) -> list[str]:
    known = [LOSSES, *TASKS]
    names = [LOSSES, "needle"] if value is None else known if value == "all" else value.split(",")
    for name in names:
        if name not in known:
            raise refuse("tasks", name, f"`all`, or some of {', '.join(known)}", "Separate them by commas.")
    return list(dict.fromkeys(names))


def _numbers(
    own: Mapping[str, str], key: str, default: tuple[Number, ...], least: float, most: float, one: bool = False
) -> tuple[Number, ...]:
    """Return the distinct numbers of a word, in order, of the type of its default. With `one`, refuse several."""
    if key not in own:
        return default
    try:
        numbers = tuple(dict.fromkeys(type(default[0])(value) for value in own[key].split(",")))
        if not all(least <= value <= most for value in numbers) or (one and len(numbers) > 1):
            raise ValueError
    except ValueError:
        what = "a number" if one else "numbers separated by commas, each"
        expected = f"{what} from {least:,} to {most:,}"
        raise refuse(key, own[key], expected, f"For example {key}={','.join(map(str, default))}.") from None
    return numbers


def _boolean(own: Mapping[str, str], key: str) -> bool:
    if own.get(key, "false") not in ("true", "false"):
        raise refuse(key, own[key], "true or false", "Leave it out for false.")
    return own.get(key) == "true"


def _folder(value: str | None, run: Path) -> Path:
    out = run / "eval" if value is None else Path(value)
    if (out / JSON).exists() or (out.exists() and not out.is_dir()):
        raise refuse("out", out, f"a folder without {JSON} of an earlier evaluation", "Name another with out=FOLDER.")
    return out


def _no_results(run: Path, job: InferenceJob, own: Mapping[str, str], lengths: Sequence[int], samples: int) -> Results:
    par = job.config.parallelism
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
    return Results(f"{run.resolve().name}, iteration {job.iteration} ({sizes})", about)


def _with_losses(evaluation: _Evaluation, config: Config, prefix: str | None) -> _Evaluation:
    """Add losses by position, and check their text: the dataset `prefix`, or the run's validation or training text."""
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
    for length in evaluation.lengths:
        preflight.check_mode(config, length, "lengths")
        check_samples(with_seq_length(config, length), part, evaluation.samples, "samples")
    samples = f"{evaluation.samples} sequences of each length"
    evaluation.results.text = f"{text}, {samples}, data.packing={data.packing}"
    return replace(evaluation, losses=replace(config, data=data), part=part)


def _check_data(config: Config) -> None:
    validate(config, training=False)
    check_corpus(config.data)
    if config.train.check_data:
        check_tokenizer(config.data, build_tokenizer(config.data.tokenizer, config.data.tokenizer_path))


def _questions(
    tasks: Sequence[str], evaluation: _Evaluation, own: Mapping[str, str], config: Config
) -> tuple[Question, ...]:
    """Make all questions, before ranks start."""
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    prompt: Callable[[str, str], str] = str.__add__
    if _boolean(own, "chat"):
        chat = load_chat(config.inference.chat_template, tokenizer)
        if chat.template is None:
            expected = f"false: the {config.data.tokenizer} tokenizer has no chat template"
            raise refuse("chat", True, expected, "Set inference.chat_template=FILE, or leave it out.")
        prompt = partial(_chat_prompt, chat)
    haystack = Haystack.essays(Path(own["haystack"])) if "haystack" in own else Haystack.noise()
    depths = _numbers(own, "depths", DEPTHS, 0, 1)
    (seed,) = _numbers(own, "seed", (0,), 0, 2**63 - 1, one=True)
    sizes, count = (evaluation.lengths, evaluation.samples), lambda text: len(tokenizer.tokenize(text))
    return tuple(make_questions(tasks, *sizes, haystack, count, depths, seed, prompt))


def _chat_prompt(chat: Chat, text: str, opening: str) -> str:
    return chat.text([{"role": "user", "content": text}]) + opening.lstrip()


def _evaluate(job: InferenceJob, groups: Any) -> None:
    """Evaluate, on every rank. Rank 0 writes the results after every task and length."""
    evaluation: _Evaluation = job.options
    results = evaluation.results
    if evaluation.losses is not None:
        with Progress("loading the checkpoint", told=dist.get_rank() == 0):
            model = LossesByPosition(evaluation.losses, groups, job.checkpoints, job.iteration, evaluation.part)
        for length in evaluation.lengths:
            begin = time.perf_counter()
            results.losses.append(model(length, evaluation.samples))
            _report(evaluation, f"{LOSSES}, {length:,} tokens: {results.losses[-1].mean:.5f}", begin)
        model.release()
    if evaluation.questions:
        with open_engine(job, groups) as (engine, tokenizer):
            chat = load_chat(job.config.inference.chat_template, tokenizer) if evaluation.chat else Chat()
            told, count = dist.get_rank() == 0, len(evaluation.questions)
            with Progress("answering", count, "questions", told) as progress:
                _answer(evaluation, engine, tokenizer, (tokenizer.eod, *chat.stop_tokens), progress)
    if dist.get_rank() == 0:
        results.complete = True
        results.write(evaluation.out)
        print((evaluation.out / TABLES).read_text(encoding="utf-8"))


def _answer(
    evaluation: _Evaluation, engine: LongContextEngine, tokenizer: Any, stop: tuple[int, ...], progress: Progress
) -> None:
    begin, right, count = time.perf_counter(), 0.0, 0
    for number, question in enumerate(progress.each(evaluation.questions)):
        session = engine.open()
        session.append(tokenizer.tokenize(question.prompt))
        answer = detokenize(tokenizer, session.generate(Sampling(max_new_tokens=question.answer_tokens, stop=stop)))
        session.close()
        scored = score(question, answer)
        evaluation.results.scores.append(scored)
        right, count = right + scored.share, count + 1
        following = evaluation.questions[number + 1 : number + 2]
        if not following or (following[0].task, following[0].length) != (question.task, question.length):
            share = f"{100 * right / count:.1f}% of {count} questions"
            _report(evaluation, f"{question.task}, {question.length:,} tokens: {share}", begin)
            begin, right, count = time.perf_counter(), 0.0, 0


def _report(evaluation: _Evaluation, result: str, begin: float) -> None:
    if dist.get_rank() == 0:
        evaluation.results.write(evaluation.out)
        logger.info("%s (%.1f s)", result, time.perf_counter() - begin)


def logprobs(words: Sequence[str]) -> None:
    """Run the verb: `checkpoint=RUN data=PREFIX out=FILE.jsonl`, `iteration=N`, and settings over the run's."""
    job = logprobs_job(words)
    job.options[1].parent.mkdir(parents=True, exist_ok=True)
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
    return replace(job, config=config, options=(config, out))


def _compute(job: InferenceJob, groups: Any) -> None:
    """Compute, on every rank. Rank 0 writes the file, which gets its name when it is complete."""
    config, out = job.options
    assert isinstance(config, Config)
    part, count, writes = out.with_suffix(".partial"), 0, dist.get_rank() == 0
    with part.open("w") if writes else nullcontext() as file, Progress("computing", 0, "packs", writes) as progress:
        model = LossesByPosition(config, groups, job.checkpoints, job.iteration)
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
