"""The HTTP interface: requests and answers."""

import http.client
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_longctx.inference.scheduler import Event
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.models.chat import Chat, load_chat
from megatron_longctx.serving.http_api import options
from megatron_longctx.serving.http_api.parsing import ApiError, Model, ParsedRequest, parse_request
from tests.inference.http_server import BODY, LIMITS, Served, answer_on, decode, encode, serving
from tests.shared.jobs import PATIENCE_S


def test_a_stream_has_the_role_once_and_ends_with_the_usage(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True, "stream_options": {"include_usage": True}}
    connection = served.post(body, "/v1/chat/completions")
    request = served.request()
    assert bytes(request.prompt) == b"ab\n" and request.sampling.stop == (0,)
    served.say(request.number, "cd", "length")
    status, text, response = answer_on(connection)
    assert status == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = text.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "c"},
        {"content": "d"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_stop_text_cancels_the_request(served: Served) -> None:
    connection = served.post({**BODY, "stop": ["yz"]})
    number = served.request().number
    served.say(number, "xyz")
    status, answer, _ = answer_on(connection)
    assert status == 200 and answer["choices"][0] == {
        "index": 0,
        "text": "x",
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert served.take() == number
    served.say(number, "!", "cancelled")


def test_a_template_formats_a_chat_and_ends_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    with serving(chat=load_chat(str(path), build_tokenizer("byte-level"))) as served:
        connection = served.post({"messages": talk, "stop": "zz"}, "/v1/chat/completions")
        request = served.request()
        assert bytes(request.prompt) == b"user:ab</s>assistant:"
        served.say(request.number, "cd</s>user:")
        choice = answer_on(connection)[1]["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("cd", "stop")
        assert served.take() == request.number
        status, answer, _ = served.ask({"messages": [*talk, {"role": "tool", "content": ""}]}, "/v1/chat/completions")
        assert (status, answer["error"]["message"]) == (400, "messages: refused by the chat template: no tools")
        body = served.complete(served.post({"prompt": "a"}), "</s>")  # not a chat
        assert body["choices"][0]["text"] == "</s>"


def test_errors_of_the_ranks_are_reported(served: Served) -> None:
    for refused, expected in ((True, 400), (False, 500)):
        for stream in (False, True):
            connection = served.post({**BODY, "stream": stream})
            number = served.request().number
            served.inbox.deliver([Event(number, finish_reason="error", error="of this kind", refused=refused)])
            status, answer, _ = answer_on(connection)
            assert (status, answer["error"]["message"]) == (expected, "of this kind")
    connection = served.post({**BODY, "stream": True})
    number = served.request().number
    served.say(number, "a")
    served.inbox.deliver([Event(number, finish_reason="error", error="late")])
    status, text, _ = answer_on(connection)
    assert status == 200 and b'"late"' in text and b"[DONE]" not in text


def test_answers_are_counted_before_there_are_any(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParsedRequest, "answers", property(lambda request: [][1]))
    status, answer, _ = served.ask({"prompt": [[97]] * 100, "n": 100_000})
    assert status == 400 and "asks for 10000000 answers: expected at most 8" in answer["error"]["message"]


def test_a_body_may_be_chunked(served: Served) -> None:
    data = json.dumps(BODY).encode()
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:5], data[5:])) + b"0\r\n\r\n"
    connection = served.connect("POST /v1/completions", parts, Transfer_Encoding="chunked")
    assert served.complete(connection)["choices"][0]["text"] == "c"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 900, 400, "not JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 900 + b"}", 200, ""),
        (b'{"prompt": "a", "temperature": ' + b"9" * 900 + b"}", 400, "expected a number of 64 bits"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature=inf"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
        (b'{"prompt": "a", "model": "' + b"m" * 900 + b'"}', 404, "is not served here"),
        (b'{"prompt": "a", "stop": ["\\ud800"]}', 200, ""),
        (b'{"prompt": "a", "max_tokens": null, "n": null, "model": null}', 200, ""),
        (b'{"prompt": "a", "stream": "true"}', 400, "stream='true': expected true or false"),
        (b'{"prompt": "a", "stream_options": 5}', 400, "stream_options=5: expected an object"),
        (b'{"prompt": "a", "stream_options": {"include_usage": "no"}}', 400, "include_usage='no': expected true"),
        (b'{"prompt": "a", "response_format": {"type": "xml"}}', 400, "expected the type text, json_object or"),
        (b'{"prompt": "a", "response_format": {"type": "text"}, "min_p": 0.0}', 200, ""),
        (b'{"prompt": "a", "repetition_penalty": "1"}', 400, "repetition_penalty='1': expected a number"),
        (b'{"prompt": "a", "logit_bias": {"-1": 1}}', 400, "expected an object of at most 1024 token ids"),
        (b'{"prompt": "a", "logit_bias": {"1000": 1}}', 400, "token=1000: expected an id from 0 to 999"),
        (b'{"prompt": "a", "stop_token_ids": [1000]}', 400, "token=1000: expected an id from 0 to 999"),
        (b'{"prompt": "a", "guided_choice": ["a"], "guided_regex": "a"}', 400, "expected one of them"),
        (b'{"prompt": "a", "guided_choice": []}', 400, "guided_choice=[]: expected a list of texts"),
        (b'{"prompt": "a", "guided_regex": "a", "ignore_eos": true}', 400, "not supported with a grammar"),
        (b'{"prompt": "a", "n": 0}', 400, "n=0: expected an integer from 1"),
        (b'{"prompt": "a", "n": 9}', 400, "asks for 9 answers: expected at most 8"),
        (b'{"prompt": "a", "n": 1, "best_of": 2, "stream": true}', 400, "best_of is not supported in a stream"),
        (b'{"prompt": "a", "n": 3, "best_of": 2}', 400, "best_of=2: expected at least n=3"),
        (b'{"prompt": "a", "logprobs": 21}', 400, "logprobs=21: expected an integer from 0 to 20"),
        (b'{"prompt": ["a"]}', 200, ""),
        (b'{"prompt": [[97, 98]]}', 200, ""),
        (b'{"prompt": [["a"], "b"]}', 400, "prompt=[['a'], 'b']: expected a text"),
        (b'{"prompt": [[]]}', 400, "prompt=[[]]: expected a text"),
        (b'{"prompt": "a", "max_completion_tokens": -1}', 400, "max_completion_tokens=-1: expected an integer from 0"),
        (b'{"prompt": "break"}', 500, "the server failed on this request"),
        (b"[]", 400, "not a JSON object"),
        (b'{"prompt": ""}', 400, "a text that is not empty"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 30 + b"}", 400, "expected an integer from 0"),
        (b'{"prompt": "a", "max_tokens": "2"}', 400, "max_tokens='2': expected an integer"),
        (b'{"prompt": "a", "temperature": -1}', 400, "temperature=-1"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature=nan"),
        (b'{"prompt": "a", "top_p": true}', 400, "top_p=True: expected a number"),
        (b'{"prompt": "a", "stop": [1]}', 400, "expected a text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_hostile_bodies(served: Served, body: bytes, status: int, message: str) -> None:
    connection = served.connect("POST /v1/completions", body, Content_Length=str(len(body)))
    if status == 200:
        served.complete(connection)
    else:
        found, answer, _ = answer_on(connection)
        assert found == status and message in answer["error"]["message"] and len(answer["error"]["message"]) < 300


TALK = {"messages": [{"role": "user", "content": "a"}]}
PART = {"type": "text", "text": "a"}
MODEL = Model("m", encode, decode, 0, Chat(), 16, LIMITS)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        *({key: {"type": "object"}} for key in ("chat_template_kwargs", "audio", "structural_tag")),
        *({key: ["a"]} for key in ("allowed_token_ids", "bad_words", "guided_grammar", "functions")),
        *({key: 5} for key in ("truncate_prompt_tokens", "priority", "length_penalty")),
        *({key: True} for key in ("return_token_ids", "include_stop_str_in_output", "use_beam_search")),
        *({key: False} for key in ("skip_special_tokens", "spaces_between_special_tokens")),
        *({key: "auto"} for key in ("regex", "reasoning_effort", "tempreature", "cache_salt")),
        *({key: "a"} for key in ("suffix", "function_call")),
        {"structured_outputs": {"grammar": "a"}},
        {"stream_options": {"include_obfuscation": True}},
        {"stream_options": {"include_usages": True}},
        {"top_k\u2028": 5},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strictness": 1}}},
    ],
    ids=str,
)
def test_keys_that_would_change_the_answer_are_refused(given: dict[str, Any], chat: bool) -> None:
    body = {**(TALK if chat else BODY), **given}
    with pytest.raises(ApiError, match="is not supported; leave it out") as caught:
        parse_request(MODEL, json.dumps(body).encode(), chat)
    (key,) = given
    param = caught.value.body["error"]["param"]
    assert caught.value.status == 400 and param.startswith(key) and ascii(key)[1:-1] in str(caught.value)


@pytest.mark.parametrize(
    ("body", "chat", "param"),
    [
        ({**BODY, "messages": TALK["messages"]}, False, "messages"),
        ({**TALK, "prompt": "a"}, True, "prompt"),
        ({**BODY, "logprobs": True}, False, "logprobs"),
        ({**BODY, "top_logprobs": 2}, False, "top_logprobs"),
        ({**TALK, "top_logprobs": 2}, True, "top_logprobs"),
        ({**TALK, "logprobs": 2}, True, "logprobs"),
        ({**TALK, "echo": True}, True, "echo"),
        ({**TALK, "best_of": 2}, True, "best_of"),
        ({**TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}, True, "tools"),
        ({**TALK, "tool_choice": "required"}, True, "tool_choice"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, True, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, True, "messages[0].tool_call_id"),
        ({**BODY, "prompt_logprobs": 2, "stream": True}, False, "prompt_logprobs"),
        ({**BODY, "echo": True, "logprobs": 2, "n": 2, "stream": True}, False, "n"),
        ({**BODY, "add_special_tokens": False}, False, "add_special_tokens"),
        ({**TALK, "add_special_tokens": True}, True, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, True, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, True, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [PART, PART | {"cut": 1}]}]}, True, "messages[0].content[1].cut"),
        ({"messages": [{"role": "user", "content": [PART | {"type": "image"}]}]}, True, "messages[0].content[0].type"),
        ({**BODY, "temperature": "hot"}, False, "temperature"),
    ],
    ids=str,
)
def test_errors_name_the_key(body: dict[str, Any], chat: bool, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(MODEL, json.dumps(body).encode(), chat)
    assert caught.value.status == 400 and caught.value.body["error"]["param"] == param


FUNCTION = {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("tool", "call", "param"),
    [
        ({"type": "function", "function": {}}, {}, "tools"),
        ({"type": "function", "function": {"name": 5}}, {}, "tools"),
        ({"type": "function", "function": {"name": "f", "strict": True}}, {}, "tools"),
        ({"type": "web_search"}, {}, "tools"),
        (None, {"function": FUNCTION | {"name": {"a": 1}}}, "messages[0].tool_calls"),
        (None, {"function": FUNCTION, "type": "custom"}, "messages[0].tool_calls.type"),
        (None, {"function": FUNCTION, "output": "a"}, "messages[0].tool_calls.output"),
        (None, {"function": FUNCTION | {"result": "a"}}, "messages[0].tool_calls.function.result"),
    ],
    ids=str,
)
def test_tools_and_calls_that_would_be_ignored_are_refused(tool: Any, call: dict[str, Any], param: str) -> None:
    template: Any = SimpleNamespace(source="tools <tool_call> arguments", render=lambda given: "a")
    model = replace(MODEL, chat=Chat(template))
    fine: dict[str, Any] = {"function": FUNCTION, "type": "function", "id": "1", "index": 0}
    function = {"type": "function", "function": {"name": "f", "strict": False}}

    def parsed(tool: Any, call: Any) -> ParsedRequest:
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return parse_request(model, json.dumps({"messages": [message], "tools": [tool]}).encode(), True)

    assert parsed(function, fine).tools is not None
    with pytest.raises(ApiError) as caught:
        parsed(tool or function, call or fine)
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({**BODY, "user": "x", "metadata": {"a": 1}, "store": True, "guided_json": None, "logprobs": None}, False),
        ({**BODY, "n": 1, "best_of": 1, "top_k": -1, "echo": False, "suffix": "", "add_special_tokens": True}, False),
        ({**TALK, "logprobs": False, "top_logprobs": 0, "modalities": ["text"], "tool_choice": "none"}, True),
        ({**TALK, "add_generation_prompt": True, "continue_final_message": False, "stream_options": None}, True),
        ({**TALK, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, True),
        # An answer of the `openai` package, sent back.
        (
            {"messages": [{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}]},
            True,
        ),
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_accepted(body: dict[str, Any], chat: bool) -> None:
    assert parse_request(MODEL, json.dumps(body).encode(), chat).prompts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{" + ",".join(f'"{i}":0' for i in range(100_001)) + "}", "expected at most 100000 strings, lists"),
        ('{"prompt": [' + "[]," * 100_001 + "1]}", "expected at most 100000 strings, lists"),
        ('{"prompt": [' + "1," * 120_000 + "1]}", "expected at most 10000 tokens"),
    ],
    ids=["keys", "lists", "numbers"],
)
def test_bodies_with_too_many_values_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    """Parsing them would hold Python's lock, and every other request, for seconds."""
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("parsed"))
    with pytest.raises(ApiError, match=message) as caught:
        parse_request(MODEL, body.encode(), chat=False)
    assert caught.value.status == 400


