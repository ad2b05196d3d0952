"""docs/extend.md, start to end: every command of its blocks runs on a stand-in of Llama 3 with two layers, on CPUs.

It takes about 40 s on two busy cores, nearly all of them in the eight commands that start ranks.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron_longctx.training.compose import load_config
from tests.docs.test_docs import ROOT, commands
from tests.shared.jobs import CLI, clean_environment, finished
from tests.shared.published import TEXTS, tensors_of, write_model

PAGE = ROOT / "docs/extend.md"
COMMANDS = [line for line in commands(PAGE) if not line.startswith("#")]
STAND_IN = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512}  # fmt: skip
# What a command of the page has, and what the test replaces it by: lengths, ranks, steps and samples.
SMALLER = {
    "131072": "1024", "8192": "512", "context_parallel_size=8": "context_parallel_size=2", "samples=4": "samples=1",
    "train.steps=20": "train.steps=2", "warmup_steps=2": "warmup_steps=1", "data.split=99,1": "data.split=50,50",
}  # fmt: skip
# What it appends to the words of a recipe: the shape of the stand-in, and what does not fit two CPU cores.
RECIPE = [
    *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_kv_heads=2"),
    *("model.ffn_hidden_size=96", "model.vocab_size=300", "model.rope_scaling.original_length=512"),
    *("parallelism.context_parallel_size=2", "recompute.head_chunk_tokens=128", "train.precision=fp32"),
    *("train.device=cpu", "train.global_batch_size=2", "train.eval_samples=1", "data.workers=0"),
    *("data.split='50,50'", "logging.wandb=disabled", "parallelism.cluster=mi300x_x8"),
]
LENGTHS = {"extend": "1024", "sft": "512"}
STEPS = ["train.steps=2", "optim.warmup_steps=1", "train.save_interval=1", "train.eval_interval=1"]
SLURM = ["--ntasks-per-node=2", "--gpus-per-node=0"]
TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE = TURN + "{% if add_generation_prompt %}<assistant>{% endif %}"


def smaller(line: str) -> list[str]:
    """Return the words of a command of the page for the stand-in."""
    pattern = re.compile("|".join(map(re.escape, SMALLER)))
    words = [pattern.sub(lambda found: SMALLER[found[0]], word) for word in shlex.split(line, comments=True)[1:]]
    recipe = next((re.search("extend|sft", word)[0] for word in words if word.startswith("experiment=")), None)  # type: ignore[index]
    if recipe:
        more = [*RECIPE, f"data.seq_length={LENGTHS[recipe]}"]
        more += [] if "train.steps=2" in words else STEPS
        at = next(i for i, word in enumerate(words) if word.startswith("experiment=")) + 1
        options = SLURM if words[0] == "submit" else []
        words = [*words[:2], *options, *words[2:at], *more, *words[at:]]
    return words


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page begins with: a model, documents and conversations; and a Slurm that takes jobs."""
    write_model(tmp_path / "Meta-Llama-3-8B", "llama", torch.float32, **STAND_IN)
    text = " ".join(TEXTS)
    lines = [json.dumps({"text": f"{i}. " + text * (1 + i % 9)}) for i in range(60)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    turns = [{"role": "user", "content": "what glitters?"}, {"role": "assistant", "content": "all that is gold"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", "echo Submitted batch job 7"), ("sinfo", "exit 1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_every_command_of_the_page(place: Path) -> None:
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    environment["PATH"] = f"{place}/bin:{environment['PATH']}"
    said = []
    for line in COMMANDS:
        job = finished(place, [*CLI, *smaller(line)], environment, quick=True)
        assert job.process.returncode == 0, f"{line}\n{job.output()}"
        said.append(job.out.read_text())
    verbs = [line.split()[1] for line in COMMANDS]
    assert {"import", "data", "plan", "submit", "train", "compare", "eval", "export"} <= set(verbs)
    listed = said[verbs.index("submit")]
    assert (
        all(f"modes-{mode}: 2 ranks (CP 2" in listed for mode in ("all_gather", "zigzag", "ulysses"))
        and " h in all" in listed
    )
    runs = place / "runs"
    extended = runs / "llama3_8b_extend_128k_cp8_h200_bf16"
    assert load_config(extended / "resolved.yaml").model.rope_scaling.kind == "llama3"
    assert "<html" in (runs / "modes.html").read_text()
    for name in ("before", "after"):
        assert json.loads((place / f"results/{name}/eval.json").read_text())["complete"]
    written = json.loads((place / "Llama-3-8B-128K/config.json").read_text())
    assert written["max_position_embeddings"] == 4096 and "llama3" in str(written)
    assert tensors_of(place / "Llama-3-8B-128K").keys() == tensors_of(place / "Meta-Llama-3-8B").keys()
    trained = [
        json.loads(line) for line in (runs / "llama3_8b_sft_64k_cp8_h200_bf16/metrics.jsonl").read_text().splitlines()
    ]
    assert len(trained) == 2 and "loss/validation" in trained[-1]
