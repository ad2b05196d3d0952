"""`megatron-longctx generate`: text from a run's checkpoint, on this host's ranks or under torchrun.

Only the text goes to standard output. Every rank makes the same calls; rank 0 reads, decides what comes next, and
writes. It is the process that was started, so that it has the terminal.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .compose import RESOLVED, load_config, override_config
from .config import Config, refuse
from .inference.engine import LongContextEngine, Session
from .inference.sampling import Sampling
from .mcore import checkpoint, groups
from .mcore.inference import build_engine, for_inference
from .mcore.model import fingerprint, padded_vocab_size
from .mcore.tokenizer import build_tokenizer, text_of
from .training.launcher import JobFailed
from .training.preflight import device_type

_HOST = "127.0.0.1"
_GRACE_S = 5.0
_OWN_KEYS = ("checkpoint", "prompt", "prompt_file", "iteration")


@dataclass(frozen=True)
class Job:
    """What to generate. prompt: None for a chat, whose turns come from standard input."""

    config: Config
    checkpoints: Path
    iteration: int | None
    prompt: str | None

    @property
    def world_size(self) -> int:
        par = self.config.parallelism
        return par.context_parallel_size * par.tensor_parallel_size


def generate(words: Sequence[str], chat: bool = False) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, `prompt=TEXT` or `prompt_file=FILE`, `iteration=N`, and settings over the run's.

    Raises:
        ValueError: words, a checkpoint or sizes that cannot be used; a prompt that does not fit.
        JobFailed: another rank ended.
    """
    job = job_of(words, chat)
    if job.config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world != job.world_size:
            raise refuse("world size", world, f"context x tensor = {job.world_size}", "Start that many ranks.")
        _join(job, rank, int(os.environ.get("LOCAL_RANK", "0")), None)
        _run(job)
        dist.destroy_process_group()
        return
    with _ranks(job):
        _run(job)


def job_of(words: Sequence[str], chat: bool) -> Job:
    """What the words ask for, checked as far as one process can.

    Raises:
        ValueError: as `generate`.
    """
    own = {key: value for key, _, value in (word.partition("=") for word in words) if key in _OWN_KEYS}
    settings = [word for word in words if word.partition("=")[0] not in _OWN_KEYS]
    if "checkpoint" not in own:
        raise refuse("checkpoint", "", "checkpoint=RUN, the folder of a run", "Give runs/NAME of a training run.")
    run = Path(own["checkpoint"])
    loaded = load_config(run / RESOLVED)
    # Training's own sizes say nothing about these two.
    whole = replace(loaded.parallelism, pipeline_parallel_size=1, data_parallel_size=None)
    config = for_inference(override_config(replace(loaded, parallelism=whole), settings))
    prompt = _prompt(own, chat)
    iteration = own.get("iteration")
    if iteration is not None and not iteration.isdecimal():
        raise refuse("iteration", iteration, "a number", "Leave it out for the latest.")
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    checkpoints = run / "checkpoints"
    if (
        checkpoint.check(checkpoints, fingerprint(config, padded_vocab_size(config.model, tokenizer.vocab_size)))
        is None
    ):
        raise refuse("checkpoint", run, "a run with a checkpoint", "Train it with train.save=true first.")
    config = _with_cache(config, 0 if prompt is None else len(tokenizer.tokenize(prompt)))
    job = Job(config, checkpoints, None if iteration is None else int(iteration), prompt)
    if device_type(config) == "cuda" and job.world_size > torch.cuda.device_count() and "RANK" not in os.environ:
        sizes = "parallelism.context_parallel_size x tensor_parallel_size"
        raise refuse(sizes, job.world_size, f"at most {torch.cuda.device_count()}, the GPUs here", "Set them lower.")
    return job


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


@contextmanager
def _ranks(job: Job) -> Iterator[None]:
    """The other ranks, for as long as the context takes; this process is rank 0."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    others: list[Any] = []
    if job.world_size > 1:
        args, count = (job, store.port), job.world_size - 1
        others = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _other_rank, args=args, nprocs=count, join=False, daemon=True, start_method="spawn"
        ).processes
    try:
        _join(job, 0, 0, store)
        yield
        dist.barrier()
    except RuntimeError as error:  # what a broken connection is to the process group
        for process in others:
            process.join(timeout=_GRACE_S)
        failed = [process for process in others if process.exitcode]
        if not failed:
            raise
        raise JobFailed(f"another rank ended with exit code {failed[0].exitcode}: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in others:
            process.join(timeout=_GRACE_S)
            if process.is_alive():
                process.kill()


def _other_rank(index: int, job: Job, port: int) -> None:
    limit = datetime.timedelta(seconds=job.config.parallelism.timeout_s)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    _join(job, index + 1, index + 1, store)
    try:
        _run(job)
    except ValueError:
        return  # rank 0 has met it as well, and says so
    dist.barrier()
    dist.destroy_process_group()


def _join(job: Job, rank: int, local_rank: int, store: Any) -> None:
    """Become a rank of the job's process group; without a store by torchrun's environment."""
    limit = datetime.timedelta(seconds=job.config.parallelism.timeout_s)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    backend = "nccl" if cuda else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=limit)
    if cuda:
        dist.all_reduce(torch.zeros(1, device="cuda"))


def _run(job: Job) -> None:
    """This rank's part."""
    par = job.config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    try:
        engine, tokenizer = build_engine(job.config, collection, job.checkpoints, job.iteration)
        sampling = _sampling(job.config, tokenizer.eod)
        session = engine.open()
        for text in _turns(job):
            _answer(engine, session, tokenizer, text, sampling)
    finally:
        groups.destroy()


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


def _turns(job: Job) -> Iterator[str]:
    """The prompt; in a chat, lines of rank 0's standard input, told to every rank."""
    if job.prompt is not None:
        yield job.prompt
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
