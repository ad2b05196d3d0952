"""Clusters as data, and the rings that use all of their links at once. Pure functions over integers and numbers.

- `cluster`: a `Cluster` describes how ranks are linked. `Cluster.route(a, b)` gives the shared resources that a message
  from a to b occupies, with its rate and latency. `load_cluster` reads a cluster from YAML, `save_cluster` writes one.
- `hamiltonian`, `latin`, `rainbow`: cut complete digraphs into edge-disjoint Hamiltonian cycles and paths.
- `rings`: the rings of u nodes with m ranks, and those that suit a cluster.
- `measured`, `measure`: turn a running process group into a `Cluster`. Only `measure` imports torch; import it by name.

To add a cluster, copy a file in `recipes/cluster/` and adapt it, or measure one. Every key is a dataclass field in
`cluster.py`; give the source of each figure in a comment. Rates are in GiB/s (2**30 bytes) in one direction, for
messages of tens of MiB. Latencies are in seconds per message, including software.
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
