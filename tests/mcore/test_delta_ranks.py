"""fla-core's kernels under Triton's interpreter give the reference's outputs and gradients over ranks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.mcore import delta_kernels
from megatron_longctx.mcore.delta_net import _normalized
from megatron_longctx.models import delta_rule
from megatron_longctx.models.delta_rule import Place
from tests.core.kernels.interpreter import run_forked, run_interpreted

INSTALLED = Path(sys.prefix, "fla-core", "fla")  # by `make setup`, apart from other packages
HEADS, SHARED, SIZE = 1, 2, 16
CASES = (
    # documents, tokens of each rank
    ((90, 1, 65), (66, 90)),
    ((205, 64, 1, 30), (100, 69, 131)),  # one rank is in the middle of a document
)


def fla_for_the_interpreter(folder: Path) -> None:
    """Import a copy of fla-core in which loops' variables, Python's numbers in the interpreter, are not converted."""
    import triton.runtime.autotuner

    shutil.copytree(INSTALLED, folder / "fla")
    for name, found, other in (
        ("common/chunk_delta_h", "i_t.to(tl.int64)", "i_t"),
        ("cp/chunk_fwd", "i_t.to(tl.int64)", "i_t"),
        ("cp/chunk_bwd", "i_t.to(tl.int64)", "i_t"),
        ("cp/context", "if not IS_NVIDIA or device", "return\n    if device"),  # it refuses CPUs
        ("cp/comm", "(out, inp, group", "(out, inp.unsqueeze(0), group"),  # as gloo wants it
    ):
        path = folder / f"fla/ops/{name}.py"
        path.write_text(path.read_text(encoding="utf-8").replace(found, other), encoding="utf-8")
    sys.path.insert(0, str(folder))
    triton.runtime.autotuner.Autotuner._bench = lambda *args, **kwargs: [1.0, 1.0, 1.0]
    import fla.ops.gated_delta_rule

    assert str(folder) in fla.ops.gated_delta_rule.__file__


def compare(rank: int, documents: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    from megatron_longctx.mcore.delta_ranks import SharedRule

    torch.manual_seed(0)
    total = sum(documents)
    q, k, v, grad = (torch.randn(1, total, heads, SIZE) for heads in (HEADS, HEADS, SHARED, SHARED))
    g, beta = -torch.rand(1, total, SHARED) / 8, torch.rand(1, total, SHARED)
    bounds = [0, *accumulate(tokens)]
    place = Place([0, *accumulate(documents)][:-1], bounds, rank)
    inside = slice(*bounds[rank : rank + 2])
    stops = torch.tensor([0, *accumulate(place.lengths)])
    own = [x[:, inside].contiguous().requires_grad_() for x in (q, k, v, g, beta)]
    out = SharedRule.apply(*own, place, (stops, stops), dist.group.WORLD)
    found = [out, *torch.autograd.grad(out, own, grad[:, inside])]
    whole = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    wide = [_normalized(whole[0], SIZE**-0.5), _normalized(whole[1])]
    wide = [*(x.repeat_interleave(SHARED, 2) for x in wide), *whole[2:]]
    zeros = torch.zeros(1, SHARED, SIZE, SIZE)
    expected = delta_rule.chunked(documents, zeros, *wide)[0]
    for one, other in zip(found, (expected, *torch.autograd.grad(expected, whole, grad.double())), strict=True):
        torch.testing.assert_close(one, other[:, inside].float(), rtol=1e-5, atol=2e-6)


def compare_kimi(rank: int, documents: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    total = sum(documents)
    q, k, v, rates, grad = (torch.randn(1, total, n, SIZE) for n in (HEADS, HEADS, SHARED, SHARED, SHARED))
    beta, log, bias = torch.rand(1, total, SHARED), torch.rand(SHARED), torch.rand(SHARED * SIZE)
    bounds = [0, *accumulate(tokens)]
    place = Place([0, *accumulate(documents)][:-1], bounds, rank)
    inside = slice(*bounds[rank : rank + 2])
    stops = torch.tensor([0, *accumulate(place.lengths)])
    pack: Any = SimpleNamespace(place=place, stops=lambda rows, device: (stops, stops))
    own = [x[:, inside].contiguous().requires_grad_() for x in (q, k, v, rates, beta)]
    weights = [log.requires_grad_(), bias.requires_grad_()]
    out = delta_kernels.kimi_delta_rule(*own, *weights, pack, dist.group.WORLD)
    found = [out, *torch.autograd.grad(out, [*own, *weights], grad[:, inside])]
    for sums in found[-2:]:
        dist.all_reduce(sums)
    whole = [x.detach().double().requires_grad_() for x in (q, k, v, rates, beta, log, bias)]
    wide = [_normalized(whole[0], SIZE**-0.5), _normalized(whole[1])]
    g = -whole[5].exp().unsqueeze(-1) * torch.nn.functional.softplus(whole[3] + whole[6].view(SHARED, SIZE))
    inputs = [*(x.repeat_interleave(SHARED, 2) for x in wide), whole[2], g, whole[4]]
    expected = delta_rule.chunked(documents, torch.zeros(1, SHARED, SIZE, SIZE), *inputs)[0]
    grads = torch.autograd.grad(expected, whole, grad.double())
    for number, (one, other) in enumerate(zip(found, (expected, *grads), strict=True)):
        part = other[:, inside] if number < 6 else other
        torch.testing.assert_close(one, part.float(), rtol=1e-4, atol=1e-4 if number > 5 else 1e-5)


def test_kernels_over_ranks_equal_the_reference() -> None:
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} is missing: make setup")
    run_interpreted(__name__)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        fla_for_the_interpreter(Path(folder))
        for case in CASES:
            run_forked(compare, len(case[1]), *case)
        run_forked(compare_kimi, 3, *CASES[1])
