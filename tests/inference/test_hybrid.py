"""Recurrent layers in inference: logits equal those of one forward pass over the whole text, on any ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.cli.conversion import import_model
from megatron_longctx.config import Config
from megatron_longctx.inference.cache_manager import CacheFull, CacheManager
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.memory import check_cache, state_shape, weight_bytes
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request
from megatron_longctx.inference.states import StateRows
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.serving import serve
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import RESOLVED, load_config
from tests.inference.conversations import dense, engine_of, parallel
from tests.inference.test_scheduler import alone, finish, scheduling, tokens_of
from tests.inference.test_serve import serving
from tests.inference.test_windows import Logits, check, logits_in, texts
from tests.models.test_parity import MODELS
from tests.models.test_parity import SIZES as PARITY_SIZES
from tests.shared.published import theirs, write_model
from tests.shared.training import changed, tiny_config

SIZES = {
    "model.pattern": "G-*-G-", "model.num_layers": 3, "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 4, "model.linear_key_head_dim": 8, "model.linear_value_head_dim": 6,
    "parallelism.schedule": "helper",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "plans": {"decode": "plan"},
    "chunks": {"prefill_chunk": 5},
    "small chunks, and pages": {"prefill_chunk": 3, "page_tokens": 7, "mode": "pass_q"},
}
PROMPT = tuple(random.Random(4).randrange(97, 105) for _ in range(30))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("hybrid"), "x", SIZES)


@pytest.fixture(scope="module")
def truth(config: Config) -> dict[str, list[torch.Tensor]]:
    return run_distributed(truths, 1, config)[0]


def truths(rank: int, config: Config) -> dict[str, list[torch.Tensor]]:
    return {kind: dense(of_kind(config, kind), None, texts(), fp64=True) for kind in "GKM"}


def of_kind(config: Config, kind: str) -> Config:
    return changed(config, {"model.pattern": f"{kind}-*-{kind}-"})


def a_pass_that_fails_changes_nothing(engine: LongContextEngine) -> None:
    whole, session = engine.open(), engine.open()
    whole.append(PROMPT)
    session.append(PROMPT[:11])

    def fail() -> None:
        raise InterruptedError

    engine.model.attention.on_layer = fail
    with pytest.raises(InterruptedError):  # the first layer, a recurrent one, has written states by then
        session.append(PROMPT[11:])
    engine.model.attention.on_layer = lambda: None
    session.append(PROMPT[11:])
    torch.testing.assert_close(engine.next_logits([session]), engine.next_logits([whole]))
    session.close()
    whole.close()


def forks_and_dropped_sessions_go_on_from_a_state_that_is_kept(engine: LongContextEngine) -> None:
    engine.cache_manager.drop_cached()
    parent = engine.open()
    parent.append(PROMPT)
    parent.append(PROMPT[:4])
    logits = engine.next_logits([parent])
    fork, at_page, shorter = parent.fork(), parent.fork(32), parent.fork(31)
    assert [each.cached_tokens for each in (fork, at_page, shorter)] == [32, 32, 28]
    fresh = engine.open()
    fresh.append(at_page.tokens)
    torch.testing.assert_close(engine.next_logits([at_page]), engine.next_logits([fresh]))
    torch.testing.assert_close(engine.next_logits([fork]), logits)
    engine.cache_manager.truncate(parent.number, 0)
    parent.next_token = None
    torch.testing.assert_close(engine.next_logits([parent]), logits)
    shorter.append(parent.tokens[31:])
    torch.testing.assert_close(engine.next_logits([shorter]), logits)
    assert parent.generate(Sampling(max_new_tokens=6)) == fork.generate(Sampling(max_new_tokens=6))
    text = [104, *range(97, 104)]  # two whole pages: the last token is computed again, so the first one is kept
    whole = engine.open()
    whole.append(text)
    again = engine.open(text[:-1])
    assert again.cached_tokens == 4
    for session in (parent, fork, at_page, shorter, fresh, whole, again):
        session.close()


def requests_reuse_whole_prompts(engine: LongContextEngine) -> None:
    page, sampling = engine.cache_manager.page_tokens, Sampling(max_new_tokens=5, temperature=1.0, seed=3)
    same = [Request(i, PROMPT, sampling, stream=i) for i in range(3)]
    other = Request(3, (*PROMPT[:20], 97, 98), sampling)
    expected = [alone(engine, each) for each in (same[0], other)]
    with scheduling(engine, prefill_chunk=8) as scheduler:
        for request in (*same, other):
            scheduler.submit(request)
        events = {event.number: [event] for event in scheduler.advance()}
        assert scheduler.num_requests == {"waiting": 2, "running": 2}, "a prompt that ends differently finds no state"
        for number, more in finish(scheduler).items():
            events.setdefault(number, []).extend(more)
        turn = Request(4, (*PROMPT, *tokens_of(events[0]), 99, 100), sampling)
        events |= finish(scheduler, turn)
    kept = 29 // page * page
    assert [events[i][0].cached_tokens for i in range(5)] == [0, kept, kept, 0, kept]
    assert [tokens_of(events[i]) for i in (0, 3, 4)] == [*expected, alone(engine, turn)]
    assert len({tuple(tokens_of(events[i])) for i in range(3)}) == 3


def too_many_sessions_are_refused(engine: LongContextEngine) -> None:
    rows = engine._states
    sessions = [engine.open() for _ in range(rows.total)]
    for session in sessions[:-2]:
        session.append([97])
    with pytest.raises(CacheFull, match=r"need 3 recurrent states: expected at most the 2 of 12 that are free"):
        engine.append({session: [97] for session in (*sessions[-2:], sessions[0])})
    assert not sessions[-1].tokens and sessions[0].tokens == [97]
    assert len(engine.generate([[98]], Sampling(max_new_tokens=1))[0]) == 1
    for session in sessions:
        session.close()
    engine.cache_manager.drop_cached()
    assert len(rows._free) + len({*rows._kept.values()}) == rows.total


def found_by(rank: int, configs: list[Config]) -> list[Logits]:
    found = []
    for config in configs:
        with engine_of(config) as engine:
            found.append(logits_in(engine))
            if config is configs[0] and config.model.pattern == SIZES["model.pattern"]:  # rows are alike for all
                a_pass_that_fails_changes_nothing(engine)
                forks_and_dropped_sessions_go_on_from_a_state_that_is_kept(engine)
                requests_reuse_whole_prompts(engine)
                too_many_sessions_are_refused(engine)
    return found


@pytest.mark.parametrize(
    ("kind", "tensor", "n"), [("G", 1, 1), ("G", 1, 3), ("G", 2, 2), ("M", 1, 3), ("M", 2, 2), ("K", 1, 3), ("K", 2, 2)]
)
def test_every_way_equals_the_training_forward_pass(
    kind: str, tensor: int, n: int, config: Config, truth: dict[str, list[torch.Tensor]]
) -> None:
    ways = list(WAYS.values())
    if kind != "G" or tensor > 1:
        ways = ways[::3] if tensor == 1 else ways[:2] if kind == "G" else ways[1:2]
    configs = [parallel(of_kind(config, kind), n, tensor, recurrent_states=12, **way) for way in ways]
    for rank in run_distributed(found_by, tensor * n, configs):
        for found in rank:
            check(found, truth[kind])


def test_rows_are_written_once_and_the_least_recent_prefix_gives_way() -> None:
    manager, rows = CacheManager(1, 20, 4), StateRows(5)
    kept = []
    for first in (0, 50):
        session = manager.open()
        chunks = [manager.append({session: count}) for count in (8, 1, 1)]
        rows.begin(chunks, {session: 8})
        moves = []
        for chunk in chunks:
            rows.move(chunk)
            moves.append(rows.moves[session])
        assert [read for read, _ in moves] == [0, *(write for _, write in moves[:-1])]
        assert len({write for _, write in moves}) == 3, "the first is kept, the second is read"
        manager.name_pages(session, range(first, first + 10))
        rows.end(True, manager)
        kept.append(moves[0][1])
        manager.close(session)
        rows.close(session)
    for first, place in ((0, 8), (50, 8), (0, 8)):
        session = manager.open(range(first, first + 10))
        assert manager.length(session) == 8
        rows.adopt(session, manager)
        assert manager.length(session) == place
        manager.close(session)
        rows.close(session)
    sessions = [manager.open() for _ in range(4)]
    rows.begin([manager.append(dict.fromkeys(sessions, 1))], {})  # takes the three free rows and one of the others
    for first, place in ((0, 8), (50, 0)):
        session = manager.open(range(first, first + 10))
        rows.adopt(session, manager)
        assert manager.length(session) == place
        rows.close(session)
    rows.end(False, manager)


def test_the_server_answers_as_transformers(tmp_path: Path, on_cpu: None) -> None:
    pytest.importorskip("uvicorn")
    model = write_model(tmp_path / "published", "qwen3_next", torch.float32, **PARITY_SIZES | MODELS["qwen3_next"])
    import_model(str(tmp_path / "published"), [f"out={tmp_path / 'run'}"])
    prompt = [45, 60, 71, 90, 60, 45, 33, 71, 99, 12, 17]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "published")
    settings = ("parallelism.context_parallel_size=2", "inference.max_model_len=100", "serve.max_active=2")
    with serving(load_config(tmp_path / "run" / RESOLVED), tmp_path, *settings, name="run") as client:
        for text, cached in ((prompt, 0), (prompt, 8), (prompt + [7] * 9, 8)):
            body = {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2}
            status, answer = client.ask("/v1/completions", body)
            expected = tokenizer.decode(theirs(model, text, 12, len(tokenizer))[1])
            assert status == 200 and [each["text"] for each in answer["choices"]] == [expected] * 2
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inference.speculate": 3}, "inference.speculate=3: expected 0 with model.pattern"),
        ({"inference.exact_reuse": True, "inference.prefill_chunk": 8}, "inference.exact_reuse=True: expected false"),
        ({"serve.host_cache_gib": 1.0}, "serve.host_cache_gib=1.0: expected 0.0 with model.pattern"),
        ({"inference.shard_weights": True}, "inference.shard_weights=True: expected false with model.pattern"),
        ({"model.pattern": "G-G-G-"}, r"model.pattern=G-G-G-: expected a layer \* for inference"),
    ],
)
def test_what_a_state_excludes_is_refused(config: Config, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inference_config(changed(config, settings))


def test_memory_counts_states_and_the_cache_of_attention_alone(config: Config) -> None:
    config = parallel(config, 2, cache_tokens=8, recurrent_states=10)
    assert state_shape(config).row_bytes == 2 * (4 * 4 * 8 * 6 + 4 * 3 * (2 * 2 * 8 + 4 * 6))
    pages = 2 * 4 * 2 * 2 * 8 * 4  # two of four tokens in one layer: keys and values of two heads of 8 in fp32
    needed = weight_bytes(config, 300) + 10 * state_shape(config).row_bytes + pages
    check_cache(config, 300, needed)
    with pytest.raises(ValueError, match=r"beside 0\.0 GiB of weights and recurrent states"):
        check_cache(config, 300, needed - 1)


def test_more_sequences_than_states_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(config, {"serve.max_active": 5, "inference.recurrent_states": 14})
    job = type("Job", (), {"config": config})
    monkeypatch.setattr(serve, "build_job", lambda *_: job)
    with pytest.raises(ValueError, match="=5: expected at most 4, a third of inference"):
        serve.job_of(["runs/x"])
