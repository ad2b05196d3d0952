"""What operators see of the server: metrics of Prometheus, and the figures of a request in the log."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count

from .responses import Answer

_FIRST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kinds: Any = {"registry": self.registry, "namespace": "megatron_longctx"}
        self._requests = Gauge("requests", "requests by their state", ["state"], **kinds)
        self._pages = Gauge("cache_pages", "pages of the cache by their state", ["state"], **kinds)
        self._tokens = Count("tokens", "tokens of prompts, cached tokens of these, generated ones", ["kind"], **kinds)
        self._hits = Count("prefix_hits", "prompts of which a prefix was cached", **kinds)
        self._passes = Count("passes", "passes of the model by mode of attention", ["mode"], **kinds)
        self._refused = Count("refused_requests", "requests refused, by status", ["status"], **kinds)
        self._first = Histogram("first_token_seconds", "time to the first token", buckets=_FIRST_S, **kinds)
        self._next = Histogram("next_token_seconds", "time per token after the first", buckets=_NEXT_S, **kinds)
        self._counted: Counter[str] = Counter()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def show(self, requests: Mapping[str, int], pages: Mapping[str, int], passes: Mapping[str, int]) -> None:
        """Show what rank 0 has found: numbers of requests and pages by their states, and of all passes by mode."""
        for gauge, numbers in ((self._requests, requests), (self._pages, pages)):
            for state, number in numbers.items():
                gauge.labels(state).set(number)
        for mode, number in (Counter(passes) - self._counted).items():
            self._passes.labels(mode).inc(number)
        self._counted = Counter(passes)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def ended(self, answer: Answer) -> str:
        """Count an answer's tokens and times, and return them for the log."""
        (prompt, cached, generated), first = answer.counts, "none"
        for kind, number in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(number)
        self._hits.inc(sum(choice.cached_tokens > 0 for choice in answer.choices[:: answer.request.best_of]))
        if len(answer.times) > 1:
            self._first.observe(answer.times[1] - answer.times[0])
            first = f"{answer.times[1] - answer.times[0]:.3f} s"
        if (more := max(choice.num_tokens for choice in answer.choices) - 1) > 0:
            self._next.observe((answer.times[-1] - answer.times[1]) / more)
        ends = ", ".join(sorted({choice.finish_reason or "left" for choice in answer.choices}))
        return f"prompt {prompt}, cached {cached}, new {generated}, first token {first}, {ends}"
