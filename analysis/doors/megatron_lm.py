"""Megatron-LM's `pretrain_gpt.py` for five steps on two ranks, with its own attention and through the door."""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
    --num-layers 2 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 4 --swiglu --group-query-attention
    --num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --context-parallel-size 2
    --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --lr 0.0003 --tokenizer-type NullTokenizer
    --vocab-size 127 --make-vocab-size-divisible-by 2 --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-masked-softmax-fusion --no-persist-layer-norm --log-interval 1 --eval-iters 0
    --eval-interval 1000 --num-workers 0 --calculate-per-token-loss --no-create-attention-mask-in-dataloader"""
GPU = "--bf16 --transformer-impl transformer_engine --distributed-timeout-minutes 2"
CPU = "--transformer-impl local --use-cpu-initialization --distributed-backend gloo --no-rope-fusion"
DOOR = "--spec megatron_longctx.integrations.megatron_lm layer"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall"
LIMIT = 2e-3
"""Relative difference of losses that rounding to bf16 explains."""


def _jobs(folder: Path) -> dict[str, str]:
    """Return the arguments of each job by its name; those with the same end are compared."""
    packs = f"--sft --data-path {folder}/chats.jsonl --split 100,0,0 --data-cache-path {folder}"
    experts = f"{EXPERTS} --moe-grouped-gemm" if torch.cuda.is_available() else EXPERTS
    kinds = {"dense": "--mock-data", "experts": f"--mock-data {experts}", "packs": packs}
    own = {f"own, {kind}": words for kind, words in kinds.items() if torch.cuda.is_available()}
    doors = {f"door, {kind}": f"{words} {DOOR}" for kind, words in kinds.items()}
    return own | doors | {"door, masks of documents": f"--mock-data --reset-attention-mask {DOOR}"}


def _write_conversations(path: Path) -> None:
    """Write lines of several conversations, that a sequence holds with their padding."""
    source = random.Random(3)
    with path.open("w") as file:
        for _ in range(40):
            turns = []
            for _ in range(source.randint(2, 6)):
                for role, longest in (("system", 10), ("user", 40), ("assistant", 110)):
                    text = "".join(source.choices("abcdefgh", k=source.randint(3, longest)))
                    turns.append({"role": role, "content": text})
            file.write(json.dumps({"messages": turns}) + "\n")


def train(checkout: Path) -> dict[str, dict[str, Any]]:
    """Return the losses of each job, and the end of its output if it failed. All run at once."""
    script, path = (
        (checkout / "pretrain_gpt.py").resolve(),
        os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )
    # Compilation takes longer than the five steps.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "analysis.doors.start", str(script), *MODEL.split()]
    command += (GPU if torch.cuda.is_available() else CPU).split()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_conversations(folder / "chats.jsonl")
        running = {}
        for job, words in _jobs(folder).items():
            packs = {"DOORS_PACKS": str(int("--sft" in words))}
            log = (folder / f"{job}.log").open("w")
            environment = {**os.environ, **variables, **packs, "PYTHONPATH": path}
            arguments = [*command, *words.split()]
            running[job] = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log)
        for job, process in running.items():
            code = process.wait(timeout=400)
            text = (folder / f"{job}.log").read_text()
            losses = [float(each) for each in re.findall(r"lm loss: (\S+)", text)]
            errors = [line for line in text.splitlines() if re.match(r"(\[rank\d\]: ?)?\w*(Error|Exception): ", line)]
            found[job] = {"code": code, "losses": losses, "error": (errors or [text[-3000:]])[0] if code else ""}
    return found


def judge(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return where the two attentions train differently, or a job has not ended as expected."""
    wrong = []
    for job, each in found.items():
        kind = job.partition(", ")[2]
        if kind == "masks of documents":
            if "--reset-attention-mask=True: expected False" not in each["error"]:
                wrong.append(f"{job}: not refused by name: {each}")
        elif each["code"] or len(each["losses"]) != 5:
            wrong.append(f"{job}: {each}")
        elif own := found.get(f"own, {kind}", {}).get("losses"):
            differences = [abs(x - y) / abs(y) for x, y in zip(each["losses"], own, strict=True)]
            if max(differences) > LIMIT:
                wrong.append(f"{job}: {each['losses']}, own {own}")
    return wrong
