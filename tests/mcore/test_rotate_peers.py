"""Gathered, rotated and stored queries, keys and values in one kernel, in Triton's interpreter and compiled."""

import itertools

import pytest
import torch

from megatron_longctx.mcore.rotate import rotate_torch
from tests.core.kernels.interpreter import hopper_code, run_interpreted

CASES = ((2, 3, 2, 2, 8, 4, False), (3, 1, 1, 4, 6, 2, True), (4, 2, 2, 2, 8, 3, False))
"""Ranks, tokens, KV heads, query heads of each, head dimension, pairs that are rotated, and whether interleaved."""


def compare() -> None:
    from megatron_longctx.mcore.rope import Rotation
    from megatron_longctx.mcore.rotate_peers import PUSH, TAKE, rotate_and_store
    from tests.core.comm.simulated_peers import one_process

    for number, (n, rows, groups, queries, head_dim, half, interleaved) in enumerate(CASES):
        memories, gen = one_process(n, 2**16), torch.Generator().manual_seed(number)
        angles, slots = torch.randn(rows, half, generator=gen), torch.tensor([5, 0, 7][:rows])
        rotation = Rotation(angles.cos(), angles.sin(), interleaved)
        for _ in range(3):
            whole = torch.randn(rows, 1, groups * (queries + 2) * head_dim, generator=gen)
            parts = [part.contiguous() for part in whole.chunk(n, -1)]
            found = [torch.empty(rows, 1, groups * queries, head_dim) for _ in range(n)]
            storages = [torch.full((9, 2, 1, groups, head_dim), 3.0) for _ in range(n)]
            for phase, rank in itertools.product((PUSH, TAKE), range(n)):
                rotate_and_store(memories[rank], parts[rank], found[rank], storages[rank], slots, rotation, phase)
            q, k, v = whole.view(rows, 1, groups, queries + 2, head_dim).split((queries, 1, 1), 3)
            q, k = rotate_torch((q, k), rotation.cos, rotation.sin, interleaved, False)
            stored = torch.full((9, 2, 1, groups, head_dim), 3.0)
            stored[slots, 0], stored[slots, 1] = k.squeeze(3), v.squeeze(3)
            for own, storage in zip(found, storages, strict=True):
                torch.testing.assert_close(own, q.flatten(2, 3), rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(storage, stored, rtol=1e-6, atol=1e-6)
        assert [memory.state.tolist() for memory in memories] == [[3, 0]] * n


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("-m", "tests.mcore.test_rotate_peers")


@pytest.mark.parametrize("rest", [0, 64])
def test_the_kernel_compiles_for_hopper(rest: int) -> None:
    pytest.importorskip("triton")
    from megatron_longctx.mcore.rotate_peers import _rotate_and_store_kernel

    constants = {"INTERLEAVED": False, "HEADS": 16, "HALF": 64, "REST": rest, "COLS": 4096, "ITEM_BYTES": 2}
    constants |= {"WORLD": 2, "LANES": 2, "MAX": 128, "PHASES": 3}
    pointers = dict.fromkeys(("x", "q", "storage"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    pointers |= dict.fromkeys(("slots", "data", "flags", "state"), "*i64")
    code = hopper_code(_rotate_and_store_kernel, constants, pointers)
    assert code.count("atom.global.sys.release.exch.b64") == code.count("atom.global.sys.acquire.add.u64") == 1


if __name__ == "__main__":
    compare()
