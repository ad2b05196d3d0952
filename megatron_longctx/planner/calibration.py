"""Calibrations: the measured costs of a machine, stored in a file, by which modes are simulated and chosen."""

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import files
from ..config.cluster import Cluster, as_data, cluster_from
from ..core.cache import cache_folder
from .cost import Costs, KernelSample, MessageSample, ModeSample, Workload

_VERSION = 2


@dataclass(frozen=True)
class Calibration:
    """The links between ranks, and the costs of a workload on their device."""

    device: str
    kernel: str
    transport: str
    cluster: Cluster
    workload: Workload
    costs: Costs
    environment: dict[str, Any] = field(default_factory=dict)  # what it was measured on, and when


def head_sizes(workload: Workload) -> str:
    """Return the head dim as text, with that of values if it differs: 128 or 192v128."""
    d, e = workload.head_dim, workload.value_dim
    return str(d) if e == d else f"{d}v{e}"


def calibration_path(device: str, ranks: int, workload: Workload, transport: str, folder: Path | None = None) -> Path:
    """Return the file for a device, a number of ranks and a transport (peer or p2p), for any batch size."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    shape = f"{workload.num_heads}x{workload.num_kv_heads}x{head_sizes(workload)}-{workload.element_bytes}bytes"
    return (folder or cache_folder()) / f"{name}-{ranks}ranks-{transport}-{shape}.json"


def find_calibration(device: str, ranks: int, workload: Workload, transport: str) -> Path:
    """Return the file for a configured transport. On GPUs, `auto` is the first transport with a file."""
    names = (transport,) if transport != "auto" else ("p2p",) if device == "cpu" else ("peer", "p2p")
    paths = [calibration_path(device, ranks, workload, name) for name in names]
    return next((path for path in paths if path.is_file()), paths[0])


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration; no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"version": _VERSION, **asdict(calibration), "cluster": as_data(calibration.cluster)}
    files.write_text(path, json.dumps(data, indent=1) + "\n")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises ValueError: the file is missing, is not a calibration, or has another version."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        found = {each.name: data[each.name] for each in fields(Calibration)}
        known = {each.name for each in fields(Costs)}
        costs = {"modes": ()} | {name: value for name, value in data["costs"].items() if name in known}
        for name, kind in (("kernels", KernelSample), ("messages", MessageSample), ("modes", ModeSample)):
            costs[name] = tuple(kind(*sample) for sample in costs[name])
        parts = {"cluster": cluster_from(found["cluster"]), "workload": Workload(**found["workload"])}
        return Calibration(**{**found, **parts, "costs": Costs(**costs)})
    except FileNotFoundError:
        remedy = "Run `megatron-longctx calibrate` with the same settings."
        raise ValueError(f"{path}: expected a calibration. {remedy}") from None
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        expected = f"expected a calibration of version {_VERSION} ({error})"
        raise ValueError(f"{path}: {expected}. Run `megatron-longctx calibrate` again.") from None
