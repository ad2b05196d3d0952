"""Parsing of request bodies: bytes to checked tokens and sampling settings, without side effects."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from ...inference.sampling import Sampling
from ...inference.scheduler import RequestLimits
from ...models.chat import Chat
from .options import (
    MAX_LOGPROBS,
    SAMPLING_KEYS,
    ApiError,
    count,
    flag,
    is_ids,
    printable,
    read_sampling,
    refuse_ignored,
    shown,
    wrong,
)
from .tools import Format, format_of

_MAX_STOPS = 16
_MAX_PARTS = 100_000  # strings, lists and objects of a body
_OTHER_BYTES = 2**16  # of a body, besides its prompt
_MAX_SCORES = 2**23  # log-probabilities of prompts in one answer
_NEXT_PART = re.compile(r'["\[{]')

# Keys by where they occur. Null is as good as leaving a key out.
_READ = {*SAMPLING_KEYS, "model", "stop", "stream", "stream_options", "n", "logprobs"}
_KNOWN = {
    True: {*_READ, "messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"},
    False: {*_READ, "prompt", "echo", "best_of"},
}
# No value of these changes a token.
_HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prediction",
}
# These change no token with these values, which are what this server does anyway. All other keys are refused, also
# those of other servers: the client would not notice that they are ignored.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
    **dict.fromkeys(("tools", "functions", "bad_words"), ([],)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    **{"priority": (0,), "chat_template_kwargs": ({},), "suffix": ("",), "parallel_tool_calls": (True, False)},
}
_NEUTRAL_IN: Mapping[bool, Mapping[str, tuple[Any, ...]]] = {  # by whether it is a chat
    True: {
        **{"modalities": (["text"],), "add_special_tokens": (False,)},
        **{"add_generation_prompt": (True,), "continue_final_message": (False,)},
    },
    False: {"add_special_tokens": (True,)},
}
_NEUTRAL_STREAM_OPTIONS = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("tool_calls", "annotations"), ([],))


@dataclass(frozen=True)
class Model:
    """The model that is served."""

    name: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    stop_token: int | None  # ends a text; None if there is none
    chat: Chat
    default_tokens: int  # the most tokens of an answer if the request does not say
    limits: RequestLimits  # of a single request
    max_token_chars: int | None = None  # the most characters that a token can stand for; None if unknown
    begin: tuple[int, ...] = ()  # in front of a text; chats have theirs from the template, lists of tokens their own
    check_grammar: Callable[[str], Any] = str  # raises ValueError for a grammar that cannot be used

    @property
    def max_bytes(self) -> float:
        """The size of a body beyond which it cannot be served: a character, or a token's number, takes at most 16
        bytes, however it is written."""
        if self.max_token_chars is None:
            return math.inf
        return _OTHER_BYTES + 16 * self.max_token_chars * self.limits.tokens

    def check_chars(self, chars: int) -> None:
        """Raise ApiError for a text too long for any tokenization, before it costs time that all requests share."""
        most = None if self.max_token_chars is None else self.max_token_chars * self.limits.prompt
        if most is not None and chars > most:
            expected = (
                f"expected at most {most}, because a prompt may have {self.limits.prompt} tokens ({self.limits.key})"
            )
            raise ApiError(400, f"the prompt has {chars} characters: {expected}")


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    stops: tuple[str, ...]  # texts that end an answer
    stream: bool
    usage: bool  # whether a stream ends with the usage
    chat: bool
    texts: tuple[str, ...] = ()  # of prompts, in front of their answers; empty without `echo`
    n: int = 1  # the answers to return for each prompt
    best_of: int = 1  # the answers to generate for each prompt
    logprobs: int | None = None  # of the body: the likeliest tokens to show for each token; None for none
    prompt_logprobs: int | None = None  # the same for prompts
    tools: Format | None = None  # the format of calls in answers; None if the model has not been offered any tools

    @property
    def answers(self) -> list[tuple[tuple[int, ...], Sampling, int]]:
        """The prompt, the sampling and the stream of every answer; each prompt is scored once."""
        unscored = replace(self.sampling, prompt_logprobs=None)
        samplings = [self.sampling, *[unscored] * (self.best_of - 1)]
        return [(prompt, sampling, i) for prompt in self.prompts for i, sampling in enumerate(samplings)]


def parse_request(model: Model, data: bytes, chat: bool) -> ParsedRequest:
    """Parse the body of a request. Raises ApiError: it cannot be served."""
    body = _object(data, model.limits.tokens)
    if body.get("model") not in (None, model.name):
        message = f"model={shown(body['model'])} is not served here; the model is {model.name!r}"
        raise ApiError(404, message, "not_found_error", "model")
    refuse_ignored(body, _KNOWN[chat] | _HARMLESS, {**_NEUTRAL, **_NEUTRAL_IN[chat]})
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    refuse_ignored(options, {"include_usage"}, _NEUTRAL_STREAM_OPTIONS, "stream_options.")
    offered, tools = _tools(model, body) if chat else ([], None)
    prompts, sources = ([_chat_prompt(model, body, offered)], []) if chat else _prompts(model, body)
    stream, echo = flag(body, "stream"), flag(body, "echo")
    n = count(body, "n", 1, _MAX_PARTS, 1)
    best_of = count(body, "best_of", 1, _MAX_PARTS, n)
    if best_of < n:
        raise wrong("best_of", best_of, f"at least n={n}")
    logprobs, prompt_logprobs = _logprobs(body, chat), count(body, "prompt_logprobs", 0, MAX_LOGPROBS)
    whole = {"best_of": best_of > n, "prompt_logprobs": prompt_logprobs is not None}
    for key, is_asked in (whole | {"n": echo and n > 1 and logprobs is not None}).items():
        if stream and is_asked:
            raise ApiError(400, f"{key} is not supported in a stream like this", param=key)
    ends = () if model.stop_token is None else (model.stop_token,)
    longest = max(map(len, prompts))
    sampling = read_sampling(
        body,
        max(1, min(model.default_tokens, model.limits.together - longest)),
        ends + (model.chat.stop_tokens if chat else ()),
        0 if logprobs is None and best_of > n else logprobs,
        max((x for x in (prompt_logprobs, logprobs if echo else None) if x is not None), default=None),
    )
    _check(model, prompts, sampling)
    return ParsedRequest(
        prompts=tuple(map(tuple, prompts)),
        sampling=sampling,
        stops=_stops(body) + (model.chat.stop_texts if chat else ()) + (tools.stops if tools else ()),
        stream=stream,
        usage=flag(options, "include_usage"),
        chat=chat,
        texts=tuple(s if isinstance(s, str) else model.decode(s) for s in sources) if echo else (),
        n=n,
        best_of=best_of,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        tools=tools,
    )


def _check(model: Model, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Refuse what the ranks would refuse, here, where it costs other requests nothing."""
    if sampling.prompt_logprobs is not None:
        scores = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs)
        if scores > _MAX_SCORES:
            raise ApiError(400, f"the body asks for {scores} log-probabilities: expected at most {_MAX_SCORES}")
    try:
        for prompt in prompts:
            model.limits.check(prompt, sampling)
        if sampling.grammar is not None:
            model.check_grammar(sampling.grammar)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """Return how many likeliest tokens to show for each token of the answer; None to show no log-probabilities."""
    if not chat:
        return count(body, "logprobs", 0, MAX_LOGPROBS)  # type: ignore[no-any-return]
    most = count(body, "top_logprobs", 0, MAX_LOGPROBS, 0)
    if flag(body, "logprobs"):
        return most  # type: ignore[no-any-return]
    if most:
        raise wrong("top_logprobs", most, "logprobs=true beside it")
    return None


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
    Raises ApiError: it has too many. Raises ValueError: it is not JSON.
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


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and len(stops) <= _MAX_STOPS and all(isinstance(s, str) and s for s in stops)):
        raise ApiError(400, f"stop={shown(stops)}: expected a text or up to {_MAX_STOPS} texts", param="stop")
    return tuple(stops)


