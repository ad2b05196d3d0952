"""`python -m analysis.benchmarks inference` on CPU: its results, and how the choice of `auto` is judged."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from analysis.benchmarks.__main__ import main
from analysis.benchmarks.inference import percentiles, tables
from analysis.benchmarks.inference_ranks import Decoded, FirstToken, Sweep, measure
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import compose_config

SETTINGS = ["parallelism=cp2", "train.device=cpu", "train.precision=fp32", "model.num_layers=2", "attention.kernel=cpu"]


def test_first_tokens_of_all_modes_and_decoding_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    words = "--context 1,2 --lengths 96 --miss-rates 0.05,1 --batches 2,1 --iterations 2 --tokens 3"
    words += " --modes pass_kv,pass_q,one_hop"
    assert main(["inference", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    cases = [(m["context_parallel_size"], m["cached"], m["new"]) for m in data["first_token"]]
    assert cases == [(1, 0, 96), (1, 91, 5), (2, 0, 96), (2, 91, 5)]
    modes = {"pass_kv", "pass_q", "one_hop"}
    for m in data["first_token"]:
        assert set(m["seconds"]) - {"replicated"} == (modes if m["context_parallel_size"] == 2 else {"pass_kv"})
        assert all(len(s["all"]) == 2 and 0 < s["p50"] <= s["p99"] for s in m["seconds"].values())
        if m["context_parallel_size"] == 2:
            assert m["auto"] in modes and m["slower"] >= 0
        else:
            assert m["auto"] is m["slower"] is None
    fresh, warm = data["first_token"][2:]
    assert fresh["auto"] == "pass_kv" and warm["auto"] != "pass_kv"
    assert [(m["context_parallel_size"], m["batch"]) for m in data["decode"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(m["mode"].startswith("replicated") and 0 < m["p50"] <= m["p99"] for m in data["decode"])
    assert data["model"]["num_layers"] == 2 and data["environment"]["commit"]
    assert "| 2 | 96 | 5 | 5.21% |" in out.with_suffix(".md").read_text()


def _append_counts(path: Path, first: list[FirstToken], decoded: list[Decoded]) -> None:
    with path.open("a") as file:
        file.write(f"{len(first)}{len(decoded)} ")


def test_results_are_written_after_every_measurement_and_the_first_time_may_count(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    config = inference_config(compose_config([*SETTINGS, "inference.cache_tokens=512"]))
    sweep = Sweep((40,), (1.0, 0.1), (1, 2), 0, 2, modes=("pass_q",))
    first, decoded = run_distributed(measure, 2, config, sweep, partial(_append_counts, counts))[1]
    assert counts.read_text() == "10 20 21 22 " and (len(first), len(decoded)) == (2, 2)
    assert [len(m.seconds["pass_q"]) for m in first] == [1, 1]


def test_decoding_alone_needs_no_prompts(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    settings = [*SETTINGS, "inference.decode=plan", "inference.mode=one_hop"]
    words = "--decode-only --context 2 --lengths 3000 --batches 3 --tokens 3"
    assert main(["inference", *settings, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (found,) = data["decode"]
    assert data["first_token"] == []
    assert found["mode"] == "one_hop" and found["cached"] == 3000


def test_the_choice_is_judged_by_medians() -> None:
    case = FirstToken(4, 990, 10, {"pass_kv": [9.0, 2.0, 2.0], "pass_q": [1.0, 1.0, 1.0]}, "pass_kv")
    assert case.slower == 1.0 and replace(case, auto="pass_q").slower == 0.0
    text = tables([case], [Decoded(4, 1000, 2, "one_hop", [0.001, 0.002, 0.003])])
    assert "| 4 | 1,000 | 10 | 1.00% |" in text and "| pass_kv | 100.0% |" in text
    assert "| 4 | 1,000 | 2 | one_hop | 2.00 | 2.00 | 3.00 | 3.00 |" in text


def test_percentiles_are_measured_values() -> None:
    found = percentiles([float(i) for i in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}


@pytest.mark.parametrize(("n", "page"), [(1, 64), (2, 4), (3, 7)])
def test_a_sweep_fits_into_its_pages(n: int, page: int) -> None:
    sweep = Sweep((50, 9), (0.5, 0.001, 1.0), (3, 1), 1, 5)
    assert sweep.prompts(50) == [(0, 50), (25, 25), (48, 2)]
    manager = CacheManager(n, sweep.pages(n, page), page)
    sessions = [manager.open() for _ in range(3)]
    for session in sessions:
        manager.append({session: 50})
    for _ in range(8):  # 3 to warm up
        manager.append(dict.fromkeys(sessions, 1))
