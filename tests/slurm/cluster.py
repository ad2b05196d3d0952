"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, in a folder of its own.

Where this machine lets us make network namespaces (root, iproute2), each node is one: an address, a host name and an
`/etc/hosts` of its own, in which its own name is 127.0.1.1, as Debian's installer writes it. Elsewhere all nodes share
this machine's network. Nothing of the system's own Slurm, munge or network is touched.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET

import psutil

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_NET = "10.213.0"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_CONF = """\
ClusterName=longctx
SlurmctldHost={controller}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=200000,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=8
BatchStartTimeout=20
KillWait=60
ReturnToService=2
MinJobAge=3600
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """What of Slurm's and munge's programs is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@dataclass
class Cluster:
    """A running one. environment: with which its commands find it. nodes: their names."""

    folder: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]
    namespaces: bool
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """An IPv4 address of this host that is not loopback, where it has one."""
        known = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == AF_INET]
        return next((address for address in known if not address.startswith("127.")), "127.0.0.1")

    def command(self, *words: str, check: bool = True, **environment: str) -> str:
        """Standard output of a command of Slurm's, without its last newline."""
        env = self.environment | environment
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800, cwd=self.folder)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.log('slurmctld')}"
        return done.stdout.rstrip("\n")

    def field_of(self, job: str, name: str) -> str:
        """What `scontrol show job` says of a field of a job."""
        for word in self.command("scontrol", "show", "job", job).split():
            if word.startswith(f"{name}="):
                return word.split("=", 1)[1]
        raise AssertionError(f"job {job} has no {name}")

    def log(self, daemon: str) -> str:
        """The end of a daemon's log."""
        path = self.folder / f"{daemon}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def lose(self, node: str) -> None:
        """End a node as a power cut does: nobody hears from it, and all that ran there is gone."""
        if self.namespaces:
            _ip("link", "set", f"{node}v", "down")
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        while left := _of_node(self.folder, node):  # one may have started another meanwhile
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, 1.0)

    def start(self, node: str) -> None:
        """Start a node's slurmd."""
        if self.namespaces:
            _ip("link", "set", f"{node}v", "up")
        place = f'mount --bind {self.folder}/{node}.hosts /etc/hosts && hostname {node} && exec "$@"'
        inside = ["nsenter", f"--net=/run/netns/{node}", "unshare", "--mount", "--uts", "sh", "-c", place, "sh"]
        words = [*(inside if self.namespaces else []), "slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"]]
        self._daemons[node] = _daemon(self.folder, words, self.environment | {"LONGCTX_TEST_NODE": node})

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until every node can take a job."""
        deadline = time.monotonic() + seconds
        while (states := self.command("sinfo", "-h", "-N", "-o", "%N %t", "-p", "low")) != "\n".join(
            f"{node} idle" for node in self.nodes
        ):
            assert time.monotonic() < deadline, f"{states}\n{self.log('slurmctld')}"
            time.sleep(0.2)


def _of_node(folder: Path, node: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = process.environ()
            if said.get("SLURM_CONF", "").startswith(str(folder)) and node in (
                said.get("SLURMD_NODENAME"),
                said.get("LONGCTX_TEST_NODE"),
            ):
                found.append(process)
    return found


def _daemon(folder: Path, words: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / "daemons.out").open("ab") as out:
        return subprocess.Popen(words, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder)


@contextlib.contextmanager
def cluster(size: int, cpus: int = 4) -> Iterator[Cluster]:
    """`size` nodes of `cpus` processors each, whatever this machine has.

    Raises:
        AssertionError: a daemon did not come up; says what it wrote.
    """
    nodes = tuple(f"longctx{i}" for i in range(1, size + 1))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)  # munged wants to be reached by all
        namespaces = stack.enter_context(_network(nodes, folder))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        env |= {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        made = Cluster(folder, nodes, env, namespaces)
        (folder / "slurm.conf").write_text(_conf(folder, nodes, cpus, namespaces))
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (folder / name).mkdir()
        stack.callback(_end_all, made)
        socket = folder / "munge.socket"
        subprocess.run(["mungekey", "-c", "-k", str(folder / "munge.key")], env=env, check=True)
        files = [f"--{kind}-file={folder}/munge.{end}" for kind, end in _MUNGE_FILES]
        munge = ["munged", "--foreground", "--force", f"--socket={socket}", *files]
        made._daemons["munged"] = _daemon(folder, munge, env)
        _until(socket.exists, "munged", folder)
        made._daemons["slurmctld"] = _daemon(folder, ["slurmctld", "-D", "-f", env["SLURM_CONF"]], env)
        for node in nodes:
            made.start(node)
        _until(lambda: bool(made.command("sinfo", "-h", check=False)), "slurmctld", folder)
        made.wait_idle()
        yield made


_MUNGE_FILES = (("key", "key"), ("log", "log"), ("pid", "pid"), ("seed", "seed"))


def _conf(folder: Path, nodes: Sequence[str], cpus: int, namespaces: bool) -> str:
    controller = f"{os.uname().nodename}({_NET}.1)" if namespaces else f"{os.uname().nodename}(127.0.0.1)"
    lines = []
    for i, node in enumerate(nodes):
        place = (
            f"NodeAddr={_NET}.{11 + i} NodeHostname={node} Port=17300"
            if namespaces
            else f"NodeAddr=127.0.0.1 NodeHostname={os.uname().nodename} Port={17300 + i}"
        )
        lines.append(f"NodeName={node} {place} CPUs={cpus} RealMemory=1000 State=UNKNOWN")
    user = pwd.getpwuid(os.getuid()).pw_name
    return _CONF.format(controller=controller, port=17299, folder=folder, user=user, nodes="\n".join(lines))


def _ip(*words: str, check: bool = True) -> str:
    env = os.environ | {"PATH": _PATH}
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, env=env).stdout


@contextlib.contextmanager
def _network(nodes: Sequence[str], folder: Path) -> Iterator[bool]:
    """A namespace for every node, joined by a bridge; False where this machine does not allow it."""

    def remove() -> None:
        for node in nodes:
            for pid in _ip("netns", "pids", node, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)  # a process keeps its namespace
            _ip("netns", "del", node, check=False)
            _ip("link", "del", f"{node}v", check=False)
        _ip("link", "del", "longctx0", check=False)

    if os.geteuid() != 0 or shutil.which("ip", path=_PATH) is None:
        yield False
        return
    remove()
    try:
        try:
            _ip("link", "add", "longctx0", "type", "bridge")
            _ip("addr", "add", f"{_NET}.1/24", "dev", "longctx0")
            _ip("link", "set", "longctx0", "up")
            for i, node in enumerate(nodes):
                _ip("netns", "add", node)
                _ip("link", "add", f"{node}v", "type", "veth", "peer", "name", "eth0", "netns", node)
                _ip("link", "set", f"{node}v", "master", "longctx0", "up")
                _ip("-n", node, "addr", "add", f"{_NET}.{11 + i}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    _ip("-n", node, "link", "set", device, "up")
                others = "".join(f"{_NET}.{11 + k} {n}\n" for k, n in enumerate(nodes) if n != node)
                hosts = f"127.0.0.1 localhost\n127.0.1.1 {node}\n{_NET}.1 {os.uname().nodename}\n{others}"
                (folder / f"{node}.hosts").write_text(hosts)
        except (subprocess.CalledProcessError, OSError):
            yield False
            return
        yield True
    finally:
        remove()


def _until(true: object, what: str, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not true():  # type: ignore[operator]
        logs = "".join(p.read_text(errors="replace")[-2000:] for p in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"{what} did not come up:\n{(folder / 'daemons.out').read_text()}\n{logs}"
        time.sleep(0.1)


def _end_all(made: Cluster) -> None:
    made.command("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name, check=False)
    for node in made.nodes:
        if node in made._daemons:
            made.lose(node)
    for daemon in made._daemons.values():
        daemon.send_signal(signal.SIGTERM)
    for daemon in made._daemons.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
        daemon.kill()
        daemon.wait()
