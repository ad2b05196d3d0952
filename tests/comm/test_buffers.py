"""Scratch memory that is kept between uses."""

import torch

from megatron_longctx.comm import BufferPool


def test_memory_is_kept_and_grows():
    pool = BufferPool(torch.device("cpu"))
    assert pool.num_bytes == 0
    first = pool.get("kv", (4, 2, 3), torch.float32)
    assert first.shape == (4, 2, 3) and first.dtype == torch.float32 and first.is_contiguous()
    assert first.device == torch.device("cpu")
    assert pool.num_bytes == 24 * 4
    # Same size, smaller, another shape: the same memory.
    for shape in ((4, 2, 3), (2, 2, 3), (24,), (3, 8), (0, 5)):
        again = pool.get("kv", shape, torch.float32)
        assert again.shape == shape and again.is_contiguous()
        assert again.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert pool.num_bytes == 24 * 4
    # Larger: new memory in place of the old.
    larger = pool.get("kv", (25,), torch.float32)
    assert larger.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert pool.num_bytes == 25 * 4
    assert pool.get("kv", (4, 2, 3), torch.float32).data_ptr() == larger.data_ptr()


def test_names_and_dtypes_have_memory_of_their_own():
    pool = BufferPool(torch.device("cpu"))
    names = [("kv", 0), ("kv", 1), "kv"]
    dtypes = [torch.float32, torch.bfloat16]
    tensors = [pool.get(name, (8,), dtype) for name in names for dtype in dtypes]
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert (tensor == value).all()
    assert pool.num_bytes == 3 * 8 * 4 + 3 * 8 * 2


def test_empty_shapes_take_no_memory():
    pool = BufferPool(torch.device("cpu"))
    assert pool.get("out", (0, 4), torch.float32).shape == (0, 4)
    assert pool.num_bytes == 0
    assert pool.get("scalar", (), torch.float32).shape == ()
