"""`megatron-longctx eval`: a run's checkpoint on long texts: losses by position, needles, and tasks of RULER."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import Config, configured_mode, token_unit, validate
from ..errors import refuse
from ..evaluation import DEPTHS, TASKS, Haystack, Question, questions, score
from ..evaluation.asking import Form
from ..evaluation.results import JSON, TABLES, Results
from ..inference.engine import LongContextEngine
from ..inference.sampling import Sampling
from ..mcore import checkpoint
from ..mcore.corpus import check_corpus, check_tokenizer
from ..mcore.data import check_samples
from ..mcore.inference import for_inference
from ..mcore.losses import LossesByPosition, at_length, for_losses
from ..mcore.tokenizer import build_tokenizer, text_of
from ..metrics.environment import environment
from ..models.chat import Chat, chat_of
from ..schedules import build_plan
from ..serving.inference_job import InferenceJob, build_job, check_memory, open_engine, split_words, start
from ..training import auto

logger = logging.getLogger(__name__)

LOSSES = "loss_by_position"
OWN_WORDS = (
    *("checkpoint", "iteration", "tasks", "lengths", "samples", "depths", "seed"),
    *("data", "haystack", "chat", "out"),
)
_MOST_LENGTH, _MOST_COUNT = 10**9, 10**6
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Asked:
    """losses: the configuration that losses are taken with; None: they are not. part: of `data.split` that they are of.
    chat: how prompts were laid out."""

    lengths: tuple[int, ...]
    samples: int
    out: Path
    results: Results
    losses: Config | None = None
    part: int = 0
    questions: tuple[Question, ...] = ()
    chat: bool = False


def evaluate(words: Sequence[str]) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, the verb's own (`docs/evaluation.md`), and settings over the run's.

    Raises:
        ValueError: words, a checkpoint, text or sizes that cannot be used.
        JobFailed: another rank ended.
    """
    own, settings = split_words(words, OWN_WORDS)
    tasks = _tasks(own.get("tasks"))
    asks = [task for task in tasks if task != LOSSES]
    job = build_job(own, settings, adapted=for_inference if asks else for_losses)
    job = replace(job, iteration=checkpoint.latest(job.checkpoints) if job.iteration is None else job.iteration)
    run = Path(own["checkpoint"])
    lengths = _numbers(own, "lengths", (job.config.data.seq_length,), int, 1, _MOST_LENGTH)
    check_positions(job.config, lengths)
    (samples,) = _numbers(own, "samples", (8,), int, 1, _MOST_COUNT, most_values=1)
    out = _folder(own.get("out"), run)
    results = Results(_title(run, job), _about(run, job, own, lengths, samples))
    asked = Asked(lengths, samples, out, results)
    if LOSSES in tasks:
        training = job if not asks else build_job(own, settings, adapted=for_losses)
        asked = _with_losses(asked, training.config, own.get("data"))
    elif "data" in own:
        raise refuse("data", own["data"], f"{LOSSES} among the tasks", "Add it to tasks, or leave data out.")
    if asks:
        asked = replace(asked, questions=_questions(asks, asked, own, job.config), chat=_truth(own, "chat"))
        inference = replace(job.config.inference, cache_tokens=job.config.inference.cache_tokens or max(lengths))
        job = replace(job, config=replace(job.config, inference=inference))
        check_memory(job)
    elif named := [word for word in ("haystack", "chat", "depths") if word in own]:
        raise refuse(named[0], own[named[0]], "a task with questions", f"Set tasks={LOSSES},needle, or leave it out.")
    out.mkdir(parents=True, exist_ok=True)
    start(replace(job, options=asked), _evaluate)


def check_positions(config: Config, lengths: Sequence[int]) -> None:
    """Refuse, as ValueError, lengths beyond the positions that a model has embeddings for."""
    longest, most = max(lengths), config.data.seq_length
    if config.model.position_embedding == "learned" and longest > most:
        expected = f"at most the {most} positions that the model has learned"
        raise refuse("lengths", longest, expected, "Ask for shorter texts.")


def _tasks(value: str | None) -> list[str]:
    known = [LOSSES, *TASKS]
    names = [LOSSES, "needle"] if value is None else known if value == "all" else value.split(",")
    for name in names:
        if name not in known:
            raise refuse("tasks", name, f"`all`, or some of {', '.join(known)}", "Separate them by commas.")
    return list(dict.fromkeys(names))


def _numbers(
    own: Mapping[str, str],
    key: str,
    default: tuple[Number, ...],
    kind: Callable[[str], Number],
    least: float,
    most: float,
    most_values: int | None = None,
) -> tuple[Number, ...]:
    """The numbers of a word, each once, in order."""
    if key not in own:
        return default
    try:
        found = tuple(dict.fromkeys(kind(value) for value in own[key].split(",")))
        if not all(least <= value <= most for value in found) or len(found) > (most_values or len(found)):
            raise ValueError
    except ValueError:
        what = "number" if most_values == 1 else "numbers separated by commas, each"
        expected = f"{what} from {least:,} to {most:,}"
        raise refuse(key, own[key], expected, f"For example {key}={','.join(map(str, default))}.") from None
    return found


def _truth(own: Mapping[str, str], key: str) -> bool:
    if own.get(key, "false") not in ("true", "false"):
        raise refuse(key, own[key], "true or false", "Leave it out for false.")
    return own.get(key) == "true"


def _folder(value: str | None, run: Path) -> Path:
    out = run / "eval" if value is None else Path(value)
    if (out / JSON).exists() or (out.exists() and not out.is_dir()):
        raise refuse("out", out, f"a folder without {JSON} of an earlier evaluation", "Name another with out=FOLDER.")
    return out


