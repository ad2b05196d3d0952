"""`megatron-longctx serve` as its clients see it: answers, streams, limits, and errors that affect no other request."""

import http.client
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config import Config
from megatron_longctx.serving import inference_job, serve
from megatron_longctx.serving.inference_job import InferenceJob
from tests.shared.jobs import CLI, PATIENCE_S, TORCHRUN, Job, clean_environment, started
from tests.shared.processes import SLOW_START
from tests.shared.training import changed

KEY = "a-secret"


def _headers(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


class Client:
    def __init__(self, port: int, job: Job | None) -> None:
        self.port, self.job = port, job

    def raw(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        status, answer = self.raw("GET" if body is None else "POST", path, data, _headers(key))
        return status, json.loads(answer)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        data = json.dumps({**body, "stream": True}).encode()
        status, answer = self.raw("POST", path, data, _headers())
        assert status == 200, answer
        lines = answer.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line[6:]) for line in lines[:-2]]

    def wait_for_health(self, code: int, **body: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found, answer = self.raw("GET", "/ready", None, {})
            if found == code and body.items() <= json.loads(answer).items():
                return
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)


@contextmanager
def serving(
    config: Config, folder: Path, *settings: str, name: str = "trained", **environment: str
) -> Iterator[Client]:
    """Run a server of the run, which has to end without an error."""
    words = [f"checkpoint={Path(config.run.root, config.run.name)}", "serve.port=0", "inference.page_tokens=8"]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", **environment)
    with started(folder, [*CLI, "serve", *words, *settings], environment, quick=True) as job:
        job.wait_for(f"serving {name} at http://127.0.0.1:")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", job.out.read_text())
        assert found is not None
        assert job.listening() == {"127.0.0.1"}, "its ranks listen at other addresses than the server"
        yield Client(int(found.group(1)), job)
        os.killpg(job.process.pid, signal.SIGTERM)  # to all ranks, as torchrun and Slurm send it
        assert job.wait() == 0, job.output()
        assert "Traceback" not in job.output(), job.output()


