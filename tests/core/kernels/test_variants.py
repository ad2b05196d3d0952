"""The number of variants that Triton compiles while lengths, batches and addresses change from call to call.

Without a GPU, the tests count the keys with which Triton would look up compiled kernels; on a GPU, they count those
kernels. Launches without Triton's inspection of arguments must distinguish the same arguments as Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import fused
from megatron_longctx.core.kernels.partials import Partial
from megatron_longctx.inference.paged import PackedPartials, Pages
from megatron_longctx.inference.quantize_kv import packed_shape
from megatron_longctx.lowbit.quantize import QuantFormat

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or interprets",
)
CALLS = 60
D, KV_HEADS, GROUP = 128, 2, 4
BF16 = torch.bfloat16
Draw = Callable[..., Tensor]
"""torch.zeros on a device."""


class Launches:
    """A stand-in for a kernel that records the variants for which it would be compiled.

    What it returns is launched again by `fused.launch`, and checks that the variant is right for those arguments.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.kernel, self.backend = kernel, make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        self.variants: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> Variant:
        found = self.bind(*args, **kwargs)
        self.variants[f"{found[1]}{sorted(found[2].items())}"] = found
        return Variant(self, found[1])

    def compiled(self) -> list[str]:
        """Compile every variant to PTX."""
        import triton
        from triton.compiler import ASTSource

        texts = []
        for bound, keys, options in self.variants.values():
            names = [param.name for param in self.kernel.params]
            signature = {name: key[0] for name, key in zip(names, keys, strict=True)}
            constants = {name: bound[name] for name in names if signature[name] == "constexpr"}
            attributes = {
                (i,): self.backend.parse_attr(key[1])
                for i, key in enumerate(keys)
                if isinstance(key[1], str) and key[0] != "constexpr"
            }
            source = ASTSource(self.kernel, signature, constants, attributes)
            options = self.backend.parse_options(options).__dict__
            texts.append(triton.compile(source, target=self.backend.target, options=options).asm["ptx"])
        return texts


class Variant:
    """A stand-in for a compiled variant: all arguments by position, the constants last."""

    def __init__(self, launches: Launches, specialization: list[Any]) -> None:
        self.launches, self.specialization = launches, specialization

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any) -> None:
        found = self.launches.bind(*args)[1]
        assert found == self.specialization, (found, self.specialization)


