"""Measured links: exchanges over gloo have the right structure, and measurements turn into the right cluster."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.config.cluster import Cluster, Device, Mesh, Network, Switch, load_cluster, save_cluster
from megatron_longctx.planner.measure_links import LinkMeasurements, Sample, measure_links, probe_pairs, to_cluster
from megatron_longctx.testing.distributed import run_distributed

SIZE = 2**20


def measure(rank, folder, hosts):
    measured = measure_links(dist.group.WORLD, torch.device("cpu"), size=SIZE, repeats=3, host=hosts and hosts[rank])
    # A separate group whose ranks are numbered in another order than the world's.
    some = dist.new_group([1, 0] if dist.get_world_size() == 2 else [3, 1])
    path = folder / "links" / "found.yaml"
    cluster = None
    if rank in dist.get_process_group_ranks(some):
        cluster = to_cluster(measure_links(some, torch.device("cpu"), size=SIZE, repeats=1, host="here"), "found")
        if rank == 1:
            path.parent.mkdir()
            save_cluster(cluster, path)
    return measured, cluster


def refuse(rank):
    alone = [dist.new_group([rank]) for rank in range(2)][rank]
    with pytest.raises(ValueError, match="group of 1 rank: expected at least 2"):
        measure_links(alone, torch.device("cpu"))


@pytest.mark.parametrize(
    ("n", "hosts", "nodes"),
    [
        (2, None, ((0, 1),)),
        (4, None, ((0, 1, 2, 3),)),
        (4, ("a", "a", "b", "b"), ((0, 1), (2, 3))),
        (4, ("a", "b", "c", "d"), ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_measure_their_links(tmp_path, n, hosts, nodes):
    start = time.perf_counter()
    results = run_distributed(measure, n, tmp_path, hosts)
    elapsed = time.perf_counter() - start
    measured = results[0][0]
    assert all(result == measured for result, _ in results)
    assert measured.nodes() == nodes
    probed = {pair for a, b in probe_pairs(nodes) for pair in ((a, b), (b, a))}
    assert {(s.source, s.destination) for s in measured.alone} == probed
    m = n // len(nodes)
    reached = {(a, b) for a in range(n) for b in range(n) if a != b and (a // m == b // m or a % m == b % m)}
    assert sorted((s.source, s.destination) for s in measured.rounds) == sorted(reached)
    assert [s.source for s in measured.inside] == (list(range(n)) if m > 1 else [])
    assert all(0 < s.latency_s < elapsed for s in measured.alone)
    assert all(SIZE / elapsed / 2**30 < s.gibps < 2000 for s in (*measured.alone, *measured.rounds))
    cluster = to_cluster(measured)
    assert (cluster.nodes, cluster.ranks_per_node) == (len(nodes), m)
    assert (cluster.intra is not None, cluster.network is not None) == (m > 1, len(nodes) > 1)
    small = next(cluster for _, cluster in results if cluster)
    assert (small.name, small.nodes, small.ranks_per_node) == ("found", 1, 2)
    assert load_cluster(tmp_path / "links" / "found.yaml") == small


def test_what_cannot_be_measured():
    run_distributed(refuse, 2)


def ideal(cluster):
    """Return the result of `measure_links` on a cluster that is exactly as described."""
    n, m = cluster.n, cluster.ranks_per_node
    hosts = tuple(f"node{rank // m}" for rank in range(n))
    probe = LinkMeasurements(hosts)
    pairs = [pair for a, b in probe_pairs(probe.nodes()) for pair in ((a, b), (b, a))]
    intra, network = cluster.intra, cluster.network
    rounds = [(a, b) for a in range(n) for b in range(n) if a != b and (a // m == b // m or a % m == b % m)]
    sharing = max(1, m // network.nics) if network else 1

    def rate(a, b):
        return cluster.route(a, b).gibps / (1 if a // m == b // m else sharing)

    everyone = (m - 1) * intra.pair_gibps if isinstance(intra, Mesh) else intra.egress_gibps if intra else 0.0
    return replace(
        probe,
        alone=tuple(Sample(a, b, cluster.route(a, b).gibps, cluster.route(a, b).latency_s) for a, b in pairs),
        rounds=tuple(Sample(a, b, rate(a, b)) for a, b in rounds),
        inside=tuple(Sample(a, a, everyone) for a in range(n)) if m > 1 else (),
    )


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("c", 1, 8, Mesh(48, 1e-5)),
        Cluster("c", 1, 2, Mesh(48, 1e-5)),
        Cluster("c", 1, 8, Switch(315, 315, 234, 1e-4)),
        Cluster("c", 1, 8, Switch(336, 336, None, 1e-5)),
        Cluster("c", 4, 1, None, Network(1, 1.09, 1e-4)),
        Cluster("c", 4, 8, Switch(300, 300, None, 1e-5), Network(8, 43, 2e-5)),
        Cluster("c", 2, 8, Switch(300, 300, None, 1e-5), Network(1, 10, 2e-5), Device("A100", 312)),
        Cluster("c", 2, 4, Mesh(5, 1e-5), Network(2, 1, 2e-5)),
    ],
)
def test_a_described_cluster_is_found_again(cluster):
    assert to_cluster(ideal(cluster), "c", cluster.device) == cluster


def test_slow_outliers_do_not_count():
    cluster = Cluster("measured", 1, 4, Mesh(10, 1e-5))
    measured = ideal(cluster)
    slow = (measured.inside[0]._replace(gibps=0.001), *measured.inside[1:])
    late = (measured.alone[0]._replace(latency_s=1.0), *measured.alone[1:])
    assert to_cluster(replace(measured, inside=slow, alone=late)) == cluster


@pytest.mark.parametrize("hosts", [("a", "a", "b"), ("a", "b", "a", "b")])
def test_ranks_must_be_numbered_node_by_node(hosts):
    with pytest.raises(ValueError, match=f"hosts {', '.join(hosts)}: expected equally many ranks on each"):
        LinkMeasurements(hosts).nodes()


def test_probes_stay_few():
    assert probe_pairs([(0, 1, 2)]) == ((0, 1), (0, 2), (1, 2))
    assert probe_pairs([(0, 1), (2, 3), (4, 5)]) == ((0, 1), (0, 2), (0, 4))
    assert len(probe_pairs([range(i * 64, i * 64 + 64) for i in range(500)])) <= 128
