"""Processes that start with everything imported, which otherwise is most of what they do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megatron_longctx.testing.distributed import start_context
from megatron_longctx.verbs import cli


class Quick:
    """A verb in a process that begins with everything imported, and so do the ranks that it starts.

    It takes the place of `subprocess.Popen` where starting interpreters is not what is tested: the command's own code
    runs, in real processes with real signals, for a tenth of the time.
    """

    def __init__(self, words: Sequence[str], cwd: Path, files: tuple[str, str, str], env: Mapping[str, str]) -> None:
        """files: that the standard input, output and error are."""
        self._process = start_context().Process(target=_verb, args=(list(words), str(cwd), files, dict(env)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

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


def _verb(words: Sequence[str], cwd: str, files: tuple[str, str, str], environment: Mapping[str, str]) -> None:
    """What a `Quick` process does: become one as a shell starts it."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    flags = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
    for number, (name, flag) in enumerate(zip(files, flags, strict=True)):
        os.dup2(os.open(name, flag), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (multiprocessing has put /dev/null there)
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        start: Callable[..., Any] = mp.start_processes  # type: ignore[attr-defined]
        mp.start_processes = lambda fn, args, **how: start(  # type: ignore[attr-defined]
            _rank, (fn, *args), **how | {"start_method": "fork"}
        )
    sys.exit(cli.main(words))


def _rank(index: int, fn: Callable[..., None], *args: Any) -> None:
    """A rank that is a fork of the process that starts it has nothing of its logging and signal handlers."""
    logging.getLogger().handlers.clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fn(index, *args)
