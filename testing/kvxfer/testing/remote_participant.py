"""A participant in a process of its own, which can really be killed and stopped.

The process has a ``LocalParticipant`` that is controlled over a pipe; the first message says which back end to make, whose class must be
importable there. ``RemoteParticipant`` is the other end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvxfer import errors
from kvxfer.testing.participant import LocalParticipant
from kvxfer.testing.ready import ready
from kvxfer.testing.remote import apart
from kvxfer.transport.contract import Batch, Fence, Transport

REPLY_S = 60.0
"""Seconds after which a child that does not answer, or does not stop, has hung. Loading a GPU library takes seconds."""


class RemoteParticipant:
    """A ``Participant`` in a child process, where what is not defined here is called; ``close`` leaves the process running.

    ``idle`` is called again and again while a reply is awaited.
    """

    def __init__(
        self, backend: type[Transport], options: Mapping[str, Any], name: str, device: str, idle: Callable[[], None]
    ) -> None:
        self.name = name
        self._idle = idle
        self._pipe, theirs = Pipe()
        self._child = apart(_serve, theirs)
        theirs.close()
        self._ask(backend, dict(options), name, device)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._ask, method)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        if after is not None:
            raise NotImplementedError("a fence cannot be sent to another process")
        return int(self._ask("submit", batch))

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._child.kill()
        self._child.join(10)
        self._pipe.close()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has taken effect.

        Raises:
            RuntimeError: It has not, within ``REPLY_S``.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + REPLY_S
        while not self._stands():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process of {self.name!r} did not stand still within {REPLY_S:g} s of SIGSTOP")
            time.sleep(0.001)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._child.is_alive():
            os.kill(self._child.pid or 0, number)

    def _stands(self) -> bool:
        """Whether all of its threads have stopped, or it has ended."""
        try:
            threads = Path(f"/proc/{self._child.pid}/task").glob("*/stat")
            return all(thread.read_text().rpartition(") ")[2][0] == "T" for thread in threads)
        except OSError:
            return False  # one has ended meanwhile

    def end(self) -> None:
        """End the process in whatever state it is. Idempotent."""
        if self._child.exitcode is None:
            self.kill()

    def _ask(self, *command: Any, **named: Any) -> Any:
        self._pipe.send((command, named))
        deadline = time.monotonic() + REPLY_S
        while not self._pipe.poll():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process of {self.name!r} did not answer {command} within {REPLY_S:g} s")
            self._idle()
        try:
            value, kind = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._child.join(10)
            raise RuntimeError(f"the process of {self.name!r} ended (exit status {self._child.exitcode})") from None
        if kind is not None:
            raise getattr(errors, kind, RuntimeError)(value)
        return value


def _serve(pipe: Connection) -> None:
    """Do what is asked over a pipe until the parent has gone."""
    participant: LocalParticipant | None = None

    def answer(act: Callable[[], Any]) -> None:
        try:
            pipe.send((act(), None))
        except Exception as e:
            pipe.send((str(e), type(e).__name__))

    def make() -> None:
        nonlocal participant
        arguments, _ = pipe.recv()
        participant = LocalParticipant(*arguments)

    answer(make)
    while participant is not None:
        fd, timeout = (None, 1.0) if participant.closed else participant.wait()
        readable = ready([pipe.fileno(), *([] if fd is None else [fd])], timeout)
        if not participant.closed:
            participant.turn(fd in readable)
        if pipe.fileno() in readable:
            try:
                (command, *arguments), named = pipe.recv()
            except EOFError:
                return  # the parent has gone
            answer(partial(getattr(participant, command), *arguments, **named))
