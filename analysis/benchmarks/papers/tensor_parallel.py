"""Tensor parallelism over several nodes compared with context parallelism: first tokens of Llama 3 405B."""

from megatron_longctx.config.cluster import Switch, load_cluster
from megatron_longctx.planner.cost import GIB

from .nodes import HIDDEN, LAYERS, ONE_NODE_S, RDMA, TP, first_token
from .page import Cell, Table, cell, paper

_TOKENS, _VALUE_BYTES = 128 * 1000, 2
_SUMS = 2
"""All-reduces per layer: of the output projection and of the down projection."""
PAPERS = {1: (42.010, 42.010), 2: (21.042, 29.917), 4: (10.950, 19.841), 8: (5.85, None)}
"""Seconds of context and of tensor parallelism by number of nodes (table 7; section 4.2.1 for 8 nodes)."""
_TWICE = 2.0
"""For 8 nodes, the paper only says that tensor parallelism takes 100% longer (section 4.2.2)."""


def all_reduces(n: int) -> float:
    """Return the seconds of a prompt's all-reduces over all GPUs of n nodes.

    A ring inside each node runs at the data sheet's rate of NVLink. Each GPU of a node then has an eighth, which a ring
    of n GPUs sums over a separate NIC at the paper's rate.
    """
    inside = load_cluster("dgx_h100_x4").intra
    assert isinstance(inside, Switch)
    size = _TOKENS * HIDDEN * _VALUE_BYTES
    near = 2 * (TP - 1) / TP * size / (inside.egress_gibps * GIB)
    far = 2 * (n - 1) / n * size / TP / (RDMA * GIB)
    return _SUMS * LAYERS * (near + far)


def tensor_parallel(n: int) -> float:
    """Return the seconds to the first token: the paper's time of one node divided by n, except for all-reduces."""
    return (ONE_NODE_S - all_reduces(1)) / n + all_reduces(n)


def table_7() -> Table:
    rows: list[list[Cell]] = []
    for n, (context, tensor) in PAPERS.items():
        ours, sums = tensor_parallel(n), all_reduces(n)
        between = first_token(n, _TOKENS)
        ratio = tensor / context if tensor else _TWICE
        rows.append([
            str(n), cell(between, "d"), paper(context), cell(ours, "d"), paper(tensor), cell(sums, "d"),
            cell(ours / between, "d"), paper(ratio), cell(tensor_parallel(1) / ours, "d"),
            paper(PAPERS[1][0] / tensor if tensor else None),
        ])  # fmt: skip
    columns = [
        "nodes", "CP, s", "paper", "TP, s", "paper", "of it all-reduces, s", "TP / CP", "paper", "TP, times one node",
        "paper",
    ]  # fmt: skip
    title = "tensor parallelism over nodes beside context parallelism, 128K tokens"
    return Table("tensor", title, columns, rows, ["table 7", "figure 7"])
