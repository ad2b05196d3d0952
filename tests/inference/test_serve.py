"""`megatron-longctx serve` as its clients see it: answers, streams, limits, and errors that harm nobody."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx import cli
from megatron_longctx.config import Config
from megatron_longctx.http_api import TextStream
from megatron_longctx.testing.jobs import CLI, clean_environment, started

KEY = "a-secret"


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def raw(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        status, answer = self.raw("GET" if body is None else "POST", path, data, {"Authorization": f"Bearer {key}"})
        return status, json.loads(answer)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        data = json.dumps({**body, "stream": True}).encode()
        status, answer = self.raw("POST", path, data, {"Authorization": f"Bearer {KEY}"})
        assert status == 200, answer
        lines = answer.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line[6:]) for line in lines[:-2]]


@pytest.fixture(scope="module")
def client(trained: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server on 2 context-parallel ranks; it has to end well, too."""
    words = [f"checkpoint={Path(trained.run.root, trained.run.name)}", "parallelism=cp2", "serve.port=0"]
    words += [
        "serve.max_body_bytes=5000",
        "inference.cache_tokens=400",
        "inference.page_tokens=8",
        "serve.max_active=3",
    ]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", MEGATRON_LONGCTX_API_KEY=KEY)
    with started(tmp_path_factory.mktemp("serve"), [*CLI, "serve", *words], environment) as job:
        job.wait_for("serving trained at http://127.0.0.1:")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", job.out.read_text())
        assert found is not None
        yield Client(int(found.group(1)))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(30) == 0, job.said()


def test_models_are_listed(client: Client) -> None:
    status, models = client.ask("/v1/models")
    assert status == 200 and [model["id"] for model in models["data"]] == ["trained"]
    assert client.ask("/v1/models/trained")[1]["object"] == "model"


def test_a_completion_streams_the_text_that_it_answers_whole(client: Client) -> None:
    body = {"model": "trained", "prompt": "abc de", "max_tokens": 12, "temperature": 0}
    status, whole = client.ask("/v1/completions", body)
    assert status == 200 and whole["object"] == "text_completion"
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (6, 12)
    chunks = client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 18
    ids = client.ask("/v1/completions", {**body, "prompt": list(b"abc de")})[1]
    assert ids["choices"][0]["text"] == choice["text"]
    stop = choice["text"][3:5]
    cut = client.ask("/v1/completions", {**body, "stop": stop})[1]["choices"][0]
    assert cut == choice | {"text": choice["text"].split(stop)[0], "finish_reason": "stop"}


def test_a_chat_finds_its_cache_again(client: Client) -> None:
    messages = [{"role": "user", "content": "tell me about " + "abcdefgh" * 5}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    first = client.ask("/v1/chat/completions", body)[1]
    assert first["object"] == "chat.completion" and first["choices"][0]["message"]["role"] == "assistant"
    longer = client.ask("/v1/chat/completions", {**body, "messages": [*messages, {"role": "user", "content": "and?"}]})
    shared = len(messages[0]["content"] + "\n")  # the answer is not in this prompt
    assert longer[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    said = first["choices"][0]["message"]["content"]
    text = messages[0]["content"] + "\n" + said + "and?"
    status, again = client.ask("/v1/completions", {"prompt": text, "max_tokens": 2, "temperature": 0})
    assert status == 200
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1
    chunks = client.stream(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    )
    assert chunks[0]["object"] == "chat.completion.chunk" and "content" in chunks[0]["choices"][0]["delta"]


def test_requests_beside_each_other_get_their_own_answers(client: Client) -> None:
    bodies = [
        {"prompt": chr(97 + i) * (5 + 9 * i), "max_tokens": 2 + i, "temperature": 0.8, "seed": i} for i in range(5)
    ]
    alone = [client.ask("/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda body: client.ask("/v1/completions", body), bodies))
    assert [answer["choices"][0]["text"] for _, answer in together] == alone


GOOD = {"prompt": "ab", "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ([], 400, "not a JSON object"),
        ({**GOOD, "model": "gpt-4"}, 404, "the model is 'trained'"),
        ({**GOOD, "prompt": ""}, 400, "a text that is not empty"),
        ({**GOOD, "prompt": ["a", "b"]}, 400, "or a list of token ids"),
        ({**GOOD, "prompt": [97, 100000]}, 400, "token=100000: expected an id from 0 to 511"),
        ({**GOOD, "prompt": [97, -1]}, 400, "token=-1"),
        ({**GOOD, "prompt": "a" * 600}, 400, "prompt and max_tokens=602: expected at most"),
        ({**GOOD, "max_tokens": 10**30}, 400, "expected at most"),
        ({**GOOD, "max_tokens": 0}, 400, "max_new_tokens=0"),
        ({**GOOD, "max_tokens": "2"}, 400, "max_tokens='2': expected an integer"),
        ({**GOOD, "temperature": -1}, 400, "temperature=-1"),
        ({**GOOD, "temperature": float("nan")}, 400, "temperature=nan"),
        ({**GOOD, "top_p": True}, 400, "top_p=True: expected a number"),
        ({**GOOD, "stop": [1]}, 400, "stop: expected a text"),
        ({**GOOD, "n": 2}, 400, "n is not supported"),
        ({**GOOD, "logit_bias": {"97": 1}}, 400, "logit_bias is not supported"),
        ({**GOOD, "prompt": "a" * 6000}, 413, "expected at most 5000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_told_why(client: Client, body: Any, status: int, message: str) -> None:
    found, answer = client.ask("/v1/completions", body)
    assert found == status and message in answer["error"]["message"]


def test_bad_connections_harm_nobody(client: Client) -> None:
    assert client.ask("/v1/models", key="guess")[0] == 401
    assert client.raw("GET", "/v1/models", None, {})[0] == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert client.raw("POST", "/v1/completions", b"{", headers)[0] == 400
    assert client.raw("POST", "/v1/completions", b"[" * 4000, headers)[0] == 400
    assert client.raw("POST", "/v1/other", b"{}", headers)[0] == 404
    assert client.ask("/v2/models")[0] == 404
    assert client.ask("/v1/chat/completions", {"messages": [{"role": "user"}]})[0] == 400
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
    # A client that goes away in the middle of its stream.
    body = json.dumps({"prompt": "ab", "max_tokens": 300, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode("latin-1") + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert client.ask("/v1/completions", GOOD)[0] == 200


def test_an_open_address_needs_a_key(
    trained: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_LONGCTX_API_KEY", raising=False)
    run = f"checkpoint={Path(trained.run.root, trained.run.name)}"
    assert cli.main(["serve", run, "serve.host=0.0.0.0"]) == 2
    assert "serve.host=0.0.0.0: expected a loopback address, or MEGATRON_LONGCTX_API_KEY" in capsys.readouterr().err


def test_stop_texts_end_a_stream_wherever_tokens_cut_them() -> None:
    def shown(text: str, *stops: str) -> tuple[str, bool]:
        stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"), stops)
        said = ""
        for byte in text.encode():
            said += stream.feed(byte)
            assert not any(stop in said for stop in stops)
            if stream.stopped:
                return said, True
        return said + stream.finish(), False

    assert shown("one two three", "two", "tw!") == ("one ", True)
    assert shown("one tw", "two") == ("one tw", False)
    assert shown("größer", "ß") == ("grö", True)
    assert shown("größer") == ("größer", False)
    assert shown("aab", "ab") == ("a", True)
