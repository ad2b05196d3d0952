"""Formatting of a request's events as answers of the interface."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from ...inference.sampling import Score
from ...inference.scheduler import Event
from ..text_stream import TextStream
from .options import ApiError
from .parsing import Model, ParsedRequest


@dataclass
class Choice:
    """One answer to a prompt."""

    index: int  # among the answers that are returned
    stream: TextStream
    measure: TextStream  # the text of tokens with scores, apart from stop texts
    prompt: Sequence[int]
    echo: str
    length: int  # of the text before these tokens, and of theirs
    running: bool = True  # whether the ranks still work on it
    finish_reason: str | None = None  # None while it runs
    num_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    new: str = ""  # the text that the latest event has completed
    begun: bool = False
    scores: list[Score] = field(default_factory=list)
    latest: list[Score] = field(default_factory=list)  # of the latest event's token, which may be a stop token
    prompt_scores: Sequence[Score] | None = None

    @property
    def mean_logprob(self) -> float:
        return sum(score.logprob for score in self.scores) / max(1, len(self.scores))


@dataclass
class Answer:
    """The answer to a request in progress."""

    model: Model
    request: ParsedRequest
    numbers: Sequence[int]  # of the ranks' requests, prompt after prompt, `best_of` for each
    cancel: Callable[[int], None]  # ends one of these requests
    created: int = field(default_factory=lambda: int(time.time()))
    times: list[float] = field(default_factory=lambda: [time.monotonic()])  # of its arrival, first and latest token

    def __post_init__(self) -> None:
        request = self.request
        self._of_number: dict[int, Choice] = {}
        for i, number in enumerate(self.numbers):
            at, decode = i // request.best_of, self.model.decode
            echo = request.texts[at] if request.texts else ""
            stream, measure = TextStream(decode, request.stops), TextStream(decode)
            self._of_number[number] = Choice(i, stream, measure, request.prompts[at], echo, len(echo))
        self.choices = list(self._of_number.values())

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add(self, event: Event) -> Choice | None:
        """Add an event and return the choice that it belongs to; None if that has ended already.

        Raises ApiError: the request was refused, has failed, or was ended by the server.
        """
        choice = self._of_number[event.number]
        choice.running = choice.running and event.finish_reason is None
        if choice.finish_reason is not None:
            return None
        if event.finish_reason == "cancelled":
            raise ApiError(503, event.error, "server_error")
        if event.finish_reason == "error":
            raise ApiError(400, event.error) if event.refused else ApiError(500, event.error, "server_error")
        self.times[1:] = [*self.times[1:2], time.monotonic()]
        choice.cached_tokens, choice.new = event.cached_tokens, ""
        if event.prompt_scores is not None:
            choice.prompt_scores = event.prompt_scores
        choice.latest = [] if event.score is None else [event.score]
        choice.scores += choice.latest
        if event.token is not None:
            choice.num_tokens += 1
            choice.new = choice.stream.feed(event.token)
        if event.finish_reason is not None:
            choice.new += choice.stream.finish()
        choice.text += choice.new
        choice.finish_reason = "stop" if choice.stream.stopped else event.finish_reason
        if choice.finish_reason is not None and choice.running:
            self._cancel(choice, event.number)
        return choice

    def close(self) -> None:
        """End what the ranks still work on."""
        for number, choice in self._of_number.items():
            self._cancel(choice, number)

    def _cancel(self, choice: Choice, number: int) -> None:
        if choice.running:
            choice.running = False
            self.cancel(number)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The tokens of prompts, cached ones of these, and generated ones."""
        first = self.choices[:: self.request.best_of]
        cached, generated = sum(c.cached_tokens for c in first), sum(c.num_tokens for c in self.choices)
        return sum(map(len, self.request.prompts)), cached, generated

    @property
    def usage(self) -> dict[str, Any]:
        prompt, cached, generated = self.counts
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        most, n = self.request.best_of, self.request.n
        returned: list[dict[str, Any]] = []
        for start in range(0, len(self.choices), most):
            choices = self.choices[start : start + most]
            if most > n:
                choices = sorted(choices, key=lambda choice: -choice.mean_logprob)[:n]
            returned += [self._whole(choice, i, self.choices[start]) for i, choice in enumerate(choices, len(returned))]
        body = self._body(returned, whole=True) | {"usage": self.usage}
        if self.request.chat and self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(self.choices[0])
        return body

    def _whole(self, choice: Choice, index: int, first: Choice) -> dict[str, Any]:
        """Return a choice. first: the one of its prompt that has the prompt's scores."""
        reason, tools = choice.finish_reason, self.request.tools
        content: dict[str, Any] = {"text": choice.echo + choice.text}
        if self.request.chat:
            message = {"content": choice.text} if tools is None else tools.parsed(choice.text).message
            reason = "tool_calls" if "tool_calls" in message else reason
            content = {"message": {"role": "assistant", **message}}
        elif self.request.prompt_logprobs is not None:
            content["prompt_logprobs"] = self._prompt_logprobs(first)
        logprobs = self._logprobs(choice, choice.scores, first.prompt_scores if self.request.texts else None)
        return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}

    def chunks(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream for the latest event of a choice. Calls of tools come whole, at its end."""
        text, more, reason = choice.new, {}, choice.finish_reason
        if self.request.tools is not None:
            more = {} if reason is None else self.request.tools.parsed(choice.text).message
            text = more.pop("content", None) or ""
            if "tool_calls" in more:
                more["tool_calls"] = [{"index": i, **call} for i, call in enumerate(more["tool_calls"])]
                reason = "tool_calls"
        echoed = choice.prompt_scores if self.request.texts and not choice.begun else None
        logprobs = self._logprobs(choice, choice.latest, echoed, len(choice.scores) - len(choice.latest))
        text = text if choice.begun else choice.echo + text
        if text or more or choice.latest:
            yield self._chunk(choice, {"content": text} | more, None, logprobs)
        if reason is not None:
            yield self._chunk(choice, {}, reason, None)

    def last_chunks(self) -> list[dict[str, Any]]:
        return [self._body([]) | {"usage": self.usage}] if self.request.usage else []

    def _chunk(self, choice: Choice, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        """Return a chunk; the first of a chat's choice has the role."""
        role = {} if choice.begun else {"role": "assistant"}
        choice.begun = True
        content = {"delta": role | delta} if self.request.chat else {"text": delta.get("content", "")}
        return self._body([{"index": choice.index, **content, "finish_reason": reason, "logprobs": logprobs}])

    def _body(self, choices: list[dict[str, Any]], whole: bool = False) -> dict[str, Any]:
        chat = self.request.chat
        name = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.numbers[0]}",
            "object": name + (".chunk" if chat and not whole else ""),
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }

    def _logprobs(
        self, choice: Choice, scores: Sequence[Score], echoed: Sequence[Score] | None, before: int = 0
    ) -> dict[str, Any] | None:
        """Return `logprobs` of a choice. before: the number of its scores before these."""
        most = self.request.logprobs
        if most is None:
            return None
        prompt, pieces = choice.prompt, partial(_pieces, self.model.decode, most=most)
        entries = list(pieces(scores, [choice.scores[before - 1].token] if before else prompt[-1:]))
        if self.request.chat:
            return {"content": list(map(_chat_logprob, entries))}
        *offsets, choice.length = _offsets(choice.measure, choice.length, (score.token for score in scores))
        if echoed is not None:
            entries = [(self.model.decode(prompt[:1]), None, {}), *pieces(echoed, prompt[:1]), *entries]
            offsets = _offsets(TextStream(self.model.decode), 0, prompt)[:-1] + offsets
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [None if entry[1] is None else entry[2] for entry in entries],
            "text_offset": offsets,
        }

    def _prompt_logprobs(self, choice: Choice) -> list[Any]:
        """Return the likeliest tokens of a prompt by their ids, as vLLM does; the first token has none."""
        found: list[Any] = [None]
        for score in choice.prompt_scores or ():
            top = list(enumerate(score.top[: self.request.prompt_logprobs], 1))
            entries = {token: (logprob, rank) for rank, (token, logprob) in top} | {score.token: score[1:3]}
            found.append(
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": self.model.decode([token])}
                    for token, (logprob, rank) in entries.items()
                }
            )
        return found


