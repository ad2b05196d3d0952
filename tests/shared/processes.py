"""Processes that start with everything imported, which otherwise is most of what they do."""

import io
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.multiprocessing as mp
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from megatron_longctx.cli import cli
from megatron_longctx.testing.distributed import start_context
from megatron_longctx.training.ranks import RankProcesses

SLOW_START = "TEST_RANKS_START_AFTER_S"
"""Of the environment of a `Quick`: seconds that the ranks it starts wait first, as those do that have to import."""

FILE_BYTES = "TEST_FILE_BYTES"
"""Also: what files of the command may come to at most."""


class Quick:
    """A command in a process that begins with everything imported, and so do the ranks that it starts.

    It takes the place of `subprocess.Popen` where starting interpreters is not what is tested: the command's own code
    runs, in real processes with real signals, for a tenth of the time.
    """

    def __init__(self, words: Sequence[str], cwd: Path | None, files: Sequence[str], env: Mapping[str, str]) -> None:
        """words: of a verb, or `torchrun` and its own. files: that the standard input, output and error are; none to
        leave them."""
        process = start_context().Process(target=_command, args=(list(words), cwd, files, dict(env)))
        process.start()
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a verb", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _command(words: Sequence[str], cwd: Path | None, files: Sequence[str], environment: Mapping[str, str]) -> None:
    """What a `Quick` process does: become one as a shell starts it."""
    os.setsid()
    os.chdir(cwd or ".")
    os.environ.clear()
    os.environ.update(environment)
    flags = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
    for number, (name, flag) in enumerate(zip(files, flags, strict=False)):
        os.dup2(os.open(name, flag), number)  # a terminal becomes the session's
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (multiprocessing has put /dev/null there)
    sys.stdout, sys.stderr = (  # as PYTHONUNBUFFERED has them: what a closed terminal does not take is not kept
        io.TextIOWrapper(open(n, "wb", buffering=0, closefd=False), encoding="utf-8", write_through=True)  # noqa: SIM115
        for n in (1, 2)
    )
    _plain_signals()
    if FILE_BYTES in environment:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(environment[FILE_BYTES]),) * 2)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
        serve_forks()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if words[0] == "torchrun":
        SubprocessHandler._popen = (
            lambda handler, args, env: Quick(list(args)[1:], None, (), env)  # type: ignore[assignment, return-value]
        )
        torchrun.main(list(words[1:]))
        return
    if words[0] == "-u":  # a rank of torchrun: python -u, and a module or a script
        words = words[1:]
    if words[0].endswith(".py"):
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        return
    if words[0] == "-m":
        words = words[2:]
    if not torch.cuda.is_available():
        start = RankProcesses.__init__
        RankProcesses.__init__ = lambda ours, fn, args, ranks, **how: start(  # type: ignore[method-assign]
            ours,
            _rank,
            (dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ()), fn, *args),
            ranks,
            **how | {"start_method": "forkserver"},
        )
    sys.exit(cli.main(words))


def serve_forks() -> None:
    """Processes that this one starts by `forkserver` from here on are forks of it as it is now, with one thread. A fork
    beside another thread may find a lock of it closed for ever: rank 0 of a verb hosts a store, whose thread is there
    when the verb starts the other ranks."""
    assert psutil.Process().num_threads() == 1, "to be called before anything starts a thread"
    address = connection.arbitrary_address("AF_UNIX")
    alive, closed_at_the_end = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = os.fork()
        if server == 0:
            try:
                os.close(closed_at_the_end)
                mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # its forks hear from it, as their parent, of our end
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    ours: Any = forkserver._forkserver
    ours._forkserver_pid, ours._forkserver_address, ours._forkserver_alive_fd = server, address, closed_at_the_end


def _plain_signals(blocked: Iterable[int] = ()) -> None:
    """As in a process of its own: nothing is left of the handlers of the one that it is a fork of."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _rank(
    index: int, environment: Mapping[str, str], blocked: Iterable[int], fn: Callable[..., None], *args: Any
) -> None:
    """environment, blocked: signals, of the process that starts it."""
    os.environ.clear()
    os.environ.update(environment)
    _plain_signals(blocked)
    time.sleep(float(os.environ.get(SLOW_START, 0)))
    fn(index, *args)
