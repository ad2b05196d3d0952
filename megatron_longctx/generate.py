"""`megatron-longctx generate`: text from a run's checkpoint. Only the text goes to standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .config import Config, refuse
from .inference.engine import LongContextEngine, Session
from .inference.sampling import Sampling
from .inference_job import InferenceJob, job_of, run, split_words
from .mcore.tokenizer import build_tokenizer, text_of


def generate(words: Sequence[str], chat: bool = False) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, `prompt=TEXT` or `prompt_file=FILE`, `iteration=N`, and settings over the run's.
        chat: read turns from standard input instead of a prompt.

    Raises:
        ValueError: words, a checkpoint or sizes that cannot be used; a prompt that does not fit.
        JobFailed: another rank ended.
    """
    own, settings = split_words(words, ("checkpoint", "prompt", "prompt_file", "iteration"))
    job = job_of(own, settings)
    prompt = _prompt(own, chat)
    data = job.config.data
    length = 0 if prompt is None else len(build_tokenizer(data.tokenizer, data.tokenizer_path).tokenize(prompt))
    run(replace(job, config=_with_cache(job.config, length), options=prompt), _converse)


def _prompt(own: dict[str, str], chat: bool) -> str | None:
    if chat:
        if "prompt" in own or "prompt_file" in own:
            raise refuse("--chat", "with a prompt", "turns on standard input", "Leave prompt and prompt_file out.")
        return None
    if ("prompt" in own) == ("prompt_file" in own):
        raise refuse("prompt", own.get("prompt", ""), "prompt=TEXT or prompt_file=FILE", "Give one of them, or --chat.")
    prompt = own["prompt"] if "prompt" in own else Path(own["prompt_file"]).read_text()
    if not prompt:
        raise refuse("prompt", "", "some text", "Give the model something to go on from.")
    return prompt


def _with_cache(config: Config, prompt_tokens: int) -> Config:
    """By default a cache of the trained length, or of the prompt where that is longer."""
    inference = config.inference
    if inference.cache_tokens is not None:
        return config
    tokens = max(config.data.seq_length, prompt_tokens) + inference.max_new_tokens
    return replace(config, inference=replace(inference, cache_tokens=tokens))


def _converse(job: InferenceJob, engine: LongContextEngine, tokenizer: Any) -> None:
    sampling = _sampling(job.config, tokenizer.eod)
    session = engine.open()
    for text in _turns(job.options):
        _answer(engine, session, tokenizer, text, sampling)


def _sampling(config: Config, end: int) -> Sampling:
    settings = config.inference
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        stop=(end,),
    )


def _answer(engine: LongContextEngine, session: Session, tokenizer: Any, text: str, sampling: Sampling) -> None:
    """Go on from `text`; rank 0 writes what comes, and what it took."""
    writes = dist.get_rank() == 0
    begin = time.perf_counter()
    session.append(tokenizer.tokenize(text))
    times: list[float] = []
    ids: list[int] = []
    shown = ""
    for token in session.stream(sampling):
        times.append(time.perf_counter())
        ids.append(token)
        if writes:
            # A character may take several tokens: what is not whole yet waits.
            whole = text_of(tokenizer, ids).rstrip("\ufffd")
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
    if writes:
        print(text_of(tokenizer, ids)[len(shown) :], flush=True)
        print(_summary(engine, session, begin, times), file=sys.stderr, flush=True)


def _turns(prompt: str | None) -> Iterator[str]:
    """The prompt; in a chat, lines of rank 0's standard input, told to every rank."""
    if prompt is not None:
        yield prompt
        return
    while True:
        line: list[str | None] = [None]
        if dist.get_rank() == 0:
            if sys.stdin.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = [sys.stdin.readline()]
        dist.broadcast_object_list(line, src=0)
        if not line[0]:
            return
        yield line[0]


def _summary(engine: LongContextEngine, session: Session, begin: float, times: Sequence[float]) -> str:
    """What a turn took, and what the cache holds."""
    ledger = engine.ledger
    said = [f"{len(session.tokens)} tokens, {session.reused_tokens} of them cached before this turn"]
    if times:
        said.append(f"first token after {times[0] - begin:.3f} s")
    if len(times) > 1:
        said.append(f"{(times[-1] - times[0]) / (len(times) - 1) * 1e3:.1f} ms per token")
    pages = ledger.pages_per_rank * ledger.n
    said.append(f"cache {ledger.used_pages()} of {pages} pages, {engine.cache_gib:.3f} GiB")
    return "; ".join(said)