@pytest.fixture(scope="module")
def client(trained: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server on 2 context-parallel ranks."""
    settings = ["parallelism=cp2", "serve.max_body_bytes=5000", "inference.cache_tokens=400", "serve.max_active=3"]
    folder = tmp_path_factory.mktemp("serve")
    with serving(trained, folder, *settings, MEGATRON_LONGCTX_API_KEY=KEY) as found:
        yield found


def test_a_chat_reuses_its_cache(client: Client) -> None:
    messages = [{"role": "user", "content": "tell me about " + "abcdefgh" * 5}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    first = client.ask("/v1/chat/completions", body)[1]
    assert first["object"] == "chat.completion" and first["choices"][0]["message"]["role"] == "assistant"
    longer = client.ask("/v1/chat/completions", {**body, "messages": [*messages, {"role": "user", "content": "and?"}]})
    shared = len(messages[0]["content"] + "\n")  # the answer is not in this prompt
    assert longer[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == shared // 8 * 8  # whole pages
    text = first["choices"][0]["message"]["content"]
    prompt = messages[0]["content"] + "\n" + text + "and?"
    status, again = client.ask("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})
    assert status == 200
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (first["usage"]["total_tokens"] - 1) // 8 * 8
    chunks = client.stream(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    )
    assert chunks[0]["object"] == "chat.completion.chunk" and "content" in chunks[0]["choices"][0]["delta"]


GOOD = {"prompt": "ab", "max_tokens": 2}


def leave_in_the_middle(client: Client) -> None:
    """Start a stream that would fill most of the cache, and disconnect."""
    body = json.dumps({"prompt": "xyz", "max_tokens": 200, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode("latin-1") + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_bad_requests_do_not_change_other_answers(client: Client) -> None:
    good = {"prompt": "abcdefgh" * 3, "max_tokens": 30, "temperature": 0.9, "seed": 5}
    alone = client.ask("/v1/completions", good)[1]["choices"][0]["text"]
    headers = _headers()
    bad = [
        lambda: client.ask("/v1/completions", {**GOOD, "prompt": [97, 10**6]})[0] == 400,
        lambda: leave_in_the_middle(client) is None,
        lambda: client.ask("/v1/completions", {**GOOD, "prompt": "a" * 500})[0] == 400,
        lambda: client.raw("POST", "/v1/completions", b"{", headers)[0] == 400,
        lambda: client.ask("/v1/completions", {**GOOD, "prompt": "a" * 6000})[0] == 413,
        lambda: client.ask("/v1/completions", GOOD, key="guess")[0] == 401,
        lambda: client.ask("/v1/completions", {**GOOD, "model": "gpt-4"})[0] == 404,
        # Of the smallest temperature, and ids and sizes that fit no integer of 64 bits.
        lambda: client.ask("/v1/completions", {**GOOD, "temperature": 5e-324, "top_p": 0.5})[0] == 200,
        lambda: client.ask("/v1/completions", {**GOOD, "temperature": 1, "top_k": 10**30, "seed": -(10**30)})[0] == 200,
        lambda: client.ask("/v1/completions", {**GOOD, "prompt": [10**30]})[0] == 400,
    ]
    text, done = "", 0
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps({**good, "stream": True}), headers)
    answer = connection.getresponse()
    while (line := answer.readline()) != b"data: [DONE]\n":
        if line.startswith(b"data: "):
            text += json.loads(line[6:])["choices"][0]["text"]
            if done < len(bad):  # between the chunks of the good one
                assert bad[done](), f"the bad request {done}"
                done += 1
    connection.close()
    assert text == alone and done == len(bad)
    client.wait_for_health(200, requests=0)
    # The pages promised to the client that left are free again: this needs nearly all of the cache.
    assert client.ask("/v1/completions", {"prompt": "a" * 350, "max_tokens": 5})[0] == 200


def test_a_stopped_rank_is_reported_until_it_continues(trained: Config, tmp_path: Path) -> None:
    """Also without requests, although rank 0 could still send it messages then."""
    settings = ["parallelism=cp2", "serve.stalled_s=0.5"]
    with serving(trained, tmp_path, *settings, MEGATRON_LONGCTX_API_KEY=KEY) as client:
        _, other = client.job.ranks()  # the first is the process of the HTTP interface
        other.suspend()
        client.wait_for_health(503, status="stalled")
        assert client.ask("/v1/completions", GOOD)[0] == 503
        other.resume()
        client.wait_for_health(200, status="ok")
        assert "cache: 400,016 tokens, 0." in client.job.output(), "four sequences of the most tokens"


STOPPED_IN_A_LAYER = """
import os, signal, sys
from megatron_longctx.cli import cli
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.serving import serve
from megatron_longctx.serving.http_api.inbox import Inbox

append, beat = LongContextEngine.append, Inbox.beat

def stop(inbox):
    print("a layer", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    beat(inbox)

def compute(engine, new):
    Inbox.beat = stop
    append(engine, new)
    print("a round", flush=True)

run_rounds = serve.Rounds.run

def run(rounds):
    LongContextEngine.append = compute  # not in the warm-up
    run_rounds(rounds)

serve.Rounds.run = run
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_ends_the_round_of_ranks_that_torchrun_started(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED_IN_A_LAYER)
    words = [f"checkpoint={Path(trained.run.root, trained.run.name)}", "serve.port=0", "parallelism=cp2"]
    words += ["inference.page_tokens=1"]  # both ranks have tokens, and wait for each other
    command = [*TORCHRUN, "--nproc-per-node", "2", str(tmp_path / "stopped.py"), "serve", *words]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", MEGATRON_LONGCTX_API_KEY=KEY)
    with started(tmp_path, command, environment, quick=True) as job:
        job.wait_for("serving trained at http://127.0.0.1:")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", job.out.read_text())
        assert found is not None
        assert Client(int(found.group(1)), job).ask("/v1/completions", {"prompt": "abc"})[0] == 503
        assert job.wait() == 0, job.output()
    text = job.output()
    assert text.count("a layer") == 1 and "a round" not in text and "Traceback" not in text, text


def test_other_ranks_end_before_this_one_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Others:
        pids = ()

        def __init__(self, *_: Any, **__: Any) -> None:
            """Start no rank."""

        def wait(self, *_: Any) -> None:
            """Nothing runs."""

        def kill(self) -> None:
            done.append("kill")

        def end(self, *_: Any) -> None:
            done.append("end")

    monkeypatch.setattr(inference_job, "RankProcesses", Others)
    monkeypatch.setattr(inference_job, "join_group", lambda *_: None)
    monkeypatch.setattr(inference_job.groups, "initialize", lambda **sizes: None)
    monkeypatch.setattr(inference_job.groups, "destroy", lambda: done.append("destroy"))
    for name in ("is_initialized", "destroy_process_group", "barrier"):
        monkeypatch.setattr(inference_job.dist, name, lambda name=name: done.append(name) or name == "is_initialized")
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def work(job: InferenceJob, collection: Any) -> None:
        raise inference_job.Stopped

    inference_job.start(InferenceJob(Config(), Path()), work)
    assert done == ["destroy", "kill", "is_initialized", "destroy_process_group", "end"]


@pytest.mark.parametrize("where", [".", "checkpoints/..", "../trained/"])
def test_the_model_has_the_name_of_its_run(trained: Config, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    jobs: list[InferenceJob] = []
    monkeypatch.setattr(serve, "start", lambda job, *_: jobs.append(job))
    monkeypatch.chdir(Path(trained.run.root, trained.run.name))
    serve.serve([f"checkpoint={where}", "serve.port=0"])
    assert jobs[0].options == "trained"


def test_an_open_address_needs_a_key(
    trained: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_LONGCTX_API_KEY", raising=False)
    run = f"checkpoint={Path(trained.run.root, trained.run.name)}"
    assert cli.main(["serve", run, "serve.host=0.0.0.0"]) == 2
    assert "serve.host=0.0.0.0: expected a loopback address, or MEGATRON_LONGCTX_API_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [True, False])
def test_ctrl_c_while_ranks_are_starting_ends_all_of_them(trained: Config, tmp_path: Path, quick: bool) -> None:
    """A terminal sends it to every process, also while the second rank starts."""
    words = [f"checkpoint={Path(trained.run.root, trained.run.name)}", "serve.port=0", "parallelism=cp2"]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", **{SLOW_START: "2"})
    with started(tmp_path, [*CLI, "serve", *words], environment, quick=quick) as job:
        others = family(job, "serve")
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait() != 0 and "serving" not in job.out.read_text()
        assert not psutil.wait_procs(others, timeout=PATIENCE_S)[1]


@pytest.mark.parametrize(("verb", "ended_by"), [("generate", signal.SIGTERM), ("serve", signal.SIGKILL)], ids=str)
def test_ranks_that_are_starting_end_with_the_first(trained: Config, tmp_path: Path, verb: str, ended_by: int) -> None:
    """However it ends: otherwise they would wait for it until a timeout."""
    words = [f"checkpoint={Path(trained.run.root, trained.run.name)}", "parallelism=cp2"]
    words.append({"generate": "prompt=x", "serve": "serve.port=0"}[verb])
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", **{SLOW_START: "2"})
    with started(tmp_path, [*CLI, verb, *words], environment, quick=True) as job:
        others = family(job, verb)
        os.kill(job.process.pid, ended_by)
        assert not psutil.wait_procs(others, timeout=PATIENCE_S)[1]


@pytest.mark.parametrize("verb", ["generate", "serve"])
def test_a_rank_that_ends_while_starting_ends_the_job(trained: Config, tmp_path: Path, verb: str) -> None:
    words = [f"checkpoint={Path(trained.run.root, trained.run.name)}", "parallelism=cp2", "parallelism.timeout_s=7200"]
    words.append({"generate": "prompt=x", "serve": "serve.port=0"}[verb])
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", **{SLOW_START: str(PATIENCE_S)})
    with started(tmp_path, [*CLI, verb, *words], environment, quick=True) as job:
        family(job, verb)
        job.ranks()[-1].kill()
        assert job.wait() == 1
        assert job.err.read_text() == "megatron-longctx: rank 1 was killed by SIGKILL\n"


def family(job: Job, verb: str) -> list[psutil.Process]:
    """Wait for the second rank, which `serve` starts after the process of the HTTP interface, and return it with what
    else the command has started."""
    limit = time.monotonic() + PATIENCE_S
    while len(job.ranks()) < 1 + (verb == "serve"):
        assert time.monotonic() < limit and job.process.poll() is None, job.output()
        time.sleep(0.02)
    return psutil.Process(job.process.pid).children(recursive=True)


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "prometheus_client"])
def test_packages_that_are_not_installed_are_named(
    missing: str, trained: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["serve", f"checkpoint={Path(trained.run.root, trained.run.name)}"]) == 2
    text = capsys.readouterr().err
    assert f"serve=without {missing}: expected its packages" in text and "'megatron-longctx[serve]'" in text


def test_bad_settings_are_refused_before_the_model_is_loaded(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"checkpoint={Path(trained.run.root, trained.run.name)}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", run, f"serve.port={port}"]) == 2
    assert f"127.0.0.1:{port}: expected an address to listen at (address already in use" in capsys.readouterr().err
    (tmp_path / "broken").write_text("{% for")
    assert cli.main(["serve", run, f"inference.chat_template={tmp_path}/broken"]) == 2
    assert "broken: expected a Jinja template (line 1:" in capsys.readouterr().err


def test_it_warms_up_for_its_batches_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(engine: str, sequences: int) -> None:
        raise RuntimeError(f"warming up {engine} for {sequences} sequences")

    job = SimpleNamespace(config=changed(Config(), {"serve.max_active": 12}))
    monkeypatch.setattr(serve, "open_engine", lambda *_: nullcontext(("an engine", None)))
    monkeypatch.setattr(serve, "warm_up", warm_up)
    with pytest.raises(RuntimeError, match="warming up an engine for 12 sequences"):
        serve._serve(job, None)  # type: ignore[arg-type]
