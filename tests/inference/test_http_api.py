"""The HTTP interface and its bounds. Tests take requests from the inbox as the ranks do, and answer when they like."""

from __future__ import annotations

import http.client
import json
import math
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from megatron_longctx import serve
from megatron_longctx.chat import Chat, chat_of
from megatron_longctx.config import ServeConfig
from megatron_longctx.http_api import app, server
from megatron_longctx.http_api.access import API_KEY, Access, access_of
from megatron_longctx.http_api.app import Api
from megatron_longctx.http_api.inbox import Inbox
from megatron_longctx.http_api.parsing import ApiError, Model, checked
from megatron_longctx.http_api.server import server_of
from megatron_longctx.inference.scheduler import Bounds, Event, Request
from megatron_longctx.mcore.tokenizer import build_tokenizer
from tests.shared.jobs import PATIENCE_S

BODY = {"prompt": "ab", "max_tokens": 9}
BOUNDS = Bounds(tokens=10**4, positions=None, vocab_size=1000)
LONG = 1000  # the token whose text is long
LONG_TEXT = "x" * 200_000


def decode(ids: Any) -> str:
    return "".join(LONG_TEXT if i == LONG else chr(i) for i in ids)


def encode(text: str) -> list[int]:
    if text == "break":
        raise RuntimeError("a mistake of the server")
    return list(text.encode())


@dataclass
class Served:
    """A server on a port, and the ranks' end of its inbox."""

    port: int
    inbox: Inbox
    _taken: list[Request | int] = field(default_factory=list)

    def take(self) -> Request | int:
        """What arrives next."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._taken:
            assert time.monotonic() < deadline, "nothing arrives"
            self._taken += self.inbox.take(wait=True)
        return self._taken.pop(0)

    def request(self) -> Request:
        found = self.take()
        assert isinstance(found, Request)
        return found

    def say(self, number: int, text: str, reason: str | None = None) -> None:
        """The request's next tokens; the last with `reason`."""
        for i, letter in enumerate(text):
            self.inbox.deliver([Event(number, ord(letter), reason if i == len(text) - 1 else None, cached_tokens=1)])

    def connect(self, head: str = "", body: bytes = b"", **headers: str) -> socket.socket:
        """A connection that has sent a head with these headers (`_` for `-`), or nothing yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        if head:
            fields = {"Host": "here", "Content_Type": "application/json"} | headers
            lines = [f"{head} HTTP/1.1", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return connection

    def post(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """A connection that has sent a request."""
        data = json.dumps(body).encode()
        return self.connect(f"POST {path}", data, Content_Length=str(len(data)))

    def ask(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any, http.client.HTTPResponse]:
        """The answer of a request that needs no ranks."""
        return answer_on(self.post(body, path))


def answer_on(connection: socket.socket) -> tuple[int, Any, http.client.HTTPResponse]:
    with connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        text = response.read()
        return response.status, json.loads(text) if text.startswith((b"{", b"[")) else text, response


def ended(connection: socket.socket) -> bool:
    """Whether the server closes the connection without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def serving(
    max_waiting: int = 8,
    max_connections: int = 100,
    timeout_s: float = 30.0,
    access: Access | None = None,
    chat: Chat | None = None,
    inbox: Inbox | None = None,
    encode: Callable[[str], list[int]] = encode,
) -> Iterator[Served]:
    inbox = inbox or Inbox(max_waiting)
    model = Model("m", encode, decode, 0, chat or Chat(), 16, BOUNDS, 1)
    api = Api(model, inbox, 1000, timeout_s, access or Access())
    listener = socket.create_server(("127.0.0.1", 0))
    running = server_of(api, max_connections)
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield Served(listener.getsockname()[1], inbox)
    finally:
        inbox.stop()
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def test_a_stream_says_who_speaks_once_and_ends_with_what_was_asked_for(served: Served) -> None:
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


def test_a_stop_text_ends_the_request_for_the_ranks_too(served: Served) -> None:
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


