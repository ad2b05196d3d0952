"""`megatron-longctx serve`: an OpenAI-compatible server over a run's checkpoint.

A process beside rank 0 receives requests over HTTP. Before every round, rank 0 sends the new ones to all ranks, which
run the same scheduler.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config.extras import absent, install
from ..core.errors import JobFailed, refuse
from ..inference.host_cache import HostCache
from ..inference.pace import Pace, attention_tile
from ..inference.scheduler import RequestLimits, Scheduler
from ..inference.states import ROWS_OF_SEQUENCE
from ..inference.warm_up import warm_up
from ..mcore.tokenizer import build_tokenizer
from ..models.chat import load_chat
from ..training import forks
from ..training.ranks import RankFailed, RankProcesses, broadcast_json
from ..training.rendezvous import RankInfo
from ..training.signals import blocked, handled_signals
from .grammar import Grammars
from .http_api.access import build_access
from .http_api.inbox import Inbox
from .inference_job import (
    InferenceJob,
    Stopped,
    build_job,
    check_memory,
    open_engine,
    refuse_unread,
    split_arguments,
    start,
)
from .rounds import Rounds

_ENDS_WITHIN_S = 10.0  # after the last answers, for which it waits 3 s


def serve(words: Sequence[str]) -> None:
    """Run the verb until SIGINT or SIGTERM: `checkpoint=RUN`, `iteration=N`, and settings over the run's.

    Refuse missing packages, and words, a checkpoint, a chat template or sizes that cannot be used. Refuse a port that
    is taken, and an address other than a loopback address without an API key. Raises JobFailed: another rank ended.
    """
    job = forks.checked(job_of, words)
    place = RankInfo.from_environment(os.environ)
    if place is None or place.rank == 0:
        with _http_process(job) as http:
            start(job, _serve, functools.partial(_serve, http=http))
    else:
        start(job, _serve)


def job_of(words: Sequence[str]) -> InferenceJob:
    """Return the job of `serve`, checked as far as one process can without its port."""
    if missing := [module for module in absent("serve") if module != "xgrammar"]:  # grammars ask for it themselves
        raise refuse("serve", f"without {', '.join(missing)}", "its packages", f"Run {install('serve')}.")
    own, settings = split_arguments(words, ("checkpoint", "iteration"))
    job = build_job(own, settings, os.path.basename(os.path.abspath(own.get("checkpoint", ""))))  # also a name for `.`
    refuse_unread(settings)
    build_access(job.config.serve, os.environ)
    most = job.config.inference.recurrent_states // ROWS_OF_SEQUENCE
    if job.config.model.recurrent and job.config.serve.max_active > most:
        expected = f"at most {most}, a third of inference.recurrent_states"
        raise refuse("serve.max_active", job.config.serve.max_active, expected, "Lower it, or raise the other.")
    data = job.config.data
    load_chat(job.config.inference.chat_template, build_tokenizer(data.tokenizer, data.tokenizer_path))
    check_memory(job)
    return job


_Http = tuple[Inbox, RankProcesses]
"""Rank 0's end of the connection to the process of the HTTP interface, and that process."""


@contextmanager
def _http_process(job: InferenceJob) -> Iterator[_Http]:
    """Run the process of the HTTP interface. It starts first, as a fork if this process has no threads and no GPU yet.

    Refuse a port that is taken, before the model is loaded.
    """
    from .http_api.server import listen, run

    listen(job.config.serve).close()
    (ours, theirs), shared = socket.socketpair(), Inbox.new_shared()
    stalled_s = min(job.config.serve.stalled_s, job.timeout_s / 2)
    name = job.config.serve.served_model_name or str(job.options)
    args, how = (job.config, name, theirs, shared, stalled_s), "spawn" if forks.obstacle() else "fork"
    with ours:
        with theirs, blocked(handled_signals()):  # signals may go to all processes; rank 0 decides when to end
            process = RankProcesses(run, args, [0], start_method=how, daemon=True)
        try:
            yield Inbox(ours, shared), process
        finally:
            process.kill()


def _serve(job: InferenceJob, groups: Any, http: _Http | None = None) -> None:
    settings = job.config.serve
    with open_engine(job, groups) as (engine, tokenizer):
        warm_up(engine, settings.max_active)
        gc.collect()
        gc.freeze()  # a full collection of what compilers made holds a round for tens of milliseconds
        chunk = job.config.inference.prefill_chunk
        ranks, model = job.config.parallelism.context_parallel_size, job.config.model
        tile = attention_tile(model, job.config.parallelism.tensor_parallel_size, engine.model.attention.device)
        tile = broadcast_json(tile)  # ranks cut prompts alike, also on unequal GPUs
        pace = Pace(chunk) if chunk else Pace.timed(model, ranks, settings.max_delay_s, tile)
        grammars = functools.cache(lambda: Grammars(tokenizer))  # a large vocabulary takes a second
        engine.grammars = lambda grammar, stop: grammars()(grammar, stop)
        attention, gib = engine.model.attention, settings.host_cache_gib
        host = HostCache(engine.cache_manager, attention.groups, attention.rank, gib) if gib else None
        scheduler = Scheduler(engine, settings.max_active, pace=pace, host=host)
        # Messages of NCCL would wait for the kernels before them.
        group = None
        if dist.get_backend() == "nccl":
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=job.timeout_s))
        if http is None:
            for number in handled_signals():  # signals may go to all ranks; rank 0 decides when to end
                signal.signal(number, signal.SIG_IGN)
            Rounds(scheduler, None, group).run()
            return
        inbox = http[0]

        def beat() -> None:
            if inbox.stopping:
                raise Stopped
            inbox.beat()

        inbox.prepare = lambda grammar: grammars().compile(grammar)
        with _serving(http, scheduler.request_limits):
            engine.model.attention.on_layer = beat
            Rounds(scheduler, inbox, group).run()


@contextmanager
def _serving(http: _Http, limits: RequestLimits) -> Iterator[None]:
    """Let the HTTP interface begin, and end with the context; if it ends before, the inbox stops. Raises JobFailed."""
    inbox, process = http
    previous = {n: signal.signal(n, inbox.ask_to_stop) for n in handled_signals()}
    try:
        inbox.open(limits)
        try:
            yield
        finally:
            inbox.stop()
            process.wait(_ENDS_WITHIN_S)
    except RankFailed as failed:
        raise JobFailed(f"the HTTP process {failed.summary.removeprefix('rank 0 ')}") from failed
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
