"""Serve thousands of mixed requests and show that no page and no memory is lost: `python -m analysis.soak`.

Prompts have common beginnings; answers are greedy and drawn, with penalties, scores and stop tokens. Some requests are
refused, some leave. They need several times the cache, so that pages give way and come back from the host.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import replace

import psutil

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.host_cache import HostCache
from megatron_longctx.inference.pace import Pace
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

_SETTINGS = ("train.device=cpu", "train.precision=fp32", "inference.cache_tokens=2000", "inference.page_tokens=8")
_SHAPE = ("model=tiny", "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", *_SETTINGS)
_MIB, _ROWS, _COMPARED = 2**20, 20, 100


def mixed_request(source: random.Random, number: int, texts: list[tuple[int, ...]]) -> Request:
    """Return a random request that begins like one of the texts, one of which it may replace."""
    text = source.choice(texts)
    prompt = (*text[: source.randint(1, len(text))], *source.choices(range(256), k=source.choice((1, 5, 60))))
    if source.random() < 0.05:
        prompt = source.choice(((), (*prompt, 10**6), prompt * 1000))  # refused
    elif source.random() < 0.3 and len(prompt) < 600:
        texts[source.randrange(len(texts))] = prompt
    sampling = Sampling(
        max_new_tokens=source.randint(1, 12),
        temperature=source.choice((0.0, 0.0, 1.0)),
        seed=number,
        stop=source.choice(((), (7, 9))),
        presence_penalty=source.choice((0.0, 0.5)),
        logprobs=source.choice((None, None, 2)),
        prompt_logprobs=source.choice((None, None, None, None, 0)),
    )
    return Request(number, prompt, sampling, salt=source.randrange(2))


def serve(rank: int, config: Config, requests: int) -> list[tuple[int, float, float]]:
    """Serve the requests, and return at 20 points how many have ended, and this rank's memory in MiB.

    After every round each page is either used, kept or free. At the end nothing is held, whatever happened, and some of
    the greedy answers are compared with those to the same prompts alone.
    """
    collection = groups.initialize(context=config.parallelism.context_parallel_size, seed=1)
    engine, _ = build_engine(config, collection, None)
    attention, source = engine.model.attention, random.Random(1)
    host = HostCache(engine.cache_manager, attention.groups, attention.rank, 2**-12)
    scheduler = Scheduler(engine, max_active=6, pace=Pace(64), host=host)
    texts = [tuple(source.choices(range(256), k=size)) for size in (40, 300, 500)]
    ended: Counter[str] = Counter()
    compared: dict[int, tuple[Request, list[int]]] = {}
    rows: list[tuple[int, float, float]] = []
    sent, began = 0, time.monotonic()
    while sent < requests or scheduler.busy:
        if sent < requests and scheduler.num_requests["waiting"] < 8:
            request = mixed_request(source, sent, texts)
            scheduler.submit(request)
            plain = replace(request.sampling, logprobs=None, prompt_logprobs=None, seed=0)
            if plain == Sampling(max_new_tokens=plain.max_new_tokens) and len(compared) < _COMPARED:
                compared[sent] = request, []
            sent += 1
        if source.random() < 0.03:
            scheduler.cancel(source.randrange(max(0, sent - 6), sent))
        for event in scheduler.advance():
            ended.update([event.finish_reason] if event.finish_reason else [])
            if event.number in compared and event.token is not None:
                compared[event.number][1].append(event.token)
        check_pages(engine, scheduler)
        if ended.total() * _ROWS // requests > len(rows):
            rows.append((ended.total(), time.monotonic() - began, psutil.Process().memory_info().rss / _MIB))
            if rank == 0:
                done, seconds, mib = rows[-1]
                print(f"{done} requests, {seconds:.0f} s, {mib:.1f} MiB", dict(ended), scheduler.num_pages, flush=True)
    scheduler.close()
    assert ended.total() == requests, ended
    assert all(ended[reason] for reason in ("length", "cancelled", "error")), ended
    assert engine.cache_manager.used_pages() == 0 and not engine.cache_manager.sessions and not host.stores[0].claims
    assert not scheduler._overtaken_by
    answered = [(request, answer) for request, answer in compared.values() if answer]
    for request, answer in answered:
        assert engine.generate([request.prompt], request.sampling)[0][: len(answer)] == answer, request
    if rank == 0:
        print(f"{len(answered)} greedy answers are those of their prompts alone")
    engine.release()
    groups.destroy()
    return rows


def check_pages(engine: LongContextEngine, scheduler: Scheduler) -> None:
    """Raise AssertionError if a page is lost: used ones are those of active requests alone."""
    manager, pages = engine.cache_manager, scheduler.num_pages
    held = sum(manager.held_pages(manager.sessions, rank) for rank in range(manager.n))
    assert pages["used"] == held and min(pages.values()) >= 0, pages
    assert len(manager.sessions) == scheduler.num_requests["running"]


def configuration(ranks: int) -> Config:
    """Return a small model with a small cache, on some context-parallel ranks."""
    return inference_config(compose_config([*_SHAPE, f"parallelism.context_parallel_size={ranks}"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    ranks = arguments.ranks
    rows = run_on_ranks(Ranks(ranks, "cpu"), serve, configuration(ranks), arguments.requests)
    print(f"memory after a quarter: {rows[len(rows) // 4][2]:.1f} MiB, at the end: {rows[-1][2]:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
