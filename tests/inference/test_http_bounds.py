"""The HTTP interface's limits: access, sizes, connections, and time limits for clients and ranks."""

import http.client
import json
import math
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import ServeConfig
from megatron_longctx.inference.scheduler import Event, RequestLimits
from megatron_longctx.models.chat import Chat
from megatron_longctx.serving.http_api import app
from megatron_longctx.serving.http_api.access import API_KEY, Access, build_access
from megatron_longctx.serving.http_api.app import Api
from megatron_longctx.serving.http_api.inbox import Inbox, Outbox
from megatron_longctx.serving.http_api.parsing import ApiError, Model, parse_request
from megatron_longctx.serving.http_api.server import build_server, listen
from tests.inference.http_server import BODY, LIMITS, LONG, Served, answer_on, decode, encode, ended, serving, until
from tests.shared.jobs import PATIENCE_S


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", ["", "a"])
def test_a_client_that_disconnects_ends_its_request(served: Served, stream: bool, tokens: str) -> None:
    connection = served.post({**BODY, "stream": stream})
    number = served.request().number
    served.say(number, tokens)
    if stream and tokens:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    if stream and tokens:  # it is noticed with the next token
        served.say(number, "b")
    assert served.take() == number
    served.say(number, "c", "cancelled")
    until(lambda: served.outbox.num_requests == 0)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(served: Served) -> None:
    status, answer, response = answer_on(served.connect("POST /v1/completions", Content_Length="1001"))
    assert status == 413 and "1001 bytes: expected at most 1000" in answer["error"]["message"]
    assert response.headers["connection"] == "close"
    chunk = b"200\r\n" + b" " * 512 + b"\r\n"
    status, answer, _ = answer_on(served.connect("POST /v1/completions", chunk * 2, Transfer_Encoding="chunked"))
    assert status == 413 and "more than 1000 bytes" in answer["error"]["message"]


def test_errors_of_clients_keep_the_connection() -> None:
    """Also those that are found before the body is read, if it is short."""
    with serving(access=Access(("a",))) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        key, as_json = {"Authorization": "Bearer a"}, {"Content-Type": "application/json"}
        first = None
        for status, path, headers, body in (
            (401, "/v1/completions", as_json, b"{" + b" " * 500),
            (404, "/v1/nothing", key | as_json, b"{}"),
            (405, "/v1/models", key | as_json, b"{}"),
            (415, "/v1/completions", key, b"x" * 900),
            (400, "/v1/completions", key | as_json, b"{"),
            (400, "/v1/completions", key | as_json, b'{"prompt": [100000]}'),
        ):
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            first = first or connection.sock
            assert (answer.status, connection.sock) == (status, first), path
        connection.close()
        for length in ("100000", "1001"):  # more than is worth reading, and more than allowed
            found = answer_on(served.connect("POST /v1/completions", Content_Length=length, Authorization="Bearer b"))
            assert found[0] == 401 and (found[2].headers["connection"] == "close") == (length == "100000")


def test_health_needs_no_key_and_everything_else_does() -> None:
    with serving(access=Access(("schlüssel",))) as served:
        assert served.get("/ready")[:2] == (200, {"status": "ok", "requests": 0})
        for path in ("/v1/models", "/v1/other"):
            for shown in ({}, {"Authorization": "Bearer schlussel"}, {"Authorization": "\xff"}):
                status, answer, _ = served.get(path, **shown)
                assert status == 401 and "missing or wrong API key" in answer["error"]["message"]
        right = "Bearer " + "schlüssel".encode().decode("latin-1")
        assert served.get("/v1/models", Authorization=right)[1]["data"][0]["id"] == "m"
        assert served.get("/v1/other", Authorization=right)[0] == 404
        assert served.get("/v1/other", Authorization=right.replace("B", "b"))[0] == 404


