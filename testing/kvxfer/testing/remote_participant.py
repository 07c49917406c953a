"""A participant in a process of its own, which can really be killed and stopped.

The process has a ``LocalParticipant``, whose back end must be importable there. ``RemoteParticipant`` is the other end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvxfer import errors
from kvxfer.testing.participant import LocalParticipant
from kvxfer.testing.ready import ready
from kvxfer.testing.remote import Remote
from kvxfer.transport.contract import Batch, Fence, Transport


class RemoteParticipant(Remote):
    """A ``Participant`` in a child process, where what is not defined here is called; ``close`` leaves the process running.

    ``idle`` is called again and again while a reply is awaited.
    """

    answer_s = 60.0  # loading a GPU library takes seconds

    def __init__(
        self, backend: type[Transport], options: Mapping[str, Any], name: str, device: str, idle: Callable[[], None]
    ) -> None:
        self._idle = idle
        super().__init__(name, LocalParticipant, backend, dict(options), name, device, next_call=_turning)
        self.wait()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self, method)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        if after is not None:
            raise NotImplementedError("a fence cannot be sent to another process")
        return int(self("submit", batch))

    def close(self) -> None:
        self("close")

    def end(self) -> None:
        """End the process in whatever state it is. Idempotent."""
        if self.process.exitcode is None:
            self.kill()

    def _comes(self) -> bool:
        deadline = time.monotonic() + self.answer_s
        while not self.ready(0):
            if time.monotonic() > deadline:
                return False
            self._idle()
        return True

    def _error(self, kind: str, text: str) -> Exception:
        made: Exception = getattr(errors, kind, RuntimeError)(text)
        return made


def _turning(participant: LocalParticipant, pipe: Connection) -> Any:
    """Let the participant make progress until the next call comes, and return that."""
    while True:
        fd, timeout = (None, 1.0) if participant.closed else participant.wait()
        readable = ready([pipe.fileno(), *([] if fd is None else [fd])], timeout)
        if not participant.closed:
            participant.turn(fd in readable)
        if pipe.fileno() in readable:
            return pipe.recv()
