"""Tools: the calls in a model's answer, by the format that its chat template asks for."""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_QWEN = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_GPT_OSS = re.compile(r"([^<]*)<\|channel\|>(.*?)<\|message\|>(.*?)(?=<\|(?:end|call|return|start)\|>|\Z)", re.DOTALL)
_GPT_OSS_NAME = re.compile(r"to=functions\.([\w.-]+)")


class Parsed(NamedTuple):
    """An answer. calls: pairs of a function's name and its arguments. reasoning: None if the format has none."""

    content: str
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the interface."""
        calls = [
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for name, arguments in self.calls
        ]
        reasoning = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        content = self.content or (None if calls else "")
        return {"content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


class Format(NamedTuple):
    """A format of calls. parse: raises ValueError for a malformed call. stops: texts that end an answer with calls."""

    parse: Callable[[str], Parsed]
    stops: tuple[str, ...] = ()

    def parsed(self, text: str) -> Parsed:
        """Return the calls in a text; a text with a malformed call is content as it is."""
        try:
            return self.parse(text)
        except (ValueError, KeyError, TypeError, RecursionError):
            return Parsed(text)


def _qwen(text: str) -> Parsed:
    calls = tuple(_call(json.loads(block), "arguments") for block in _QWEN.findall(text))
    return Parsed(_QWEN.sub("", text).strip() if calls else text, calls)


def _llama(text: str) -> Parsed:
    rest, calls = text.strip().removeprefix("<|python_tag|>").lstrip(), []
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        calls.append(_call(value, "parameters"))
        rest = rest[end:].lstrip("; \n")
    return Parsed("", tuple(calls)) if calls else Parsed(text)


def _gpt_oss(text: str) -> Parsed:
    calls: list[tuple[str, Any]] = []
    reasoning: list[str] = []
    content: list[str] = []
    for header, channel, body in _GPT_OSS.findall(text):
        if name := _GPT_OSS_NAME.search(header + channel):
            calls.append((name[1], json.loads(body)))
        else:
            (reasoning if channel.strip() == "analysis" else content).append(body)
    return Parsed("".join(content), tuple(calls), "".join(reasoning)) if calls or reasoning or content else Parsed(text)


def _call(value: Mapping[str, Any], arguments: str) -> tuple[str, Any]:
    return str(value["name"]), value[arguments]


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks a model for; None if it is none of those known here."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "to=functions." in template:
        return Format(_gpt_oss, ("<|call|>",))
    if "<tool_call>" in template and "<function=" not in template and "arguments" in template:
        return Format(_qwen)
    if "parameters" in template and ("ipython" in template or "<|python_tag|>" in template):
        return Format(_llama)
    return None
