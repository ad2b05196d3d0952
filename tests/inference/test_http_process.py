"""The process of the HTTP interface and its connection to rank 0, which a test stands in for."""

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import uvicorn

from megatron_longctx.config import Config, ServeConfig
from megatron_longctx.core.errors import JobFailed
from megatron_longctx.inference.scheduler import Event, Request
from megatron_longctx.serving import serve
from megatron_longctx.serving.http_api import server
from megatron_longctx.serving.inference_job import InferenceJob, Stopped
from megatron_longctx.testing.distributed import start_context
from megatron_longctx.training import forks
from tests.inference.http_server import LIMITS, serving, until
from tests.shared.jobs import PATIENCE_S, free_port


def job(host: str = "127.0.0.1") -> InferenceJob:
    return InferenceJob(replace(Config(), serve=ServeConfig(host=host, port=free_port())), Path(), options="m")


@contextmanager
def running(job: InferenceJob) -> Iterator[tuple[serve.Inbox, psutil.Process]]:
    """Run the process, and yield rank 0's end of the connection and the process."""
    with serve._http_process(job) as (inbox, started), serve._serving((inbox, started), LIMITS):
        yield inbox, psutil.Process(started.pids[0])


@pytest.fixture(autouse=True)
def _a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "obstacle", lambda: None)


def connected(served: InferenceJob) -> http.client.HTTPConnection:
    """Return a connection to the server as soon as that listens."""
    address = served.config.serve.host, served.config.serve.port
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)

    def listens() -> bool:
        try:
            connection.connect()
        except ConnectionRefusedError:
            return False
        return True

    until(listens)
    return connection


def test_rank_0_does_not_wait_for_the_process() -> None:
    """Stopped, it reads nothing; a send that waits would never return. It gets everything later, in order."""
    served, count = job(), 30_000
    prompt = [i % 250 for i in range(9000)]
    body = {"prompt": prompt, "max_tokens": 999, "stream": True, "ignore_eos": True}
    with running(served) as (inbox, other):
        connection = connected(served)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        found: list[Request | int] = []
        until(lambda: bool(found.extend(inbox.take(wait=True)) or found))
        (request,) = found
        assert isinstance(request, Request) and list(request.prompt) == prompt
        other.suspend()
        for i in range(count):
            inbox.deliver([Event(request.number, ord("a") + i % 26)])
        inbox.deliver([Event(request.number, ord("!"), "length")])
        assert not inbox.take(wait=True), "it returns early, to send the rest"
        other.resume()
        until(lambda: bool(inbox.deliver([]) or not inbox._unsent))
        lines = connection.getresponse().read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])
        assert text == "".join(chr(ord("a") + i % 26) for i in range(count)) + "!"


def test_its_failure_ends_the_job_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(JobFailed, match=r"^the HTTP process was killed by SIGKILL$"), running(job()) as (inbox, other):
        other.kill()
        until(lambda: inbox.stopping)
        assert inbox.take(wait=True), "it wakes rank 0"
        raise Stopped  # as a layer of a long round does
    assert signal.getsignal(signal.SIGTERM) is before

    async def fail(*_: object) -> None:
        raise RuntimeError("out of threads")

    monkeypatch.setattr(uvicorn.Server, "serve", fail)
    expected = pytest.raises(JobFailed, match=r"^the HTTP process failed: RuntimeError: out of threads$")
    with expected, running(job()) as (inbox, _):
        until(lambda: inbox.stopping)


def test_a_port_that_is_taken_meanwhile_is_refused() -> None:
    served = job()
    with serve._http_process(served) as started, socket.create_server(("127.0.0.1", served.config.serve.port)):
        expected = pytest.raises(JobFailed, match=r"HTTP process failed: ValueError: serve.host:serve.port=127")
        with expected, serve._serving(started, LIMITS):
            until(lambda: started[0].stopping)


def _serve(sender: Connection, served: InferenceJob) -> None:
    forks.obstacle = lambda: None
    with running(served) as (_, other):
        connected(served).close()
        sender.send(other.pid)
        until(lambda: False)


def test_it_ends_with_rank_0() -> None:
    """However that ends, and signals to the process itself do not end it."""
    context, served = start_context(), job()
    receiver, sender = context.Pipe(duplex=False)
    rank_0 = context.Process(target=_serve, args=(sender, served))
    rank_0.start()
    other = psutil.Process(receiver.recv())
    for number in (signal.SIGINT, signal.SIGTERM):
        other.send_signal(number)
    connection = connected(served)
    connection.request("GET", "/ready")
    assert json.loads(connection.getresponse().read()) == {"status": "ok", "requests": 0}
    rank_0.kill()
    rank_0.join()
    assert not psutil.wait_procs([other], timeout=PATIENCE_S)[1]
    socket.create_server(("127.0.0.1", served.config.serve.port)).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_it_listens_at_ipv6_addresses(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served = job("::1")
    monkeypatch.setattr(server.logger, "info", lambda line, *values: print(line % values, flush=True))
    with running(served):
        connection = connected(served)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    assert f"serving m at http://[::1]:{served.config.serve.port}/v1" in capfd.readouterr().out


def test_grammars_are_compiled_before_rank_0_gets_their_requests() -> None:
    with serving() as served:
        prepared: list[str] = []
        served.inbox.prepare = prepared.append
        connection = served.post({"prompt": "ab", "guided_choice": ["a"]})
        grammar = served.request().sampling.grammar
        assert grammar is not None and prepared == [grammar]
        connection.close()
