"""Policies of reductions: what is quantized from which size on, and how `auto` finds and keeps its crossover."""

import json
import logging
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.lowbit import crossover
from megatron_longctx.lowbit.crossover import Case, Crossover
from megatron_longctx.lowbit.quantized import all_reduce, reduce_scatter
from megatron_longctx.lowbit.reduction import Reducer, ReductionPolicy
from megatron_longctx.testing.distributed import run_distributed

KIB = 1024


def _policies(rank: int) -> list[str]:
    """Above its least size a tensor is summed as the policy says, below it and with `none` exactly."""
    group, wrong = dist.group.WORLD, []
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank)).bfloat16()  # 8 KiB
    exact = x.clone()
    dist.all_reduce(exact)
    share = exact.chunk(2)[rank]
    for mode, bits in (("none", None), ("int8", 8), ("int6", 6), ("int4", 4)):
        for min_kib in (0, 8, 8.1):
            reducer = Reducer(group, ReductionPolicy(mode, group_size=32, min_kib=min_kib))
            before, quantized = x.clone(), bits is not None and min_kib <= 8
            total, part = reducer.all_reduce(x), reducer.reduce_scatter(x)
            wanted = all_reduce(x, group, bits=bits, group_size=32) if quantized else exact
            wanted_part = reduce_scatter(x, group, bits=bits, group_size=32) if quantized else share
            if not (torch.equal(total, wanted) and torch.equal(part, wanted_part) and torch.equal(x, before)):
                wrong.append(f"{mode} from {min_kib} KiB")
            if quantized and torch.equal(total, exact):
                wrong.append(f"{mode} from {min_kib} KiB is exact")
    return wrong


def test_policies_over_two_ranks() -> None:
    assert run_distributed(_policies, 2) == [[], []]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _exact_sums(rank: int, folder: Path) -> list[tuple]:
    """What exact sums are made of, where nothing is quantized and where `auto` decides that."""
    group, found = dist.group.WORLD, []
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank)).bfloat16()  # 8 KiB
    wanted = x.clone()
    dist.all_reduce(wanted)
    for mode, min_kib in (("none", 0), ("int4", 9), ("auto", 9), ("auto", 1)):
        reducer = Reducer(group, ReductionPolicy(mode, min_kib=min_kib), folder)
        reducer._crossover = lambda operation, x: Crossover(64 * KIB, ())  # from a file, or measured
        for overwrite in (False, True):
            mine = x.clone()
            reducer.all_reduce(mine.clone(), overwrite=overwrite)  # decides
            with _Ops() as ops:
                total = reducer.all_reduce(mine, overwrite=overwrite)
            untouched = torch.equal(mine, x)
            found.append((torch.equal(total, wanted), total is mine, untouched, *ops.names))
    return found


def test_exact_sums_copy_nothing_that_may_be_overwritten(tmp_path: Path) -> None:
    anew = (True, False, True, "aten.clone.default", "c10d.allreduce_.default")
    in_place = (True, True, False, "c10d.allreduce_.default")
    assert run_distributed(_exact_sums, 2, tmp_path) == [[anew, in_place] * 4] * 2


def _auto(rank: int, folder: Path) -> dict:
    """`auto` measures once, says so, and then follows the file, whatever is in it."""
    crossover._SIZES = crossover._SIZES[:4]  # up to 1 MiB
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("megatron_longctx").addHandler(handler)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO)
    group, policy = dist.group.WORLD, ReductionPolicy("auto", min_kib=1)
    x = torch.randn(4, 4096).bfloat16()  # 32 KiB
    reducer = Reducer(group, policy, folder)
    measured = [reducer.bits("all_reduce", x), reducer.bits("all_reduce", x)]
    said = list(records)
    files = sorted(path.name for path in folder.iterdir()) if rank == 0 else []
    dist.barrier()
    found = []
    for samples in (
        [[8 * KIB, 2.0, 1.0]],
        [[8 * KIB, 1.0, 1.0]],
        [[8 * KIB, 2.0, 1.0], [16 * KIB, 1.0, 2.0], [64 * KIB, 2.0, 1.0]],
    ):
        if rank == 0:
            data = json.loads((folder / files[0]).read_text())
            (folder / files[0]).write_text(json.dumps(data | {"samples": samples}))
        dist.barrier()
        fresh = Reducer(group, policy, folder)
        found.append((fresh.bits("all_reduce", x), fresh.bits("all_reduce", torch.cat([x, x]))))
    if rank == 0:
        (folder / files[0]).write_text("{")
    dist.barrier()
    again = Reducer(group, policy, folder).bits("all_reduce", x)
    total = Reducer(group, policy, folder).reduce_scatter(x)
    return {"measured": [*measured, again], "said": said, "files": files, "found": found, "share": total.shape,
            "records": records}  # fmt: skip


