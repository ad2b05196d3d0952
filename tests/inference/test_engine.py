"""A trained model with a sharded cache answers as in one dense forward pass, turn by turn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config
from megatron_longctx.core.plans.cache_modes import CACHE_MODES as MODES
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import error
from tests.inference.conversations import Model, Record, Truth, converse_in, engine_of, parallel, truths
from tests.shared.training import changed, tiny_config

OTHER_SHAPES = (
    {"model.num_kv_heads": 1, "model.tie_embeddings": True},
    {"model.num_kv_heads": 4, "model.position_embedding": "learned", "model.normalization": "layernorm"},
)


def models_of(trained: Config) -> list[Model]:
    """Return the trained model, with grouped heads, and untrained ones: one KV head, and as many as query heads."""
    others = [Model(changed(trained, {**shape, "data.seq_length": 128})) for shape in OTHER_SHAPES]
    return [Model(trained, Path(trained.run.root, trained.run.name, "checkpoints")), *others]


@pytest.fixture(scope="module")
def truth(trained: Config) -> list[Truth]:
    single = [Model(parallel(model.config, 1), model.checkpoints) for model in models_of(trained)]
    return run_distributed(truths, 1, single)[0]


def check(records: list[Record], truth: Truth) -> None:
    """Compare tokens exactly, and logits by the project's rule: at most twice the error of one device's kernel."""
    assert [record.tokens for record in records] == [record.tokens for record in truth.records]
    for record, exact, own in zip(records, truth.exact, truth.own, strict=True):
        assert len(record.generated) >= 5
        for at in record.generated:
            assert record.tokens[at] == int(exact[at - 1].argmax()), f"token {at}"
        rows = torch.tensor([at - 1 for at in record.logits])
        found = torch.stack(list(record.logits.values()))
        assert error(found, exact[rows]) <= 2 * error(own[rows], exact[rows])


def test_one_rank_equals_the_dense_model(truth: list[Truth]) -> None:
    for each in truth:
        check(each.records, each)
        assert all(len(set(record.tokens)) > 5 for record in each.records)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_turn_equals_the_dense_model(trained: Config, truth: list[Truth], n: int) -> None:
    model, *others = models_of(trained)
    modes = {2: ("pass_kv", "pass_q"), 3: tuple(MODES), 4: ("auto",)}[n]
    cases = [(parallel(model.config, n, mode=mode), 0) for mode in modes]
    if n == 2:
        cases.append((parallel(model.config, n, prefill_chunk=4), 0))
        cases += [
            (parallel(other.config, n, mode="pass_kv", decode="replicated"), i) for i, other in enumerate(others, 1)
        ]
    if n == 3:
        cases += [(parallel(other.config, n, mode="pass_q"), i) for i, other in enumerate(others, 1)]
        cases.append((parallel(model.config, n, decode="plan"), 0))
    if n == 4:
        cases.append((parallel(model.config, 2, tensor=2), 0))
        alone = parallel(model.config, 1)
        sizes = replace(alone.parallelism, tensor_parallel_size=4)  # two ranks for each KV head, which is no training
        cases.append((replace(alone, parallelism=sizes), 0))
    jobs = [Model(config, model.checkpoints if i == 0 else None) for config, i in cases]
    ranks = run_distributed(converse_in, n, jobs)
    for records in ranks:
        for (_, i), found in zip(cases, records, strict=True):
            check(found, truth[i])


def still_computes(rank: int, config: Config) -> bool:
    """Return whether a GPU computes a prompt when the host has waited for it."""
    with engine_of(config) as engine, engine._chooser.forcing("pass_kv"):
        engine.append({engine.open(): range(60)})  # compiles kernels, for which a host waits
        layers, cycles = iter(range(1, 1 + config.model.num_layers)), {config.model.num_layers: 2 * 10**9}
        engine.model.attention.on_layer = lambda: torch.cuda._sleep(cycles.get(next(layers), 0))  # type: ignore[no-untyped-call]
        engine.append({engine.open(): range(60)})
        engine.wait()
        return not torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_the_last_layers_are_not_waited_for(tmp_path: Path) -> None:
    for layers in (15, 32):
        settings = {"train.device": "cuda", "model.num_layers": layers, "data.seq_length": 128, "model.hidden_size": 64}
        config = parallel(tiny_config(tmp_path, "x", settings), 1)
        assert run_distributed(still_computes, 1, config, backend="nccl") == [layers == 32]