def _prompts(model: Model, body: Mapping[str, Any]) -> tuple[list[Sequence[int]], list[Any]]:
    """Return the tokens of `prompt`, a text, a list of token ids, or a list of either; and these one by one."""
    given = body.get("prompt")
    several = isinstance(given, list) and bool(given) and all(isinstance(each, str | list) for each in given)
    most = f"{model.limits.prompt} ({model.limits.key})"
    prompts: list[Sequence[int]] = []
    sources: list[Any] = given if several and isinstance(given, list) else [given]
    for prompt in sources:
        if isinstance(prompt, list) and len(prompt) > model.limits.tokens:  # before looking at each of them
            raise ApiError(400, f"prompt has {len(prompt)} tokens: expected at most {most}", param="prompt")
        if isinstance(prompt, str):
            encoded = _encode(model, str, prompt)
            prompt = [*(model.begin if encoded else ()), *encoded]
        if not (prompt and is_ids(prompt)):
            raise wrong("prompt", given, "a text that is not empty, a list of token ids, or a list of either")
        prompts.append(prompt)
    return prompts, sources


def _tools(model: Model, body: Mapping[str, Any]) -> tuple[list[Any], Format | None]:
    """Return the tools that the model is offered, and the format of its calls."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "none", "auto") or (choice == "auto" and not tools):
        raise ApiError(400, f"tool_choice={shown(choice)} is not supported; leave it out", param="tool_choice")
    if not tools or choice == "none":
        return [], None
    listed = tools if isinstance(tools, list) else []
    functions: list[Any] = [t.get("function") for t in listed if isinstance(t, dict) and t.get("type") == "function"]
    if not functions or len(functions) < len(tools) or not all(_is_function(each) for each in functions):
        raise wrong("tools", tools, "a list of functions with names")
    if any(each.get("strict") for each in functions):
        raise ApiError(400, "strict=true of tools is not supported; leave it out", param="tools")
    if flag(body, "parallel_tool_calls") is False and body.get("parallel_tool_calls") is not None:
        raise ApiError(400, "parallel_tool_calls=false is not supported; leave it out", param="parallel_tool_calls")
    return tools, _format(model, "tools")


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _format(model: Model, key: str) -> Format:
    template = model.chat.template
    found = None if template is None else format_of(template.source)
    if found is None:
        known = "tools in the format of Llama, Qwen or gpt-oss"
        raise ApiError(400, f"{printable(key)} is not supported: the chat template has no {known}", param=key)
    return found


def _chat_prompt(model: Model, body: Mapping[str, Any], tools: list[Any]) -> Sequence[int]:
    messages = _messages(model, body)
    model.check_chars(sum(len(message["content"]) for message in messages))
    return _encode(model, lambda source: model.chat.text(source, tools=tools), messages)


def _messages(model: Model, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the role and the text of every message, and what it says about calls of tools."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a list of messages with role and content", param="messages")
    checked = []
    for i, message in enumerate(messages):
        message = message if isinstance(message, dict) else {}  # refused as one without a role
        more = _about_calls(model, message, f"messages[{i}].")
        refuse_ignored(message, ("role", "content", *more), _NEUTRAL_IN_MESSAGE, f"messages[{i}].")
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            content = _joined(content, f"messages[{i}].content")
        if content is None and "tool_calls" in more:
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            expected = "expected the role and the content of every message to be text"
            raise ApiError(400, f"messages: {expected}", param=f"messages[{i}]")
        checked.append({"role": role, "content": content, **more})
    return checked


def _about_calls(model: Model, message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `tool_calls` of an answer with arguments as objects, or `tool_call_id` and `name` of a tool's message."""
    if message.get("role") == "tool":
        more = {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
        if not all(isinstance(value, str) for value in more.values()):
            raise ApiError(400, f"{where}tool_call_id: expected a text", param=where + "tool_call_id")
    elif message.get("role") == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else [None]
        more = {"tool_calls": [_past_call(call, where + "tool_calls") for call in calls]}
    else:
        return {}
    if more:
        _format(model, where + next(iter(more)))
    return more


def _past_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of an earlier answer, whose arguments templates read as an object."""
    try:
        arguments = call["function"]["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not (_is_function(call["function"]) and isinstance(parsed, dict)):
            raise ValueError
    except (TypeError, KeyError, ValueError, RecursionError):
        expected = "expected calls with function.name and function.arguments, a JSON object as text"
        raise ApiError(400, f"{where}: {expected}", param=where) from None
    refuse_ignored(call, ("id", "index", "function"), {"type": ("function",)}, f"{where}.")
    refuse_ignored(call["function"], ("name", "arguments"), {}, f"{where}.function.")
    function = {"name": call["function"]["name"], "arguments": parsed}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


def _joined(parts: Sequence[Any], where: str) -> str | None:
    """Return the text of a message that is given in parts; None if not all of them are text."""
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return None
        refuse_ignored(part, ("text",), {"type": ("text",)}, f"{where}[{i}].")
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
