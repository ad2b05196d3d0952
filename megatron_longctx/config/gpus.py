"""The GPU of each rank: one GPU per rank, or one that several ranks share to test multi-GPU code on few GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING

from ..core.errors import refuse

if TYPE_CHECKING:
    from .tree import Config

RANKS_PER_GPU = "MEGATRON_LONGCTX_RANKS_PER_GPU"
"""Environment variable: the number of neighbouring ranks that share a GPU. They compute in turns and their messages are
slow, so it shows what runs, not how fast."""
_of_other_nodes: list[int] = []  # the GPUs of each node that a job is checked for


@contextmanager
def other_nodes(num_gpus: int) -> Iterator[None]:
    """While the context is open, jobs are checked for other nodes with `num_gpus` GPUs each; no device is asked."""
    _of_other_nodes.append(num_gpus)
    try:
        yield
    finally:
        _of_other_nodes.pop()


def for_other_nodes() -> bool:
    """Whether jobs are checked for other nodes than this host (`other_nodes`)."""
    return bool(_of_other_nodes)


def ranks_per_gpu() -> int:
    """Return how many ranks share a GPU. Raises ValueError: `RANKS_PER_GPU` is not a positive integer."""
    value = os.environ.get(RANKS_PER_GPU, "1")
    if not value.isdecimal() or int(value) < 1:
        raise refuse(RANKS_PER_GPU, value, "a whole number of at least 1", "Correct it, or unset it.")
    return int(value)


def max_gpu_ranks() -> int:
    """Return how many ranks can run on the GPUs of this host, or of each of `other_nodes`."""
    import torch  # in these functions, so that reading runs needs no torch, which takes seconds to import

    return (_of_other_nodes[-1] if _of_other_nodes else torch.cuda.device_count()) * ranks_per_gpu()


def uses_cuda(device: str) -> bool:
    """Whether ranks with `train.device=device` run on GPUs."""
    import torch

    return device != "cpu" and (_of_other_nodes[-1] > 0 if _of_other_nodes else torch.cuda.is_available())


def refuse_peer(config: Config, transport: str, reduces: bool = True) -> None:
    """Refuse messages of attention through peer memory on CPUs; `transport` is their key.

    With `reduces`, also those of sums that `config.reduction` quantizes.
    """
    reduction = config.reduction
    quantizes = reduces and {reduction.output_projection, reduction.down_projection} != {"none"}
    others = {transport: "auto or p2p", **({"reduction.transport": "auto or collective"} if quantizes else {})}
    for key, expected in others.items():
        if attrgetter(key)(config) == "peer":
            raise refuse(key, "peer", f"{expected} on CPUs", "Only GPUs read each other's memory.")


def use_gpu(local_rank: int) -> None:
    """Make the GPU of a rank of this host the current device of this process."""
    import torch

    sharing = ranks_per_gpu()
    torch.cuda.set_device(local_rank // sharing)
    if sharing > 1:
        # NCCL refuses ranks of one host that share a GPU, so each pretends to be a host and talks over sockets.
        os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{local_rank}"
        os.environ.setdefault("NCCL_NET", "Socket")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
