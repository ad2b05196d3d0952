"""What a Slurm job asks for, by its script and `sbatch`'s options, and whether its partition can give it."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..core.errors import refuse

_LETTERS = {"N": "nodes", "n": "ntasks", "p": "partition", "t": "time", "G": "gpus"}
_VARIABLES = {"SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time", "SBATCH_GPUS_PER_NODE": "gpus-per-node"}
_SINFO_S = 20.0


@dataclass(frozen=True)
class Request:
    """What a job asks for. gpus: of a node. time: as written. partition: names with commas; empty for the default."""

    nodes: int
    ranks: int
    gpus: int
    time: str
    partition: str

    @classmethod
    def of(cls, script: Path, options: Sequence[str]) -> Request:
        """Read the `#SBATCH` lines of a script, `sbatch`'s variables, and options, which win in this order.

        Raises:
            ValueError: a number that is none.
        """
        lines = re.findall(r"^#SBATCH (\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
        variables = {name: os.environ[key] for key, name in _VARIABLES.items() if key in os.environ}
        given = dict(_parsed(options))
        asked = dict(_parsed(lines)) | variables | given
        nodes = _count("nodes", asked)
        gpus = _count("gpus-per-node", asked)
        if "gres" in given or "gpus" in given:
            gpus = _count("gres", asked) if "gres" in given else -(-_count("gpus", asked) // nodes)
        ranks = _count("ntasks", asked) if "ntasks" in given else nodes * _count("ntasks-per-node", asked)
        if os.environ.get("LAUNCH") == "torchrun":
            ranks = nodes * int(os.environ.get("NPROC", gpus))
        elif 0 < gpus * nodes < ranks:
            remedy = "Set as many tasks as GPUs: one rank for each."
            raise refuse("--ntasks-per-node", -(-ranks // nodes), f"at most {gpus}, the GPUs of a node", remedy)
        return cls(nodes, ranks, gpus, asked.get("time", ""), asked.get("partition", ""))


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into `sbatch`'s options, which begin with `-` and may be followed by a value, and settings."""
    options: list[str] = []
    settings: list[str] = []
    previous = ""
    for word in words:
        is_value = re.fullmatch(r"-\w|--[\w-]+", previous) and "=" not in word
        (options if word.startswith("-") or is_value else settings).append(word)
        previous = word
    return options, settings


def check_limits(request: Request) -> None:
    """Refuse what no partition of the request can give. Nothing is refused if `sinfo` does not answer.

    Raises:
        ValueError: a partition that does not exist, or its time limit, nodes or GPUs do not suffice.
    """
    partitions = _partitions()
    names = request.partition.split(",") if request.partition else [p.name for p in partitions.values() if p.default]
    refusals = []
    for name in names if partitions else ():
        try:
            if name not in partitions:
                near = difflib.get_close_matches(name, partitions, n=1)
                remedy = f"Did you mean {near[0]}?" if near else "`sinfo` lists them."
                raise refuse("--partition", name, f"one of {', '.join(partitions)}", remedy)
            partitions[name].check(request)
            return
        except ValueError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


@dataclass
class _Partition:
    """A partition; of rows of different nodes, their sum and the most GPUs of a node."""

    name: str
    default: bool
    up: bool
    time: str
    most_nodes: float
    nodes: int = 0
    gpus: int = 0

    def check(self, request: Request) -> None:
        of = f"of the partition {self.name}"
        if not self.up:
            raise refuse("--partition", self.name, "one that is up; this one is down", "Choose another: see `sinfo`.")
        if request.time and _minutes(request.time) > _minutes(self.time):
            remedy = "Lower it: a job that trains is requeued and goes on."
            raise refuse("--time", request.time, f"at most {self.time}, the time limit {of}", remedy)
        if request.nodes > (most := min(self.nodes, self.most_nodes)):
            raise refuse(
                "--nodes", request.nodes, f"at most {most:.0f}, the nodes that a job gets {of}", "Ask for fewer."
            )
        if request.gpus > self.gpus:
            expected = f"at most {self.gpus}, the GPUs of a node {of}"
            raise refuse("--gpus-per-node", request.gpus, expected, "Ask for fewer, or choose another partition.")


def _partitions() -> Mapping[str, _Partition]:
    """Return the partitions that `sinfo` lists, keyed by name; none without Slurm."""
    words = ["sinfo", "--noheader", "--format=%P|%a|%l|%s|%D|%G"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=_SINFO_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, _Partition] = {}
    for line in said.splitlines():
        name, up, time, size, nodes, gres = line.split("|")
        most = size.rpartition("-")[2]
        made = _Partition(
            name.rstrip("*"), name.endswith("*"), up == "up", time, float(most.replace("infinite", "inf"))
        )
        partition = found.setdefault(made.name, made)
        partition.nodes += int(nodes)
        partition.gpus = max(partition.gpus, _gpus(gres))
    return found


def _parsed(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of every option: `--nodes=2`, `--nodes 2`, `-N2` or `-N 2`."""
    for word, following in pairwise([*options, "-"]):
        name, equals, value = word.lstrip("-").partition("=")
        if word[:1] == "-" and word[1:2] not in ("-", ""):
            name, value, equals = _LETTERS.get(word[1], word[1]), word[2:], word[2:]
        if word.startswith("-"):
            yield name, value if equals or following.startswith("-") else following


def _count(name: str, asked: Mapping[str, str]) -> int:
    """Return a number of nodes, tasks or GPUs: the fewest of `2-4`, without the type of `h100:8` or `gpu:h100:8`."""
    value = asked.get(name, "1")
    number = str(_gpus(value)) if name == "gres" else value.split("-")[0].rpartition(":")[2]
    if not number.isdecimal():
        raise refuse(f"--{name}", value, "a number", f"For example --{name}=2.")
    return int(number)


def _gpus(gres: str) -> int:
    """Return the GPUs of `gpu:h100:8(S:0-1),…`."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)) or (
        "gpu" in gres.split(",")
    )


def _minutes(time: str) -> float:
    """Return the minutes of Slurm's `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; infinity for no limit."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")):
        if time.lower() in ("infinite", "unlimited", "n/a"):
            return float("inf")
        raise refuse("--time", time, "minutes, H:M:S or D-H:M:S", "For example --time=12:00:00.")
    numbers = [int(part) for part in parts]
    units = (60.0, 1.0, 1 / 60) if dash or len(parts) == 3 else (1.0, 1 / 60)
    return 1440 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))
