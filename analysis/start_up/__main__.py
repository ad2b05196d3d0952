"""Seconds from `megatron-longctx train` to the end of the first step: `python -m analysis.start_up --out FILE.json`.

It prints the milestones of `train` with ranks as they are, which are forks where nothing is in the way, and as new
processes. The first run fills the caches of kernels, if they are empty.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN = time.time()


def left(seconds: float) -> float:
    return seconds - (time.time() - BEGIN)


def train(how: str, folder: Path, device: str, ranks: int, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Train three steps; return the milestones."""
    settings = [
        *("experiment=demo", "model=llama3_8b", "model.num_layers=4", "model.hidden_size=1024"),
        *("model.num_attention_heads=8", "model.num_kv_heads=2", "model.ffn_hidden_size=4096"),
        *("data.seq_length=16384", "data.prefix=data/stdlib", "parallelism=single", "train.save=false"),
        *("train.precision=bf16", f"train.device={device}", "train.steps=3", "optim.warmup_steps=1"),
        *(f"train.global_batch_size={ranks}", f"parallelism.context_parallel_size={ranks}"),
        *(f"train.num_processes={ranks}", f"run.name={how}_{time.time():.0f}", "logging.wandb=disabled", *words),
    ]
    begin = time.time()
    path = f"{Path(__file__).parent}{os.pathsep}{_path()}"
    environment = os.environ | {"T0": str(begin), "HOW": how, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_longctx", "train", *settings]
    with (folder / f"{how}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    whole, lines = time.time() - begin, (folder / f"{how}.log").read_text().splitlines()
    told = [
        line for line in lines if line.startswith("TL ") or re.search("rror|not forks|first step|step +[123]/", line)
    ]
    print("\n".join(line[:200] for line in told), flush=True)
    first = next((float(line.split()[1]) for line in lines if re.search("^TL .*_one_step", line)), None)
    print(f"== {how}: exit code {code}, the first step ends after {first} s, the job after {whole:.1f} s", flush=True)
    return {"how": how, "exit_code": code, "first_step_s": first, "job_s": whole, "milestones": told}


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main(argv: Sequence[str] | None = None) -> int:
    """Train in both ways, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value words of the job")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="no part begins later (default: %(default)s)")
    parser.add_argument("--how", default="as_is,spawn", help="how ranks start (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one job")
    arguments = parser.parse_args(argv)
    folder = arguments.out.resolve().parent / "start_up"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    from megatron_longctx.training.text import Source, prepare

    if not (folder / "data" / "stdlib.bin").exists():
        prepare(Source("stdlib"), folder / "data" / "stdlib", "byte-level")
    found = []
    hows = arguments.how.split(",")[: 1 if arguments.quick else None]
    filled = arguments.device == "cpu" or any((Path.home() / ".cache/megatron_longctx/fa4").glob("*"))
    for how in hows if filled or arguments.quick else [hows[0], *hows]:
        if (rest := left(arguments.seconds)) > 15:
            print(f"== {time.time() - BEGIN:.0f} s: {how}", flush=True)
            found.append(train(how, folder, arguments.device, arguments.ranks, arguments.settings, rest + 20))
            arguments.out.write_text(json.dumps({"what": "seconds to the first step", "runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
