"""Decode with drafts from the text so far (inference.speculate) and without, for answers that repeat a prompt.

With `checkpoint=RUN` a model answers in earnest. Without it, weights are random: a model of any size computes the
answers that an earlier run wrote to `--answers FILE.json`, so that drafts are accepted as they were there.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_longctx.config import Config
from megatron_longctx.core.comm.device import synchronize
from megatron_longctx.core.errors import refuse
from megatron_longctx.inference.batch import ScheduledChunk
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.choose_cache_mode import Chooser
from megatron_longctx.inference.decode import Decoder
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.memory import pages_per_rank
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import NextToken, Session
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.models.chat import load_chat
from megatron_longctx.serving.inference_job import build_job
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .report import Report, numbers, table

DEFAULTS = ("model=llama3_8b", "model.implementation=local", "train.precision=bf16")
_STORY = (
    "The quick brown fox jumpd over the lazy dog. After the jump it ran thru the forest until it came to a river. At "
    "the river it drank some water, lookd back, and saw that the dog had not moved at all. It decided to rest under an "
    "old oak tree, where it fell asleep and dreamd of a field full of rabbits."
)
_CODE = (
    "def moving_average(values, window):\n    total = sum(values[:window])\n    averages = [total / window]\n"
    "    for i in range(window, len(values)):\n        total += values[i] - values[i - window]\n"
    "        averages.append(total / window)\n    return averages\n"
)
TASKS = {
    "summarize": f"Summarize this story. Use its own sentences where you can.\n\n{_STORY}",
    "correct": f"Correct the spelling of this text and return all of it.\n\n{_STORY}",
    "edit code": f"Add a docstring to this function and return all of the code.\n\n{_CODE}",
    "question": "Why is the sky blue?",
}


@dataclass
class Answer:
    """The tokens of a task; `tokens` begins with the prompt's."""

    prompt: int
    tokens: list[int]


@dataclass(frozen=True)
class Limits:
    """What to measure: values of `inference.speculate`, new tokens, rounds; nothing begins after `seconds`."""

    drafts: tuple[int, ...]
    tokens: int
    rounds: int
    seconds: float


@dataclass
class Cell:
    """The seconds of decode in each round, the passes of the model, and whether the tokens are those without drafts."""

    tasks: str
    drafts: int
    new: int
    passes: int
    equal: bool
    seconds: list[float]


