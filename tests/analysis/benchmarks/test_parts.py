"""Benchmarks on CPU, `parts` to `huggingface`: their results and tables."""

import json
from pathlib import Path
from typing import Any

from analysis.benchmarks import parts, prefill
from analysis.benchmarks.__main__ import main
from megatron_longctx.core.plans import build

SETTINGS = "train.device=cpu train.precision=fp32 attention.kernel=cpu"


def run(folder: Path, words: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark; return its JSON and its Markdown."""
    out = folder / "out.json"
    assert main([*words.split(), "--out", str(out)]) == 0
    return json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_attention_is_a_part_of_its_layer(tmp_path: Path) -> None:
    words = f"parts parallelism=single model.num_layers=2 {SETTINGS} --lengths 64,16 --iterations 3"
    data, text = run(tmp_path, words)
    assert [each["tokens"] for each in data["measurements"]] == [16, 64] and data["model"]["num_layers"] == 2
    for each in data["measurements"]:
        assert len(each["attention"]) == len(each["layer"]) == 2 * 3
        assert all(0 < part < whole for part, whole in zip(each["attention"], each["layer"], strict=True))
    assert "\n| 64 | " in text


def test_prefill_measures_every_reduction_and_says_what_auto_takes(tmp_path: Path) -> None:
    words = "--lengths 32,16 --reductions none,auto,int8 --iterations 2 reduction.min_kib=0 model.num_layers=1"
    data, text = run(tmp_path, f"prefill parallelism.tensor_parallel_size=2 {SETTINGS} {words}")
    cases = [(m["tokens"], m["reduction"]) for m in data["measurements"]]
    assert cases == [(tokens, name) for tokens in (16, 32) for name in ("none", "auto", "int8")]
    assert all(len(m["seconds"]) == 2 and min(m["seconds"]) <= m["median"] > 0 for m in data["measurements"])
    assert data["tensor_parallel_size"] == 2 and data["model"]["num_layers"] == 1 and data["environment"]["commit"]
    assert set(data["auto"]) == {"all_reduce of float32"} and " from " in data["auto"]["all_reduce of float32"]
    assert "\n| 32 | " in text and "\nauto: all_reduce of float32: " in text


def test_planning_times_all_phases_of_new_batches(tmp_path: Path) -> None:
    build._build_cached.cache_clear()
    data, text = run(tmp_path, "planning --ranks 2 --schedules all_gather,ulysses --iterations 3")
    assert build._build_cached.cache_info().hits == 0, "batches that were planned before cost less"
    for phases in data["milliseconds"].values():
        assert [len(phase) for phase in phases] == [3] * 4 and min(map(min, phases)) > 0
    for schedule, medians in data["medians"].items():
        assert medians["sum"] == sorted(map(sum, zip(*data["milliseconds"][schedule], strict=True)))[1]
    assert text.startswith("24 documents in 65,536 tokens, 2 ranks") and "\n| ulysses | " in text


def test_simulation_times_plans_and_simulations_of_both_passes(tmp_path: Path) -> None:
    data, text = run(tmp_path, "simulation --ranks 16 --tokens 8 --schedules zigzag,usp")
    assert data["ranks"] == 16 and data["tokens"] == 128 and list(data["measurements"]) == ["zigzag", "usp"]
    for times in data["measurements"].values():
        *phases, whole = times.values()
        assert len(phases) == 4 and min(phases) > 0 and whole == sum(phases)
    assert text.startswith("causal, 16 ranks, 128 tokens") and "\n| usp | " in text


def test_the_rate_of_data_is_beside_that_of_the_tokenizers_library(tmp_path: Path) -> None:
    data, text = run(tmp_path, "data --megabytes 1 --repeats 1")
    assert list(data["measurements"]) == ["byte-level", "huggingface", "library alone"]
    assert min(data["measurements"].values()) > 0 and 0.9 < data["megabytes"] < 1.1
    assert text.startswith("1 MB of text in a .jsonl file") and "\n| huggingface | " in text


def test_tables_show_shares_and_ratios() -> None:
    measured = [parts.Parts(4096, [0.001, 0.002, 0.009], [0.008] * 3)]
    assert parts.medians(measured).splitlines()[-1] == "| 4,096 | 2.00 | 6.00 | 25% |"
    prompts = [prefill.Prefill(8, "none", [0.2, 0.1, 0.3]), prefill.Prefill(8, "int8", [0.1, 0.1, 0.5])]
    assert prefill.medians(prompts).splitlines()[-1] == "| 8 | 200.00 | 100.00 (0.500) |"


def test_a_transformers_model_is_measured_beside_others_that_are_right(tmp_path: Path) -> None:
    words = "--device cpu --ranks 2 --packs causal --tokens 256 --documents 128:64 --layers 1 --size 64"
    data, text = run(tmp_path, f"huggingface {words} --vocabulary 200 --iterations 1 --rounds 2")
    assert [(m["name"][:5], len(m["rounds"])) for m in data["measurements"][::3]] == [("this ", 2)] * 2
    assert all(m["loss_error"] < 1e-5 for m in data["measurements"] if m["rounds"])
    assert [m["reason"].startswith("ValueError: 2 documents") for m in data["measurements"][2::3]] == [False, True]
    assert "ring-flash-attn, llama3 | " in text and "| not possible: " in text


def test_fp8_compares_values_and_times_every_division_of_the_ranks(tmp_path: Path) -> None:
    words = "fp8 model=tiny train.precision=bf16 --device cpu --lengths 64,96 --quick --prompt 96 --prompts 48"
    data, text = run(tmp_path, words)
    cells = {each.pop("name"): each for each in data["cells"]}
    for name in ("1 GPU", "TP 2", "CP 2"):
        assert 0.01 < cells[f"{name}, loss of 96 tokens"]["logits off by"] < 0.1
        assert set(cells[f"{name}, decode, 96 cached, batch 1"]["medians"]) == {"exact", "fp8"}
        assert cells[f"{name}, first token of 96"]["fp8"]
    assert "int4:32" in cells["TP 2, first token of 48 by reduction"]["medians"]
    assert data["notes"]["first tokens, two_shot"] == "not all ranks have a CUDA device"
    assert "\n| CP 2, decode, 64 cached, batch 2 | " in text
