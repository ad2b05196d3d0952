"""The connection of rank 0 with the process of the HTTP interface: requests one way, events the other.

Rank 0 has the inbox and never waits for the other process, which has the outbox. The rest is in shared memory.
"""

import asyncio
import math
import pickle
import queue
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.sharedctypes import RawArray
from typing import Any

from ...inference.sampling import Sampling
from ...inference.scheduler import Event, Request, RequestLimits, Scheduler

_HEARTBEAT_S = 2.0  # the longest that other ranks wait for rank 0
_UNSENT_S = 0.01  # between attempts to send what the other process has had no room for
_SIZE_BYTES = 8  # in front of a message of rank 0
_BEAT, _STOPPING = 0, 1  # what shared memory has: the latest beat, or 0, and whether the server is shutting down

Listener = Callable[[list[Event]], None]


class _End:
    """One end. `shared`: made by `new_shared` and given to both processes."""

    def __init__(self, end: socket.socket, shared: Any) -> None:
        self._socket, self._shared = end, shared

    @staticmethod
    def new_shared() -> Any:
        return RawArray("d", 2)

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return bool(self._shared[_STOPPING])

    @property
    def last_beat(self) -> float | None:
        """The round's latest progress, by `time.monotonic`; None between rounds."""
        return self._shared[_BEAT] or None

    @last_beat.setter
    def last_beat(self, seconds: float | None) -> None:
        self._shared[_BEAT] = seconds or 0.0


class Inbox(_End):
    """Rank 0's end. A thread calls `prepare` with the grammar of a request before `take` returns the request."""

    def __init__(self, end: socket.socket, shared: Any) -> None:
        super().__init__(end, shared)
        self.prepare: Callable[[str], Any] = str
        # Requests, and the numbers of cancelled ones. A signal handler may put into a `SimpleQueue`.
        self._arrived: queue.SimpleQueue[Request | int] = queue.SimpleQueue()
        self._unsent, self._observed = bytearray(), 0.0

    def open(self, limits: RequestLimits) -> None:
        """Let the server begin, with the limits of a request."""
        self._send(limits)
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def beat(self) -> None:
        """Note that a round makes progress."""
        self.last_beat = time.monotonic()

    def deliver(self, events: Sequence[Event]) -> None:
        """Send events to the listeners of their requests, or later if the other process has no room for them."""
        if events or self._unsent:
            self._send([tuple(vars(event).values()) for event in events])

    def observe(self, scheduler: Scheduler) -> None:
        """Send what metrics show of a scheduler, at most once a second as long as it is busy."""
        if not scheduler.busy or time.monotonic() - self._observed >= 1:
            self._observed = time.monotonic()
            self._send((scheduler.num_requests, scheduler.num_pages, scheduler.engine.mode_counts))

    def ask_to_stop(self, *_: Any) -> None:
        """Set `stopping` and wake `take`; usable as a signal handler."""
        self._shared[_STOPPING] = 1
        self._arrived.put(-1)

    def stop(self) -> None:
        """Let the server refuse new requests, end the open ones, and end itself."""
        self.ask_to_stop()
        self._socket.shutdown(socket.SHUT_WR)

    def take(self, wait: bool) -> list[Request | int]:
        """Return what has arrived; with `wait`, block for the first item, but not longer than the heartbeat."""
        arrived: list[Request | int] = []
        longest = _UNSENT_S if self._unsent else _HEARTBEAT_S
        try:
            arrived.append(self._arrived.get(timeout=longest if wait else None, block=wait))
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return arrived

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        self._unsent += len(data).to_bytes(_SIZE_BYTES) + data
        with suppress(OSError):  # there is no room now, or the other process has ended, which `_read` sees
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]

    def _read(self) -> None:
        """Read what the other process sends; if it ends, ask to stop."""
        with suppress(EOFError, OSError, pickle.UnpicklingError), self._socket.makefile("rb") as stream:
            while True:
                message = pickle.load(stream)
                for number, prompt, sampling, *others in message if isinstance(message, list) else ():
                    if sampling.grammar is not None:
                        with suppress(ValueError):  # which the rank raises
                            self.prepare(sampling.grammar)
                    self._arrived.put(Request(number, tuple(prompt), sampling, *others))
                if isinstance(message, int):
                    self._arrived.put(message)
        self.ask_to_stop()


class Outbox(_End):
    """The other process's end, with its open requests; its event loop alone uses it.

    Args:
        max_waiting: the most open requests.
        stalled_s: the seconds without a beat after which a round counts as stalled.
    """

    def __init__(self, end: socket.socket, shared: Any, max_waiting: int, stalled_s: float = math.inf) -> None:
        super().__init__(end, shared)
        self.max_waiting, self._stalled_s, self._number = max_waiting, stalled_s, 0
        self._listeners: dict[int, Listener] = {}

    @property
    def stalled(self) -> bool:
        """Whether a round makes no progress: a rank hangs and the others wait for it, or a layer takes long."""
        beat = self.last_beat
        return beat is not None and time.monotonic() - beat > self._stalled_s

    @property
    def num_requests(self) -> int:
        """The number of open requests, including waiting ones."""
        return len(self._listeners)

    async def open(self) -> RequestLimits:
        """Return the limits of a request when rank 0 is ready. Raises EOFError: it has ended."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        limits: RequestLimits = await self._receive()
        return limits

    async def follow(self, show: Callable[..., None], server: Any) -> None:
        """Pass on what rank 0 sends, events to their listeners and figures to `show`. When it stops, end the server."""
        with suppress(EOFError, OSError):
            while True:
                message = await self._receive()
                if isinstance(message, list):
                    self._pass_on(Event(*fields) for fields in message)
                else:
                    show(*message)
        self._shared[_STOPPING] = 1
        self._pass_on([Event(n, None, "cancelled", error="the server is stopping") for n in self._listeners])
        self._writer.close()
        server.should_exit = True

    def submit(
        self, answers: Sequence[tuple[Sequence[int], Sampling, int]], salt: int, listen: Listener
    ) -> list[int] | None:
        """Add requests and return their numbers, or None if there are too many already.

        `answers` are the prompt, sampling and stream of each. `salt` identifies the client; `listen` receives the
        events of a round.
        """
        if len(self._listeners) + len(answers) > self.max_waiting or self.stopping:
            return None
        numbers = list(range(self._number, self._number + len(answers)))
        self._number += len(answers)
        self._listeners.update(dict.fromkeys(numbers, listen))
        prompts = {id(prompt): array("i", prompt) for prompt, _, _ in answers}  # a pickle has each once
        new = [(n, prompts[id(p)], s, salt, i) for n, (p, s, i) in zip(numbers, answers, strict=True)]
        self._writer.write(pickle.dumps(new))
        return numbers

    def cancel(self, number: int) -> None:
        if not self.stopping:
            self._writer.write(pickle.dumps(number))

    def _pass_on(self, events: Iterable[Event]) -> None:
        found: dict[Listener, list[Event]] = {}
        for event in events:
            take = self._listeners.get if event.finish_reason is None else self._listeners.pop
            if (listen := take(event.number, None)) is not None:
                found.setdefault(listen, []).append(event)
        for listen, its in found.items():
            listen(its)

    async def _receive(self) -> Any:
        size = int.from_bytes(await self._reader.readexactly(_SIZE_BYTES))
        return pickle.loads(await self._reader.readexactly(size))
