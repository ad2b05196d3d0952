"""Parsing of request bodies: bytes to checked tokens and sampling settings, without side effects."""

from __future__ import annotations

import json
import math
import re
import reprlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from ...core.errors import is_line
from ...inference.sampling import Sampling
from ...inference.scheduler import RequestLimits
from ...models.chat import Chat

_MAX_STOPS = 16
_MAX_PARTS = 100_000  # strings, lists and objects of a body
_OTHER_BYTES = 2**16  # of a body, besides its prompt
_MAX_SHOWN = 100  # characters of a wrong value that an error repeats
_NEXT_PART = re.compile(r'["\[{]')
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = _MAX_SHOWN

# Keys by where they occur. Null is as good as leaving a key out.
_READ = ("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream")
_KNOWN = {True: {*_READ, "stream_options", "messages"}, False: {*_READ, "stream_options", "prompt"}}
# No value of these changes a token.
_HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "parallel_tool_calls"),
}
# These change no token with these values, which are what this server does anyway. All other keys are refused, also
# those of other servers: the client would not notice that they are ignored.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(
        ("echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)
    ),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}
_NEUTRAL_IN: Mapping[bool, Mapping[str, tuple[Any, ...]]] = {  # by whether it is a chat
    True: {
        **{"logprobs": (False,), "top_logprobs": (0,), "modalities": (["text"],), "add_special_tokens": (False,)},
        **{"add_generation_prompt": (True,), "continue_final_message": (False,)},
    },
    False: {"add_special_tokens": (True,)},
}
_NEUTRAL_STREAM_OPTIONS = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("tool_calls", "annotations"), ([],))


class ApiError(Exception):
    """An answer with a status other than 200. param: the key of the body that is wrong."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class Model:
    """The model that is served.

    Attributes:
        stop_token: the token that ends a text; None if there is none.
        default_tokens: the most tokens of an answer if the request does not say.
        limits: of a single request.
        max_token_chars: the most characters that a token can stand for; None if unknown.
        begin: tokens in front of a text. Chats have theirs from the template; lists of tokens contain their own.
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    stop_token: int | None
    chat: Chat
    default_tokens: int
    limits: RequestLimits
    max_token_chars: int | None = None
    begin: tuple[int, ...] = ()

    @property
    def max_bytes(self) -> float:
        """The size of a body beyond which it cannot be served: a character, or a token's number, takes at most 16
        bytes, however it is written."""
        if self.max_token_chars is None:
            return math.inf
        return _OTHER_BYTES + 16 * self.max_token_chars * self.limits.tokens

    def check_chars(self, chars: int) -> None:
        """Refuse a text that is too long for any tokenization, before tokenizing costs time that all requests share.

        Raises:
            ApiError: it is too long.
        """
        most = None if self.max_token_chars is None else self.max_token_chars * self.limits.prompt
        if most is not None and chars > most:
            expected = (
                f"expected at most {most}, because a prompt may have {self.limits.prompt} tokens ({self.limits.key})"
            )
            raise ApiError(400, f"the prompt has {chars} characters: {expected}")


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request.

    Attributes:
        stops: texts that end the answer.
        usage: whether a stream ends with the usage.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    chat: bool


def parse_request(model: Model, data: bytes, chat: bool) -> ParsedRequest:
    """Parse the body of a request.

    Raises:
        ApiError: it cannot be served.
    """
    body = _object(data, model.limits.tokens)
    if body.get("model") not in (None, model.name):
        name = _shown(body["model"])
        raise ApiError(404, f"model={name} is not served here; the model is {model.name!r}", "not_found_error", "model")
    _refuse_ignored(body, _KNOWN[chat] | _HARMLESS, {**_NEUTRAL, **_NEUTRAL_IN[chat]})
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options={_shown(options)}: expected an object", param="stream_options")
    _refuse_ignored(options, {"include_usage"}, _NEUTRAL_STREAM_OPTIONS, "stream_options.")
    prompt = tuple(_chat_prompt(model, body) if chat else _prompt(model, body))
    sampling = _sampling(model, body, chat, model.limits.together - len(prompt))
    try:  # here, where it costs other requests nothing
        model.limits.check(prompt, sampling.max_new_tokens)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return ParsedRequest(
        prompt=prompt,
        sampling=sampling,
        stops=_stops(body) + (model.chat.stop_texts if chat else ()),
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
        chat=chat,
    )


