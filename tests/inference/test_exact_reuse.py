"""With `inference.exact_reuse`, a prompt's logits are bit-identical with and without a cached prefix."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import Session
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import tiny_config

CHUNK = 8
LENGTHS = (CHUNK + 1, 45)


def prompt_of(length: int) -> list[int]:
    source = random.Random(7)
    return [source.randrange(256) for _ in range(length)]


def all_logits(engine: LongContextEngine, session: Session, rest: list[int]) -> Tensor:
    """Return the logits after the prompt and after each of two decoded tokens, alone in the batch."""
    engine.append({session: rest})
    found = [engine.next_logits([session])]
    for _ in range(2):
        engine.continue_all([session], Sampling(max_new_tokens=1))
        found.append(engine.next_logits([session]))
    return torch.cat(found)


def crowd(engine: LongContextEngine, seed: int) -> list[Session]:
    """Open, extend and close sessions so that free pages are few and scattered; return those left."""
    source = random.Random(seed)
    sessions = [engine.open() for _ in range(6)]
    for _ in range(3):
        engine.append({s: [source.randrange(256) for _ in range(source.randint(1, 9))] for s in sessions})
    for session in sessions[::2]:
        session.close()
    return sessions[1::2]


def cold_and_reused(engine: LongContextEngine, length: int) -> tuple[Tensor, list[Tensor]]:
    prompt = prompt_of(length)
    cold = engine.open()
    truth = all_logits(engine, cold, prompt)
    assert cold.exact_tokens == length // CHUNK * CHUNK
    # The same prefix with another end: in scattered pages, with another first rank, beside other sessions.
    others = crowd(engine, length)
    source = engine.open()
    assert engine.cache_manager.n == 1 or (source.number - cold.number) % engine.cache_manager.n
    engine.append({others[0]: [5] * 11, source: [*prompt[: length - 1], 0, 1, 2], others[1]: [6]})
    source.generate(Sampling(max_new_tokens=3))
    found = []
    for cut in range(0, length, 2 * CHUNK if length > 2 * CHUNK else CHUNK):
        fork = source.fork(cut)
        found.append(all_logits(engine, fork, prompt[cut:]))
        assert fork.reused_tokens == cut and fork.exact_tokens == cold.exact_tokens
        if cut == CHUNK:
            source_again = fork.fork()
            torch.testing.assert_close(*engine.next_logits([source_again, fork]), rtol=2e-5, atol=2e-5)
            source_again.close()
        fork.close()
    for session in (cold, source, *others):
        session.close()
    assert engine.cache_manager.used_pages() == 0
    return truth, found


def every_length(rank: int, configs: list[Config]) -> int:
    count = 0
    for config in configs:
        with engine_of(config) as engine:
            for length in LENGTHS:
                truth, found = cold_and_reused(engine, length)
                assert len(found) >= 2
                for number, logits in enumerate(found):
                    assert torch.equal(logits, truth), (config.inference.mode, length, number)
                count += len(found)
    return count


@pytest.mark.parametrize("n", [1, 3])
def test_cold_and_reused_prompts_are_bit_identical(tmp_path: Path, n: int) -> None:
    config = tiny_config(tmp_path, "fresh", {"data.seq_length": 128})
    settings = {"prefill_chunk": CHUNK, "exact_reuse": True, "cache_tokens": 1200}
    configs = [parallel(config, n, mode=mode, **settings) for mode in ("pass_kv", "pass_q")]
    assert min(run_distributed(every_length, n, configs)) > 0
