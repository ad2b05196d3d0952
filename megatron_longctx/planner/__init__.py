"""Clusters as data, and the rings that use all of their links together. Pure functions over integers and numbers.

- `cluster`: a `Cluster` describes how ranks are linked. `Cluster.route(a, b)` returns the shared resources that a
  message from a to b occupies, with its rate and latency. `load_cluster` reads a cluster from YAML, `save_cluster`
  writes one.
- `rings`: the rings of u nodes with m ranks, and those that suit a cluster.
- `measure`: measures the links of a process group and turns them into a `Cluster`. It imports torch, so import it by
  name.

To add a cluster, copy a file in `recipes/cluster/` and adapt it, or measure one. Every key is a dataclass field in
`cluster.py`; give the source of each figure in a comment. Rates are in GiB/s (2**30 bytes) in one direction, for
messages of tens of MiB. Latencies are in seconds per message, including software.
"""

from ..config.cluster import (
    Cluster,
    Device,
    Mesh,
    Network,
    Resource,
    Switch,
    as_data,
    cluster_from,
    load_cluster,
    save_cluster,
)
from ..config.rings import Decomposition, choose, decompositions, multi_node_rings, seconds_per_gib
