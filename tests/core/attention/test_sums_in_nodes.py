"""Gradients that are summed within nodes, on ranks that are processes: exact, with one message per node."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config.cluster import Cluster, Mesh, Network
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import symmetric
from megatron_longctx.core.comm.p2p import Exchange, P2PTransport
from megatron_longctx.core.plans import ModeOptions, build_plan, find_mode
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import shard
from tests.core.attention.test_context_parallel import Case, check, gradients

SCHEDULES = ("ring", "zigzag", "striped", "double_ring", "node_gather", "tasp", "all_gather", "helper")
PER_NODE = (2, 3)


def options(node: int) -> ModeOptions:
    """Two nodes, whose ranks share a NIC."""
    return ModeOptions(inner_size=node, cluster=Cluster("two", 2, node, Mesh(50.0), Network(1, 5.0)))


def cases(node: int) -> list[Case]:
    """Return causal and full attention and packed documents in a window, with GQA and MHA. In nodes of an odd size few
    modes: tests/core/plans/test_node_sums.py proves the plans of all."""
    n = 2 * node
    found = []
    for schedule in SCHEDULES if node == 2 else ("zigzag", "double_ring", "helper"):
        of_mode = [
            Case(schedule, (8 * n + 3,), (2 * n, n)),
            Case(schedule, (8 * n,), (n, n), causal=False, keep=True),
            Case(schedule, (9, 1, 6 * n + 3), (2 * n, n), window=(13, None)),
            Case(schedule, (3 * n, 5 * n + 1), (2 * n, n), keep=True),
            Case(schedule, (16 * n,), (2 * n, n), kernel="cpu", dtype=torch.bfloat16),
        ]
        found += of_mode[: None if node == 2 else 3]
    return found


class Crossings:
    """A counter of the bytes that this rank sends to the other node."""

    def __init__(self, rank: int, node: int) -> None:
        self.num_bytes, self.home = 0, rank // node
        start = P2PTransport.start

        def counted(transport: P2PTransport, sends: Sequence[Any], *others: Any) -> Exchange:
            self.num_bytes += sum(x.nbytes for x, peer in sends if peer // node != self.home)
            return start(transport, sends, *others)

        P2PTransport.start = counted  # type: ignore[method-assign]


class Rank:
    def __init__(self, rank: int, node: int) -> None:
        self.rank, self.node, self.crossings = rank, node, Crossings(rank, node)
        self.logged: list[str] = []
        logger = logging.getLogger("megatron_longctx.core.attention.context_parallel")
        logger.setLevel(logging.INFO)
        logger.addFilter(lambda record: self.logged.append(record.getMessage()) is None)

    def call(self, case: Case, setting: bool | None) -> tuple[dict[str, Tensor], int]:
        """Return out and gradients, and the bytes that backward sent to the other node."""
        attention = ContextParallelAttention(
            dist.group.WORLD,
            schedule=case.schedule,
            kernel=case.kernel,
            options=options(self.node),
            keep_received=case.keep,
            sum_in_node=setting,
        )
        *leaves, grad_out = (shard(x, attention.layout(case.mask), self.rank) for x in case.tensors())
        out = attention(*(x.requires_grad_() for x in leaves), mask=case.mask)
        before = self.crossings.num_bytes
        return gradients(leaves, out, grad_out), self.crossings.num_bytes - before


def _run(number: int, node: int) -> dict[str, Any]:
    rank = Rank(number, node)
    runs = {"false": False, "auto": None, "auto again": None}
    cases_of = [{name: rank.call(case, setting) for name, setting in runs.items()} for case in cases(node)]
    found: dict[str, Any] = {"results": [{name: of[0] for name, of in each.items()} for each in cases_of]}
    found["sent"] = [{name: of[1] for name, of in each.items()} for each in cases_of]
    found["logged"] = rank.logged.copy()
    rank.logged.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(symmetric.os, "uname", lambda: SimpleNamespace(nodename=f"host{number % 2}"))
        found["elsewhere"] = [rank.call(cases(node)[0], setting)[1] for setting in (None, True)]
    return {**found, "logged elsewhere": rank.logged}


@pytest.fixture(params=PER_NODE, ids=lambda node: f"2 nodes of {node}", scope="module")
def node(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(node: int) -> list[dict[str, Any]]:
    return run_distributed(_run, 2 * node, node)


def test_sums_are_the_gradients_of_dense_attention(node: int, ranks: list[dict[str, Any]]) -> None:
    for i, case in enumerate(cases(node)):
        layout = build_plan(find_mode(case.schedule, 2 * node, options(node)), 2 * node, case.mask).queries
        check([found["results"][i]["auto"] for found in ranks], layout, case)


def test_sums_are_bit_equal_from_run_to_run(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for results in found["results"]:
            for name, x in results["auto"].items():
                assert torch.equal(x, results["auto again"][name])
            assert torch.equal(results["auto"]["out"], results["false"]["out"])


def test_less_crosses_between_nodes(node: int, ranks: list[dict[str, Any]]) -> None:
    """With full attention and kept keys, backward sends only gradients, of every rank of a node or of one."""
    for i, case in enumerate(cases(node)):
        plain, less = (sum(found["sent"][i][setting] for found in ranks) for setting in ("false", "auto"))
        assert less < plain
        if not case.causal and case.schedule != "helper":
            block = 8 * 2 * 2 * node * 2 * 8 * 8  # dK, dV of a rank: tokens, sequences, heads, channels, bytes
            assert plain == 2 * node * node * block and less == 2 * node * block


def test_the_first_rank_logs_it_once(node: int, ranks: list[dict[str, Any]]) -> None:
    expected = f"partial gradients for other nodes are summed by every {node} neighbouring ranks "
    assert ranks[0]["logged"] == [f"{expected}(sum_in_node=None)"] * 2 * len(cases(node))
    assert not any(found["logged"] for found in ranks[1:])


def test_auto_checks_the_description_of_the_cluster(node: int, ranks: list[dict[str, Any]]) -> None:
    """Every other rank pretends to be on another machine; `true` trusts the description."""
    plain, less = (sum(found["sent"][0][setting] for found in ranks) for setting in ("false", "auto"))
    assert [sum(found["elsewhere"][i] for found in ranks) for i in (0, 1)] == [plain, less]
    auto, true = ranks[0]["logged elsewhere"]
    assert "are not summed by" in auto and "are on several machines" in auto
    assert true.endswith("(sum_in_node=True)") and "are summed by" in true
