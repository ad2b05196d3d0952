"""Megatron-Core runs without CUDA after `cpu.apply`, in every thread, with repeatable dropout.

Tests run in spawned processes, because the replacements last as long as a process.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch

from megatron_longctx.mcore import cpu
from megatron_longctx.mcore.groups import timeout_of
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.jobs import PATIENCE_S


def test_nothing_happens_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.zeros, torch.Tensor.cuda, torch.cuda.current_device)
    assert cpu.apply() is False
    assert (torch.zeros, torch.Tensor.cuda, torch.cuda.current_device) == before


def _names(rank: int) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    assert torch.zeros(2).type() == "torch.FloatTensor"
    assert cpu.apply()
    replaced = torch.zeros
    assert cpu.apply()
    assert torch.zeros is replaced, "a second call changes nothing"
    _check_names()
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(_check_names).result()


def _check_names() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.synchronize()
    x = torch.ones(2, device="cuda", pin_memory=True)
    assert x.cuda(non_blocking=True).device.type == "cpu"
    assert x.to("cuda:0").to(device=torch.device("cuda")).pin_memory().device.type == "cpu"
    assert x.to("cuda", torch.bfloat16).dtype == torch.bfloat16
    assert torch.empty_like(x, device=torch.cuda.current_device()).shape == (2,)
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.int64).dtype == torch.int64
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.record_stream(side)
    assert side.record_event().query()
    end.record()
    assert start.elapsed_time(end) >= 0.0


def test_cuda_names_mean_the_cpu() -> None:
    run_distributed(_names, 1)


def _tracker(rank: int) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_longctx.mcore import groups

    groups.initialize(tensor=2, seed=5)
    tracker = get_cuda_rng_tracker()
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with tracker.fork():
        first = torch.rand(3)
        with tracker.fork("data-parallel-rng"):
            shared = torch.rand(3)
        second = torch.rand(3)
    assert torch.equal(torch.rand(4), expected), "the outer stream is untouched"
    assert not torch.equal(first, second)
    # The stream of the next fork continues the last one.
    with tracker.fork():
        third = torch.rand(3)
    groups.seed_everything(5)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(9), torch.cat([first, second, third]))
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, (first, shared))
    assert not torch.equal(gathered[0][0], gathered[1][0]), "tensor-parallel ranks draw differently"
    assert torch.equal(gathered[0][1], gathered[1][1]), "and share the data-parallel stream"

    with pytest.raises(ValueError, match="process groups=initialized: expected none"):
        groups.initialize(tensor=2)
    groups.destroy()
    with pytest.raises(ValueError, match=r"tensor x context x pipeline=3 x 1 x 1: expected a divisor of the 2"):
        groups.initialize(tensor=3)
    with pytest.raises(ValueError, match=r"context=0: expected at least 1"):
        groups.initialize(context=0)
    collection = groups.initialize(context=2)
    assert (collection.tp.size(), collection.cp.size(), collection.dp.size(), collection.dp_cp.size()) == (1, 2, 1, 2)
    limits = {timeout_of(group) for group in torch.distributed.distributed_c10d._world.pg_map}
    assert limits == {timedelta(seconds=PATIENCE_S)}, "no group may wait longer than the world"
    del collection, limits
    threads = []
    for _ in range(3):
        groups.destroy()
        groups.initialize(context=2)
        threads.append(psutil.Process().num_threads())
    assert len(set(threads)) == 1, "threads of old groups slow down the next ones"
    groups.destroy()


def test_random_tracker_and_groups() -> None:
    run_distributed(_tracker, 2)


def _recompute(rank: int) -> None:
    from tests.mcore.tiny_gpt import Layout, Trainer

    curves = {}
    for name, options in {
        "none": {},
        "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    }.items():
        trainer = Trainer(Layout(tensor=2), hidden_dropout=0.2, **options)
        losses = trainer.train(range(3))
        _, norm, _ = trainer.optimizer.step()
        curves[name] = (losses, float(norm))
        trainer.close()
    assert curves["none"] == curves["full"]
    quiet = Trainer(Layout(tensor=2))
    assert quiet.train(range(3)) != curves["none"][0], "dropout must change the losses, or this test is void"
    quiet.close()


def test_dropout_under_recomputation_repeats_exactly() -> None:
    run_distributed(_recompute, 2)
