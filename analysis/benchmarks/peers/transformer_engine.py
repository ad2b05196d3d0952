"""TransformerEngine's context parallelism, on the cuDNN kernels that it calls itself."""

import importlib
import os
from functools import partial

import torch.distributed as dist

from analysis.transformer_engine import TransformerEngineAttention

from ..cases import Case
from ..measure import Contender, Prepared
from . import check_parts

ENGINE = "transformer_engine.pytorch"
NOTE = "it calls cuDNN by itself (NVTE_FLASH_ATTN=0 unless set otherwise), through its own build."


def contenders(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    os.environ.setdefault("NVTE_FLASH_ATTN", "0")
    importlib.import_module(ENGINE)
    kinds = ("p2p", "all_gather", "a2a")
    return [Contender(f"TransformerEngine, {kind}", partial(_engine, group, kind)) for kind in kinds]


def _engine(group: dist.ProcessGroup, kind: str, case: Case) -> Prepared:
    """Prepare the attention that training cases compare with."""
    check_parts(case, 2 * dist.get_world_size(group))
    attention = TransformerEngineAttention(group, kind)
    attention.check_heads(case.num_heads, case.num_kv_heads)
    attention.check_mask(case.mask)
    return Prepared(partial(attention, mask=case.mask), list(attention.layout(case.mask).tokens(dist.get_rank(group))))
