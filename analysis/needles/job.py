"""The questions for a run's checkpoint, which its ranks answer with the inference engine."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from analysis.needles.questions import DEPTHS, TASKS, Haystack, Question, make_questions, score
from analysis.needles.scores import TABLES, Results
from megatron_longctx.cli.evaluate import described, folder_of, numbers, sizes_of, with_iteration
from megatron_longctx.config import Config
from megatron_longctx.config.progress import Progress
from megatron_longctx.core.errors import refuse
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.mcore.tokenizer import build_tokenizer, detokenize
from megatron_longctx.models.chat import Chat, load_chat
from megatron_longctx.serving.inference_job import InferenceJob, build_job, check_memory, open_engine, split_arguments

logger = logging.getLogger(__name__)

OWN_WORDS = ("checkpoint", "iteration", "tasks", "lengths", "samples", "depths", "seed", "haystack", "chat", "out")


@dataclass(frozen=True)
class Asked:
    """What the ranks answer. chat: whether questions are formatted as chats."""

    questions: tuple[Question, ...]
    chat: bool
    out: Path
    results: Results


def job_of(words: Sequence[str]) -> InferenceJob:
    """Return the job, checked as far as one process can. Nothing is written."""
    own, settings = split_arguments(words, OWN_WORDS)
    job = with_iteration(build_job(own, settings))
    lengths, samples = sizes_of(own, job.config)
    results = Results(*described(job, own, lengths, samples))
    asked = Asked(_questions(own, job.config, lengths, samples), _is_chat(own), folder_of(own), results)
    cache = job.config.inference.cache_tokens or max(lengths)
    inference = replace(job.config.inference, cache_tokens=cache)
    job = replace(job, config=replace(job.config, inference=inference), options=asked)
    check_memory(job)
    return job


def _tasks(value: str) -> list[str]:
    names = list(TASKS) if value == "all" else value.split(",")
    for name in names:
        if name not in TASKS:
            raise refuse("tasks", name, f"`all`, or some of {', '.join(TASKS)}", "Separate them by commas.")
    return list(dict.fromkeys(names))


def _is_chat(own: Mapping[str, str]) -> bool:
    if own.get("chat", "false") not in ("true", "false"):
        raise refuse("chat", own["chat"], "true or false", "Leave it out for false.")
    return own.get("chat") == "true"


def _questions(own: Mapping[str, str], config: Config, lengths: Sequence[int], samples: int) -> tuple[Question, ...]:
    """Make all questions, before ranks start."""
    tasks = _tasks(own.get("tasks", "needle"))
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    prompt: Callable[[str, str], str] = str.__add__
    if _is_chat(own):
        chat = load_chat(config.inference.chat_template, tokenizer)
        if chat.template is None:
            expected = f"false: the {config.data.tokenizer} tokenizer has no chat template"
            raise refuse("chat", True, expected, "Set inference.chat_template=FILE, or leave it out.")
        prompt = partial(_chat_prompt, chat)
    haystack = Haystack.essays(Path(own["haystack"])) if "haystack" in own else Haystack.noise()
    depths = numbers(own, "depths", DEPTHS, 0, 1)
    (seed,) = numbers(own, "seed", (0,), 0, 2**63 - 1, one=True)

    def count(text: str) -> int:
        return len(tokenizer.tokenize(text))

    return tuple(make_questions(tasks, lengths, samples, haystack, count, depths, seed, prompt))


def _chat_prompt(chat: Chat, text: str, opening: str) -> str:
    return chat.text([{"role": "user", "content": text}]) + opening.lstrip()


def work(job: InferenceJob, groups: Any) -> None:
    """Answer, on every rank. Rank 0 writes the results after every task and length."""
    asked: Asked = job.options
    results, writes, begin = asked.results, dist.get_rank() == 0, time.perf_counter()
    with open_engine(job, groups) as (engine, tokenizer):
        chat = load_chat(job.config.inference.chat_template, tokenizer) if asked.chat else Chat()
        stop = tokenizer.eod, *chat.stop_tokens
        with Progress("answering", len(asked.questions), "questions", writes) as progress:
            for number, question in enumerate(progress.each(asked.questions), start=1):
                session = engine.open()
                session.append(tokenizer.tokenize(question.prompt))
                sampling = Sampling(max_new_tokens=question.answer_tokens, stop=stop)
                results.scores.append(score(question, detokenize(tokenizer, session.generate(sampling))))
                session.close()
                following = asked.questions[number : number + 1]
                if following and (following[0].task, following[0].length) == (question.task, question.length):
                    continue
                results.complete = not following
                if writes:
                    results.write(asked.out)
                    share = results.means()[question.task][question.length]
                    seconds = time.perf_counter() - begin
                    logger.info("%s, %s tokens: %.1f%% (%.1f s)", question.task, question.length, 100 * share, seconds)
    if writes:
        print((asked.out / TABLES).read_text(encoding="utf-8"))
