"""`megatron-longctx serve`: an OpenAI-compatible server over a run's checkpoint.

Rank 0 receives requests over HTTP. Before every round it sends the new ones to all ranks, which run the same scheduler.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..config import ServeConfig
from ..config.extras import absent, install
from ..core.errors import refuse
from ..inference.host_cache import HostCache
from ..inference.pace import Pace, attention_tile
from ..inference.scheduler import Scheduler
from ..inference.states import ROWS_OF_SEQUENCE
from ..inference.warm_up import warm_up
from ..mcore.tokenizer import bos_tokens, build_tokenizer, detokenize, max_token_chars
from ..models.chat import load_chat
from ..training import forks
from ..training.ranks import broadcast_json
from ..training.rendezvous import RankInfo
from ..training.signals import handled_signals
from .grammar import Grammars
from .http_api.access import build_access
from .http_api.inbox import Inbox
from .http_api.parsing import Model
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

if TYPE_CHECKING:
    from .http_api.metrics import Metrics

logger = logging.getLogger(__name__)


def serve(words: Sequence[str]) -> None:
    """Run the verb until SIGINT or SIGTERM: `checkpoint=RUN`, `iteration=N`, and settings over the run's.

    Refuse missing packages, and words, a checkpoint, a chat template or sizes that cannot be used. Refuse a port that
    is taken, and an address other than a loopback address without an API key. Raises JobFailed: another rank ended.
    """
    job = forks.checked(job_of, words)
    place = RankInfo.from_environment(os.environ)
    if place is None or place.rank == 0:
        _listen(job.config.serve).close()  # refuse a taken port before the model is loaded
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


def _listen(settings: ServeConfig) -> socket.socket:
    address = settings.host, settings.port
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where, expected = f"{settings.host}:{settings.port}", f"an address to listen at ({reason})"
        raise refuse("serve.host:serve.port", where, expected, "Choose another port; 0 takes any free one.") from None


def _serve(job: InferenceJob, groups: Any) -> None:
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
        if dist.get_rank() != 0:
            for number in handled_signals():  # signals may go to all ranks; rank 0 decides when to end
                signal.signal(number, signal.SIG_IGN)
            Rounds(scheduler, None, group=group).run()
            return
        inbox = Inbox(settings.max_waiting, min(settings.stalled_s, job.timeout_s / 2))
        served = Model(
            name=settings.served_model_name or str(job.options),
            encode=tokenizer.tokenize,
            decode=lambda ids: detokenize(tokenizer, ids),
            stop_token=tokenizer.eod,
            chat=load_chat(job.config.inference.chat_template, tokenizer),
            default_tokens=job.config.inference.max_new_tokens,
            limits=scheduler.request_limits,
            max_token_chars=max_token_chars(tokenizer),
            begin=tuple(bos_tokens(tokenizer)),
            check_grammar=lambda grammar: grammars().compile(grammar),
        )

        def beat() -> None:
            if inbox.stopping:
                raise Stopped
            inbox.beat()

        with _serving(served, inbox, settings) as metrics:
            engine.model.attention.on_layer = beat
            Rounds(scheduler, inbox, lambda: metrics.of_round(scheduler), group).run()


@contextmanager
def _serving(model: Model, inbox: Inbox, settings: ServeConfig) -> Iterator[Metrics]:
    """Run the server in a thread, and yield its metrics; if it ends, the inbox stops. This thread keeps the signals and
    the model."""
    from .http_api.app import Api
    from .http_api.server import build_server

    origins = tuple(filter(None, map(str.strip, (settings.allowed_origins or "").split(","))))
    access = build_access(settings, os.environ)
    api = Api(model, inbox, settings.max_body_bytes, settings.timeout_s, access, origins)
    server, listener = build_server(api, settings.max_connections), _listen(settings)
    previous = {n: signal.signal(n, inbox.ask_to_stop) for n in handled_signals()}
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        with ThreadPoolExecutor(1, "http") as pool:
            served = pool.submit(server.run, [listener])
            served.add_done_callback(inbox.ask_to_stop)
            logger.info("serving %s at http://%s:%d/v1", model.name, host, listener.getsockname()[1])
            try:
                yield api.metrics
            finally:
                inbox.stop()
                server.should_exit = True
        served.result()  # raises the error that ended it
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
