"""`python -m analysis.benchmarks serving` on CPU: a server of a random Llama gives the texts of the engine."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis import random_llama
from analysis.benchmarks import serving
from analysis.benchmarks.__main__ import main
from megatron_longctx.cli.conversion import import_model
from tests.shared.processes import Quick

SIZES = "--layers 1 --hidden 32 --ffn 48 --heads 2 --kv_heads 1 --vocabulary 600 --positions 2000 --precision fp32"


def quickly(command: list[str], stdout: Any, env: dict[str, str], **_: Any) -> Quick:
    return Quick(command[3:], None, (os.devnull, stdout.name, stdout.name), env)


def test_a_server_gives_the_texts_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    patched = SimpleNamespace(Popen=quickly, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(serving, "subprocess", patched)
    folder, run, out = tmp_path / "llama", tmp_path / "run", tmp_path / "serving.json"
    assert random_llama.main([str(folder), *SIZES.split()]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len({tokenizer.decode([token]) for token in range(258, 600)}) == 342, "a word for every token"
    import_model(str(folder), [f"out={run}"])
    settings = [f"--run={run}", "train.device=cpu", "parallelism.context_parallel_size=2"]
    words = "--parts first,drafts --exact --lengths 90,1500 --rounds 1 --drafts 5 --tokens 20"
    assert main(["serving", *settings, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    warm, *rows = data["first"]
    assert [row["tokens"] for row in rows] == [90, 1500] and warm["tokens"] == 90
    for row in (warm, *rows):
        assert len(set(row["engine"]["text"].split())) > 1 and row["engine"]["first_s"] > 0
        assert 0 < row["server"]["2"]["first_s"] < row["server"]["2"]["all_s"] and row["server"]["2"]["tokens"] == 8
    assert len(data["drafts"]) == 4 and all(min(row["rates"]) > 0 and row["equal"] for row in data["drafts"])
    assert "| 1,500 | 2 |" in out.with_suffix(".md").read_text()
    assert main(["serving", *settings, "--parts", "fast", "--out", str(out)]) == 2
