"""Checks of values in request bodies, and the settings of sampling in them."""

import json
import reprlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...core.errors import is_line
from ...inference.sampling import Sampling

MAX_LOGPROBS = 20
_MAX_BIASES = 1024
_MAX_SHOWN = 100  # characters of a wrong value that an error repeats
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = _MAX_SHOWN

_NUMBERS = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
}
SAMPLING_KEYS = {
    *_NUMBERS,
    *("max_tokens", "max_completion_tokens", "top_k", "seed", "min_tokens", "logit_bias", "ignore_eos"),
    "stop_token_ids",
    *("prompt_logprobs", "response_format", "guided_json", "guided_regex", "guided_choice", "structured_outputs"),
}


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


def wrong(key: str, value: Any, expected: str) -> ApiError:
    """Return the error for a value of a key."""
    return ApiError(400, f"{key}={shown(value)}: expected {expected}", param=key)


def number(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise wrong(key, value, "a number" if kind is float else "an integer")
    try:
        return kind(value)
    except OverflowError:
        raise wrong(key, value, "a number of 64 bits") from None


def count(body: Mapping[str, Any], key: str, least: int, most: int, default: Any = None) -> Any:
    """Return an integer in these bounds."""
    value = number(body, key, int, default)
    if value is not None and not least <= value <= most:
        raise wrong(key, value, f"an integer from {least} to {most}")
    return value


def flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return bool(value)


def is_ids(value: Any) -> bool:
    """Whether a value is a list of integers."""
    return isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def refuse_ignored(
    given: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Refuse keys that are not read and might change the answer. where: the path of the object, for the message."""
    for key, value in given.items():
        if value is None or key in known or any(_is_same(value, each) for each in neutral.get(key, ())):
            continue
        name = where + key[:_MAX_SHOWN]
        raise ApiError(400, f"{printable(name)} is not supported; leave it out", param=name)


def _is_same(value: Any, other: Any) -> bool:
    """Whether JSON values are equal; unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def shown(value: Any) -> str:
    """Return the beginning of a value, which may be as large as a body."""
    return _SHOWN.repr(value)[:_MAX_SHOWN]


def printable(text: str) -> str:
    return text if is_line(text) else ascii(text)[1:-1]


def read_sampling(
    body: Mapping[str, Any], default_tokens: int, ends: Sequence[int], logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Return how to draw the answers.

    `default_tokens` are the most of an answer if the body does not say; `ends` end it unless the body ignores them.
    """
    key = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    stops = body.get("stop_token_ids") or []
    if not is_ids(stops):
        raise wrong("stop_token_ids", stops, "a list of token ids")
    grammar, ignores = _grammar(body), flag(body, "ignore_eos")
    if grammar is not None and (ignores or stops or body.get("min_tokens")):
        raise ApiError(400, "ignore_eos, stop_token_ids and min_tokens are not supported with a grammar")
    top_k = number(body, "top_k", int)
    try:
        numbers: dict[str, Any] = {key: number(body, key, float, value) for key, value in _NUMBERS.items()}
        return Sampling(
            max_new_tokens=count(body, key, 0, 2**62, default_tokens),
            top_k=None if top_k in (0, -1) else top_k,
            seed=number(body, "seed", int, time.time_ns()),
            stop=(*(() if ignores else ends), *stops),
            logit_bias=_biases(body.get("logit_bias")),
            grammar=grammar,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            min_tokens=count(body, "min_tokens", 0, 2**62, 0),
            **numbers,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs of `logit_bias`, an object whose keys are token ids as text."""
    given = given or {}
    expected = f"an object of at most {_MAX_BIASES} token ids and numbers from -100 to 100"
    if not isinstance(given, dict) or len(given) > _MAX_BIASES:
        raise wrong("logit_bias", given, expected)
    for token, bias in given.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isascii() and token.isdecimal() and len(token) < 13 and is_number and -100 <= bias <= 100):
            raise wrong("logit_bias", given, expected)
    return tuple((int(token), float(bias)) for token, bias in given.items())


def _grammar(body: Mapping[str, Any]) -> str | None:
    """Return the grammar that an answer must follow, as `serving.grammar` reads it."""
    found: dict[str, tuple[str, Any]] = {}
    form = body.get("response_format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if isinstance(form, dict):
        refuse_ignored(form, ("type", *["json_schema"] * (kind == "json_schema")), {}, "response_format.")
    if kind == "json_schema":
        inner = form["json_schema"] if isinstance(form.get("json_schema"), dict) else {}
        schema = inner.get("schema")
        if not isinstance(schema, dict):
            raise wrong("response_format", form, "json_schema.schema, an object")
        refuse_ignored(inner, ("name", "description", "schema", "strict"), {}, "response_format.json_schema.")
        found["response_format"] = "json", schema
    elif kind == "json_object":
        found["response_format"] = "json", {"type": "object"}
    elif kind != "text":
        raise wrong("response_format", form, "the type text, json_object or json_schema")
    structured = body.get("structured_outputs") or {}
    if not isinstance(structured, dict):
        raise wrong("structured_outputs", structured, "an object")
    refuse_ignored(structured, ("json", "regex", "choice"), {}, "structured_outputs.")
    for kind in ("json", "regex", "choice"):
        for key, value in (
            (f"guided_{kind}", body.get(f"guided_{kind}")),
            ("structured_outputs", structured.get(kind)),
        ):
            if value is not None:
                if not _is_grammar(kind, value):
                    raise wrong(key, value, {"json": "a schema", "regex": "a text"}.get(kind, "a list of texts"))
                found[f"{key}.{kind}"] = kind, value
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)}: expected one of them", param=next(iter(found)))
    return None if not found else json.dumps(dict(found.values()))


def _is_grammar(kind: str, value: Any) -> bool:
    if kind == "choice":
        return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)
    return isinstance(value, str) or (kind == "json" and isinstance(value, dict))
