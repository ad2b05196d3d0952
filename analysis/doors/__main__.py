"""Compare the doors with TransformerEngine's own context-parallel attention, on two GPUs.

    python -m analysis.doors OUT [--only NAME ...] [--megatron-lm FOLDER]

Small models with the same weights compute losses and gradients through each door, with TransformerEngine's attention,
and with that on one rank. All are compared with the definition: fp32 layers with dense attention, on each document
alone. Wrong combinations must be refused. With a checkout of Megatron-LM, its `pretrain_gpt.py` trains five steps with
both attentions. OUT.json and OUT.md have the results; the exit code is 1 if one is not as expected. Without GPUs it
runs Megatron's local layers on gloo, and nothing is compared with TransformerEngine.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from analysis.benchmarks.report import table
from analysis.doors import megatron_lm
from analysis.doors.layers import CASES, WORLD, judge
from analysis.doors.refusals import on_rank
from megatron_longctx.testing.distributed import run_distributed


def _tables(found: dict[str, Any]) -> str:
    parts = []
    if "layers" in found:
        rows = [
            [name, way, *([each, ""] if isinstance(each, str) else [f"{each[x]:.2e}" for x in ("losses", "gradients")])]
            for name, ways in found["layers"].items()
            for way, each in ways.items()
        ]
        parts.append("Relative errors from the definition in fp32.")
        parts.append(table(["case", "attention", "losses", "worst gradient"], rows))
        parts.append(table(["refused", "message"], [[name, said] for name, said in found["refused"].items()]))
    if "megatron_lm" in found:
        rows = [
            [name, " ".join(f"{x:.5f}" for x in job["losses"]) or job["error"]]
            for name, job in found["megatron_lm"].items()
        ]
        parts.append("Losses that `pretrain_gpt.py` prints.")
        parts.append(table(["job", "losses of five steps"], rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES], metavar="CASE")
    parser.add_argument("--megatron-lm", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
    wrong, start = [], time.monotonic()
    if options.only:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # or TransformerEngine's products in fp32 would be of TF32
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        found["layers"], found["refused"] = run_distributed(on_rank, WORLD, options.only, timeout=400, backend=backend)[
            0
        ]
        del os.environ["NVIDIA_TF32_OVERRIDE"]
        wrong += judge(found["layers"])
        wrong += [f"{name!r} is said as {said!r}" for name, said in found["refused"].items() if name not in said]
        print(f"layers: {time.monotonic() - start:.0f} s", flush=True)
    if options.megatron_lm is not None:
        start = time.monotonic()
        found["megatron_lm"] = megatron_lm.train(options.megatron_lm)
        wrong += megatron_lm.judge(found["megatron_lm"])
        print(f"pretrain_gpt.py: {time.monotonic() - start:.0f} s", flush=True)
    found["wrong"] = wrong
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    options.out.with_suffix(".md").write_text(_tables(found))
    print(_tables(found), *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
