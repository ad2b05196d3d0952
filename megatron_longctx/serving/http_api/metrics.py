"""What operators see of the server: Prometheus metrics at `/metrics`, and a line of the log for every request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...inference.scheduler import Scheduler
from .responses import Answer

logger = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:+-]{1,128}", re.ASCII)
_FIRST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """The counters of one server. `of_round` is called by the thread that runs the model, the rest by the server's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kinds = {"registry": self.registry, "namespace": "megatron_longctx"}
        self._requests = Gauge("requests", "requests by their state", ["state"], **kinds)
        self._pages = Gauge("cache_pages", "pages of the cache by their state", ["state"], **kinds)
        self._tokens = Count("tokens", "tokens of prompts, cached tokens of these, generated ones", ["kind"], **kinds)
        self._hits = Count("prefix_hits", "prompts of which a prefix was cached", **kinds)
        self._passes = Count("passes", "passes of the model by mode of attention", ["mode"], **kinds)
        self._refused = Count("refused_requests", "requests refused, by status", ["status"], **kinds)
        self._first = Histogram("first_token_seconds", "time to the first token", buckets=_FIRST_S, **kinds)
        self._next = Histogram("next_token_seconds", "time per token after the first", buckets=_NEXT_S, **kinds)
        self._counted: Counter[str] = Counter()
        self._looked = 0.0

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def of_round(self, scheduler: Scheduler) -> None:
        """Look at the scheduler, at most once a second as long as it is busy."""
        if scheduler.busy and time.monotonic() - self._looked < 1:
            return
        self._looked, counts = time.monotonic(), scheduler.engine.mode_counts
        for gauge, numbers in ((self._requests, scheduler.num_requests), (self._pages, scheduler.num_pages)):
            for state, number in numbers.items():
                gauge.labels(state).set(number)
        for mode, number in (counts - self._counted).items():
            self._passes.labels(mode).inc(number)
        self._counted = Counter(counts)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def ended(self, answer: Answer) -> None:
        """Count an answer's tokens and times."""
        prompt, cached, generated = answer.counts
        for kind, number in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(number)
        self._hits.inc(sum(choice.cached_tokens > 0 for choice in answer.choices[:: answer.request.best_of]))
        if len(answer.times) > 1:
            self._first.observe(answer.times[1] - answer.times[0])
        if (more := max(choice.num_tokens for choice in answer.choices) - 1) > 0:
            self._next.observe((answer.times[-1] - answer.times[1]) / more)


class Observed:
    """Gives every request its `X-Request-Id`, the client's own if it sends one, and logs and counts its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, began = Headers(scope=scope).get("x-request-id", ""), time.monotonic()
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        status = 499  # of clients that left before an answer

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            if scope["method"] == "POST":
                self._log(name, scope, status, time.monotonic() - began)

    def _log(self, name: str, scope: Scope, status: int, seconds: float) -> None:
        found: Answer | None = scope["state"].get("answer")
        parts = [f"request {name}", str(status), f"{seconds:.3f} s"]
        if status >= 400 and status != 499:
            self._metrics.refused(status)
        if found is not None:
            self._metrics.ended(found)
            prompt, cached, generated = found.counts
            first = f"{found.times[1] - found.times[0]:.3f} s" if len(found.times) > 1 else "none"
            ends = sorted({choice.finish_reason or "left" for choice in found.choices})
            parts += [f"prompt {prompt}", f"cached {cached}", f"new {generated}", f"first token {first}", *ends]
        logger.info("%s", ", ".join(parts))