def test_a_template_lays_a_chat_out_and_ends_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    with serving(chat=chat_of(str(path), build_tokenizer("byte-level"))) as served:
        connection = served.post({"messages": talk, "stop": "zz"}, "/v1/chat/completions")
        request = served.request()
        assert bytes(request.prompt) == b"user:ab</s>assistant:"
        served.say(request.number, "cd</s>user:")
        choice = answer_on(connection)[1]["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("cd", "stop")
        assert served.take() == request.number
        status, answer, _ = served.ask({"messages": [*talk, {"role": "tool", "content": ""}]}, "/v1/chat/completions")
        assert (status, answer["error"]["message"]) == (400, "messages: refused by the chat template: no tools")
        connection = served.post({"prompt": "a"})  # which is no chat
        served.say(served.request().number, "</s>", "length")
        assert answer_on(connection)[1]["choices"][0]["text"] == "</s>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", ["", "a"])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool, tokens: str) -> None:
    connection = served.post({**BODY, "stream": stream})
    number = served.request().number
    served.say(number, tokens)
    if stream and tokens:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    if stream and tokens:  # nobody reads: it shows with the next token
        served.say(number, "b")
    assert served.take() == number
    served.say(number, "c", "cancelled")
    assert served.inbox.num_requests == 0


def test_what_the_ranks_refuse_or_fail_at_is_told(served: Served) -> None:
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


def test_a_body_may_come_in_chunks(served: Served) -> None:
    data = json.dumps(BODY).encode()
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:5], data[5:])) + b"0\r\n\r\n"
    connection = served.connect("POST /v1/completions", parts, Transfer_Encoding="chunked")
    number = served.request().number
    served.say(number, "c", "length")
    assert answer_on(connection)[1]["choices"][0]["text"] == "c"


def test_a_body_that_is_too_large_is_refused_before_it_is_there(served: Served) -> None:
    status, answer, response = answer_on(served.connect("POST /v1/completions", Content_Length="1001"))
    assert status == 413 and "1001 bytes: expected at most 1000" in answer["error"]["message"]
    assert response.headers["connection"] == "close"
    chunk = b"200\r\n" + b" " * 512 + b"\r\n"
    status, answer, _ = answer_on(served.connect("POST /v1/completions", chunk * 2, Transfer_Encoding="chunked"))
    assert status == 413 and "more than 1000 bytes" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 900, 400, "not JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 900 + b"}", 200, ""),
        (b'{"prompt": "a", "temperature": ' + b"9" * 900 + b"}", 400, "int too large"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature=inf"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
        (b'{"prompt": "a", "model": "' + b"m" * 900 + b'"}', 404, "is not served here"),
        (b'{"prompt": "a", "stop": ["\\ud800"]}', 200, ""),
        (b'{"prompt": "a", "max_tokens": null, "n": null, "model": null}', 200, ""),
        (b'{"prompt": "a", "stream": "true"}', 400, "stream='true': expected true or false"),
        (b'{"prompt": "a", "stream_options": 5}', 400, "stream_options=5: expected an object"),
        (b'{"prompt": "a", "stream_options": {"include_usage": "no"}}', 400, "include_usage='no': expected true"),
        (b'{"prompt": "a", "response_format": {"type": "json_object"}}', 400, "response_format is not supported"),
        (b'{"prompt": "a", "response_format": {"type": "text"}, "min_p": 0.0}', 200, ""),
        (b'{"prompt": "a", "repetition_penalty": 1.2}', 400, "repetition_penalty is not supported"),
        (b'{"prompt": ["a"]}', 200, ""),
        (b'{"prompt": [[97, 98]]}', 200, ""),
        (b'{"prompt": ["a", "b"]}', 400, "prompt=['a', 'b']: expected one text"),
        (b'{"prompt": [[]]}', 400, "prompt=[[]]: expected one text"),
        (b'{"prompt": "a", "max_completion_tokens": 0}', 400, "max_completion_tokens=0: expected 1 or more"),
        (b'{"prompt": "break"}', 500, "the server failed on this request"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_mean_harm(served: Served, body: bytes, status: int, message: str) -> None:
    connection = served.connect("POST /v1/completions", body, Content_Length=str(len(body)))
    if status == 200:
        served.say(served.request().number, "c", "length")
    found, answer, _ = answer_on(connection)
    assert found == status
    if status != 200:
        assert message in answer["error"]["message"] and len(answer["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": None}, 16),
    ],
)
def test_the_most_tokens_have_two_names(served: Served, asked: dict[str, Any], most: int) -> None:
    connection = served.post({"prompt": "a", **asked})
    request = served.request()
    assert request.sampling.max_new_tokens == most
    served.say(request.number, "c", "stop")
    assert answer_on(connection)[0] == 200


def test_an_empty_answer_has_a_speaker_too(served: Served) -> None:
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
def test_messages_that_are_none(served: Served, messages: Any, message: str) -> None:
    status, answer, _ = served.ask({"messages": messages}, "/v1/chat/completions")
    assert status == 400 and message in answer["error"]["message"]


