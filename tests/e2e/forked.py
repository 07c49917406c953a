"""Servers whose processes are forks of one that has imported their engine, which saves most of a start's CPU time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from kvxfer_vllm.demo.servers import Server

_FORKS = multiprocessing.get_context("forkserver")


@functools.cache
def _forker(module: str, environment: tuple[tuple[str, str], ...]) -> forkserver.ForkServer:
    """Start a process that has imported ``module`` with what engines read from the environment as they are imported."""
    forker = forkserver.ForkServer()
    forker.set_forkserver_preload([module])
    with mock.patch.dict(os.environ, environment):
        forker.ensure_running()
    return forker


class Fresh(Server):
    """A server with an interpreter of its own, of which its engine and workers are forks: for libraries that are found by the
    environment, and for other networks."""

    program = "tests.e2e.imported"


class Forked(Server):
    """A server that is a fork itself, of a process that has imported `preloaded`."""

    program = preloaded = "tests.e2e.imported"

    @classmethod
    def forker(cls) -> forkserver.ForkServer:
        """The process of which they are forks: begun at the first call, and not waited for."""
        return _forker(cls.preloaded, tuple(cls.environment.items()))

    def _begin(self, before: Sequence[str], arguments: list[str], env: dict[str, str]) -> _Process:
        assert not before, "a fork stays where it is"
        forker = self.forker()
        begun, begins = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=_serve, args=(self.program, arguments, env, self.log, begins))
        # Python's own forks are all of one process.
        with mock.patch.object(forkserver, "connect_to_new_process", forker.connect_to_new_process):
            process.start()
        begins.close()
        begun.recv()  # it leads its process group: what is sent to the group arrives
        begun.close()
        return _Process(process)


class Referenced(Forked):
    """One whose recurrent layers have reference kernels."""

    program = "tests.e2e.references"


class _Process:
    """As much of `subprocess.Popen` as a server asks for."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked server", timeout)
        return self.returncode


def _serve(program: str, arguments: list[str], env: dict[str, str], log: Path, begins: Connection) -> None:
    """Be the server: in a process group of its own, with what it says in its log."""
    os.setpgid(0, 0)
    begins.send(None)
    begins.close()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    # One of its own, as a new interpreter has: a killed server leaves shared memory to it, which it tells in the log.
    resource_tracker._resource_tracker._fd = None
    sys.argv[1:] = arguments
    import_module(program).main()