def test_a_full_queue_and_a_stopping_server_say_when_to_try_again() -> None:
    with serving(max_waiting=2) as served:
        waiting = [(served.post(BODY), served.request().number) for _ in range(2)]
        assert served.get("/ready")[1]["requests"] == 2
        status, answer, response = served.ask(BODY)
        assert status == 429 and response.headers["retry-after"] == "1"
        assert answer["error"]["type"] == "rate_limit_error"
        served.say(waiting[0][1], "c", "length")
        assert answer_on(waiting[0][0])[0] == 200
        assert served.complete(served.post(BODY), "d")["choices"][0]["text"] == "d"
        served.inbox.stop()
        status, answer, _ = answer_on(waiting[1][0])
        assert status == 503 and answer["error"]["message"] == "the server is stopping"
        for connection in (served.post(BODY), served.connect("GET /ready")):
            status, _, response = answer_on(connection)
            assert status == 503 and response.headers["retry-after"] == "1"


def test_a_stream_without_tokens_is_kept_alive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_KEEP_ALIVE_S", 0.05)
    connection = served.post({**BODY, "stream": True})
    number = served.request().number
    with connection.makefile("rb") as answer:  # its head and a comment come before any token
        until(lambda: answer.readline() == b": keep-alive\n")
        served.say(number, "c", "length")
        until(lambda: answer.readline() == b"data: [DONE]\n")


def test_only_pages_of_listed_origins_may_call_the_server() -> None:
    with serving(origins=("https://chat.example",)) as served:
        for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://other.example", None)):
            ask = {"Origin": origin, "Access_Control_Request_Method": "POST"}
            asked = answer_on(served.connect("OPTIONS /v1/completions", **ask))[2]
            assert asked.headers["access-control-allow-origin"] == allowed and asked.status == (200 if allowed else 400)
            assert served.get("/health", Origin=origin)[2].headers["access-control-allow-origin"] == allowed


def test_a_request_has_an_id(served: Served) -> None:
    for given, kept in (("a-1", True), ("a b", False), ("x" * 200, False)):
        found = served.get("/v1/nothing", X_Request_Id=given)[2].headers["x-request-id"]
        assert (found == given) == kept and found


def test_idle_connections_are_closed_for_new_ones() -> None:
    with serving(max_connections=4) as served:
        elsewhere = socket.create_connection(
            ("127.0.0.1", served.port), source_address=("127.0.0.2", 0), timeout=PATIENCE_S
        )
        under_way = served.post(BODY)
        number = served.request().number
        half = served.connect("POST /v1/completions", b'{"prompt"', Content_Length="100")
        idle = [served.connect() for _ in range(9)]
        for _ in range(3):
            assert served.get("/health")[0] == 200
        assert ended(half) and ended(idle[0]), "the oldest of those that wait for their clients"
        served.say(number, "c", "length")
        assert answer_on(under_way)[0] == 200
        elsewhere.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")  # from an address with one connection
        assert answer_on(elsewhere)[0] == 200
        for connection in (half, *idle):
            connection.close()