def test_paths_and_methods_that_are_not_served(served: Served) -> None:
    for head in ("GET /", "GET /v1/other", "GET /v1/models/other", "POST /v1/nothing"):
        status, answer, _ = answer_on(served.connect(head))
        assert status == 404 and answer["error"]["type"] == "not_found_error"
    status, answer, _ = answer_on(served.connect("GET /v1/completions"))
    assert status == 405 and answer["error"]["message"] == "GET /v1/completions is not served here"
    with served.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_connection_takes_one_request_after_another(served: Served) -> None:
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


def test_health_needs_no_key_and_everything_else_does() -> None:
    with serving(access=Access(("schlüssel",))) as served:
        assert answer_on(served.connect("GET /health"))[:2] == (200, {"status": "ok", "requests": 0})
        for path in ("/v1/models", "/v1/other"):
            for shown in ({}, {"Authorization": "Bearer schlussel"}, {"Authorization": "\xff"}):
                status, answer, _ = answer_on(served.connect(f"GET {path}", **shown))
                assert status == 401 and "missing or wrong API key" in answer["error"]["message"]
        right = "Bearer " + "schlüssel".encode().decode("latin-1")
        assert answer_on(served.connect("GET /v1/models", Authorization=right))[1]["data"][0]["id"] == "m"
        assert answer_on(served.connect("GET /v1/other", Authorization=right))[0] == 404
        assert answer_on(served.connect("GET /v1/other", Authorization=right.replace("B", "b")))[0] == 404


def test_a_full_queue_and_a_stopping_server_say_when_to_try_again() -> None:
    with serving(max_waiting=2) as served:
        waiting = [(served.post(BODY), served.request().number) for _ in range(2)]
        assert answer_on(served.connect("GET /health"))[1]["requests"] == 2
        status, answer, response = served.ask(BODY)
        assert status == 429 and response.headers["retry-after"] == "1"
        assert answer["error"]["type"] == "rate_limit_error"
        served.say(waiting[0][1], "c", "length")
        assert answer_on(waiting[0][0])[0] == 200
        later = served.post(BODY)
        served.say(served.request().number, "d", "length")
        assert answer_on(later)[1]["choices"][0]["text"] == "d"
        served.inbox.stop()
        status, answer, _ = answer_on(waiting[1][0])
        assert status == 503 and answer["error"]["message"] == "the server is stopping"
        for connection in (served.post(BODY), served.connect("GET /health")):
            status, _, response = answer_on(connection)
            assert status == 503 and response.headers["retry-after"] == "1"


def test_a_server_that_fails_ends_the_job_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: uvicorn.Server, sockets: object) -> None:
        raise RuntimeError("out of threads")

    monkeypatch.setattr(uvicorn.Server, "run", fail)
    inbox, before = Inbox(1), signal.getsignal(signal.SIGTERM)
    model = Model("m", encode, decode, 0, Chat(), 16, BOUNDS)
    with pytest.raises(RuntimeError, match="out of threads"), serve._serving(model, inbox, ServeConfig(port=0)):
        until(lambda: inbox.stopping)
    assert signal.getsignal(signal.SIGTERM) is before


def test_connections_that_ask_for_nothing_are_in_nobodys_way() -> None:
    with serving(max_connections=4) as served:
        elsewhere = socket.create_connection(
            ("127.0.0.1", served.port), source_address=("127.0.0.2", 0), timeout=PATIENCE_S
        )
        under_way = served.post(BODY)
        number = served.request().number
        half = served.connect("POST /v1/completions", b'{"prompt"', Content_Length="100")
        idle = [served.connect() for _ in range(9)]
        for _ in range(3):
            assert answer_on(served.connect("GET /health"))[0] == 200
        assert ended(half) and ended(idle[0]), "the first of those that wait for their clients"
        served.say(number, "c", "length")
        assert answer_on(under_way)[0] == 200
        elsewhere.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")  # of an address with one connection
        assert answer_on(elsewhere)[0] == 200
        for connection in (half, *idle):
            connection.close()