@pytest.mark.parametrize("value", ["x" * 10**6, [0] * 10**6, {"a": ["x" * 10**6]}], ids=["text", "list", "nested"])
def test_an_error_copies_no_large_value(value: Any) -> None:
    tracemalloc.start()
    try:
        shown = options.shown(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(shown) <= 100 and peak < 10**5


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": None}, 16),
    ],
)
def test_max_tokens_has_two_names(served: Served, parameters: dict[str, Any], most: int) -> None:
    connection = served.post({"prompt": "a", **parameters})
    request = served.request()
    assert request.sampling.max_new_tokens == most
    served.say(request.number, "c", "stop")
    assert answer_on(connection)[0] == 200


def test_a_text_that_is_held_back_begins_with_a_role(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True, "stop": ["xyz"]}
    connection = served.post(body, "/v1/chat/completions")
    served.say(served.request().number, "xy!", "length")
    chunks = answer_on(connection)[1].decode().split("\n\n")[:-2]
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "xy!"}, {}]


def test_an_empty_answer_has_a_role(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True}
    connection = served.post(body, "/v1/chat/completions")
    served.inbox.deliver([Event(served.request().number, None, "stop")])
    first, done, _ = answer_on(connection)[1].decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant"}
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a list of messages"),
        ("hello", "a list of messages"),
        (["hello"], "the role and the content"),
        ([{"role": "user"}], "the role and the content"),
        ([{"content": "hello"}], "the role and the content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "the role and the content"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_bad_messages_are_refused(served: Served, messages: Any, message: str) -> None:
    status, answer, _ = served.ask({"messages": messages}, "/v1/chat/completions")
    assert status == 400 and message in answer["error"]["message"]


def test_paths_and_methods_that_are_not_served(served: Served) -> None:
    for head in ("GET /", "GET /v1/other", "GET /v1/models/other", "POST /v1/nothing"):
        status, answer, _ = answer_on(served.connect(head))
        assert status == 404 and answer["error"]["type"] == "not_found_error"
    status, answer, response = served.get("/v1/completions")
    assert status == 405 and answer["error"]["message"] == "GET /v1/completions is not served here"
    assert response.headers["Allow"] == "POST"
    assert len(served.get("/" + 9000 * "a")[1]["error"]["message"]) < 200
    with served.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_connection_serves_several_requests(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    connection.connect()
    sock = connection.sock
    for text in "cd":
        body = json.dumps({**BODY, "stream": text == "d"})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        served.say(served.request().number, text, "length")
        answer = connection.getresponse()
        assert answer.status == 200 and f'"text": "{text}"' in answer.read().decode()
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200 and connection.sock is sock
    connection.close()
