"""Two GPUs of one host as two hosts, over NCCL's sockets: `python -m analysis.two_hosts --out FILE.json`.

Each rank sees one GPU, has a host name of its own, and NCCL may use neither peer memory nor shared memory. Outputs and
gradients of every mode are compared with those of one GPU.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, HEADS, KV_HEADS, SIZE = 6144, 8, 2, 128
MODES = ("zigzag", "ring", "striped", "helper", "double_ring", "node_gather", "all_gather", "ulysses", "usp")


def compare() -> dict[str, dict[str, Any]]:
    """Return, on every rank, the errors of all modes and masks as shares of norms, and milliseconds of both passes."""
    name, real = os.environ["HOST"], os.uname()
    os.uname = lambda: os.uname_result((real.sysname, name, *real[2:]))
    socket.gethostname = lambda: name
    import torch
    import torch.distributed as dist

    from megatron_longctx import ContextParallelAttention, Mask
    from megatron_longctx.core.plans import ModeOptions

    dist.init_process_group("nccl")
    rank, both = dist.get_rank(), dist.group.WORLD
    alone = [dist.new_group([each]) for each in range(2)][rank]
    torch.manual_seed(0)
    kinds = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *inputs, grad = (torch.randn(TOKENS, 1, n, SIZE, device="cuda", dtype=torch.bfloat16) for n in kinds)

    def passes(attention: Any, mask: Mask, sliced: bool) -> list[torch.Tensor]:
        xs = [(attention.shard(x, mask) if sliced else x).clone().requires_grad_() for x in inputs]
        out = attention(*xs, mask=mask)
        return [out, *torch.autograd.grad(out, xs, attention.shard(grad, mask) if sliced else grad)]

    found: dict[str, dict[str, Any]] = {}
    masks = {
        "causal": Mask.causal(TOKENS),
        "packed": Mask.packed([1000, 1, 3143, 2000]),
        "window": Mask.causal(TOKENS, window=(1500, 0)),
    }
    for kind, mask in masks.items():
        expected = passes(ContextParallelAttention(alone), mask, sliced=False)
        for mode in MODES:
            options = ModeOptions(inner_size=1) if mode in ("double_ring", "node_gather") else None
            attention = ContextParallelAttention(both, schedule=mode, options=options)
            pairs = [
                (one.float(), attention.shard(other, mask).float(), other.float().norm())
                for one, other in zip(passes(attention, mask, sliced=True), expected, strict=True)
            ]
            began = time.monotonic()
            for _ in range(3):
                passes(attention, mask, sliced=True)
            torch.cuda.synchronize()
            took = (time.monotonic() - began) / 3
            errors = [float((one - other).norm() / norm) for one, other, norm in pairs]
            found[f"{kind}: {mode}"] = {"errors": errors, "ms": 1000 * took}
    dist.destroy_process_group()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if "HOST" in os.environ:
        found = compare()
        if os.environ["RANK"] == "0":
            arguments.out.write_text(json.dumps({"what": "two GPUs as two hosts", "cells": found}, indent=1) + "\n")
        return 0
    address = socket.gethostbyname(socket.gethostname())
    common = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "MASTER_ADDR": address}
    common |= {"MASTER_PORT": "29611", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = []
    for rank in range(2):
        own = {
            "RANK": str(rank),
            "HOST": f"node{rank}",
            "NCCL_HOSTID": f"node{rank}",
            "CUDA_VISIBLE_DEVICES": str(rank),
        }
        command = [sys.executable, "-m", "analysis.two_hosts", "--out", str(arguments.out)]
        ranks.append(subprocess.Popen(command, env=os.environ | common | own))
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