def _offsets(measure: TextStream, start: int, tokens: Iterable[int]) -> list[int]:
    """Return where each token's text begins, and where that of the last one ends."""
    return list(accumulate((len(measure.feed(token)) for token in tokens), initial=start))


_Entry = tuple[str, float | None, dict[str, float]]
"""A token's text and log-probability, and those of the likeliest tokens."""


def _pieces(
    decode: Callable[[Sequence[int]], str], scores: Iterable[Score], before: Sequence[int], most: int
) -> Iterator[_Entry]:
    """Yield the entries of tokens. A token without a whole character has the text `token_id:ID`, so that it is found
    in the likeliest tokens. before: the token in front of them, on which their spaces may depend."""
    for score in scores:
        known = len(decode(before))
        texts = {token: decode([*before, token])[known:] for token in (score.token, *(t for t, _ in score.top[:most]))}
        names = {t: f"token_id:{t}" if not text or "\ufffd" in text else text for t, text in texts.items()}
        top = {names[token]: logprob for token, logprob in score.top[:most]} | {names[score.token]: score.logprob}
        yield names[score.token], score.logprob, top
        before = [score.token]


def _chat_logprob(entry: _Entry) -> dict[str, Any]:
    name, logprob, top = entry
    likeliest = [{"token": t, "logprob": x, "bytes": list(t.encode())} for t, x in top.items()]
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": likeliest}
