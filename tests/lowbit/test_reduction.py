"""Policies of reductions: what is quantized at which sizes, and how `auto` measures and stores its crossover."""

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

from megatron_longctx.core.comm import device
from megatron_longctx.lowbit import reduction
from megatron_longctx.lowbit.quantized import all_reduce, reduce_scatter
from megatron_longctx.lowbit.reduction import Reducer, ReductionPolicy, SumFormat, Timings
from megatron_longctx.testing.distributed import run_distributed

KIB = 1024


def _policies(rank: int) -> list[str]:
    """The policy quantizes tensors from its minimum size on; smaller ones, and all with `none`, are summed exactly."""
    group, wrong = dist.group.WORLD, []
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank)).bfloat16()  # 8 KiB
    exact = x.clone()
    dist.all_reduce(exact)
    shard = exact.chunk(2)[rank]
    for mode, bits in (("none", None), ("int8", 8), ("int6", 6), ("int4", 4)):
        for min_kib in (0, 8, 8.1):
            reducer = Reducer(group, ReductionPolicy(mode, group_size=32, min_kib=min_kib))
            before, quantized = x.clone(), bits is not None and min_kib <= 8
            total, part = reducer.all_reduce(x), reducer.reduce_scatter(x)
            wanted = all_reduce(x, group, bits=bits, group_size=32) if quantized else exact
            wanted_part = reduce_scatter(x, group, bits=bits, group_size=32) if quantized else shard
            mine = x.clone()
            in_place = reducer.all_reduce(mine, overwrite=True)
            if not (torch.equal(in_place, wanted) and in_place.data_ptr() == mine.data_ptr()):
                wrong.append(f"{mode} from {min_kib} KiB, in place")
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
    """Return the operations of exact sums, with and without a policy that could quantize."""
    group, sums = dist.group.WORLD, []
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank)).bfloat16()  # 8 KiB
    wanted = x.clone()
    dist.all_reduce(wanted)
    for mode, min_kib in (("none", 0), ("int4", 9), ("auto", 9), ("auto", 1)):
        reducer = Reducer(group, ReductionPolicy(mode, min_kib=min_kib), folder)
        reducer._fastest = lambda operation, x: None  # from a file, or measured
        for overwrite in (False, True):
            mine = x.clone()
            reducer.all_reduce(mine.clone(), overwrite=overwrite)  # decides
            with _Ops() as ops:
                total = reducer.all_reduce(mine, overwrite=overwrite)
            untouched = torch.equal(mine, x)
            sums.append((torch.equal(total, wanted), total is mine, untouched, *ops.names))
    return sums


def test_exact_sums_that_may_overwrite_copy_nothing(tmp_path: Path) -> None:
    new = (True, False, True, "aten.clone.default", "c10d.allreduce_.default")
    in_place = (True, True, False, "c10d.allreduce_.default")
    assert run_distributed(_exact_sums, 2, tmp_path) == [[new, in_place] * 4] * 2


def _auto(rank: int, folder: Path) -> dict:
    """`auto` measures once, logs it, and then follows its file."""
    reduction._SIZES = reduction._SIZES[:4]  # up to 1 MiB
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("megatron_longctx").addHandler(handler)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO)
    group, policy = dist.group.WORLD, ReductionPolicy("auto", min_kib=1)
    x = torch.randn(4, 4096).bfloat16()  # 32 KiB
    reducer = Reducer(group, policy, folder)
    measured = [reducer.format("all_reduce", x), reducer.format("all_reduce", x)]
    logged = list(records)
    files = sorted(path.name for path in folder.iterdir()) if rank == 0 else []
    dist.barrier()
    from_file = []
    for samples in (
        [[8 * KIB, [2.0, 1.0, 1.0]]],
        [[8 * KIB, [1.0, 1.0, 1.0]]],
        [[16 * KIB, [1.0, 2.0, 2.0]], [64 * KIB, [4.0, 3.0, 1.0]]],
    ):
        if rank == 0:
            data = json.loads((folder / files[0]).read_text())
            (folder / files[0]).write_text(json.dumps(data | {"samples": samples}))
        dist.barrier()
        fresh = Reducer(group, policy, folder)
        half, small = torch.cat([x, x[:2]]), x[:2].contiguous()  # 48 KiB and 16 KiB
        from_file.append([fresh.format("all_reduce", each) for each in (small, x, half)])
        total = fresh.all_reduce(half)
    wanted = all_reduce(half, group, bits=4, group_size=32)
    if rank == 0:
        (folder / files[0]).write_text("{")
    dist.barrier()
    again = Reducer(group, policy, folder).format("all_reduce", x)
    shard = Reducer(group, policy, folder).reduce_scatter(x)
    return {"measured": [*measured, again], "logged": logged, "files": files, "from file": from_file,
            "as int4": torch.equal(total, wanted), "shard": shard.shape, "records": records}  # fmt: skip