def test_auto_measures_once_and_follows_its_file(tmp_path: Path) -> None:
    first, second = run_distributed(_auto, 2, tmp_path)
    assert first["measured"] == second["measured"] and first["measured"][0] == first["measured"][1]
    assert set(first["measured"]) <= {None, 8}
    [name] = first["files"]
    assert name == "crossover-all-reduce-cpu-gloo-2-1-bfloat16-int8-g128.json"
    [said] = first["said"]
    assert said.startswith("all_reduce of bfloat16 on 2 ranks: int8 g128 is used ") and said.endswith("measured now")
    assert second["said"] == []
    assert first["found"] == second["found"] == [(8, 8), (None, None), (None, 8)]
    assert first["share"] == (2, 4096)
    assert any("cannot be read" in text for text in first["records"])
    kept = json.loads((tmp_path / name).read_text())
    assert kept["case"]["operation"] == "all_reduce" and len(kept["samples"]) > 1
    assert len(list(tmp_path.iterdir())) == 2, "reduce_scatter has its own"


def _by_the_clock(rank: int) -> list:
    """Sums whose first call at every size takes a second more, as kernels are compiled; rank 1 is the slower one."""
    clock, seen, largest, calls = [0.0], set(), [0.0], Counter()
    crossover.time = SimpleNamespace(perf_counter=lambda: clock[0])

    def way(name: str, fixed: float, per_byte: float):
        def call(x: torch.Tensor) -> None:
            clock[0] += (1 + rank) * (fixed + per_byte * x.numel() * 2) + ((name, x.numel()) not in seen)
            seen.add((name, x.numel()))
            calls[name] += 1
            largest[0] = max(largest[0], float(x[:64].abs().max()))
            x[:64] *= 100  # as sums stay in it

        return call

    ways = way("plain", 1e-5, 1e-9), way("quantized", 1e-4, 0.5e-9)  # even at 180,000 bytes
    group, cpu = dist.group.WORLD, torch.device("cpu")
    found = crossover._measure(torch.bfloat16, group, cpu, ways)
    slow = crossover._measure(torch.bfloat16, group, cpu, (way("slow", 0.2, 0.0), ways[1]))
    return [
        found.from_bytes,
        len(found.samples),
        found.samples[0][1],
        len(slow.samples),
        calls["slow"],
        largest[0] < 50,
    ]


def test_first_calls_do_not_count_and_the_slowest_rank_decides() -> None:
    found = run_distributed(_by_the_clock, 2)
    assert found[0] == found[1]
    start, sizes, plain, slow_sizes, slow_calls, drawn_anew = found[0]
    assert start == 256 * KIB and sizes == len(crossover._SIZES)
    assert plain == pytest.approx(2 * (1e-5 + 16 * KIB * 1e-9))
    assert slow_sizes == 1 and slow_calls == 2, "larger ones, or more rounds, would take longer than anybody waits"
    assert drawn_anew


@pytest.mark.gpu
def test_a_gpu_is_not_timed_by_its_host() -> None:
    x = torch.ones(1024, device="cuda")

    def call(x: torch.Tensor) -> None:
        time.sleep(2e-4)
        x.mul_(1)

    call(x)
    assert 0 < crossover._row(call, x) < 1e-4


def test_the_crossover_is_where_it_wins_for_good() -> None:
    rising = [(1, 1.0, 2.0), (2, 2.0, 1.0), (4, 2.0, 1.98), (8, 4.0, 2.0), (16, 8.0, 4.0)]
    assert Crossover.between(rising).from_bytes == 8, "1% faster is noise"
    assert Crossover.between(rising[:3]).from_bytes is None
    assert Crossover.between(rising[:2]).from_bytes == 2
    assert "at no size up to" in str(Crossover.between(rising[:1]))
    assert "4e+03 ms plain, 2e+03 ms quantized" in str(Crossover.between(rising))


def test_files_of_different_cases_differ(tmp_path: Path) -> None:
    case = Case("all_reduce", "NVIDIA H200", "nccl", 8, 1, "bfloat16", "int8 g128")
    others = [
        Case("reduce_scatter", "NVIDIA H200", "nccl", 8, 1, "bfloat16", "int8 g128"),
        Case("all_reduce", "NVIDIA H200", "nccl", 8, 2, "bfloat16", "int8 g128"),
        Case("all_reduce", "NVIDIA H200", "nccl", 8, 1, "bfloat16", "int8 g64"),
    ]
    assert len({c.path(tmp_path) for c in (case, *others)}) == 4


def test_policies_that_are_not_offered() -> None:
    for settings, said in (
        ({"mode": "int5"}, r"output_projection=int5: expected one of none, int8, int6, int4, auto"),
        ({"group_size": 16}, r"group_size=16: expected one of 32, 64, 128"),
        ({"min_kib": -1}, r"min_kib=-1: expected at least 0"),
        ({"min_kib": float("nan")}, r"min_kib=nan: expected at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            ReductionPolicy(**settings)
