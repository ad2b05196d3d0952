"""`bench prefill` on CPU: first tokens under every reduction, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron_longctx import cli
from megatron_longctx.bench.prefill import Ask, Decided, Prefill, measure, table
from megatron_longctx.compose import compose_config
from megatron_longctx.mcore.inference import for_inference
from megatron_longctx.testing.distributed import run_distributed

SETTINGS = ["parallelism.tensor_parallel_size=2", "train.device=cpu", "train.precision=fp32", "model.num_layers=1"]


def test_it_measures_every_reduction(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    words = "--lengths 48,16 --reductions none,int8,int4 --iterations 2 reduction.min_kib=0 attention.kernel=cpu"
    assert cli.main(["bench", "prefill", *SETTINGS, *words.split()[-2:], *words.split()[:-2], "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    cases = [(m["tokens"], m["reduction"]) for m in data["measurements"]]
    assert cases == [(tokens, name) for tokens in (16, 48) for name in ("none", "int8", "int4")]
    assert all(len(m["seconds"]) == 2 and min(m["seconds"]) <= m["median"] > 0 for m in data["measurements"])
    assert data["tensor_parallel_size"] == 2 and data["model"]["num_layers"] == 1 and data["auto"] == []
    assert "| 48 | " in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def _note(path: Path, found: Sequence[Prefill], decided: Sequence[Decided]) -> None:
    path.write_text(path.read_text() + f"{len(found)} ")


def test_every_length_is_kept_at_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("")
    settings = [*SETTINGS, "inference.cache_tokens=128", "reduction.output_projection=int8", "attention.kernel=cpu"]
    config = for_inference(compose_config([*settings, "reduction.down_projection=int8"]))
    run_distributed(measure, 2, config, Ask((16, 48), ("none", "int8"), 1), partial(_note, told))
    assert told.read_text() == "2 4 "


def test_what_auto_has_gone_by_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    words = "--lengths 32 --reductions none,auto,int8 --iterations 1"
    settings = [*SETTINGS, "reduction.min_kib=0", "attention.kernel=cpu"]
    assert cli.main(["bench", "prefill", *settings, *words.split(), "--out", str(out)]) == 0
    (decided,) = json.loads(out.read_text())["auto"]
    assert (decided["operation"], decided["dtype"]) == ("all_reduce", "float32")
    sizes = [size for size, plain, quantized in decided["samples"] if plain > 0 and quantized > 0]
    assert sizes == sorted(sizes) and len(sizes) == len(decided["samples"]) > 1
    assert decided["from_bytes"] in (None, *sizes)
    text = out.with_suffix(".md").read_text()
    assert "\nauto: all_reduce of float32 is quantized " in text and "; prompts of 32 tokens " in text


def test_what_auto_takes_for_every_prompt() -> None:
    samples = ((2**20, 2e-3, 3e-3), (2**22, 8e-3, 4e-3))
    decided = Decided("all_reduce", "bfloat16", 2**22, samples)
    assert decided.said((256, 1024), 2048, 0) == (
        "auto: all_reduce of bfloat16 is quantized from 4 MiB (8 ms plain, 4 ms quantized); prompts of "
        "256 tokens none (1 MiB), 1,024 tokens int8 (4 MiB)."
    )
    assert "1,024 tokens none (4 MiB)" in decided.said((1024,), 2048, 2**23)
    never = Decided("all_reduce", "bfloat16", None, samples)
    assert "at no size up to 4 MiB; prompts of 1,024 tokens none" in never.said((1024,), 2048, 0)


def test_the_table_compares_with_none() -> None:
    found = [Prefill(8, "none", [0.2, 0.1, 0.3]), Prefill(8, "int8", [0.1, 0.1, 0.5])]
    assert table(found).splitlines()[-1] == "| 8 | 200.00 | 100.00 (0.500) |"


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("a", "none", 1), "--lengths=a: expected numbers"),
        (("8", "int5", 1), "--reductions=int5: expected of none, int8"),
        (("8", "none", 0), "--iterations=0: expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            Ask.of(*words)
    out = ["--out", str(tmp_path / "prefill.json")]
    assert cli.main(["bench", "prefill", "train.device=cpu", *out]) != 0
    assert "parallelism.tensor_parallel_size=1: expected 2 or more" in capsys.readouterr().err
    assert cli.main(["bench", "prefill", "parallelism=cp2", "train.device=cpu", *out]) != 0
    assert "parallelism.context_parallel_size=2: expected 1" in capsys.readouterr().err
