"""TransformerEngine's attention in place of ours computes the same outputs and gradients."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from analysis.transformer_engine import TransformerEngineAttention
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.plans import mask as masks
from megatron_longctx.testing.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine"),
]
KINDS = ("p2p", "all_gather", "a2a")
PACK = (1024, 64, 4096 - 1024 - 64)


def _differences(rank: int, n: int) -> dict[str, float]:
    """Return the largest relative difference of the output and of all gradients, keyed by case and kind."""
    torch.manual_seed(0)
    ours = ContextParallelAttention(dist.group.WORLD, schedule="all_gather", layout="per_document")
    found = {}
    for name, mask in (("dense", masks.causal(4096)), ("packed", masks.documents(PACK))):
        whole = [torch.randn(4096, 1, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2, 8)]
        mine = torch.tensor([*ours.layout(mask).tokens(rank)], device="cuda")
        *qkv, grad = (x[mine] for x in whole)
        results = {}
        engines = {kind: TransformerEngineAttention(dist.group.WORLD, kind) for kind in KINDS}
        for kind, attention in {"ours": ours, **engines}.items():
            inputs = [x.clone().requires_grad_() for x in qkv]
            out = attention(*inputs, mask=mask)
            out.backward(grad)
            results[kind] = [out.detach(), *(x.grad for x in inputs)]
        for kind in KINDS:
            pairs = zip(results[kind], results["ours"], strict=True)
            found[f"{name} {kind}"] = max(float((x - y).norm() / y.norm()) for x, y in pairs)
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_outputs_and_gradients_are_ours(n: int) -> None:
    if max_gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices, found {max_gpu_ranks()}")
    for found in run_distributed(_differences, n, n, backend="nccl", timeout=300):
        assert all(difference < 0.02 for difference in found.values()), found
