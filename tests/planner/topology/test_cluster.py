"""Cluster descriptions: routes of messages, the files, their errors, and the rings for each cluster."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.config.cluster import Cluster, Device, Mesh, Network, Resource, Switch, load_cluster, save_cluster
from megatron_longctx.config.tasp import (
    choose_rings,
    decompositions,
    hamiltonian_cycles,
    multi_node_rings,
    seconds_per_gib,
)

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "cluster"
SWITCHED = Cluster("switched", 2, 4, Switch(300, 200, 100, 1e-5), Network(2, 10, 2e-5))


def test_a_message_through_the_switch():
    route = SWITCHED.route(5, 6)
    assert route.resources == (Resource("egress", 5), Resource("ingress", 6), Resource("link", 5, 6))
    assert (route.gibps, route.latency_s) == (100, 1e-5)
    assert [SWITCHED.capacity(resource) for resource in route.resources] == [300, 200, 100]
    assert [str(resource) for resource in route.resources] == ["egress 5", "ingress 6", "link 5.6"]


def test_a_message_between_nodes():
    route = SWITCHED.route(1, 6)
    assert route.resources == (Resource("nic_out", 0, 0), Resource("nic_in", 1, 1))
    assert (route.gibps, route.latency_s) == (10, 2e-5)
    assert [SWITCHED.nic_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert SWITCHED.route(6, 1).resources == (Resource("nic_out", 1, 1), Resource("nic_in", 0, 0))


def test_a_rank_with_several_nics_uses_them_as_one():
    cluster = Cluster("x", 2, 2, Mesh(100), Network(4, 10))
    assert [cluster.nic_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert cluster.route(0, 3).gibps == cluster.capacity(Resource("nic_in", 1, 1)) == 20


@pytest.mark.parametrize(
    ("a", "b", "words"), [(0, 8, "rank=8: expected 0..7"), (-1, 2, "rank=-1"), (3, 3, "other than")]
)
def test_no_such_message(a, b, words):
    with pytest.raises(ValueError, match=words):
        SWITCHED.route(a, b)


@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_every_resource_of_every_route_has_a_capacity(nodes, m, mesh):
    cluster = Cluster("x", nodes, m, Mesh(7) if mesh else Switch(9, 8, 7), Network(1, 3))
    for a in range(cluster.n):
        for b in set(range(cluster.n)) - {a}:
            route = cluster.route(a, b)
            assert route.gibps == min(map(cluster.capacity, route.resources))
            assert ("nic" in route.resources[0].kind) == (a // m != b // m)


def test_resized():
    assert SWITCHED.resized(8) == SWITCHED
    assert SWITCHED.resized(1024).nodes == 256
    assert (SWITCHED.resized(4).nodes, SWITCHED.resized(4).network) == (1, SWITCHED.network)
    part = SWITCHED.resized(3)
    assert (part.nodes, part.ranks_per_node, part.network, part.intra) == (1, 3, None, SWITCHED.intra)
    for n, nearest in ((6, "4 or 8"), (0, "1")):
        with pytest.raises(ValueError, match=f"ranks={n}: expected 1..4 or a multiple of 4.*Nearest: {nearest}"):
            SWITCHED.resized(n)
    with pytest.raises(ValueError, match="network=None"):
        Cluster("x", 1, 2, Mesh(1)).resized(4)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Mesh(0), "pair_gibps=0: expected a number above 0"),
        (lambda: Mesh(1, -1), "latency_s=-1: expected a number from 0 on"),
        (lambda: Mesh(float("nan")), "pair_gibps=nan"),
        (lambda: Switch(1, float("inf")), "ingress_gibps=inf"),
        (lambda: Switch(1, 1, 0), "pair_gibps=0"),
        (lambda: Network(0, 1), "nics=0"),
        (lambda: Network(1, 1, float("nan")), "latency_s=nan"),
        (lambda: Device(efficiency=50), "efficiency=50: expected a share"),
        (lambda: Device(layer_efficiency=70), "layer_efficiency=70: expected a share"),
        (lambda: Device(memory_gib=-1), "memory_gib=-1"),
        (lambda: Cluster("x", 0, 1), "nodes=0: expected a number above 0"),
        (lambda: Cluster("x", 1, 2), "intra=None: expected the links between 2 ranks"),
        (lambda: Cluster("x", 2, 1), "network=None: expected the network between 2 nodes"),
        (lambda: Cluster("x", 2, 4, Mesh(1), Network(3, 1)), "nics=3: expected a divisor or a multiple of .*=4"),
    ],
)
def test_impossible_values(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_the_kernel_rate():
    assert Device(peak_tflops=200, efficiency=0.5).kernel_tflops == 100
    assert Device(peak_tflops=200).kernel_tflops is None


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_each_file_loads(name, tmp_path):
    cluster = load_cluster(name)
    assert cluster == load_cluster(FOLDER / f"{name}.yaml")
    assert cluster.name == name
    assert name == "tcp" or (cluster.device.kernel_tflops and cluster.device.memory_gib)
    save_cluster(cluster, tmp_path / "copy.yaml")
    assert load_cluster(tmp_path / "copy.yaml") == cluster


def test_parts_may_be_null(tmp_path):
    path = tmp_path / "x.yaml"
    for device in ("null", "{fp8: null}"):
        path.write_text(f"name: x\nnodes: 1\nranks_per_node: 1\nintra: null\nnetwork: null\ndevice: {device}\n")
        assert load_cluster(path) == Cluster("x", 1, 1)


GOOD = "name: x\nnodes: 1\nranks_per_node: 2\nintra:\n  kind: mesh\n  pair_gibps: 5\n"


# Nine levels of nine: 387 million values if they were expanded.
ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("nodes: 1", "noodes: 1"), "noodes=1: expected one of the keys .* Did you mean nodes"),
        (GOOD.replace("pair_gibps", "pair_gbps"), "intra.pair_gbps=5: .* Did you mean intra.pair_gibps"),
        (GOOD + "  extra: 1\n", "intra.extra=1: expected one of the keys pair_gibps, latency_s, messages. Remove it"),
        (GOOD + "  messages: [[8, 1]]\n", r"intra.messages=\[\[8, 1\]\]: expected rows \[bytes to each"),
        (GOOD + "  messages: [[8, 1.5, 0.1]]\n", "intra.messages=.*: expected rows"),
        (GOOD + "  messages: 8\n", "intra.messages=8: expected rows"),
        (GOOD.replace("mesh", "torus"), "intra.kind=torus: expected mesh or switch"),
        (GOOD.replace("  kind: mesh\n", ""), "intra.kind=None: expected mesh or switch"),
        (GOOD.replace("mesh", "switch").replace("pair_", "egress_"), "intra.ingress_gibps=missing: expected a value"),
        (GOOD.replace("name: x\n", ""), "name=missing"),
        (GOOD.replace("pair_gibps: 5", "pair_gibps: fast"), "intra.pair_gibps=fast: expected a number"),
        (GOOD.replace("pair_gibps: 5", "pair_gibps: null"), "intra.pair_gibps=None: expected a number"),
        (GOOD.replace("pair_gibps: 5", "pair_gibps: -5"), "pair_gibps=-5: expected a number above 0"),
        (GOOD.replace("nodes: 1", "nodes: 1.5"), "nodes=1.5: expected an integer"),
        (GOOD.replace("nodes: 1", "nodes: true"), "nodes=True: expected an integer"),
        (GOOD + "network: fast\n", "network=fast: expected keys with values"),
        (GOOD + "network:\n  nics: 1\n", "network.nic_gibps=missing"),
        (GOOD + "device:\n  memory: 1\n", "device.memory=1: .* Did you mean device.memory_gib"),
        (GOOD + "device:\n  fp8: {delaid: 1}\n", "device.fp8.delaid=1: .* Did you mean device.fp8.delayed"),
        (GOOD + "device:\n  fp8: {delayed: -1}\n", "delayed=-1: expected a number above 0"),
        (GOOD + "device:\n  fp8: 1290\n", "device.fp8=1290: expected keys with values"),
        ("- 1\n- 2\n", "cluster=a list: expected keys with values"),
        ("secret text\nof several lines\n", r"a cluster \(neither keys with values nor a list\)"),
        (GOOD.replace("pair_gibps: 5", "pair_gibps: 1.0e+30"), "pair_gibps=1e.30: .* at most 1,000,000"),
        (GOOD.replace("nodes: 1", "nodes: 10000000"), "nodes=10000000: .* at most 1,000,000"),
        (GOOD + "device:\n  memory_gib: 1.0e+30\n", "memory_gib=1e.30: .* at most 1,000,000"),
        (GOOD + "device:\n  name: ${oc.env:HOME}\n", r"\(\$\{…\} where values are expected\)"),
        (ALIAS_BOMB, r"line 1: an anchor or alias where values are expected"),
        ("a: " + "[" * 3000, "line 1: more than 20 levels"),
        ("#" * 2**18 + "\n", "more than 262,144 bytes"),
        ("name: [", "expected YAML that describes a cluster"),
        ("", "name=missing"),
    ],
)
def test_files_with_errors(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.yaml: .*{words}"):
        load_cluster(path)
    path.write_text(GOOD)
    assert load_cluster(str(path)) == Cluster("x", 1, 2, Mesh(5))


def test_no_such_file(tmp_path):
    with pytest.raises(ValueError, match=r"cluster=dgx: expected a \.yaml file or one of a100_2x8, dgx_h100_x1"):
        load_cluster("dgx")
    with pytest.raises(ValueError, match=r"cluster=.*no\.yaml: expected a \.yaml file"):
        load_cluster(tmp_path / "no.yaml")
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    with pytest.raises(ValueError, match=r"secret: expected a \.yaml file") as caught:
        load_cluster(secret)
    assert "root:x" not in str(caught.value)


def gain(cluster, rings):
    return seconds_per_gib(cluster, (tuple(range(cluster.n)),)) / seconds_per_gib(cluster, rings)


@pytest.mark.parametrize(
    ("name", "count", "times"),
    [
        ("mi300x_x8", 7, 7.0),  # Hamiltonian cycles of the node use 7 links of every rank instead of one
        ("h200_x8", 7, 315 / 234),
        ("h200_x8_pull", 1, 1.0),  # one ring fills each rank's connection to the switch
        ("dgx_h100_x4", 8, 8.0),  # rings of one Hamiltonian path per node use 8 NICs of every node instead of one
        ("a100_2x8", 1, 1.0),  # one ring fills the NICs that a node's ranks share
        ("tcp", 1, 1.0),  # nodes of one rank leave room for one ring only
    ],
)
def test_rings_for_each_cluster(name, count, times):
    cluster = load_cluster(name)
    rings = choose_rings(cluster)[0].rings
    assert len(rings) == count
    assert gain(cluster, rings) == pytest.approx(times)


def test_the_reason_for_a_choice_of_rings():
    cluster = load_cluster("dgx_h100_x4").resized(16)
    chosen, why = choose_rings(cluster)
    sets = {each.name: each for each in decompositions(cluster)}
    assert chosen.name == "(8-K_8-8)_2" and len(sets["K_(8 x 2)"].rings) == 15
    assert why.startswith("(8-K_8-8)_2 on dgx_h100_x4; time to pass on 1 GiB from every rank: one ring (1) 23.")
    assert chosen.seconds < sets["K_(8 x 2)"].seconds < sets["one ring"].seconds
    assert choose_rings(load_cluster("tcp"))[0].name == "one ring"


@pytest.mark.parametrize(
    ("cluster", "rings", "times"),
    [
        (Cluster("two", 1, 2, Mesh(5)), ((0, 1),), 1.0),
        (Cluster("four", 1, 4, Mesh(5)), ((0, 1, 2, 3), (0, 3, 2, 1)), 2.0),  # the largest set for 4 ranks
        (Cluster("2x2", 2, 2, Mesh(50), Network(2, 5)), ((0, 1, 2, 3), (1, 0, 3, 2)), 2.0),
        (Cluster("slow", 2, 2, Mesh(1), Network(1, 50)), ((0, 1, 2, 3), (1, 0, 3, 2)), 2.0),  # links within a node
    ],
)
def test_rings_for_small_clusters(cluster, rings, times):
    assert choose_rings(cluster)[0].rings == rings
    assert gain(cluster, rings) == pytest.approx(times)


def test_a_single_rank_has_a_ring_in_which_nothing_is_sent():
    alone = Cluster("one", 1, 1)
    assert choose_rings(alone)[0].rings == ((0,),) and seconds_per_gib(alone, ((0,),)) == 0


def test_rings_along_paths_beat_cycles_of_all_ranks_over_two_nodes():
    """TASP section 3.1.3: cycles of K_16 send most blocks over the NICs, (8-K_8-8)_2 one block in eight."""
    cluster = load_cluster("dgx_h100_x4").resized(16)
    flat, along = hamiltonian_cycles(16), multi_node_rings(8, 2)
    assert seconds_per_gib(cluster, flat) == pytest.approx(8 / 15 / 43)  # 8 of a rank's 15 blocks leave by its NIC
    assert seconds_per_gib(cluster, along) == pytest.approx(1 / 8 / 43)
    assert seconds_per_gib(cluster, (tuple(range(16)),)) == pytest.approx(1 / 43)
