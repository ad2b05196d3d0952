"""Which GPU a rank uses: one of its own, or one that it shares with its neighbours, to try on few GPUs what many do."""

from __future__ import annotations

import os

import torch

from .errors import refuse

RANKS_PER_GPU = "MEGATRON_LONGCTX_RANKS_PER_GPU"
"""Environment variable: so many neighbouring ranks share a GPU. They compute in turns and their messages are slow: for
trying what runs, not for how fast."""


def ranks_per_gpu() -> int:
    """How many ranks share a GPU here.

    Raises:
        ValueError: `RANKS_PER_GPU` is not a positive number.
    """
    value = os.environ.get(RANKS_PER_GPU, "1")
    if not value.isdecimal() or int(value) < 1:
        raise refuse(RANKS_PER_GPU, value, "one whole number from 1", "Correct it, or unset it.")
    return int(value)


def gpu_ranks() -> int:
    """How many ranks the GPUs of this host take: one each, or as many as are to share them."""
    return torch.cuda.device_count() * ranks_per_gpu()


def use_gpu(local_rank: int) -> None:
    """Take the GPU of a rank of this host, for all that this process does from now on."""
    sharing = ranks_per_gpu()
    torch.cuda.set_device(local_rank // sharing)
    if sharing > 1:
        # NCCL refuses ranks of one host that share a GPU, but not ranks of different hosts: they talk over sockets.
        os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{local_rank}"
        os.environ.setdefault("NCCL_NET", "Socket")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
