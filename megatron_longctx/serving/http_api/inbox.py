"""The queue between the server's thread and the ranks: requests and cancellations one way, events the other."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...inference.sampling import Sampling
from ...inference.scheduler import Event, Request

_HEARTBEAT_S = 2.0  # the longest that other ranks wait for rank 0


@dataclass
class Inbox:
    """The open requests of the server."""

    max_waiting: int  # the most open requests
    stalled_s: float = math.inf  # the seconds without a beat after which a round counts as stalled
    last_beat: float | None = None  # the round's latest progress, by `time.monotonic`; None between rounds
    stopping: bool = False  # whether the server is shutting down

    def __post_init__(self) -> None:
        # Requests, and the numbers of cancelled ones. A signal handler may put into a `SimpleQueue`.
        self._arrived: queue.SimpleQueue[Request | int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number = 0
        self._listeners: dict[int, Callable[[Event], None]] = {}

    @property
    def stalled(self) -> bool:
        """Whether a round makes no progress: a rank hangs and the others wait for it, or a layer takes long."""
        beat = self.last_beat
        return beat is not None and time.monotonic() - beat > self.stalled_s

    def beat(self) -> None:
        """Note that a round makes progress."""
        self.last_beat = time.monotonic()

    @property
    def num_requests(self) -> int:
        """The number of open requests, including waiting ones."""
        return len(self._listeners)

    def submit(
        self, answers: Sequence[tuple[Sequence[int], Sampling, int]], salt: int, listen: Callable[[Event], None]
    ) -> list[int] | None:
        """Add requests and return their numbers, or None if there are too many already.

        `answers` are the prompt, sampling and stream of each. `salt` identifies the client; `listen` receives events.
        """
        with self._lock:
            if len(self._listeners) + len(answers) > self.max_waiting or self.stopping:
                return None
            numbers = list(range(self._number, self._number + len(answers)))
            self._number += len(answers)
            self._listeners.update(dict.fromkeys(numbers, listen))
        for number, (prompt, sampling, stream) in zip(numbers, answers, strict=True):
            self._arrived.put(Request(number, tuple(prompt), sampling, salt, stream))
        return numbers

    def cancel(self, number: int) -> None:
        self._arrived.put(number)

    def deliver(self, events: Sequence[Event]) -> None:
        """Pass events to the listeners of their requests."""
        for event in events:
            listen = self._listeners.get(event.number)
            if event.finish_reason is not None:
                with self._lock:
                    self._listeners.pop(event.number, None)
            if listen is not None:
                listen(event)

    def ask_to_stop(self, *_: Any) -> None:
        """Set `stopping` and wake `take`; usable as a signal handler."""
        self.stopping = True
        self._arrived.put(-1)

    def stop(self) -> None:
        """Refuse new requests and end the open ones."""
        with self._lock:
            self.stopping = True
            listeners, self._listeners = self._listeners, {}
        for number, listen in listeners.items():
            listen(Event(number, finish_reason="cancelled", error="the server is stopping"))

    def take(self, wait: bool) -> list[Request | int]:
        """Return what has arrived; with `wait`, block for the first item, but not longer than the heartbeat."""
        arrived: list[Request | int] = []
        try:
            arrived.append(self._arrived.get(timeout=_HEARTBEAT_S if wait else None, block=wait))
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return arrived