def _title(run: Path, job: InferenceJob) -> str:
    par = job.config.parallelism
    sizes = f"CP={par.context_parallel_size}, TP={par.tensor_parallel_size}, {job.config.train.precision}"
    return f"{run.resolve().name}, iteration {job.iteration} ({sizes})"


def _about(
    run: Path, job: InferenceJob, own: Mapping[str, str], lengths: Sequence[int], samples: int
) -> dict[str, Any]:
    return {
        "run": str(run),
        "iteration": job.iteration,
        "words": dict(own),
        "lengths": list(lengths),
        "samples": samples,
        "config": job.config.as_dict(),
        "environment": environment(),
    }


def _with_losses(asked: Asked, config: Config, prefix: str | None) -> Asked:
    """With the text that losses are taken of, if it is there."""
    if config.parallelism.schedule == "auto":
        config = auto.settled(config)
    data, part = config.data, 1
    if prefix is not None:
        data, part = replace(data, prefix=prefix, split="100,0,0"), 0
        text = f"{prefix}"
    elif data.has_held_out:
        text = f"the second part ({data.split}) of {data.prefix}"
    else:
        data, part = replace(data, split="100,0,0"), 0
        text = f"{data.prefix}, on which the run was trained"
        logger.warning("data.split=%s has no second part: losses are those of %s. Set data=PREFIX.", data.split, text)
    config = replace(config, data=replace(data, seq_length=1))
    validate(config)
    check_corpus(config.data)
    if config.train.check_data:
        check_tokenizer(config.data, build_tokenizer(data.tokenizer, data.tokenizer_path))
    par, model = config.parallelism, config.model
    mode, tp = configured_mode(par), par.tensor_parallel_size
    mode.check_heads(par.context_parallel_size, model.num_attention_heads // tp, model.num_kv_heads // tp)
    for length in asked.lengths:
        n = par.context_parallel_size
        plan = build_plan(mode, n, length, unit=token_unit(par), layout=par.layout)
        if not all(plan.queries.num_tokens(rank) for rank in range(n)):
            expected = f"tokens for all of {n} context-parallel ranks"
            raise refuse("lengths", length, expected, "Ask for longer texts, or take fewer ranks.")
        check_samples(at_length(config, length), part, asked.samples, "samples")
    config = replace(config, data=data)
    asked.results.text = f"{text}, {asked.samples} sequences of each length, data.packing={data.packing}"
    return replace(asked, losses=config, part=part)


def _questions(tasks: Sequence[str], asked: Asked, own: Mapping[str, str], config: Config) -> tuple[Question, ...]:
    """All of them, before any rank starts."""
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    form = Form(lambda text: len(tokenizer.tokenize(text)))
    if _truth(own, "chat"):
        chat = chat_of(config.inference.chat_template, tokenizer)
        if chat.template is None:
            expected = f"false: the {config.data.tokenizer} tokenizer has no chat template"
            raise refuse("chat", True, expected, "Set inference.chat_template=FILE, or leave it out.")
        form = replace(form, lay_out=partial(_as_chat, chat))
    haystack = Haystack.essays(Path(own["haystack"])) if "haystack" in own else Haystack.noise()
    depths = _numbers(own, "depths", DEPTHS, float, 0, 1)
    (seed,) = _numbers(own, "seed", (0,), int, 0, 2**63 - 1, most_values=1)
    return tuple(questions(tasks, asked.lengths, asked.samples, haystack, form, depths, seed))


def _as_chat(chat: Chat, text: str, opening: str) -> str:
    return chat.text([{"role": "user", "content": text}]) + opening.lstrip()


def _evaluate(job: InferenceJob, groups: Any) -> None:
    """What every rank does; rank 0 writes what has been found after every task and length."""
    asked: Asked = job.options
    if asked.losses is not None:
        model = LossesByPosition(asked.losses, groups, job.checkpoints, job.iteration, asked.part)
        for length in asked.lengths:
            begin = time.perf_counter()
            asked.results.losses.append(model(length, asked.samples))
            _note(asked, f"{LOSSES}, {length:,} tokens: {asked.results.losses[-1].mean:.5f}", begin)
        model.release()
    if asked.questions:
        with open_engine(job, groups) as (engine, tokenizer):
            chat = chat_of(job.config.inference.chat_template, tokenizer) if asked.chat else Chat()
            _answer(asked, engine, tokenizer, (tokenizer.eod, *chat.stop_tokens))
    if dist.get_rank() == 0:
        asked.results.complete = True
        asked.results.write(asked.out)
        print((asked.out / TABLES).read_text(encoding="utf-8"))


def _answer(asked: Asked, engine: LongContextEngine, tokenizer: Any, stop: tuple[int, ...]) -> None:
    begin, right, count = time.perf_counter(), 0.0, 0
    for number, question in enumerate(asked.questions):
        session = engine.open()
        session.append(tokenizer.tokenize(question.prompt))
        said = text_of(tokenizer, session.generate(Sampling(max_new_tokens=question.answer_tokens, stop=stop)))
        session.close()
        found = score(question, said)
        asked.results.found.append(found)
        right, count = right + found.share, count + 1
        following = asked.questions[number + 1 : number + 2]
        if not following or (following[0].task, following[0].length) != (question.task, question.length):
            what = f"{question.task}, {question.length:,} tokens: {100 * right / count:.1f}% of {count} questions"
            _note(asked, what, begin)
            begin, right, count = time.perf_counter(), 0.0, 0


def _note(asked: Asked, what: str, begin: float) -> None:
    if dist.get_rank() == 0:
        asked.results.write(asked.out)
        logger.info("%s (%.1f s)", what, time.perf_counter() - begin)
