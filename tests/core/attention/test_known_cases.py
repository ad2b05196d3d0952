"""The shapes and masks with which other implementations of context parallelism are tested, scaled to CPUs.

They come from TransformerEngine's tests of attention with CP, MagiAttention's tests of its pipeline, and
Megatron-Core's tests of packed sequences. Every mode runs them, with all ranks in threads of one process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import AttentionKernel, KernelRequest, choose_kernel
from megatron_longctx.core.plans import MODES, Mask, ModeOptions, build_plan, find_mode
from megatron_longctx.core.plans.mask import Document, documents
from megatron_longctx.core.plans.slices import FAR, Slice
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import assert_as_good_as
from tests.shared.threads import Inputs, attend


@dataclass(frozen=True)
class Case:
    """heads: numbers of query and KV heads, head dims of keys and values. doc_args: arguments of `documents`."""

    heads: tuple[int, int, int, int]
    doc_args: dict[str, Any]
    slices: tuple[Slice, ...] = ()
    batch: int = 1
    sinks: str = ""
    dtype: torch.dtype = field(default=torch.float32)

    @functools.cached_property
    def mask(self) -> Mask:
        if not self.slices:
            return documents(**self.doc_args)
        length = self.doc_args["length"]
        return Mask(length, self.slices, (Document(0, length, 0),))

    @functools.cached_property
    def inputs(self) -> Inputs:
        h, g, d, e = self.heads
        *qkv, grad = random_qkv(self.mask.length, self.batch, h, g, d, self.dtype, e=e)
        generator = torch.Generator().manual_seed(1)
        sink = {"": None, "off_by_one": torch.zeros(h), "learnable": torch.randn(h, generator=generator)}[self.sinks]
        sink = None if sink is None else sink.requires_grad_()
        return Inputs(*(x.requires_grad_() for x in qkv), grad, sink)

    @functools.cached_property
    def truth(self) -> dict[str, Tensor]:
        seen = torch.zeros(self.mask.length, self.mask.length, dtype=torch.bool)
        for q_start, q_stop, k_start, k_stop, lo, hi in self.mask.slices:
            behind = torch.arange(k_start, k_stop) - torch.arange(q_start, q_stop)[:, None]
            part = (lo <= behind) & (behind <= hi)
            assert not (seen[q_start:q_stop, k_start:k_stop] & part).any(), "a pair in two slices"
            seen[q_start:q_stop, k_start:k_stop] |= part
        q, k, v, grad, sink = self.inputs
        return dense_attention(q, k, v, grad, seen=seen, sink=sink)

    @functools.cached_property
    def own(self) -> dict[str, Tensor]:
        """The results of one rank alone, in the same precision."""
        return self.attend("zigzag", 1)

    def attend(self, mode: str, n: int) -> dict[str, Tensor]:
        h, g, d, e = self.heads

        def kernel() -> AttentionKernel:
            request = KernelRequest("cpu", self.dtype, d, h, g, v_head_dim=e, windows=self.mask.has_windows)
            return choose_kernel("auto", request)

        plan = build_plan(find_mode(mode, n, ModeOptions()), n, self.mask)
        return attend(plan, self.inputs, d**-0.5, kernel)


def whole(length: int = 192, window: tuple[int | None, int | None] = (None, None), causal: bool = True) -> Any:
    """Return TransformerEngine's sequence of 4,096 tokens with windows of 512 and 128, scaled by 1/21."""
    return {"lengths": [length], "window": window, "causal": causal}


BI_CAUSAL: tuple[Any, ...] = tuple(  # ranges with overlapping queries, each between two diagonals
    Slice(*each).tight()
    for each in [
        (0, 256, 0, 384, 0, 128), (0, 256, 512, 640, 384, 512), (256, 640, 256, 512, -256, -64),
        (256, 640, 640, 840, 64, 300), (640, 840, 0, 200, -640, -640), (640, 840, 640, 840, -64, 0),
    ]
)  # fmt: skip
CONTINUOUS: tuple[Any, ...] = (  # consecutive full, causal, inverse causal and bi-causal slices
    Slice(0, 200, 0, 200), Slice(200, 420, 200, 420, -FAR, 0), Slice(420, 640, 420, 640, 0, FAR),
    Slice(640, 960, 400, 840, -240, -120).tight(),
)  # fmt: skip
CASES = {
    **{f"te {h}:{g} {name}": Case((h, g, 32, 32), doc_args, batch=2)
       for h, g in ((12, 12), (12, 2), (32, 4))
       for name, doc_args in {
           "causal": whole(), "full": whole(causal=False), "window 512": whole(window=(24, 0)),
           "window 512, 512": whole(window=(24, 24), causal=False), "window 128": whole(window=(6, 0)),
       }.items() if h == 12 or name == "causal"},
    "te mla": Case((12, 12, 192, 128), whole(96), batch=2),
    "te d 256": Case((4, 4, 256, 256), whole(96), batch=2),
    **{f"te sinks {kind or 'vanilla'}": Case((64, 8, 64, 64), whole(96, (6, 0)), batch=2, sinks=kind)
       for kind in ("", "off_by_one", "learnable")},
    **{f"magi {name} 8:{g}": Case((8, g, 16, 16), doc_args, slices)
       for name, g, doc_args, slices in (
           ("varlen_full_attn", 8, {"lengths": [128] * 8 + [26], "causal": False}, ()),
           ("varlen_block_causal", 2, {"lengths": [128, 128, 128, 128, 128, 128, 192],
                                       "causal": False, "parents": [-1, 0, 1, 2, -1, 4, 5]}, ()),
           ("bi_causal_with_q_overlap", 8, {"length": 840}, BI_CAUSAL),
           ("continuous_multi_masks", 2, {"length": 960}, CONTINUOUS),
           ("uneven_varlen", 2, {"lengths": [7, 301, 1, 64, 2, 127, 498, 3]}, ()),
       )},
    "megatron 65536, 8191, 4096": Case((8, 2, 32, 32), {"lengths": [512, 63, 32]}),
    "megatron 17, 31, 11": Case((8, 2, 32, 32), {"lengths": [17, 31, 11]}, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_mode_is_as_good_as_one_rank(name: str) -> None:
    case, ran = CASES[name], 0
    for mode in MODES:
        n = 2 if mode in ("ulysses", "usp") else 4
        try:
            find_mode(mode, n, ModeOptions()).check_heads(n, *case.heads[:2])
        except ValueError:
            continue
        assert_as_good_as(case.attend(mode, n), case.own, case.truth, f"{name}, {mode}")
        ran += 1
    assert ran == len(MODES), "every case has heads for two ranks"
