"""The fused kernels that pack keys and values: under Triton's interpreter and on a GPU."""

import itertools

import pytest
import torch

from megatron_longctx.inference import quantize_kv
from megatron_longctx.inference.quantize_kv import packed_shape

SHAPES = [(7, 2, 3, 64), (33, 1, 2, 128), (5, 1, 1, 72), (3, 2, 1, 4)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def keys_and_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return strided views with rows of very different sizes, halves between steps, zeros, an infinity and a NaN."""
    t, b, g, d = shape
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-14, 9, (t, 2, b, g, 1), generator=gen).float())
    kv = torch.randn(t, 2, b, g, d, generator=gen) * sizes
    kv[0, 0, 0, 0] = 0
    kv[1, 1, 0, 0, 1], kv[2, 0, -1, -1, -1] = torch.inf, torch.nan
    kv[1, 0, 0, 0, :4] = torch.tensor([127.0, 0.5, -2.5, 3.5])
    kv[1, 0, 0, 0, 4:] = 1.5
    k, v = kv.to(dtype).unbind(1)
    return (k, v.transpose(0, 2).contiguous().transpose(0, 2)) if seed % 2 else (k, v)


def compare(device: str) -> int:
    from megatron_longctx.inference import quantize_kv_triton as fused

    compared = 0
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        k, v = keys_and_values(shape, dtype, compared)
        expected = torch.empty(packed_shape(k), dtype=torch.uint8)
        quantize_kv._pack_torch(k, v, expected)
        packed = torch.empty_like(expected, device=device)
        fused.pack_kv(k.to(device), v.to(device), packed)
        d = shape[-1]
        found = packed.cpu()
        assert torch.equal(found[..., :d], expected[..., :d])
        scales = [x[..., d:].view(torch.float32) for x in (found, expected)]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
        for cut in (expected, expected[1:, :, :, -1:]):  # tokens and heads cut out of a longer message
            outs = [torch.empty(*cut.shape[:-1], d, dtype=dtype) for _ in range(2)]
            quantize_kv._unpack_torch(cut, outs[0])
            on_device = expected.to(device)[1:, :, :, -1:] if cut is not expected else expected.to(device)
            there = outs[1].to(device)
            fused.unpack_kv(on_device, there)
            # The interpreter truncates bf16 where GPUs round it.
            rtol = 2**-7 if dtype == torch.bfloat16 and device == "cpu" else 0
            torch.testing.assert_close(there.cpu(), outs[0], rtol=rtol, atol=0, equal_nan=True)
        compared += 1
    return compared


@pytest.mark.gpu
def test_fused_kernels_equal_torch_on_a_gpu():
    assert compare("cuda") == len(SHAPES) * len(DTYPES)


if __name__ == "__main__":
    assert compare("cpu") == len(SHAPES) * len(DTYPES) == 12