Answers = dict[str, Answer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help=f"group=NAME and key=value, after {' '.join(DEFAULTS)}")
    parser.add_argument("--answers", type=Path, help="the JSON of a run with checkpoint=RUN")
    parser.add_argument("--drafts", default="3,7", help="values of inference.speculate (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens, at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after the first (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing later (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown table after every cell."""
    own = dict(word.split("=", 1) for word in arguments.settings if word.startswith("checkpoint="))
    words = [word for word in arguments.settings if not word.startswith("checkpoint=")]
    recorded: Answers = {}
    checkpoints = None
    if own:
        job = build_job(own, words)
        config, checkpoints = job.config, job.checkpoints
    elif arguments.answers is None:
        raise refuse("--answers", None, "a file with answers to compute", "Give it, or checkpoint=RUN.")
    else:
        config = inference_config(compose_config([*DEFAULTS, *words]))
        written = json.loads(arguments.answers.read_text())["answers"]
        recorded = {name: Answer(answer["prompt"], renumbered(answer["tokens"])) for name, answer in written.items()}
    drafts = numbers("--drafts", arguments.drafts, 1)
    inference = replace(config.inference, cache_tokens=16_384, max_model_len=4096)
    config = replace(config, inference=inference)
    par = config.parallelism
    ranks = Ranks.of(par.context_parallel_size * par.tensor_parallel_size, config.train.device, least=1)
    weights = f"weights of {Path(own['checkpoint']).name}" if own else "random weights, recorded answers"
    about = f"{config.model.name}, {config.train.precision}, {ranks.count} ranks, {weights}"
    report = Report(arguments.out, ranks.device, "decode with and without drafts, in seconds", about, "greedy")
    limits = Limits(drafts, arguments.tokens, arguments.rounds, arguments.seconds)
    save = partial(record, report, config)
    print(tables(run_on_ranks(ranks, measure, config, checkpoints, recorded, limits, save)))


def renumbered(tokens: Sequence[int]) -> list[int]:
    """Return tokens of the byte-level vocabulary that repeat as these do."""
    numbers_of = {token: number % 256 for number, token in enumerate(dict.fromkeys(tokens))}
    return [numbers_of[token] for token in tokens]


def record(report: Report, config: Config, cells: list[Cell], answers: Answers) -> None:
    data = {"model": asdict(config.model), "precision": config.train.precision}
    found = {name: asdict(answer) for name, answer in answers.items()}
    report.write({**data, "cells": [asdict(cell) for cell in cells], "answers": found}, tables(cells))


def tables(cells: Sequence[Cell]) -> str:
    """Return a Markdown table of medians."""
    base = {cell.tasks: statistics.median(cell.seconds) / cell.new for cell in cells if not cell.drafts}
    rows = []
    for cell in cells:
        seconds = statistics.median(cell.seconds)
        faster = f"{base[cell.tasks] * cell.new / seconds:.2f}" if cell.tasks in base else ""
        per_pass, rate = f"{cell.new / cell.passes:.2f}", f"{cell.new / seconds:.1f}"
        rows.append(
            [cell.tasks, str(cell.drafts), str(cell.new), str(cell.passes), per_pass, rate, faster, str(cell.equal)]
        )
    head = ["task", "drafts", "new tokens", "passes", "tokens per pass", "tokens/s", "times faster", "equal"]
    return table(head, rows)


class _Recorded(Decoder):
    """Computes as ever, and then says that the tokens of recorded answers are the likeliest."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answers: dict[int, list[int]] = {}  # keyed by session

    def _step(
        self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], tile: int, every: bool = False
    ) -> list[NextToken]:
        found = iter(super()._step(chunks, texts, tile, every))
        said: list[NextToken] = []
        for chunk, text in zip(chunks, texts, strict=True):
            for at in range(chunk.cached + (1 if every else len(text)), chunk.cached + len(text) + 1):
                each, answer = next(found), self.answers.get(chunk.session)
                said.append(each if answer is None else NextToken(each.logits, answer[at]))
        return said


def measure(
    rank: int, config: Config, checkpoints: Path | None, answers: Answers, limits: Limits, save: Any
) -> list[Cell]:
    """Measure every task alone, and then all of them in one batch, on this rank; rank 0 calls `save`."""
    begin = time.perf_counter()
    par = config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size, seed=5)
    engine, tokenizer = build_engine(config, collection, checkpoints)
    model = engine.model
    engines = {}
    for count in (0, *limits.drafts):
        settings = replace(config.inference, speculate=count)
        manager = CacheManager(par.context_parallel_size, pages_per_rank(config), settings.page_tokens)
        engines[count] = LongContextEngine(model, manager, Chooser(model.attention.shape.workload), settings)
        if not checkpoints:
            engines[count]._decoder = _Recorded(model, manager, settings, "auto")
    stop: tuple[int, ...] = ()
    if checkpoints:
        chat = load_chat(config.inference.chat_template, tokenizer)
        stop = (tokenizer.eod, *chat.stop_tokens)
        for name, text in TASKS.items():
            prompt = list(tokenizer.tokenize(chat.text([{"role": "user", "content": text}])))
            answers[name] = Answer(
                len(prompt), [*prompt, *engine.generate([prompt], Sampling(limits.tokens, stop=stop))[0]]
            )
    if rank == 0:
        print(f"built after {time.perf_counter() - begin:.1f} s: {engines[0].decoding}", flush=True)
    cells: list[Cell] = []
    for tasks in (*([name] for name in answers), list(answers)):
        cells += _cells(engines, {name: answers[name] for name in tasks}, limits.rounds, begin + limits.seconds)
        if rank == 0:
            save(cells, answers)
    for each in engines.values():
        each.release()
    groups.destroy()
    return cells


def _cells(engines: dict[int, LongContextEngine], answers: Answers, rounds: int, deadline: float) -> list[Cell]:
    """Decode the answers with every number of drafts, in turn; the first round captures graphs."""
    name = " + ".join(answers)
    cells = {count: Cell(name, count, 0, 0, True, []) for count in engines}
    for _ in range(1 + rounds):
        for count, engine in engines.items():
            late = [time.perf_counter() > deadline]
            dist.broadcast_object_list(late, 0)
            if late[0]:
                break
            try:
                _round(engine, answers, cells[count])
            except Exception as error:  # the next cell may work
                traceback.print_exc()
                print(f"{name}, {count} drafts: {type(error).__name__}: {error}", flush=True)
                return []
    for cell in cells.values():
        cell.seconds = cell.seconds[1:] or cell.seconds
        if dist.get_rank() == 0 and cell.seconds:
            rate = cell.new / statistics.median(cell.seconds)
            passes = f"{cell.new} tokens in {cell.passes} passes"
            print(f"{name}, {cell.drafts} drafts: {rate:.1f} tokens/s, {passes}, equal: {cell.equal}", flush=True)
    return [cell for cell in cells.values() if cell.seconds]


def _round(engine: LongContextEngine, answers: Answers, cell: Cell) -> None:
    """Decode all answers in one batch, from their prompts on."""
    engine.cache_manager.drop_cached()
    sessions: list[Session] = [engine.open() for _ in answers]
    engine.append({s: answer.tokens[: answer.prompt] for s, answer in zip(sessions, answers.values(), strict=True)})
    generations = []
    for session, answer in zip(sessions, answers.values(), strict=True):
        if isinstance(engine._decoder, _Recorded):
            engine._decoder.answers[session.number] = [*answer.tokens, *[0] * 16]
            session.next_token = NextToken(None, answer.tokens[answer.prompt])
        generations.append(engine.start(session, Sampling(len(answer.tokens) - answer.prompt)))
    engine.step(generations)
    engine.mode_counts.clear()
    before = sum(len(generation.tokens) for generation in generations)
    synchronize(engine.model.attention.device)
    begin = time.perf_counter()
    while going := [generation for generation in generations if generation.finish_reason is None]:
        engine.step(going)  # ends with the tokens on the host
    cell.seconds.append(time.perf_counter() - begin)
    cell.new = sum(len(generation.tokens) for generation in generations) - before
    cell.passes = engine.mode_counts.total()
    cell.equal &= all(s.tokens == answer.tokens for s, answer in zip(sessions, answers.values(), strict=True))
    for session in sessions:
        session.close()