def test_more_requests_than_connections_get_503() -> None:
    with serving(max_connections=3) as served:
        under_way = [(served.post(BODY), served.request().number) for _ in range(3)]
        status, text, response = served.get("/health")
        assert (status, text) == (503, b"Service Unavailable") and response.headers["connection"] == "close"
        for connection, number in under_way:
            served.say(number, "c", "length")
            assert answer_on(connection)[0] == 200
        until(lambda: served.get("/health")[0] == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_half_has_gone(served: Served, stream: bool) -> None:
    with served.post({**BODY, "stream": stream}) as connection:
        number = served.request().number
        connection.shutdown(socket.SHUT_WR)
        assert served.take() == number


def test_stalled_ranks_are_reported() -> None:
    with serving(stalled_s=1000.0) as served:
        inbox = served.inbox
        waiting, streaming = served.post(BODY), served.post({**BODY, "stream": True})
        numbers = {served.request().number, served.request().number}
        inbox.last_beat = time.monotonic() - 900
        assert served.get("/ready")[0] == 200
        inbox.last_beat = time.monotonic() - 1001
        status, answer, response = served.get("/ready")
        assert status == 503 and answer == {"status": "stalled", "requests": 2} and response.headers["retry-after"]
        assert served.get("/health")[:2] == (200, {"status": "ok"})
        status, answer, _ = served.ask(BODY)
        assert status == 503 and "one of them hangs" in answer["error"]["message"]
        time.sleep(1.5)  # more than any interval of checks: requests under way are not cancelled
        for number in numbers:
            served.say(number, "c", "length")
        assert answer_on(waiting)[0] == 200 and b"[DONE]" in answer_on(streaming)[1]
        inbox.beat()  # by a layer
        assert served.get("/ready")[0] == 200


def test_requests_that_another_site_can_make_a_browser_send_are_refused() -> None:
    with serving(access=build_access(ServeConfig(), {})) as served:
        data = json.dumps(BODY).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            head = {"Content_Length": str(len(data)), "Content_Type": kind, "Host": "127.0.0.1"}
            status, answer, _ = answer_on(served.connect("POST /v1/completions", data, **head))
            assert status == 415 and "expected application/json" in answer["error"]["message"]
        head |= {"Content_Type": "Application/JSON; charset=utf-8", "Host": f"[::1]:{served.port}"}
        served.complete(served.connect("POST /v1/completions", data, **head))
        for path in ("/health", "/v1/models", "/v1/other"):
            status, answer, _ = served.get(path, Host=f"evil.example:{served.port}")
            assert status == 421 and "'evil.example:" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("host", "allowed", "accepted", "refused"),
    [
        ("127.0.0.1", None, ["localhost", "127.0.0.9:80", "[::1]:80", "LOCALHOST:1", ""], [*"[*", "here", "10.0.0.1"]),
        ("::1", None, ["[::1]", "127.0.0.1"], ["[2001:db8::1]"]),
        ("localhost", "Model.example, [2001:db8::1]", ["model.example:1", "[2001:db8::1]", "localhost"], ["a.example"]),
        ("0.0.0.0", None, ["anything", "10.0.0.1"], []),
        ("0.0.0.0", "model.example", ["model.example"], ["localhost", "10.0.0.1"]),
        ("127.0.0.1", "*", ["evil.example"], []),
    ],
)
def test_the_allowed_hosts_of_a_server(host: str, allowed: str | None, accepted: list[str], refused: list[str]) -> None:
    access = build_access(ServeConfig(host=host, allowed_hosts=allowed), {API_KEY: "k"})
    assert [access.allows_host(name) for name in accepted + refused] == [True] * len(accepted) + [False] * len(refused)


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n  two \nfirst\n")
    for mode in (0o644, 0o640, 0o606):
        (tmp_path / "keys").chmod(mode)
        with pytest.raises(ValueError, match=rf"that only its owner can read; its mode is {mode:o}\. Run chmod 600"):
            build_access(ServeConfig(api_keys=str(tmp_path / "keys")), {})
    (tmp_path / "keys").chmod(0o600)
    access = build_access(ServeConfig(host="::", api_keys=str(tmp_path / "keys")), {API_KEY: "first\nsecond"})
    assert access.keys == ("first", "second", "one", "two")
    assert [access.client(f"Bearer {key}".encode()) for key in (*access.keys, "three", "")] == [1, 2, 3, 4, None, None]
    assert build_access(ServeConfig(), {}).client(b"Bearer whatever") == 0
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "empty").chmod(0o600)
    for name, reason in (("gone", "No such file"), ("empty", "it has none")):
        with pytest.raises(ValueError, match=rf"serve.api_keys=.*{name}: expected a file with a key a line \({reason}"):
            build_access(ServeConfig(api_keys=str(tmp_path / name)), {})
    with pytest.raises(ValueError, match=r"serve.host=::: expected a loopback address, or MEGATRON_LONGCTX_API_KEY"):
        build_access(ServeConfig(host="::"), {API_KEY: " "})


def test_a_requests_salt_is_its_client() -> None:
    with serving(access=Access(("one", "two"))) as served:
        data = json.dumps(BODY).encode()
        for key, salt in (("one", 1), ("two", 2)):
            head = {"Content_Length": str(len(data)), "Authorization": f"Bearer {key}"}
            connection = served.connect("POST /v1/completions", data, **head)
            request = served.request()
            assert request.salt == salt
            served.say(request.number, "c", "length")
            assert answer_on(connection)[0] == 200


CACHE, POSITIONS = RequestLimits(10, None, 1000), RequestLimits(10, 6, 1000)


