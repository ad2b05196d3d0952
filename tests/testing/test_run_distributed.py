"""The multi-process runner: results, failures and time limits reach the caller."""

import functools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.testing.distributed import PATIENCE_S, run_distributed
from megatron_longctx.training.ranks import RankFailed, RankProcesses, run_ranks


def _environment(rank, base, words):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "sum": base + rank,
        "words": words[rank],
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "environment": [os.environ[name] for name in names],
        "reduced": total.item(),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("start_method", ["as tests do", "spawn"])
def test_results_are_ordered_by_rank(start_method):
    arguments = (_environment, 3, 10, ["a", "b", "c"])
    spawn = functools.partial(run_ranks, threads=1, timeout=PATIENCE_S)
    found = (spawn if start_method == "spawn" else run_distributed)(*arguments)
    assert found == [
        {
            "sum": 10 + rank,
            "words": word,
            "group": (rank, 3, "gloo"),
            "environment": [str(rank), str(rank), "3", "3"],
            "reduced": 3.0,
            "threads": 1,
        }
        for rank, word in enumerate("abc")
    ]


def _variable(rank, name):
    return os.environ.get(name)


def test_ranks_have_the_current_environment(monkeypatch):
    for value in ("before", "after"):
        monkeypatch.setenv("LONGCTX_TEST", value)
        assert run_distributed(_variable, 1, "LONGCTX_TEST") == [value]
    monkeypatch.delenv("LONGCTX_TEST")
    assert run_distributed(_variable, 1, "LONGCTX_TEST") == [None]


def _fail_on_one(rank):
    if rank == 1:
        raise LookupError(f"rank {rank} has no such thing")
    dist.barrier()  # the others must not wait for it forever


def test_the_error_of_the_failing_rank_is_raised():
    with pytest.raises(RankFailed) as failure:  # and no TimeoutError
        run_distributed(_fail_on_one, 2, timeout=PATIENCE_S)
    assert "LookupError: rank 1 has no such thing" in str(failure.value)
    assert "_fail_on_one" in str(failure.value)
    assert not multiprocessing.active_children()


def _leave_a_child(rank, place):
    if rank == 1:
        child = os.fork()  # it inherits all pipes of its parent
        if child:
            place.write_text(str(child))
            os._exit(3)
    time.sleep(PATIENCE_S)


def test_a_failure_is_seen_although_a_child_of_the_rank_lives_on(tmp_path):
    place = tmp_path / "pid"
    processes = RankProcesses(_leave_a_child, (place,), range(2), start_method="fork")
    try:
        with pytest.raises(RankFailed, match=r"^rank 1 ended with exit code 3$"):
            assert processes.wait(PATIENCE_S)
    finally:
        processes.kill()
        os.kill(int(place.read_text()), signal.SIGKILL)


def _sleep(rank):
    time.sleep(PATIENCE_S)


def test_ranks_that_hang_are_killed():
    with pytest.raises(TimeoutError, match="2 ranks of _sleep did not end within 4 s"):
        run_distributed(_sleep, 2, timeout=4)
    deadline = time.monotonic() + PATIENCE_S
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not multiprocessing.active_children()


def _rank(rank):
    return rank


def test_a_process_whose_end_was_not_seen_yet_is_not_missed(monkeypatch):
    processes = RankProcesses(_rank, (), range(1), start_method="fork")
    assert processes.wait(PATIENCE_S)
    monkeypatch.setattr(processes, "_exit_codes", lambda: [None])  # as if a fork server had reaped it just now
    processes._signal(signal.SIGKILL)


def test_concurrent_runs_are_independent():
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_distributed, _rank, 2) for _ in range(2)]
        assert [run.result() for run in runs] == [[0, 1]] * 2
