"""A value of rank 0 on all ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast_json(value: Any = None) -> Any:
    """Broadcast rank 0's JSON value to all ranks, tuples as lists. Every rank waits for all others.

    JSON, because unpickling can execute code.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(text)], device=device)
    dist.all_reduce(size)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, src=0)
    return json.loads(data.cpu().numpy().tobytes())
