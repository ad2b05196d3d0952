"""`bench inference` on CPU: what it writes, what its rules are judged by, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_longctx import cli
from megatron_longctx.bench.inference import Words
from megatron_longctx.bench.inference_ranks import RULES, Decoded, FirstToken, Sweep, measure
from megatron_longctx.bench.inference_report import draw, percentiles, shares, tables
from megatron_longctx.compose import compose_config
from megatron_longctx.inference.figures import calibration_file
from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.mcore.inference import for_inference
from megatron_longctx.schedules import Costs, Workload
from megatron_longctx.schedules.calibration import Calibration, save_calibration
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.topology import Cluster, Network

SETTINGS = ["parallelism=cp2", "train.device=cpu", "train.precision=fp32", "model.num_layers=2", "attention.kernel=cpu"]


def test_it_measures_rings_beside_rules_and_decodes(tmp_path: Path) -> None:
    config = compose_config(SETTINGS)
    # Links so slow that, priced by this file, fewest bytes are best: the verb has to go by it, and not to calibrate.
    cluster = Cluster("slow", 2, 1, network=Network(1, 1e-4, 1e-6))
    found = Calibration("cpu", "cpu", "p2p", cluster, Workload.of(config), Costs(100.0, 100.0))
    path = calibration_file(config, torch.device("cpu"))
    save_calibration(found, path)
    out = tmp_path / "inference.json"
    words = "--context 1,2 --lengths 96 --miss-rates 0.05,1 --batches 2,1 --iterations 2 --tokens 3"
    assert cli.main(["bench", "inference", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    cases = [(m["context_parallel_size"], m["cached"], m["new"]) for m in data["first_token"]]
    assert cases == [(1, 0, 96), (1, 91, 5), (2, 0, 96), (2, 91, 5)]
    for m in data["first_token"]:
        rings = {"pass_kv", "pass_q"} if m["context_parallel_size"] == 2 else {"pass_kv"}
        assert set(m["seconds"]) == rings
        assert all(len(s["all"]) == 2 and 0 < s["p50"] <= s["p99"] for s in m["seconds"].values())
        assert set(m["taken"]) == (set(RULES) if m["context_parallel_size"] == 2 else set())
    fresh, warm = data["first_token"][2:]
    assert fresh["taken"]["simulate"] == "pass_kv" and warm["taken"]["simulate"] == "pass_q"
    assert warm["predicted_layer_s"]["pass_q"] < warm["predicted_layer_s"]["pass_kv"]
    assert [(m["context_parallel_size"], m["batch"]) for m in data["decode"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(m["mode"] == "replicated" and 0 < m["p50"] <= m["p99"] for m in data["decode"])
    assert all(m["attention_s"] > 0 and m["read_bytes_per_rank"] > 0 for m in data["decode"])
    assert data["model"]["num_layers"] == 2 and data["environment"]["commit"]
    assert "| 2 | 96 | 5 | 5.21% |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and list(path.parent.iterdir()) == [path]


def test_the_simulator_may_take_one_hop_where_it_is_measured(tmp_path: Path) -> None:
    config = compose_config(SETTINGS)
    cluster = Cluster("slow", 2, 1, network=Network(1, 1e-4, 1e-6))
    found = Calibration("cpu", "cpu", "p2p", cluster, Workload.of(config), Costs(100.0, 100.0))
    save_calibration(found, calibration_file(config, torch.device("cpu")))
    out = tmp_path / "all.json"
    words = "--context 2 --lengths 96 --miss-rates 0.05 --batches 1 --iterations 1 --tokens 2"
    words += " --modes pass_kv,pass_q,one_hop"
    assert cli.main(["bench", "inference", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (m,) = data["first_token"]
    assert set(m["seconds"]) == set(m["predicted_layer_s"]) == {"pass_kv", "pass_q", "one_hop"}
    assert m["taken"]["simulate"] == min(m["predicted_layer_s"], key=m["predicted_layer_s"].__getitem__)
    assert {row["rule"]: len(row["modes"]) for row in data["rules"]} == dict.fromkeys(RULES, 2) | {"simulate": 3}


@pytest.mark.parametrize("modes", [["pass_q"], ["pass_q", "one_hop"]], ids=str)
def test_modes_that_are_asked_for(modes: list[str], tmp_path: Path) -> None:
    out = tmp_path / "modes.json"
    words = (
        f"--context 1,2 --lengths 96 --miss-rates 0.05 --batches 1 --iterations 1 --tokens 2 --modes {','.join(modes)}"
    )
    settings = [*SETTINGS, "inference.rule=bytes"]
    assert cli.main(["bench", "inference", *settings, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [set(m["seconds"]) for m in data["first_token"]] == [{"pass_q"}, set(modes)] and data["rules"] == []
    text = out.with_suffix(".md").read_text()
    assert "What the rules take" not in text and not out.with_suffix(".png").exists()
    assert f"| miss rate | {' | '.join(modes)} | pass_q / pass_kv |" in text
    assert [m["mode"] for m in data["decode"]] == ["replicated"] * 2, "decoding goes as the settings say"


def _note(path: Path, first: list[FirstToken], decoded: list[Decoded]) -> None:
    path.write_text(path.read_text() + f"{len(first)}{len(decoded)} ")


def test_every_measurement_is_kept_at_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("")
    config = for_inference(compose_config([*SETTINGS, "inference.rule=bytes", "inference.cache_tokens=512"]))
    sweep = Sweep((40,), (1.0, 0.1), (1, 2), 1, 2, modes=("pass_q",))
    first, decoded = run_distributed(measure, 2, config, sweep, partial(_note, told))[1]
    assert told.read_text() == "10 20 21 22 " and (len(first), len(decoded)) == (2, 2)


def test_without_iterations_the_first_time_counts(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("")
    config = for_inference(compose_config([*SETTINGS, "inference.rule=bytes", "inference.cache_tokens=512"]))
    sweep = Sweep((40,), (1.0,), (1,), 0, 1, modes=("pass_q",))
    first, _ = run_distributed(measure, 2, config, sweep, partial(_note, told))[0]
    assert first[0].seconds == {mode: [seconds] for mode, seconds in first[0].unseen.items()}


def test_decoding_alone_takes_no_calibration_and_no_prompts(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    settings = [*SETTINGS, "inference.decode=plan", "inference.mode=one_hop"]
    words = "--decode-only --context 2 --lengths 3000 --batches 3 --tokens 3"
    assert cli.main(["bench", "inference", *settings, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (found,) = data["decode"]
    assert not cache.exists()
    assert data["first_token"] == data["rules"] == [] and not out.with_suffix(".png").exists()
    assert found["mode"] == "one_hop" and found["cached"] == 3000
    shape = data["model"]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * shape["num_layers"] * shape["num_kv_heads"] * head_dim * 4
    assert 3 * 1500 < found["read_bytes_per_rank"] / per_token <= 3 * 1504  # and what was decoded


def case(new: int, kv: float, q: float, taken: str) -> FirstToken:
    rules = dict.fromkeys(RULES, "pass_kv") | {"simulate": taken}
    return FirstToken(4, 1000 - new, new, {"pass_kv": [9.0, kv, kv], "pass_q": [q, q, q]}, rules)


def test_rules_are_judged_by_medians() -> None:
    found = [case(10, 2.0, 1.0, "pass_q"), case(500, 1.0, 2.0, "pass_q"), case(100, 1.005, 1.0, "pass_kv")]
    by_rule = {row["rule"]: row for row in shares([*found, FirstToken(1, 0, 9, {"pass_kv": [1.0]})])}
    assert by_rule["simulate"]["right"] == 2 and by_rule["simulate"]["cases"] == 3  # 0.5% apart are as good
    assert by_rule["simulate"]["most_slower"] == 1.0
    assert by_rule["bytes"]["right"] == 2 and by_rule["bytes"]["mean_slower"] == pytest.approx(1.005 / 3)
    text = tables(found, [Decoded(4, 1000, 2, "one_hop", [0.001, 0.002, 0.003], 5e-4, 10**9)])
    assert "| simulate | pass_kv, pass_q | 2 of 3 | 67% | 33.5% | 100.0% | 33.5% |" in text
    assert "| 4 | 1,000 | 2 | one_hop | 2.00 | 2.00 | 3.00 | 3.00 | 0.50 | 2,000.0 |" in text


def test_only_the_simulator_is_held_to_modes_beyond_the_rings() -> None:
    third = replace(case(10, 2.0, 1.5, "one_hop"), seconds={"pass_kv": [2.0], "pass_q": [1.5], "one_hop": [1.2]})
    missed = replace(third, taken=dict.fromkeys(RULES, "pass_q"))
    by_rule = {row["rule"]: row for row in shares([third, missed])}
    assert by_rule["simulate"]["modes"] == ["one_hop", "pass_kv", "pass_q"]
    assert by_rule["simulate"]["right"] == 1 and by_rule["simulate"]["most_slower"] == pytest.approx(0.25)
    assert by_rule["bytes"]["modes"] == ["pass_kv", "pass_q"] and by_rule["bytes"]["right"] == 1
    assert by_rule["bytes"]["mean_slower"] == pytest.approx(1 / 6)  # than pass_q
    assert by_rule["bytes"]["mean_slower_of_all"] == pytest.approx((2 / 1.2 + 1.5 / 1.2) / 2 - 1)


def test_percentiles_are_measured_values() -> None:
    found = percentiles([float(i) for i in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}


def test_the_picture_takes_any_number_of_panels(tmp_path: Path) -> None:
    cases = [case(10, 2.0, 1.0, "pass_q"), case(500, 1.0, 2.0, "pass_kv")]
    cases.append(replace(case(50, 2.0, 1.5, "one_hop"), seconds={"pass_kv": [2.0], "pass_q": [1.5], "one_hop": [1.2]}))
    cases.append(replace(case(900, 1.0, 2.0, ""), taken={}))  # in several passes: no rule is asked
    draw([*cases, *(replace(m, ranks=2) for m in cases), replace(cases[-1], ranks=3)], tmp_path / "x.png", "both")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(("n", "page"), [(1, 64), (2, 4), (3, 7)])
def test_a_sweep_fits_into_the_pages_it_asks_for(n: int, page: int) -> None:
    sweep = Words("50,9", "0.5,0.001,1", "3,1", None, 1, 5).sweep()
    assert sweep == Sweep((50, 9), (0.5, 0.001, 1.0), (3, 1), 1, 5)
    assert sweep.turns(50) == [(0, 50), (25, 25), (48, 2)]
    ledger = CacheLedger(n, sweep.pages(n, page), page)
    sessions = [ledger.open() for _ in range(3)]
    for session in sessions:
        ledger.append({session: 50})
    for _ in range(8):  # 3 to warm up
        ledger.append(dict.fromkeys(sessions, 1))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--miss-rates", "0.1,2"], "--miss-rates=0.1,2: expected shares from above 0 to 1"),
        (["--miss-rates", "0"], "expected numbers above 0"),
        (["--miss-rates", "nan"], "expected numbers above 0"),
        (["--lengths", "1"], "--lengths=1: expected 2 tokens or more"),
        (["--batches", "2,x"], "--batches=2,x: expected integers of 1 or more"),
        (["--context", "0"], "--context=0: expected integers of 1 or more"),
        (["--modes", "pass_q,ring"], "--modes=pass_q,ring: expected some of pass_kv, pass_q, one_hop"),
        (["--iterations", "-1"], "--iterations=-1: expected 0 or more"),
        (["--tokens", "0"], "--tokens=0: expected 1 or more"),
        (["parallelism.pipeline_parallel_size=2"], "1 for inference"),
        (["inference.cuda_graphs=true"], "inference.cuda_graphs=true: expected auto or false on CPUs"),
        (["--out", "gone/x.json"], "--out=gone/x.json: expected a .json file in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "inference", "--out", "x.json", *SETTINGS, *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