def _object(data: bytes, max_tokens: int) -> dict[str, Any]:
    """Return the JSON object in `data`, which may have lists of `max_tokens` numbers."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        _check_parts(text, max_tokens)
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object; send one with model and prompt or messages")
    return body


def _check_parts(text: str, max_tokens: int) -> None:
    """Refuse JSON with more values than any request needs. `json.loads` holds Python's lock until it has made all of
    them: ten million bytes of keys take it seconds, in which no other request gets a token. This loop lets others run.

    Raises:
        ApiError: it has too many.
        ValueError: it is not JSON.
    """
    at = parts = commas = 0
    while (found := _NEXT_PART.search(text, at)) is not None:
        parts += 1
        commas += text.count(",", at, found.start())
        if parts > _MAX_PARTS or commas > _MAX_PARTS + max_tokens:
            break
        at = scanstring(text, found.end())[1] if found[0] == '"' else found.end()
    else:
        commas += text.count(",", at)
    if parts > _MAX_PARTS:
        raise ApiError(400, f"the body has too many values: expected at most {_MAX_PARTS} strings, lists and objects")
    if commas > _MAX_PARTS + max_tokens:
        raise ApiError(400, f"the body has too many values: expected at most {max_tokens} tokens")


def _refuse_ignored(
    given: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Refuse keys that are not read and might change the answer. where: the path of the object, for the message."""
    for key, value in given.items():
        if value is None or key in known or any(_is_same(value, each) for each in neutral.get(key, ())):
            continue
        name = where + key[:_MAX_SHOWN]
        raise ApiError(400, f"{_printable(name)} is not supported; leave it out", param=name)


def _is_same(value: Any, other: Any) -> bool:
    """Whether JSON values are equal; unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _sampling(model: Model, body: Mapping[str, Any], chat: bool, room: int) -> Sampling:
    """Return how to draw the answer. room: the most tokens that it may have."""
    key = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    most = _number(body, key, int)
    if most is not None and most < 1:
        raise ApiError(400, f"{key}={_shown(most)}: expected 1 or more", param=key)
    ends = () if model.stop_token is None else (model.stop_token,)
    try:
        return Sampling(
            max_new_tokens=max(1, min(model.default_tokens, room)) if most is None else int(most),
            temperature=float(_number(body, "temperature", float, 1.0)),
            top_k=_number(body, "top_k", int),
            top_p=float(_number(body, "top_p", float, 1.0)),
            seed=int(_number(body, "seed", int, time.time_ns())),
            stop=ends + (model.chat.stop_tokens if chat else ()),
        )
    except (ValueError, OverflowError) as error:
        raise ApiError(400, str(error)) from None


def _number(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ApiError(
            400, f"{key}={_shown(value)}: expected {'a number' if kind is float else 'an integer'}", param=key
        )
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{key}={_shown(value)}: expected true or false", param=key)
    return bool(value)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and len(stops) <= _MAX_STOPS and all(isinstance(s, str) and s for s in stops)):
        raise ApiError(400, f"stop={_shown(stops)}: expected a text or up to {_MAX_STOPS} texts", param="stop")
    return tuple(stops)


def _prompt(model: Model, body: Mapping[str, Any]) -> Sequence[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list of one prompt
    if isinstance(prompt, str):
        encoded = _encode(model, str, prompt)
        prompt = [*(model.begin if encoded else ()), *encoded]
    most = f"{model.limits.prompt} ({model.limits.key})"
    if isinstance(prompt, list) and len(prompt) > model.limits.tokens:  # before looking at each of them
        raise ApiError(400, f"prompt has {len(prompt)} tokens: expected at most {most}", param="prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return prompt
    expected = "one text that is not empty, or a list of token ids"
    raise ApiError(400, f"prompt={_shown(body.get('prompt'))}: expected {expected}")


def _chat_prompt(model: Model, body: Mapping[str, Any]) -> Sequence[int]:
    messages = _messages(body)
    model.check_chars(sum(len(message["content"]) for message in messages))
    return _encode(model, model.chat.text, messages)


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the role and the text of every message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a list of messages with role and content", param="messages")
    checked = []
    for i, message in enumerate(messages):
        if isinstance(message, dict):
            _refuse_ignored(message, ("role", "content"), _NEUTRAL_IN_MESSAGE, f"messages[{i}].")
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            content = _joined(content, f"messages[{i}].content")
        if not isinstance(role, str) or not isinstance(content, str):
            expected = "expected the role and the content of every message to be text"
            raise ApiError(400, f"messages: {expected}", param=f"messages[{i}]")
        checked.append({"role": role, "content": content})
    return checked


def _joined(parts: Sequence[Any], where: str) -> str | None:
    """Return the text of a message that is given in parts; None if not all of them are text."""
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return None
        _refuse_ignored(part, ("text",), {"type": ("text",)}, f"{where}[{i}].")
        texts.append(part["text"])
    return "".join(texts)


def _encode(model: Model, to_text: Callable[[Any], str], source: Any) -> Sequence[int]:
    try:
        text = to_text(source)
        model.check_chars(len(text))
        text.encode()  # JSON may contain half a surrogate pair
        return model.encode(text)
    except UnicodeEncodeError:
        raise ApiError(400, "the text is not valid Unicode") from None
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _shown(value: Any) -> str:
    """Return the beginning of a value, which may be as large as a body."""
    return _SHOWN.repr(value)[:_MAX_SHOWN]


def _printable(text: str) -> str:
    return text if is_line(text) else ascii(text)[1:-1]
