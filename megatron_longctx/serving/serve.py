"""`megatron-longctx serve`: an OpenAI-compatible server over a run's checkpoint.

Rank 0 takes requests over HTTP; before every round all ranks are told what came in, and run the same scheduler on it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ..comm import from_rank_0
from ..comm.rendezvous import Placement
from ..config import ServeConfig
from ..errors import refuse
from ..inference.engine import LongContextEngine
from ..inference.sampling import Sampling
from ..inference.scheduler import Limits, Request, Scheduler
from ..mcore.tokenizer import bos_tokens, build_tokenizer, text_of, token_chars
from ..models.chat import chat_of
from ..training.signals import handled
from .http_api.access import Access, access_of
from .http_api.inbox import Inbox
from .http_api.parsing import Model
from .inference_job import InferenceJob, job_of, refuse_unread, run, split_words

logger = logging.getLogger(__name__)


def serve(words: Sequence[str]) -> None:
    """Run the verb until SIGINT or SIGTERM.

    Args:
        words: `checkpoint=RUN`, `iteration=N`, and settings over the run's.

    Raises:
        ValueError: packages that are not installed; words, a checkpoint, a chat template or sizes that cannot be used;
            an address that is not this host's own without an API key; one that cannot be listened at.
        JobFailed: another rank ended.
    """
    _require_packages()
    own, settings = split_words(words, ("checkpoint", "iteration"))
    job = job_of(own, settings, os.path.basename(os.path.abspath(own.get("checkpoint", ""))))  # `.` has a name, too
    refuse_unread(settings)
    _access(job.config.serve)
    data = job.config.data
    chat_of(job.config.inference.chat_template, build_tokenizer(data.tokenizer, data.tokenizer_path))
    place = Placement.of_environment(os.environ)
    if place is None or place.rank == 0:
        _listen(job.config.serve).close()  # what is taken is refused before the model is loaded
    run(job, _serve)


def _require_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        remedy = "Install them: pip install 'megatron-longctx[serve]', or pip install starlette uvicorn."
        raise refuse("serve", f"({error})", "the packages starlette and uvicorn", remedy) from None


def _access(settings: ServeConfig) -> Access:
    return access_of(settings.host, settings.allowed_hosts, settings.api_keys, os.environ)


def _listen(settings: ServeConfig) -> socket.socket:
    address = settings.host, settings.port
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where, expected = f"{settings.host}:{settings.port}", f"an address to listen at ({reason})"
        raise refuse("serve.host:serve.port", where, expected, "Choose another port; 0 takes any free one.") from None


def _serve(job: InferenceJob, engine: LongContextEngine, tokenizer: Any) -> None:
    settings = job.config.serve
    chunk = job.config.inference.prefill_chunk or Limits.prefill_chunk
    engine.warm_up(settings.max_active)
    scheduler = Scheduler(engine, Limits(settings.max_active, chunk, settings.keep_sessions))
    if dist.get_rank() != 0:
        for number in handled():  # which may go to all ranks: rank 0 says when it ends
            signal.signal(number, signal.SIG_IGN)
        _rounds(scheduler, None)
        return
    inbox = Inbox(settings.max_waiting, min(settings.stalled_s, job.timeout_s / 2))
    model = Model(
        name=str(job.options),
        encode=tokenizer.tokenize,
        decode=lambda ids: text_of(tokenizer, ids),
        stop_token=tokenizer.eod,
        chat=chat_of(job.config.inference.chat_template, tokenizer),
        default_tokens=job.config.inference.max_new_tokens,
        bounds=scheduler.bounds,
        token_chars=token_chars(tokenizer),
        begin=tuple(bos_tokens(tokenizer)),
    )
    with _serving(model, inbox, settings):
        _rounds(scheduler, inbox)


@contextmanager
def _serving(model: Model, inbox: Inbox, settings: ServeConfig) -> Iterator[None]:
    """The server, in a thread beside this one, which has the signals and the model; if it ends, so does the inbox."""
    from .http_api.app import Api
    from .http_api.server import server_of

    api = Api(model, inbox, settings.max_body_bytes, settings.timeout_s, _access(settings))
    server, listener = server_of(api, settings.max_connections), _listen(settings)
    previous = {n: signal.signal(n, inbox.ask_to_stop) for n in handled()}
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        with ThreadPoolExecutor(1, "http") as pool:
            served = pool.submit(server.run, [listener])
            served.add_done_callback(inbox.ask_to_stop)
            logger.info("serving %s at http://%s:%d/v1", model.name, host, listener.getsockname()[1])
            try:
                yield
            finally:
                inbox.stop()
                server.should_exit = True
        served.result()  # raises what ended it
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rounds(scheduler: Scheduler, inbox: Inbox | None) -> None:
    """Until rank 0, which has the inbox, is stopped."""
    while True:
        news: list[Any] | None = None
        if inbox is not None:
            arrived = inbox.take(wait=not scheduler.busy and not inbox.stopped.is_set())
            news = None if inbox.stopped.is_set() else [_plain(item) for item in arrived]
            inbox.round_began = time.monotonic()
        news = from_rank_0(news)  # which waits for all ranks, also where there is nothing to do
        if news is None:
            scheduler.close()
            return
        for item in news:
            if isinstance(item, dict):
                sampling = Sampling(**item["sampling"] | {"stop": tuple(item["sampling"]["stop"])})
                scheduler.submit(Request(item["number"], tuple(item["prompt"]), sampling, item["salt"]))
            else:
                scheduler.cancel(item)
        events = scheduler.advance() if scheduler.busy else []
        if inbox is not None:
            inbox.round_began = None
            inbox.deliver(events)


def _plain(item: Request | int) -> dict[str, Any] | int:
    if isinstance(item, int):
        return item
    return {
        "number": item.number,
        "prompt": item.prompt,  # not by `asdict`, which copies token by token
        "sampling": asdict(item.sampling),
        "salt": item.salt,
    }
