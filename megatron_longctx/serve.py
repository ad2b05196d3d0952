"""`megatron-longctx serve`: an OpenAI-compatible server over a run's checkpoint.

Rank 0 takes requests over HTTP; before every round all ranks are told what came in, and run the same scheduler on it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .config import refuse
from .http_api import Api, ApiLimits, Server
from .inference.engine import LongContextEngine
from .inference.scheduler import Event, Limits, Request, Scheduler
from .inference_job import InferenceJob, job_of, run, split_words
from .mcore.tokenizer import text_of

logger = logging.getLogger(__name__)

API_KEY = "MEGATRON_LONGCTX_API_KEY"
_HEARTBEAT_S = 2.0  # other ranks wait for news no longer than this


@dataclass
class Inbox:
    """Requests and cancellations on their way from HTTP threads to the ranks, and events on their way back."""

    max_waiting: int
    # Of the kind that a signal handler may put into, too.
    arrived: queue.SimpleQueue[Request | int] = field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._listeners: dict[int, queue.Queue[Event]] = {}

    def submit(self, prompt: Sequence[int], sampling: Any) -> tuple[int, queue.Queue[Event]] | None:
        """The request's number and where its events will come; None where too many wait already."""
        with self._lock:
            if len(self._listeners) >= self.max_waiting or self.stopped.is_set():
                return None
            number, events = self._number, queue.Queue[Event]()
            self._number += 1
            self._listeners[number] = events
        self.arrived.put(Request(number, tuple(prompt), sampling))
        return number, events

    def cancel(self, number: int) -> None:
        self.arrived.put(number)

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            listener = self._listeners.get(event.number)
            if listener is not None:
                listener.put(event)
            if event.finish_reason is not None:
                with self._lock:
                    self._listeners.pop(event.number, None)

    def ask_to_stop(self, *_: Any) -> None:
        """Wake whoever takes; a signal handler."""
        self.stopped.set()
        self.arrived.put(-1)

    def stop(self) -> None:
        """Refuse what comes from now on, and end what is under way."""
        with self._lock:
            self.stopped.set()
            listeners, self._listeners = self._listeners, {}
        for number, listener in listeners.items():
            listener.put(Event(number, finish_reason="error", error="the server is stopping"))

    def take(self, wait: bool) -> list[Request | int]:
        """What has arrived; if nothing has, and `wait`, after a while at most."""
        found: list[Request | int] = []
        try:
            found.append(self.arrived.get(timeout=_HEARTBEAT_S if wait else None, block=wait))
            while True:
                found.append(self.arrived.get_nowait())
        except queue.Empty:
            return found


def serve(words: Sequence[str]) -> None:
    """Run the verb until SIGINT or SIGTERM.

    Args:
        words: `checkpoint=RUN`, `iteration=N`, and settings over the run's.

    Raises:
        ValueError: words, a checkpoint or sizes that cannot be used; an address that is not this host's own without an
            API key; a port that is taken.
        JobFailed: another rank ended.
    """
    own, settings = split_words(words, ("checkpoint", "iteration"))
    job = job_of(own, settings, Path(own.get("checkpoint", "")).name)
    host = job.config.serve.host
    if not _is_loopback(host) and not os.environ.get(API_KEY):
        raise refuse("serve.host", host, f"a loopback address, or {API_KEY} in the environment", "Set a key.")
    run(job, _serve)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(job: InferenceJob, engine: LongContextEngine, tokenizer: Any) -> None:
    settings = job.config.serve
    chunk = job.config.inference.prefill_chunk or Limits.prefill_chunk
    scheduler = Scheduler(engine, Limits(settings.max_active, chunk, settings.keep_sessions))
    if dist.get_rank() != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it ends
        _rounds(scheduler, None)
        return
    inbox = Inbox(settings.max_waiting)
    limits = ApiLimits(settings.max_body_bytes, settings.max_connections, job.config.inference.max_new_tokens)
    api = Api(
        name=str(job.options),
        encode=tokenizer.tokenize,
        decode=lambda ids: text_of(tokenizer, ids),
        stop_token=tokenizer.eod,
        inbox=inbox,
        limits=limits,
        key=os.environ.get(API_KEY) or None,
    )
    server = Server((settings.host, settings.port), api)
    previous = {n: signal.signal(n, inbox.ask_to_stop) for n in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    logger.info("serving %s at http://%s:%d/v1", api.name, settings.host, server.server_address[1])
    try:
        _rounds(scheduler, inbox)
    finally:
        inbox.stop()
        server.shutdown()
        server.server_close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rounds(scheduler: Scheduler, inbox: Inbox | None) -> None:
    """Until rank 0, which has the inbox, is stopped."""
    while True:
        news: list[Any] = [None]
        if inbox is not None:
            arrived = inbox.take(wait=not scheduler.busy and not inbox.stopped.is_set())
            news = [None if inbox.stopped.is_set() else arrived]
        dist.broadcast_object_list(news, src=0)
        if news[0] is None:
            scheduler.close()
            return
        for item in news[0]:
            if isinstance(item, Request):
                scheduler.submit(item)
            else:
                scheduler.cancel(item)
        events = scheduler.advance() if scheduler.busy else []
        if inbox is not None:
            inbox.deliver(events)
