"""Weights that ranks read from each other's memory."""

import ctypes
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm.collectives import PeerMemoryError
from megatron_longctx.inference.weight_gathers import GroupWeights, PeerWeights, copier, share_layers
from megatron_longctx.testing.distributed import run_distributed

SHAPES = {"up": (6, 4), "down": (5, 8), "bias": (7,)}


def own(rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator).bfloat16().to(device) for name, shape in SHAPES.items()}


def empty(_: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(shape)


def check(weights: PeerWeights | GroupWeights, ranks: range, device: str = "cpu") -> None:
    """Compare rows and columns of some ranks with those that they have."""
    parts = [own(rank, device) for rank in ranks]
    up, bias = torch.empty(6 * len(ranks), 4), torch.empty(7 * len(ranks))
    down = torch.empty(5, 8 * len(ranks))
    up, bias, down = (x.to(device, torch.bfloat16) for x in (up, bias, down))
    of = ranks, dist.group.WORLD
    weights.add_rows("up", of, up, empty)
    weights.add_rows("bias", of, bias, empty)
    weights.add_columns("down", of, down, empty)
    for _ in range(2):
        down.fill_(torch.nan)
        weights.gather()
    assert torch.equal(up, torch.cat([part["up"] for part in parts]))
    assert torch.equal(bias, torch.cat([part["bias"] for part in parts]))
    assert torch.equal(down, torch.cat([part["down"] for part in parts], 1))


def test_parts_are_in_the_order_of_ranks() -> None:
    matrices = {name: [own(rank)[name] for rank in range(6)] for name in SHAPES}
    for rank in range(6):
        for ranks in (range(6), range(rank // 3 * 3, rank // 3 * 3 + 3), range(2)):
            check(PeerWeights(matrices, rank), ranks)


def test_ranks_begin_with_their_own_part() -> None:
    orders = []
    for rank in (2, 3, 4):
        with mock.patch("megatron_longctx.inference.weight_gathers.copier") as copier:
            PeerWeights({"x": [torch.tensor(i) for i in range(5)]}, rank)._add("x", range(2, 5), [torch.empty(())] * 3)
        orders.append([int(call.args[0]) for call in copier.call_args_list])
    assert sorted(order[0] for order in orders) == sorted(order[1] for order in orders) == [2, 3, 4]


def sharing_without_memory(rank: int) -> list[str]:
    """Share three layers; there is peer memory for the first one alone."""
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None

    def of(parts: dict[str, torch.Tensor], *_: object) -> PeerWeights:
        if made:
            raise PeerMemoryError("no memory is left")
        made.append(PeerWeights({name: [part] * world for name, part in parts.items()}, rank))
        return made[0]

    made: list[PeerWeights] = []
    with mock.patch.object(PeerWeights, "of", of):
        found = share_layers([own(rank) for _ in range(3)], group, torch.device("cpu"), over_peers=True)
    assert found[0] is made[0]
    check(found[1], range(world))
    return [type(each).__name__ for each in found]


def test_layers_that_have_moved_stay_when_memory_ends() -> None:
    """Parameters are in their memory."""
    for found in run_distributed(sharing_without_memory, 2):
        assert found == ["PeerWeights", "GroupWeights", "GroupWeights"]


def read_from_peers(rank: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert dist.group.WORLD is not None
    layers = [own(rank, "cuda"), {name: 2 * x for name, x in own(rank, "cuda").items()}]
    before = [{name: x.clone() for name, x in layer.items()} for layer in layers]
    first, second = share_layers(layers, dist.group.WORLD, device, over_peers=True)
    check(first, range(dist.get_world_size()), "cuda")
    up = torch.empty(6, 4, dtype=torch.bfloat16, device=device)
    second.add_rows("up", (range(1), dist.group.WORLD), up, empty)
    second.gather()
    assert torch.equal(up, 2 * own(0, "cuda")["up"])
    for layer, copies in zip(layers, before, strict=True):
        assert all(torch.equal(layer[name], x) for name, x in copies.items()), "they have moved as they were"
    dist.barrier()


@pytest.mark.gpu(2)
def test_ranks_read_each_others_weights() -> None:
    run_distributed(read_from_peers, 2, backend="nccl")


@pytest.mark.gpu
def test_a_block_is_copied_on_a_gpu() -> None:
    source = torch.randn(300, 64, device="cuda").bfloat16()
    into = torch.zeros(300, 4, 64, device="cuda", dtype=torch.bfloat16)
    for target in (into[:, 2], whole := torch.empty_like(source)):
        copier(source, target)(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    assert torch.equal(into[:, 2], source) and not into[:, [0, 1, 3]].any() and torch.equal(whole, source)
