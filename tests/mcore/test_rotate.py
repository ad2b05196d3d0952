"""RoPE's fused kernel: under Triton's interpreter, compiled for a GPU, and run on one."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.core.kernels.interpreter import hopper_code

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1, 1, 2, 4, 16, 8), (5, 2, 3, 1, 20, 6), (3, 1, 8, 4, 128, 64), (7, 3, 5, 3, 24, 1))
"""Tokens, batch, groups of heads, query heads of a group, head dim, rotated pairs."""


def queries_and_keys(
    sizes: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu"
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return queries and keys as views of a projection's output, in groups or with all heads in one dimension."""
    gen = torch.Generator().manual_seed(seed)
    s, b, g, m, d, pairs = sizes
    mixed = torch.randn(s, b, g, m + 2, d, generator=gen).to(device, dtype)
    q, k, _ = mixed.split((m, 1, 1), 3)
    angles = torch.randn(s, pairs, generator=gen) * 3
    tensors = [q, k] if seed % 2 else [q.flatten(2, 3), k.squeeze(3)]
    return tensors, angles.cos().to(device), angles.sin().to(device)


def by_definition(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Pairs are complex numbers, each multiplied by one of length 1."""
    pairs, shape = cos.shape[1], (len(x), *[1] * (x.dim() - 2), -1)
    turned, rest = x.double().split((2 * pairs, x.shape[-1] - 2 * pairs), -1)
    parts = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    product = torch.complex(*parts) * torch.complex(cos, -sin if inverse else sin).view(shape)
    turned = torch.stack((product.real, product.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, rest), -1).to(x.dtype)


def compare(device: str) -> int:
    from megatron_longctx.mcore.rotate_triton import rotate_triton

    compared = 0
    for sizes, interleaved, inverse in itertools.product(SIZES, (False, True), (False, True)):
        # In turns, so that every dtype is combined with every size, both directions and both layouts of heads.
        dtype, seed = DTYPES[compared % 3], compared // 3
        tensors, *angles = queries_and_keys(sizes, dtype, seed)
        expected = [by_definition(x, *angles, interleaved, inverse) for x in tensors]
        tensors, cos, sin = queries_and_keys(sizes, dtype, seed, device)
        found = rotate_triton(tensors, cos, sin, interleaved, inverse)
        found += rotate_triton(tensors[1:], cos, sin, interleaved, inverse)
        # The interpreter truncates bf16 where GPUs round it.
        rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 1e-3}[dtype]
        for one, other in zip(found, (*expected, expected[1]), strict=True):
            assert one.is_contiguous() and one.dtype == dtype
            torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=1e-5 if dtype == torch.float32 else 1e-3)
        compared += 1
    return compared


def compare_stores(device: str) -> int:
    """Queries and keys are rotated, and keys and values are where a cache has them; nothing else is written."""
    from megatron_longctx.mcore.rotate_triton import rotate_into, rotate_triton

    compared = 0
    for (s, _, g, m, d, pairs), interleaved, apart in itertools.product(SIZES, (False, True), (False, True)):
        dtype = DTYPES[compared % 3]
        (q, k), cos, sin = queries_and_keys((s, 1, g, m, d, pairs), dtype, 1, device)
        v = torch.randn(s, 1, g, 2, d, generator=torch.Generator().manual_seed(2)).to(device, dtype)[:, :, :, :1]
        rows = torch.zeros(2 * s + 3, 2, 1, g, d, dtype=dtype, device=device)
        slots = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))[:s].to(device) if apart else None
        found = rotate_into(q, k, v, cos, sin, interleaved, rows, slots)
        wanted, expected = rotate_triton((q, k), cos, sin, interleaved, False), torch.zeros_like(rows)
        where = torch.arange(s, device=device) if slots is None else slots
        expected[where] = torch.stack((wanted[1].squeeze(3), v.squeeze(3)), 1)
        assert torch.equal(found, wanted[0]) and torch.equal(rows, expected)
        compared += 1
    return compared


@pytest.mark.parametrize(("rest", "interleaved"), [(0, True), (64, False)])
def test_the_kernel_compiles_for_hopper(rest: int, interleaved: bool) -> None:
    pytest.importorskip("triton")
    from megatron_longctx.mcore.rotate_triton import _rotate_kernel

    constants = {"INVERSE": False, "INTERLEAVED": interleaved, "HEADS": 16, "HALF": 64 - rest // 2, "REST": rest}
    pointers = dict.fromkeys(("x", "x_out", "y", "y_out"), "*bf16") | {"cos": "*fp32", "sin": "*fp32"}
    for store in (0, 2):
        more = {"z": "*bf16", "slots": "*i64"}
        hopper_code(_rotate_kernel, constants | {"STORE": store, "COLS": 128 if store else 0}, pointers | more)


def test_the_inverse_restores_the_inputs_which_are_not_written_to() -> None:
    from megatron_longctx.mcore.rope import rotate  # here, since the interpreter's process needs no Megatron

    tensors, cos, sin = queries_and_keys(SIZES[2], torch.float32, 1)
    before = [x.clone() for x in tensors]
    for interleaved in (False, True):
        there = rotate(tensors, cos, sin, interleaved)
        expected = [by_definition(x, cos, sin, interleaved, False) for x in tensors]
        torch.testing.assert_close(there, expected, rtol=1e-5, atol=1e-5)
        for back, x in zip(rotate(there, cos, sin, interleaved, inverse=True), before, strict=True):
            torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.gpu
def test_fused_kernel_equals_torch_on_a_gpu() -> None:
    assert compare("cuda") == compare_stores("cuda") == len(SIZES) * 4


if __name__ == "__main__":
    assert compare("cpu") == compare_stores("cpu") == len(SIZES) * 4
