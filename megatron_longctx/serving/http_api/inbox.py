"""Between the server's thread and the ranks: requests and cancellations one way, events the other."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...inference.sampling import Sampling
from ...inference.scheduler import Event, Request

_HEARTBEAT_S = 2.0  # other ranks wait for news no longer than this


@dataclass
class Inbox:
    """Requests and cancellations on their way from the server's thread to the ranks, and events on their way back.

    Attributes:
        stalled_s: ranks that take longer for a round are taken to hang.
        round_began: when the round under way did, by `time.monotonic`; None between two.
    """

    max_waiting: int
    stalled_s: float = math.inf
    round_began: float | None = None
    # Of the kind that a signal handler may put into, too.
    arrived: queue.SimpleQueue[Request | int] = field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._listeners: dict[int, Callable[[Event], None]] = {}

    @property
    def stopping(self) -> bool:
        return self.stopped.is_set()

    @property
    def stalled(self) -> bool:
        """Whether the ranks hang, or one of them does, which the others wait for."""
        began = self.round_began
        return began is not None and time.monotonic() - began > self.stalled_s

    @property
    def num_requests(self) -> int:
        """Under way, those that wait included."""
        return len(self._listeners)

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, salt: int, listen: Callable[[Event], None]
    ) -> int | None:
        """The request's number, its events going to `listen`; None where too many wait already.

        Args:
            salt: whose request it is.
        """
        with self._lock:
            if len(self._listeners) >= self.max_waiting or self.stopping:
                return None
            number = self._number
            self._number += 1
            self._listeners[number] = listen
        self.arrived.put(Request(number, tuple(prompt), sampling, salt))
        return number

    def cancel(self, number: int) -> None:
        self.arrived.put(number)

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            listen = self._listeners.get(event.number)
            if event.finish_reason is not None:
                with self._lock:
                    self._listeners.pop(event.number, None)
            if listen is not None:
                listen(event)

    def ask_to_stop(self, *_: Any) -> None:
        """Wake whoever takes; a signal handler."""
        self.stopped.set()
        self.arrived.put(-1)

    def stop(self) -> None:
        """Refuse what comes from now on, and end what is under way."""
        with self._lock:
            self.stopped.set()
            listeners, self._listeners = self._listeners, {}
        for number, listen in listeners.items():
            listen(Event(number, finish_reason="cancelled", error="the server is stopping"))

    def take(self, wait: bool) -> list[Request | int]:
        """What has arrived; if nothing has, and `wait`, after a while at most."""
        found: list[Request | int] = []
        try:
            found.append(self.arrived.get(timeout=_HEARTBEAT_S if wait else None, block=wait))
            while True:
                found.append(self.arrived.get_nowait())
        except queue.Empty:
            return found
