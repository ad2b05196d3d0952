"""Which ranks can read each other's memory."""

from __future__ import annotations

import pytest

from megatron_longctx.comm.hosts import RANKS_PER_HOST, Hosts, by_host, divided, ranks_per_host


@pytest.mark.parametrize(
    ("machines", "per_host", "expected"),
    [
        ("aaaa", None, ((0, 1, 2, 3),)),
        ("aabb", None, ((0, 1), (2, 3))),
        ("abab", None, ((0, 2), (1, 3))),
        ("aaab", None, ((0, 1, 2), (3,))),
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("aaaa", 3, ((0, 1, 2), (3,))),
        ("aabb", 4, ((0, 1), (2, 3))),
        ("aaabbb", 2, ((0, 1), (2,), (3, 4), (5,))),
    ],
)
def test_ranks_of_one_machine_are_together(
    machines: str, per_host: int | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert by_host(machines, per_host) == expected


def test_one_host_whose_devices_see_each_other_needs_no_reason() -> None:
    hosts = divided([(0, 1)], [None, None])
    assert hosts == Hosts(((0, 1),), None) and hosts.any_peers


def test_several_hosts_are_mixed_and_say_why() -> None:
    hosts = divided([(0, 2), (1, 3)], [None] * 4)
    assert hosts.sets == ((0, 2), (1, 3)) and hosts.reason == "they are on several hosts" and hosts.any_peers
    assert [hosts.of(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert str(hosts) == "0 2 | 1 3"


def test_ranks_alone_on_their_hosts_have_no_peers() -> None:
    assert not divided([(0,), (1,)], [None, None]).any_peers


def test_a_device_that_cannot_read_leaves_its_host_without_peers() -> None:
    hosts = divided([(0, 1), (2, 3)], [None, "GPU 1 cannot read the memory of GPU 0", None, None])
    assert hosts.sets == ((0,), (1,), (2, 3)) and hosts.reason == "GPU 1 cannot read the memory of GPU 0"
    assert not divided([(0, 1)], ["no", None]).any_peers


def test_hosts_are_declared_by_one_number_alike_on_all_ranks() -> None:
    assert ranks_per_host({None}) is None and ranks_per_host({"2"}) == 2
    for said in ({"0"}, {"two"}, {"-1"}, {"2", "4"}, {"2", None}):
        with pytest.raises(ValueError, match=RANKS_PER_HOST):
            ranks_per_host(said)