@pytest.mark.parametrize(
    ("limits", "parameters", "message"),
    [
        (CACHE, {"prompt": "a" * 40},
         r"the prompt has 40 characters: .* 36, because a prompt may have 9 tokens \(inference.cache_"),
        (CACHE, {"messages": [{"role": "user", "content": "a" * 20}] * 2}, "the prompt has 40 characters"),
        (CACHE, {"prompt": [1] * 11}, "prompt has 11 tokens: expected at most 9"),
        (CACHE, {"prompt": "a" * 8, "max_tokens": 3}, "prompt and max_tokens=11: expected at most 10 tokens together"),
        (CACHE, {"prompt": [1, 1000], "max_tokens": 3}, "token=1000: expected an id from 0 to 999"),
        (POSITIONS, {"prompt": "a" * 30},
         r"the prompt has 30 characters: expected at most 20, .* 5 tokens \(inference.max_model_len"),
        (POSITIONS, {"prompt": [1] * 8},
         "prompt and max_tokens=9: expected at most 6 tokens .inference.max_model_len"),
        (POSITIONS, {"prompt": "a" * 4, "max_tokens": 3}, "prompt and max_tokens=7: expected at most 6 tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_too_long_are_refused_early(
    limits: RequestLimits, parameters: dict[str, Any], message: str
) -> None:
    """Before they are tokenized, and before they are sent to the ranks."""

    def short(text: str) -> list[int]:
        assert len(text) <= 36
        return encode(text)

    model = Model("m", short, decode, 0, Chat(), 5 if limits is POSITIONS else 1, limits, max_token_chars=4)
    with pytest.raises(ApiError, match=f"^{message}") as caught:
        parse_request(model, json.dumps(parameters).encode(), chat="messages" in parameters)
    assert caught.value.status == 400


def test_the_default_length_of_an_answer_is_lowered_to_what_is_left() -> None:
    model = Model("m", encode, decode, 0, Chat(), 5, POSITIONS, max_token_chars=4)
    assert parse_request(model, b'{"prompt": "abcd"}', chat=False).sampling.max_new_tokens == 2


def test_the_largest_body_that_a_prompt_can_need() -> None:
    model = Model("m", encode, decode, 0, Chat(), 1, RequestLimits(10, None, 1000), max_token_chars=4)
    assert model.max_bytes == 2**16 + 640 and replace(model, max_token_chars=None).max_bytes == math.inf
    longest = {"messages": [{"role": "user", "content": "😀"}] * 36}
    assert len(json.dumps(longest, indent=8)) < model.max_bytes


def test_long_texts_are_tokenized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time would delay the tokens of other requests."""
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


def test_slow_clients_are_disconnected() -> None:
    with serving(timeout_s=0.2) as served:
        silent, slow, kept, half = (served.connect() for _ in range(4))
        slow.sendall(b"POST /v1/comp")
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        answer = http.client.HTTPResponse(kept)
        answer.begin()
        assert answer.status == 200 and answer.read()
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n")
        half.sendall(b"Content-Type: application/json\r\n\r\n")
        status, body, _ = answer_on(half)
        assert status == 408 and "did not come within 0.2 s" in body["error"]["message"]
        # A client that does not read loses its request, too.
        deaf = served.post({**BODY, "stream": True})
        number = served.request().number
        for _ in range(100):
            served.inbox.deliver([Event(number, LONG)])
        served.hurry()
        assert ended(silent) and ended(slow) and ended(kept)
        assert served.take() == number
        deaf.close()


def test_a_request_that_takes_long_is_not_disconnected() -> None:
    with serving() as served:
        connection = served.post({**BODY, "stream": True})
        number = served.request().number
        served.hurry()
        time.sleep(0.5)  # more than two checks of the connection
        served.say(number, "c", "length")
        assert b'"c"' in answer_on(connection)[1]


def test_connections_are_checked_at_the_time_limit() -> None:
    with socket.socket() as end:
        outbox = Outbox(end, Inbox.new_shared(), 1)
        api = Api(Model("m", encode, decode, 0, Chat(), 16, LIMITS), outbox, 1000, 1.5, Access())
        assert build_server(api, 1).config.timeout_keep_alive == 2


def test_a_streams_first_token_does_not_wait_until_its_headers_are_acknowledged() -> None:
    """Clients acknowledge packets after up to 40 ms, and Nagle's algorithm holds small ones back until then."""
    with (
        listen(ServeConfig(port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
