"""The rounds of a server's ranks: rank 0 sends what came, and all ranks advance the same scheduler."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from ..inference.sampling import Sampling
from ..inference.scheduler import Request, Scheduler
from ..training.ranks import broadcast_json
from .http_api.inbox import Inbox


class Rounds:
    """Rounds of the scheduler until rank 0, which has the inbox, is stopped.

    The ranks exchange the next round's news while GPUs compute a token of every answer, which a round does after its
    prompts. If no answer runs, they do so while GPUs compute the last layers of the round's prompts.

    Args:
        inbox: of rank 0; None on the others.
        group: of processes on the host that exchange news; None for the job's.
    """

    def __init__(self, scheduler: Scheduler, inbox: Inbox | None, group: dist.ProcessGroup | None = None) -> None:
        self._scheduler, self._inbox, self._group = scheduler, inbox, group
        self._seconds: list[float] = []  # of rounds that the other ranks do not know yet, as rank 0 measured them
        self._news: list[Any] | None = None  # of the next round
        self._began: float | None = None  # when the round began, until its time is noted

    def run(self) -> None:
        """Run rounds. The calling thread has the model."""
        scheduler, attention = self._scheduler, self._scheduler.engine.model.attention
        attention.on_wait = self._overlap
        while True:
            news, self._news = self._news or self._exchange(wait=not scheduler.busy), None
            if news[0] is None:
                scheduler.close()
                return
            self._began = time.monotonic()
            for seconds in news[0]:
                scheduler.observe(seconds)
            for item in news[1:]:
                if isinstance(item, dict):
                    sampling = Sampling(**item["sampling"] | {"stop": tuple(item["sampling"]["stop"])})
                    scheduler.submit(Request(**item | {"prompt": tuple(item["prompt"]), "sampling": sampling}))
                else:
                    scheduler.cancel(item)
            busy = scheduler.busy
            events = scheduler.advance() if busy else []
            if busy:
                self._note_time()
            if self._inbox is not None:
                self._inbox.last_beat = None
                self._inbox.deliver(events)
                self._inbox.observe(scheduler)

    def _overlap(self) -> None:
        if self._news is None:
            if self._scheduler.work:  # prompts have been computed: their time says what the next round may compute
                self._note_time()
            self._news = self._exchange(wait=False)

    def _note_time(self) -> None:
        if self._began is not None:
            self._seconds.append(time.monotonic() - self._began)
            self._began = None

    def _exchange(self, wait: bool) -> list[Any]:
        """Return the seconds of rounds, None to end, then requests and numbers of cancelled ones. Every rank waits for
        all others, also if there is nothing to do."""
        news: list[Any] | None = None
        inbox = self._inbox
        if inbox is not None:
            arrived = inbox.take(wait=wait and not inbox.stopping)
            news = [None]
            if not inbox.stopping:
                # Not by `asdict`, which copies a prompt token by token.
                news = [i if isinstance(i, int) else vars(i) | {"sampling": vars(i.sampling)} for i in arrived]
                news.insert(0, self._seconds)
            inbox.beat()
        found: list[Any] = broadcast_json(news, self._group)
        self._seconds = []
        return found
