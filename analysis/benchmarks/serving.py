"""The server as its clients see it: first tokens of long prompts beside the engine's own, loads of clients, and drafts.

`first` compares a stream's first token with the engine's in its own process, on the same prompts of random tokens.
`load` runs NVIDIA's `aiperf`, also against another server (`--url`). `drafts` asks chats whose answers repeat their
prompt, with and without drafts. Weights are those of `--run RUN`, such as an import of `analysis.random_llama`.
"""

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.errors import JobFailed, refuse
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.warm_up import warm_up
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.tokenizer import BYTE_LEVEL_EOD, build_tokenizer, detokenize
from megatron_longctx.serving.inference_job import InferenceJob, build_job, open_engine
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .inference_ranks import wait_for_all
from .report import Report, numbers, table
from .speculation import TASKS

PARTS = ("first", "load", "drafts")
_KINDS = {"first": "time_to_first_token", "each": "inter_token_latency", "all": "request_latency"}
_PERCENTILES = ("p50", "p90", "p99")
_PATIENCE_S = 600
_WARM_UP = 16_384


@dataclass
class Results:
    """Rows of every part.

    first: seconds to the first token and the texts, of each round. load: milliseconds. drafts: tokens per second.
    """

    first: list[dict[str, Any]] = field(default_factory=list)
    load: list[dict[str, Any]] = field(default_factory=list)
    drafts: list[dict[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="key=value, of the engine and the server")
    parser.add_argument("--run", type=Path, help="the folder of the run to serve")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--lengths", default="131072", help="first: tokens of prompts (default: %(default)s)")
    parser.add_argument("--delays", default="2", help="first: serve.max_delay_s of each server (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="first, drafts: times of each (default: %(default)s)")
    parser.add_argument("--new", type=int, default=8, help="first: tokens that are compared (default: %(default)s)")
    parser.add_argument("--exact", action="store_true", help="first, drafts: fail if a text differs, for fp32")
    parser.add_argument("--clients", default="1,8,32", help="load: at the same time (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4, help="load: of each client, at least 16 in all")
    parser.add_argument("--prompts", default="1024,2048,4096,8192", help="load: tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="load, drafts: of answers (default: %(default)s)")
    parser.add_argument("--url", help="load: another server's address, with --model and --tokenizer, not --run")
    parser.add_argument("--model", help="load: the other server's name of the model")
    parser.add_argument("--tokenizer", help="load: the folder of the tokenizer, for --url")
    parser.add_argument("--drafts", default="0,7", help="drafts: values of inference.speculate (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and Markdown tables after every measurement."""
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise refuse("--parts", unknown[0], f"some of {','.join(PARTS)}", "Correct it.")
    if "load" in parts and shutil.which("aiperf") is None:
        raise refuse("aiperf", "not on the path", "the load client", "Install it into an environment of its own.")
    lengths, delays = numbers("--lengths", arguments.lengths, 2), numbers("--delays", arguments.delays, 1e-3)
    what = "seconds to first tokens, milliseconds under load, tokens per second with drafts"
    results = Results()
    if arguments.url:
        if parts != ["load"] or arguments.settings or arguments.run or not (arguments.model and arguments.tokenizer):
            raise refuse("--url", arguments.url, "--parts load, --model and --tokenizer alone", "Correct it.")
        report = Report(arguments.out, "auto", what, f"{arguments.model} at {arguments.url}", "random weights")
        _load(arguments, report, results, arguments.url, arguments.model, arguments.tokenizer)
        return
    words = arguments.settings
    job = build_job({"checkpoint": str(arguments.run or "")}, words)
    data, model, par = job.config.data, job.config.model, job.config.parallelism
    if "load" in parts and data.tokenizer != "huggingface":
        raise refuse("data.tokenizer", data.tokenizer, "huggingface for aiperf", "Leave out --parts load.")
    ranks = Ranks.of(job.world_size, job.config.train.device, least=1)
    name, sizes = arguments.run.resolve().name, f"CP {par.context_parallel_size}, TP {par.tensor_parallel_size}"
    about = f"{name}, {model.num_layers} layers, {job.config.train.precision}, {sizes}"
    report = Report(arguments.out, ranks.device, what, about, " ".join(words) or "no settings")
    prompts: list[list[int]] = []
    if "first" in parts:
        prompts = _prompts(job, lengths, arguments.rounds)
        found = run_on_ranks(ranks, of_engine, job, prompts, arguments.new)
        results.first = [
            {"tokens": len(p), "engine": each, "server": {}} for p, each in zip(prompts, found, strict=True)
        ]
    for delay in delays if {"first", "load"} & {*parts} else ():
        with serving(arguments.run, [*words, f"serve.max_delay_s={delay:g}"], arguments.out) as url:
            for row, tokens in zip(results.first, prompts, strict=True):
                body = {"prompt": tokens, "max_tokens": arguments.new, "ignore_eos": True}
                row["server"][f"{delay:g}"] = ask(url, "/v1/completions", body)
                print(_save(report, results).rpartition("\n")[2], flush=True)
            if "load" in parts and delay == delays[0]:
                _load(arguments, report, results, url, name, str(data.tokenizer_path))
    if "drafts" in parts:
        _drafts(arguments, report, results)
    print(_save(report, results))
    different = [row for row in results.first if not all(_same(row, each) for each in row["server"].values())]
    different += [row for row in results.drafts if not row["equal"]]
    if arguments.exact and different:
        raise JobFailed(f"texts differ: {different[0]}")


def _prompts(job: InferenceJob, lengths: Sequence[int], rounds: int) -> list[list[int]]:
    """Return a short prompt that warms up, and as many of each length as rounds; of random tokens that end no text."""
    data = job.config.data
    begin = BYTE_LEVEL_EOD + 2 if data.tokenizer == "huggingface" else 0
    end = build_tokenizer(data.tokenizer, data.tokenizer_path).vocab_size if begin else BYTE_LEVEL_EOD
    source = random.Random(0)
    counts = [min(_WARM_UP, *lengths), *(length for length in lengths for _ in range(rounds))]
    return [source.choices(range(begin, end), k=count) for count in counts]


def of_engine(rank: int, job: InferenceJob, prompts: Sequence[list[int]], new: int) -> list[dict[str, Any]]:
    """Return the seconds to the first token on the slowest rank and the text, of every prompt alone."""
    par = job.config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    found = []
    with open_engine(job, collection) as (engine, tokenizer):
        warm_up(engine)
        for tokens in prompts:
            session = engine.open()
            wait_for_all(engine.model.attention.device)
            begin = time.perf_counter()
            session.append(tokens)
            generation = engine.start(session, Sampling(max_new_tokens=new))
            engine.step([generation])  # ends with the token on the host
            seconds = time.perf_counter() - begin
            while generation.finish_reason is None:
                engine.step([generation])
            text = detokenize(tokenizer, generation.tokens)
            found.append({"first_s": max(gather_objects(world_group(), seconds)), "text": text})
            session.close()
            engine.cache_manager.drop_cached()
    groups.destroy()
    return found


@contextmanager
def serving(run: Path, words: Sequence[str], out: Path) -> Iterator[str]:
    """Run `megatron-longctx serve` and yield its address; its output goes to a `.log` beside `out`.

    Raises:
        JobFailed: it ended before it listened.
    """
    environment = {key: value for key, value in os.environ.items() if key != "MEGATRON_LONGCTX_API_KEY"}
    command = [sys.executable, "-m", "megatron_longctx", "serve", f"checkpoint={run}", *words, "serve.port=0"]
    path = out.with_suffix(".log")
    with path.open("ab") as log:
        begin, start = log.tell(), time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        while not (found := re.search(rb"serving .* at (http://[\d.:]+)/v1", path.read_bytes()[begin:])):
            if process.poll() is not None or time.monotonic() - start > _PATIENCE_S:
                raise JobFailed(f"the server does not listen:\n{path.read_text()[-2000:]}")
            time.sleep(0.1)
        print(f"{' '.join(words)}: listens after {time.monotonic() - start:.1f} s", flush=True)
        yield found.group(1).decode()
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a greedy request; return its text, and seconds until the first text and the end of the stream."""
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    sent = json.dumps(body | options).encode()
    first, text, tokens = None, "", 0
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=_PATIENCE_S)) as connection:
        begin = time.perf_counter()
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise JobFailed(f"{path}: {answer.status} {answer.read()[:2000]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            new = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in event["choices"])
            if new and first is None:
                first = time.perf_counter() - begin
            text += new
    if first is None:
        raise JobFailed(f"{path}: no text in the answer")
    return {"first_s": first, "all_s": time.perf_counter() - begin, "text": text, "tokens": tokens}


def _load(
    arguments: argparse.Namespace, report: Report, results: Results, url: str, model: str, tokenizer: str
) -> None:
    """Run `aiperf` with every number of clients."""
    # Offline, aiperf looks for the folder of a tokenizer in the hub's cache.
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    lengths = numbers("--prompts", arguments.prompts, 2)
    share = f"{100 / len(lengths):.4f}".rstrip("0").rstrip(".")
    mix = ";".join(f"{length},{arguments.tokens}:{share}" for length in lengths)
    for clients in numbers("--clients", arguments.clients, 1):
        folder = arguments.out.with_name(f"{arguments.out.stem}_aiperf_{clients}")
        count = max(16, clients * arguments.requests)
        words = [f"--url={url}", f"--model={model}", f"--tokenizer={Path(tokenizer).resolve()}", "--streaming"]
        words += ["--endpoint-type=completions", "--use-server-token-count", "--ui=none", f"--artifact-dir={folder}"]
        words += [f"--random-seed={clients}"]  # no prompts of another number of clients, which may be cached
        words += [f"--concurrency={clients}", f"--request-count={count}", f"--seq-dist={mix}"]
        words += ["--extra-inputs=ignore_eos:true", "--extra-inputs=temperature:0", f"--warmup-request-count={clients}"]
        words += [f"--num-dataset-entries={count + clients}", "--no-gpu-telemetry", "--no-server-metrics"]
        words += [f"--workers-max={min(clients, 8)}"]
        command = ["aiperf", "profile", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment)
        path = folder / "profile_export_aiperf.json"
        if not path.exists():
            raise JobFailed(f"aiperf ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        found = json.loads(path.read_text())
        if found["error_summary"] or found["request_count"]["avg"] != count:
            raise JobFailed(f"aiperf: {found['request_count']} of {count} requests, {found['error_summary']}")
        row = {kind: {p: found[key][p] for p in ("avg", *_PERCENTILES)} for kind, key in _KINDS.items()}
        rates = {"tokens_per_s": found["output_token_throughput"]["avg"]}
        rates["prompt_tokens"] = found["usage_prompt_tokens"]["avg"]
        results.load.append({"clients": clients, "requests": count, **rates, **row})
        print(_save(report, results).rpartition("\n")[2], flush=True)


def _drafts(arguments: argparse.Namespace, report: Report, results: Results) -> None:
    """Ask the chats of every number of drafts; the first of a task warms up and fills the cache with its prompt."""
    texts: dict[str, str] = {}
    for count in numbers("--drafts", arguments.drafts, 0):
        with serving(arguments.run, [*arguments.settings, f"inference.speculate={count}"], arguments.out) as url:
            for name, task in TASKS.items():
                body = {"messages": [{"role": "user", "content": task}], "max_tokens": arguments.tokens}
                found = [ask(url, "/v1/chat/completions", body) for _ in range(1 + arguments.rounds)]
                rates = [(each["tokens"] - 1) / (each["all_s"] - each["first_s"]) for each in found[1:]]
                text = texts.setdefault(name, found[0]["text"])
                row = {"task": name, "drafts": count, "tokens": found[0]["tokens"], "rates": rates}
                results.drafts.append(row | {"text": text, "equal": all(each["text"] == text for each in found)})
                print(_save(report, results).rpartition("\n")[2], flush=True)


def _same(row: dict[str, Any], found: dict[str, Any]) -> bool:
    return bool(row["engine"]["text"] == found["text"])


def _save(report: Report, results: Results) -> str:
    return report.write(asdict(results), tables(results))


def tables(results: Results) -> str:
    """Return a Markdown table of every part, without the first prompt, which warmed up."""
    parts, rows = [], []
    for row in results.first[1:]:
        own = row["engine"]["first_s"]
        for delay, found in row["server"].items():
            share, same = found["first_s"] / own - 1, str(_same(row, found))
            rows.append([f"{row['tokens']:,}", delay, f"{own:.3f}", f"{found['first_s']:.3f}", f"{share:+.1%}", same])
    if rows:
        head = ["tokens", "serve.max_delay_s", "engine, s to first", "server, s to first", "more", "same text"]
        parts.append(table(head, rows))
    if results.load:
        names = {"first": "first token", "each": "per token", "all": "request"}
        head = ["clients", "requests", "tokens/s", *(f"{n} {p}, ms" for n in names.values() for p in _PERCENTILES)]
        rows = [
            [str(row["clients"]), str(row["requests"]), f"{row['tokens_per_s']:.0f}",
             *(f"{row[kind][p]:.1f}" for kind in names for p in _PERCENTILES)]
            for row in results.load
        ]  # fmt: skip
        parts.append(table(head, rows))
    if results.drafts:
        head = ["task", "drafts", "tokens", "tokens/s", "same text as without"]
        rows = [
            [row["task"], str(row["drafts"]), str(row["tokens"]), f"{statistics.median(row['rates']):.1f}",
             str(row["equal"])]
            for row in results.drafts
        ]  # fmt: skip
        parts.append(table(head, rows))
    return "\n\n".join(parts)
