"""Clusters as data, and the rings that use all of their links at once. Pure functions over integers and numbers.

- `cluster`: a `Cluster` says how ranks are wired; `Cluster.route(a, b)` says which shared resources a message from a to
  b occupies, at what rate and latency. `load_cluster` reads one from YAML, `save_cluster` writes one.
- `hamiltonian`, `latin`, `rainbow`: complete digraphs cut into edge-disjoint Hamiltonian cycles and paths.
- `rings`: the rings of u nodes of m ranks, and those that suit a cluster.
- `measured`, `measure`: a running process group turned into a `Cluster`. Only `measure` knows torch; import it by name.

To add a cluster: write a file in `recipes/cluster/` after one that is there (every key is a field of the dataclasses
in `cluster.py`; say in a comment where each figure comes from), or measure one. Rates are GiB/s (2**30 bytes) in one
direction as a message of tens of MiB gets them, latencies are seconds per message, software included.
"""

from .cluster import (
    Cluster,
    Device,
    Mesh,
    Network,
    Resource,
    Route,
    Switch,
    as_data,
    cluster_from,
    load_cluster,
    save_cluster,
)
from .hamiltonian import hamiltonian_cycles, hamiltonian_paths
from .latin import row_complete_latin_square
from .measured import Measured, Ping, Sample, to_cluster
from .rings import Decomposition, Rings, choose, decompositions, multi_node_rings, rings_for, seconds_per_gib