def test_auto_measures_once_and_follows_its_file(tmp_path: Path) -> None:
    first, second = run_distributed(_auto, 2, tmp_path)
    int8, int4 = SumFormat(8, 128), SumFormat(4, 32)
    assert first["measured"] == second["measured"] and first["measured"][0] == first["measured"][1]
    assert set(first["measured"]) <= {None, int8, int4}
    [name] = first["files"]
    ways = "exact-or-int8-in-groups-of-128-or-int4-in-groups-of-32"
    assert name == f"crossover-all-reduce-cpu-gloo-2-1-bfloat16-{ways}.json"
    [line] = first["logged"]
    assert line.startswith("all_reduce of bfloat16 on 2 ranks: ") and line.endswith("; measured now")
    assert second["logged"] == []
    # Between two sizes, every way's time is interpolated: at 32 KiB 2.0, 2.33 and 1.67 s.
    assert first["from file"] == second["from file"] == [[int8] * 3, [None] * 3, [None, int4, int4]]
    assert first["as int4"] and second["as int4"]
    assert first["shard"] == (2, 4096)
    assert any("cannot be read" in text for text in first["records"])
    stored = json.loads((tmp_path / name).read_text())
    assert stored["case"]["operation"] == "all_reduce" and len(stored["samples"]) > 1
    assert len(list(tmp_path.iterdir())) == 2, "reduce_scatter has its own"


def _with_a_fake_clock(rank: int) -> list:
    """Measure sums whose first call at each size takes a second longer, as if to compile; rank 1 is the slower one."""
    clock, seen, largest, calls = [0.0], set(), [0.0], Counter()
    device.time = SimpleNamespace(perf_counter=lambda: clock[0])

    def way(name: str, fixed: float, per_byte: float):
        def call(x: torch.Tensor) -> None:
            clock[0] += (1 + rank) * (fixed + per_byte * x.numel() * 2) + ((name, x.numel()) not in seen)
            seen.add((name, x.numel()))
            calls[name] += 1
            largest[0] = max(largest[0], float(x[:64].abs().max()))
            x[:64] *= 100  # like sums in place

        return call

    ways = {"exact": way("plain", 1e-5, 1e-9), "int8": way("quantized", 1e-4, 0.5e-9)}  # even at 180,000 bytes
    group, cpu = dist.group.WORLD, torch.device("cpu")
    result = reduction._measure(torch.bfloat16, group, cpu, ways)
    slow = reduction._measure(torch.bfloat16, group, cpu, {"slow": way("slow", 0.2, 0.0), "int8": ways["int8"]})
    return [
        [size for size, _ in result.samples if result.fastest(size)],
        len(result.samples),
        result.samples[0][1][0],
        len(slow.samples),
        calls["slow"],
        largest[0] < 50,
    ]


def test_first_calls_do_not_count_and_the_slowest_rank_decides() -> None:
    ranks = run_distributed(_with_a_fake_clock, 2)
    assert ranks[0] == ranks[1]
    faster, sizes, exact, slow_sizes, slow_calls, redrawn = ranks[0]
    assert faster == reduction._SIZES[2:] and faster[0] == 256 * KIB and sizes == len(reduction._SIZES)
    assert exact == pytest.approx(2 * (1e-5 + 16 * KIB * 1e-9))
    assert slow_sizes == 1 and slow_calls == 2, "larger sizes or more rounds would take too long"
    assert redrawn


@pytest.mark.gpu
def test_gpus_are_timed_with_what_the_host_needs() -> None:
    x = torch.ones(1024, device="cuda")

    def call(x: torch.Tensor) -> None:
        time.sleep(2e-4)
        x.mul_(1)

    call(x)
    assert device.mean_seconds(lambda: call(x), x.device, reduction._CALLS) > 2e-4


def test_a_larger_error_needs_a_gain() -> None:
    ways = ("exact", "int8", "int4")
    samples = ((1, (1.0, 0.9, 0.89)), (2, (1.0, 1.2, 0.96)), (4, (2.0, 1.5, 1.0)), (8, (3.0, 1.5, 1.49)))
    timings = Timings(ways, samples)
    assert [ways[timings.fastest(n)] for n in (0, 1, 2, 3, 4, 8, 99)] == [
        *("int8", "int8", "exact", "int4", "int4", "int8", "int8")
    ]
    assert str(timings) == "int8 from 9.53674e-07 MiB, exact from 1.90735e-06 MiB, int4 from 3.8147e-06 MiB, " + (
        "int8 from 7.62939e-06 MiB"
    )
    assert Timings(ways, samples[:1]).fastest(5) == 1


def test_files_of_different_cases_differ(tmp_path: Path) -> None:
    case = {"operation": "all_reduce", "device": "NVIDIA H200", "ranks": 8, "hosts": 1, "ways": "int8 in groups of 128"}
    others = [{"operation": "reduce_scatter"}, {"hosts": 2}, {"ways": "int8 in groups of 64"}]
    assert len({reduction._path(case | other, tmp_path) for other in ({}, *others)}) == 4


def test_unknown_policies_are_refused() -> None:
    for settings, expected in (
        ({"mode": "int5"}, r"output_projection=int5: expected one of none, int8, int6, int4, auto"),
        ({"group_size": 16}, r"group_size=16: expected one of 32, 64, 128"),
        ({"min_kib": -1}, r"min_kib=-1: expected at least 0"),
        ({"min_kib": float("nan")}, r"min_kib=nan: expected at least 0"),
    ):
        with pytest.raises(ValueError, match=expected):
            ReductionPolicy(**settings)