def test_more_requests_than_connections_are_told_so() -> None:
    with serving(max_connections=3) as served:
        under_way = [(served.post(BODY), served.request().number) for _ in range(3)]
        status, text, response = answer_on(served.connect("GET /health"))
        assert (status, text) == (503, b"Service Unavailable") and response.headers["connection"] == "close"
        for connection, number in under_way:
            served.say(number, "c", "length")
            assert answer_on(connection)[0] == 200
        until(lambda: answer_on(served.connect("GET /health"))[0] == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_said_all_gets_its_answer(served: Served, stream: bool) -> None:
    connection = served.post({**BODY, "stream": stream})
    connection.shutdown(socket.SHUT_WR)
    number = served.request().number
    time.sleep(3 * server._LOOK_S)  # looks whether somebody is there
    served.say(number, "cd", "length")
    status, text, _ = answer_on(connection)
    assert status == 200 and (b"[DONE]" in text if stream else text["choices"][0]["text"] == "cd")
    connection = served.post({**BODY, "stream": stream})
    connection.shutdown(socket.SHUT_WR)
    number = served.request().number
    connection.close()  # now it has gone
    assert served.take() == number
    served.say(number, "c", "cancelled")
    unfinished = served.connect("POST /v1/completions", b'{"prompt"', Content_Length="100")
    unfinished.shutdown(socket.SHUT_WR)
    assert ended(unfinished)


def test_ranks_that_hang_are_not_said_to_be_well() -> None:
    inbox = Inbox(8, stalled_s=1000.0)
    with serving(inbox=inbox) as served:
        waiting, streaming = served.post(BODY), served.post({**BODY, "stream": True})
        numbers = {served.request().number, served.request().number}
        inbox.round_began = time.monotonic() - 900
        assert answer_on(served.connect("GET /health"))[0] == 200
        inbox.round_began = time.monotonic() - 1001
        status, answer, response = answer_on(served.connect("GET /health"))
        assert status == 503 and answer == {"status": "stalled", "requests": 2} and response.headers["retry-after"]
        for connection in (waiting, streaming, served.post(BODY)):
            status, answer, _ = answer_on(connection)
            assert status == 503 and "one of them hangs" in answer["error"]["message"]
        assert {served.take(), served.take()} == numbers, "the ranks are told, should they come back"
        for number in numbers:
            served.say(number, "c", "cancelled")
        inbox.round_began = None
        assert answer_on(served.connect("GET /health"))[0] == 200


def test_what_another_sites_page_can_have_a_browser_send_is_refused() -> None:
    with serving(access=access_of("127.0.0.1", None, None, {})) as served:
        data = json.dumps(BODY).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            head = {"Content_Length": str(len(data)), "Content_Type": kind, "Host": "127.0.0.1"}
            status, answer, _ = answer_on(served.connect("POST /v1/completions", data, **head))
            assert status == 415 and "expected application/json" in answer["error"]["message"]
        head |= {"Content_Type": "Application/JSON; charset=utf-8", "Host": f"[::1]:{served.port}"}
        connection = served.connect("POST /v1/completions", data, **head)
        served.say(served.request().number, "c", "length")
        assert answer_on(connection)[0] == 200
        for path in ("/health", "/v1/models", "/v1/other"):
            status, answer, _ = answer_on(served.connect(f"GET {path}", Host=f"evil.example:{served.port}"))
            assert status == 421 and "'evil.example:" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("host", "allowed", "called", "refused"),
    [
        (
            "127.0.0.1",
            None,
            ["localhost", "127.0.0.9:80", "[::1]:80", "LOCALHOST:1", ""],
            ["here", "10.0.0.1", "[", "*"],
        ),
        ("::1", None, ["[::1]", "127.0.0.1"], ["[2001:db8::1]"]),
        ("localhost", "Model.example, [2001:db8::1]", ["model.example:1", "[2001:db8::1]", "localhost"], ["a.example"]),
        ("0.0.0.0", None, ["anything", "10.0.0.1"], []),
        ("0.0.0.0", "model.example", ["model.example"], ["localhost", "10.0.0.1"]),
        ("127.0.0.1", "*", ["evil.example"], []),
    ],
)
def test_by_which_names_a_server_may_be_called(
    host: str, allowed: str | None, called: list[str], refused: list[str]
) -> None:
    access = access_of(host, allowed, None, {API_KEY: "k"})
    assert [access.called(name) for name in called + refused] == [True] * len(called) + [False] * len(refused)


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n  two \nfirst\n")
    access = access_of("::", None, str(tmp_path / "keys"), {API_KEY: "first\nsecond"})
    assert access.keys == ("first", "second", "one", "two")
    assert [access.client(f"Bearer {key}".encode()) for key in (*access.keys, "three", "")] == [1, 2, 3, 4, None, None]
    assert access_of("127.0.0.1", None, None, {}).client(b"Bearer whatever") == 0
    (tmp_path / "empty").write_text("\n")
    for name, reason in (("gone", "No such file"), ("empty", "it has none")):
        with pytest.raises(ValueError, match=rf"serve.api_keys=.*{name}: expected a file with a key a line \({reason}"):
            access_of("127.0.0.1", None, str(tmp_path / name), {})
    with pytest.raises(ValueError, match=r"serve.host=::: expected a loopback address, or MEGATRON_LONGCTX_API_KEY"):
        access_of("::", None, None, {API_KEY: " "})