def size(rng: random.Random, most: int) -> int:
    """Draw 1, multiples of 16 and other sizes, each often."""
    return rng.choice((1, 16 * rng.randint(1, most // 16), rng.randint(2, most)))


def block(draw: Draw, rng: random.Random, *sizes: int) -> Tensor:
    """Draw `[s, b, h, d]` or `[s, b, h]`: dense, with heads first in memory, or the end of a longer tensor."""
    s, b, h, *rest = sizes
    way = rng.randrange(3)
    if way == 0:
        return draw(sizes)
    if way == 1:
        return draw(b, h, s, *rest).permute(2, 0, 1, *range(3, len(sizes)))
    skipped = size(rng, 64)
    return draw(s + skipped, b, h, *rest)[skipped:]


def combine(draw: Draw, rng: random.Random) -> None:
    from megatron_longctx.core.kernels.partials_triton import combine_triton

    s, b, h = size(rng, 300), size(rng, 17), KV_HEADS * GROUP
    parts = []
    for _ in range(rng.randint(1, 4)):
        start, first = rng.randrange(s), rng.randrange(h)
        t, g = rng.randint(1, s - start), rng.randint(1, h - first)
        value = block(partial(draw, dtype=BF16), rng, t, b, g, D)
        parts.append(Partial(start, first, value, block(draw, rng, t, b, g)))
    out, lse = block(partial(draw, dtype=BF16), rng, s, b, h, D), block(draw, rng, s, b, h)
    combine_triton(parts, out, lse if rng.random() < 0.5 else None)


def rotate(draw: Draw, rng: random.Random) -> None:
    from megatron_longctx.mcore.rotate_triton import rotate_triton

    s, b, skipped = size(rng, 300), size(rng, 17), size(rng, 64)
    q, k, _ = draw(s, b, KV_HEADS, GROUP + 2, D, dtype=BF16).split((GROUP, 1, 1), 3)
    cos, sin = (draw(s + skipped, D // 2)[skipped:] for _ in range(2))
    rotate_triton([q, k], cos, sin, False, False)


def paged(draw: Draw, rng: random.Random) -> None:
    from megatron_longctx.inference.paged_triton import attend_triton, merge_ranks_triton

    rows, slots = size(rng, 40), 64
    cache = draw(64 * slots, 2, KV_HEADS, D, dtype=BF16)
    q = draw(rows, KV_HEADS * (GROUP + 2), D, dtype=BF16)[:, : KV_HEADS * GROUP]
    table = torch.zeros(rows, size(rng, 99) + 1, dtype=torch.int32, device=q.device)[:, 1:]
    counts = torch.ones(rows, dtype=torch.int64, device=q.device)
    found, merged = attend_triton(q, cache, Pages(table, counts, slots), 0.1), PackedPartials.empty(q)
    if len(found.out) > 1:
        merge_ranks_triton(found, merged.out, merged.lse)
    ranks = PackedPartials.empty(q, (rng.randint(1, 4),))
    merge_ranks_triton(ranks, torch.empty_like(q))


def pack(draw: Draw, rng: random.Random) -> None:
    from megatron_longctx.inference.quantize_kv_triton import pack_kv, unpack_kv

    k, v = draw(size(rng, 300), 2, size(rng, 17), rng.randint(1, 16), D, dtype=BF16).unbind(1)
    first = rng.randrange(5)  # a cache's slots, or a message
    packed = draw(first + len(k), *packed_shape(k)[1:], dtype=torch.uint8)[first:]
    pack_kv(k, v, packed)
    first = rng.randrange(k.shape[2])
    cut = packed[rng.randrange(len(packed)) :, :, :, first:]
    unpack_kv(cut, draw(*cut.shape[:-1], D, dtype=BF16))


def quantize(draw: Draw, rng: random.Random) -> None:
    from megatron_longctx.lowbit import quantize_triton

    form, ranks = QuantFormat(8, 128, False, BF16), 4
    each = size(rng, 99) * D  # tokens of a model whose hidden size is a multiple of 128
    x, packed = draw(ranks * each, dtype=BF16), draw(ranks, form.message_bytes(each), dtype=torch.uint8)
    quantize_triton.quantize(x, each, form, packed)
    quantize_triton.dequantize(packed, each, form, x)
    quantize_triton.sum_quantized(packed, each, form, x[:each])
    quantize_triton.requantize_sum(packed, each, (form, form), draw(1, form.message_bytes(each), dtype=torch.uint8))


def peers(draw: Draw, rng: random.Random) -> None:
    """Launch reductions over peers; not on a GPU, where they would wait."""
    from megatron_longctx.lowbit.peer_kernels import one_step, two_step
    from megatron_longctx.lowbit.peer_memory import PeerMemory

    world, each = 4, size(rng, 9999) * D
    addresses, state = draw(world, dtype=torch.int64), draw(2, dtype=torch.int64)
    memory = PeerMemory(rng.randrange(world), world, addresses, addresses, state, 2**26)
    form, x = QuantFormat(8, 128, False, BF16), draw(world * each, dtype=BF16)
    two_step(memory, x, x, (form, form), chunk=each, stride=each)
    one_step(memory, x[:each], x[:each], form)


def merged_over_peers(draw: Draw, rng: random.Random) -> None:
    """Launch a merge over peers; not on a GPU, where it would wait."""
    from megatron_longctx.inference.peer_merge import PeerMerge
    from megatron_longctx.lowbit.peer_memory import PeerMemory

    addresses, state = draw(4, dtype=torch.int64), draw(2, dtype=torch.int64)
    q = draw(size(rng, 40), KV_HEADS * GROUP, D, dtype=BF16)
    merge = PeerMerge(PeerMemory(rng.randrange(4), 4, addresses, addresses, state, 2**24))
    merge(PackedPartials.empty(q, (size(rng, 128),)), torch.empty_like(q))


BOUNDS = {
    # Merged or summed, of 1 to 4 partials.
    ("core.kernels.partials_triton", "_combine_kernel"): (combine, 8),
    ("mcore.rotate_triton", "_rotate_kernel"): (rotate, 1),
    # Results of several splits that are a multiple of 16 numbers apart, or not.
    ("inference.paged_triton", "_attend_kernel"): (paged, 2),
    # The same, for splits and for ranks.
    ("inference.paged_triton", "_merge_kernel"): (paged, 4),
    ("inference.quantize_kv_triton", "_pack_kernel"): (pack, 1),
    ("inference.quantize_kv_triton", "_unpack_kernel"): (pack, 1),
    ("lowbit.quantize_triton", "_quantize_kernel"): (quantize, 1),
    # Messages unpacked one at a time, or summed.
    ("lowbit.quantize_triton", "_unpack_kernel"): (quantize, 2),
    ("lowbit.quantize_triton", "_requantize_kernel"): (quantize, 1),
    # Small or large tiles, with all groups at a time or a quarter.
    ("lowbit.peer_kernels", "_two_step_kernel"): (peers, 4),
    ("lowbit.peer_kernels", "_one_step_kernel"): (peers, 4),
    # 1, 2, 4, 8, and 16 or more splits, or up to 128, that are a multiple of 16 numbers apart, or not.
    ("inference.peer_merge", "_merge_over_peers_kernel"): (merged_over_peers, 24),
}
WAITING = (peers, merged_over_peers)


def launched(module: str, name: str, monkeypatch: pytest.MonkeyPatch, calls: int) -> Launches:
    """Return the kernel's launches in `calls` calls on host tensors; nothing runs."""
    of = importlib.import_module(f"megatron_longctx.{module}")
    if hasattr(of, "_processors"):
        monkeypatch.setattr(of, "_processors", lambda _: 132)  # an H100's
    for other_module, other in BOUNDS:
        if other_module == module:
            monkeypatch.setattr(of, other, Launches(getattr(of, other)))
    rng = random.Random(0)
    for _ in range(calls):
        BOUNDS[module, name][0](torch.zeros, rng)
    return getattr(of, name)


@needs_compiler
@pytest.mark.parametrize(("module", "name"), BOUNDS, ids=str)
def test_no_variants_for_lengths(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = launched(module, name, monkeypatch, CALLS).variants
    assert 1 <= len(variants) <= BOUNDS[module, name][1]


@needs_compiler
@pytest.mark.parametrize(
    ("module", "name", "wide"),
    [
        ("core.kernels.partials_triton", "_combine_kernel", r"ld\.global\S*\.v4\.b32"),
        ("mcore.rotate_triton", "_rotate_kernel", r"ld\.global\S*\.v4\.b32"),
        ("inference.paged_triton", "_attend_kernel", r"cp\.async\.cg\.shared\.global \[.*\], 0x10"),
        ("inference.quantize_kv_triton", "_pack_kernel", r"ld\.global\S*\.v4\.b32"),
        ("inference.quantize_kv_triton", "_unpack_kernel", r"st\.global\S*\.v4\.b32"),
        ("lowbit.quantize_triton", "_quantize_kernel", r"ld\.global\S*\.v4\.b32"),
    ],
    ids=str,
)
def test_values_are_still_moved_16_bytes_at_a_time(
    module: str, name: str, wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for ptx in launched(module, name, monkeypatch, 1).compiled():
        assert re.search(wide, ptx)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize(("module", "name"), [at for at, (call, _) in BOUNDS.items() if call not in WAITING], ids=str)
def test_no_variants_for_lengths_on_a_gpu(module: str, name: str) -> None:
    call, bound = BOUNDS[module, name]
    kernel = getattr(importlib.import_module(f"megatron_longctx.{module}"), name)
    compiled = kernel.device_caches[torch.cuda.current_device()][0]
    before, rng = len(compiled), random.Random(0)  # other tests may have used it
    for _ in range(CALLS):
        call(partial(torch.zeros, device="cuda"), rng)
    torch.cuda.synchronize()
    assert compiled and len(compiled) - before <= bound


@needs_compiler
def test_no_variants_for_strides_of_dimensions_of_size_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension of size 1 may have any stride, also 1, which Triton takes as a constant."""
    from megatron_longctx.core.kernels import partials_triton

    launches = Launches(partials_triton._combine_kernel)
    monkeypatch.setattr(partials_triton, "_combine_kernel", launches)
    into, lse = torch.zeros(8, 1, 4, D), torch.zeros(8, 1, 4)
    for stride in (4 * D, 1, 17, 16):
        out = torch.zeros(8 * 4 * D, dtype=BF16).as_strided((8, 1, 4, D), (4 * D, stride, D, 1))
        partials_triton.combine_triton([Partial(0, 0, out, lse)], into, lse)
    assert len(launches.variants) == 1


_SPACE = torch.zeros(64, dtype=torch.uint8)
_TENSORS = [_SPACE[at : at + 32].view(dtype) for at in (0, 4, 8, 16) for dtype in (torch.float32, torch.int32)]
_NUMBERS = [n + by for n in (0, 16, -16, 2**31, -(2**31), 2**40) for by in (-1, 0, 1, 2)]


def test_specializations_are_those_of_triton() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    arguments = [*_TENSORS, *_NUMBERS]
    of_triton = [jit.native_specialize_impl(nvidia.CUDABackend, x, False, True, True) for x in arguments]
    ours = [fused.specialization_of(x) for x in arguments]
    for (one, other), (mine, yours) in zip(product(of_triton, repeat=2), product(ours, repeat=2), strict=True):
        assert (one == other) == (mine == yours), (one, other)


class StandIn:
    """A kernel that records whether it is launched through `triton.jit` or as a compiled variant."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **constants: int) -> Compiled:
            self.launches.append(("first", (grid, arguments[1:], constants)))
            return Compiled(self)

        return first


class Compiled:
    def __init__(self, kernel: StandIn) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._kernel.launches.append(("again", (grid, arguments[1:])))


def test_each_specialization_is_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", {})
    kernel = StandIn()
    for number, rows, warps in ((32, 4, 8), (48, 4, 8), (33, 4, 8), (32, 8, 8), (48, 4, 4), (16, 4, 4)):
        fused.launch(kernel, (3,), (torch.zeros(1), number), {"ROWS": rows}, num_warps=warps)
    assert kernel.launches == [
        ("first", ((3,), (32,), {"ROWS": 4, "num_warps": 8})),
        ("again", ((3, 1, 1), (48, 4))),
        ("first", ((3,), (33,), {"ROWS": 4, "num_warps": 8})),
        ("first", ((3,), (32,), {"ROWS": 8, "num_warps": 8})),
        ("first", ((3,), (48,), {"ROWS": 4, "num_warps": 4})),
        ("again", ((3, 1, 1), (16, 4))),
    ]