def test_the_ranks_are_told_whose_a_request_is() -> None:
    with serving(access=Access(("one", "two"))) as served:
        data = json.dumps(BODY).encode()
        for key, salt in (("one", 1), ("two", 2)):
            head = {"Content_Length": str(len(data)), "Authorization": f"Bearer {key}"}
            connection = served.connect("POST /v1/completions", data, **head)
            request = served.request()
            assert request.salt == salt
            served.say(request.number, "c", "length")
            assert answer_on(connection)[0] == 200


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "a" * 40}, "the prompt has 40 characters: expected at most 36, since a prompt may have 9 tokens"),
        ({"messages": [{"role": "user", "content": "a" * 20}] * 2}, "the prompt has 40 characters"),
        ({"prompt": [1] * 11}, "prompt has 11 tokens: expected at most 9"),
        ({"prompt": "a" * 8, "max_tokens": 3}, "prompt and max_tokens=11: expected at most 10 tokens together"),
        ({"prompt": [1, 1000], "max_tokens": 3}, "token=1000: expected an id from 0 to 999"),
    ],
    ids=str,
)
def test_prompts_that_are_too_long_are_refused_here(asked: dict[str, Any], message: str) -> None:
    """Before the time of cutting them into tokens, and before all ranks hear of them."""

    def short(text: str) -> list[int]:
        assert len(text) <= 36
        return encode(text)

    model = Model("m", short, decode, 0, Chat(), 1, Bounds(10, None, 1000), token_chars=4)
    with pytest.raises(ApiError, match=f"^{message}") as caught:
        checked(model, json.dumps(asked).encode(), chat="messages" in asked)
    assert caught.value.status == 400


def test_a_body_that_no_prompt_can_need_is_not_waited_for() -> None:
    model = Model("m", encode, decode, 0, Chat(), 1, Bounds(10, None, 1000), token_chars=4)
    assert model.most_bytes == 2**16 + 640 and replace(model, token_chars=None).most_bytes == math.inf
    longest = {"messages": [{"role": "user", "content": "😀"}] * 36}
    assert len(json.dumps(longest, indent=8)) < model.most_bytes


def test_long_texts_are_cut_into_tokens_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many beside each other would leave the tokens of others no time to go out."""
    monkeypatch.setattr(app, "_LONG", 10)
    under_way, most = [0], []

    def slow(text: str) -> list[int]:
        under_way[0] += 1
        most.append(under_way[0])
        time.sleep(0.05)
        under_way[0] -= 1
        return encode(text)

    with serving(encode=slow) as served:
        connections = [served.post(BODY) for _ in range(4)]
        for _ in connections:
            served.say(served.request().number, "c", "length")
        assert [answer_on(connection)[0] for connection in connections] == [200] * 4 and max(most) == 1


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_it_listens_at_addresses_of_ipv6(caplog: pytest.LogCaptureFixture) -> None:
    inbox, model = Inbox(1), Model("m", encode, decode, 0, Chat(), 16, BOUNDS)
    caplog.set_level("INFO", "megatron_longctx")
    with serve._serving(model, inbox, ServeConfig(host="::1", port=0)):
        found = re.search(r"http://\[::1\]:(\d+)/v1", caplog.text)
        assert found is not None
        connection = http.client.HTTPConnection("::1", int(found.group(1)), timeout=PATIENCE_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_clients_that_let_others_wait_are_let_go() -> None:
    with serving(timeout_s=1.5) as served:
        silent, slow = served.connect(), served.connect()
        slow.sendall(b"POST /v1/comp")
        kept = served.connect("GET /health")
        half = served.connect("POST /v1/completions", b'{"prompt"', Content_Length="100")
        status, answer, _ = answer_on(half)
        assert status == 408 and "did not come within 1.5 s" in answer["error"]["message"]
        assert ended(silent) and ended(slow)
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        while kept.recv(1000):
            pass
        # One that asks and does not read: its request is over, too.
        deaf = served.post({**BODY, "stream": True})
        number = served.request().number
        for _ in range(100):
            served.inbox.deliver([Event(number, LONG)])
        assert served.take() == number
        deaf.close()


def test_a_request_that_takes_long_is_not_let_go() -> None:
    with serving(timeout_s=0.2) as served:
        connection = served.post({**BODY, "stream": True})
        number = served.request().number
        time.sleep(2.5)  # more than two looks at the connection
        served.say(number, "c", "length")
        assert b'"c"' in answer_on(connection)[1]
