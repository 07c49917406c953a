"""A participant in a process of its own, to be killed and stopped for real.

``python -m kvxfer.testing.remote_participant`` reads commands from stdin and answers on stdout, one JSON line each. The
first says which back end to make (``module:Class``, so it must be importable in the child). ``RemoteParticipant`` is
the other end.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer import errors
from kvxfer.testing.participant import Bytes, LocalParticipant, Result, batch_from_wire, batch_to_wire
from kvxfer.testing.ready import ready
from kvxfer.transport.contract import Batch, Fence, Transport

__all__ = ["RemoteParticipant"]

REPLY_S = 60.0
"""A child that does not answer for so long is taken for hung. Loading a GPU library takes seconds."""


class RemoteParticipant:
    """A ``Participant`` in a child process; ``idle`` is called again and again while a reply is awaited."""

    def __init__(
        self, backend: type[Transport], options: Mapping[str, Any], name: str, device: str, idle: Callable[[], None]
    ) -> None:
        self.name = name
        self._idle = idle
        self._received = b""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.testing.remote_participant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
        self._ask(
            backend=f"{backend.__module__}:{backend.__qualname__}", options=dict(options), name=name, device=device
        )

    def allocate(self, sizes: Sequence[int], seed: int) -> int:
        return int(self._ask("allocate", list(sizes), seed))

    def allocate_untouched(self, sizes: Sequence[int]) -> int:
        return int(self._ask("allocate_untouched", list(sizes)))

    def allocate_repeating(self, nbytes: int) -> int:
        return int(self._ask("allocate_repeating", nbytes))

    def read(self, memory: int, offset: int, nbytes: int) -> Bytes:
        return np.frombuffer(base64.b64decode(self._ask("read", memory, offset, nbytes)), np.uint8)

    def write(self, memory: int, offset: int, data: Bytes) -> None:
        self._ask("write", memory, offset, base64.b64encode(data.tobytes()).decode())

    def content(self, memory: int) -> Bytes:
        return np.frombuffer(base64.b64decode(self._ask("content", memory)), np.uint8)

    def fill(self, memory: int, seed: int) -> None:
        self._ask("fill", memory, seed)

    def deregister(self, memory: int) -> None:
        self._ask("deregister", memory)

    def endpoint(self) -> bytes:
        return base64.b64decode(self._ask("endpoint"))

    def connect(self, mine: bytes, theirs: bytes) -> int:
        return int(self._ask("connect", base64.b64encode(mine).decode(), base64.b64encode(theirs).decode()))

    def withdraw(self, endpoint: bytes) -> None:
        self._ask("withdraw", base64.b64encode(endpoint).decode())

    def disconnect(self, peer: int) -> None:
        self._ask("disconnect", peer)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        if after is not None:
            raise NotImplementedError("a fence cannot be sent to another process")
        return int(self._ask("submit", batch_to_wire(batch)))

    def result(self, batch: int) -> Result | None:
        found = self._ask("result", batch)
        return None if found is None else Result(*found)

    def quiet(self) -> bool:
        return bool(self._ask("quiet"))

    def abort(self, batch: int) -> None:
        self._ask("abort", batch)

    def close(self) -> None:
        """Close its transport; the process goes on."""
        self._ask("close")

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._child.kill()
        self._reap()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has taken effect."""
        self._child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._child.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the process in whatever state it is. Idempotent."""
        if self._child.returncode is None:
            self._child.kill()
            self._reap()

    def _reap(self) -> None:
        self._child.wait(10)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, *command: Any, **first: Any) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(first or command).encode() + b"\n")
        deadline = time.monotonic() + REPLY_S
        while b"\n" not in self._received:
            if ready([self._child.stdout.fileno()], 0):
                more = os.read(self._child.stdout.fileno(), 1 << 20)
                if not more:
                    raise RuntimeError(f"the process of {self.name!r} ended (exit status {self._child.wait(10)})")
                self._received += more
                continue
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process of {self.name!r} did not answer {command} within {REPLY_S:g} s")
            self._idle()
        line, _, self._received = self._received.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            kind, text = reply["error"]
            raise getattr(errors, kind, RuntimeError)(text)
        return reply["ok"]


def main() -> None:
    """Serve commands from stdin until the parent has gone."""
    # What a library prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    commands = sys.stdin.buffer
    first = json.loads(commands.readline())
    participant: LocalParticipant | None = None

    def answer(act: Callable[[], Any]) -> None:
        try:
            reply = {"ok": act()}
        except Exception as e:
            reply = {"error": [type(e).__name__, str(e)]}
        replies.write(json.dumps(reply).encode() + b"\n")

    def make() -> None:
        nonlocal participant
        module, _, name = first["backend"].partition(":")
        backend = getattr(importlib.import_module(module), name)
        participant = LocalParticipant(backend, first["options"], first["name"], first["device"])

    answer(make)
    os.set_blocking(commands.fileno(), False)
    received = b""
    while True:
        fd, timeout = (None, 1.0) if participant is None or participant.closed else participant.wait()
        readable = ready([commands.fileno(), *([] if fd is None else [fd])], timeout)
        if participant is not None and not participant.closed:
            participant.turn(fd in readable)
        if commands.fileno() not in readable:
            continue
        more = os.read(commands.fileno(), 1 << 20)
        if not more:
            return  # the parent has gone
        received += more
        *lines, received = received.split(b"\n")
        for line in lines:
            assert participant is not None
            command, *arguments = json.loads(line)
            answer(lambda c=command, a=arguments, p=participant: _obey(p, c, a))  # type: ignore[misc]


def _obey(participant: LocalParticipant, command: str, arguments: list[Any]) -> Any:
    match command:
        case "endpoint":
            return base64.b64encode(participant.endpoint()).decode()
        case "connect":
            return participant.connect(*(base64.b64decode(a) for a in arguments))
        case "withdraw":
            return participant.withdraw(base64.b64decode(arguments[0]))
        case "content" | "read":
            return base64.b64encode(getattr(participant, command)(*arguments).tobytes()).decode()
        case "write":
            memory, offset, data = arguments
            return participant.write(memory, offset, np.frombuffer(base64.b64decode(data), np.uint8))
        case "submit":
            return participant.submit(batch_from_wire(arguments[0]))
        case "result":
            result = participant.result(*arguments)
            return None if result is None else [result.error, result.quiet]
        case "quiet" | "fill" | "deregister" | "disconnect" | "abort" | "close":
            return getattr(participant, command)(*arguments)
        case "allocate" | "allocate_untouched" | "allocate_repeating":
            return getattr(participant, command)(*arguments)
    raise ValueError(f"unknown command {command!r}")


if __name__ == "__main__":
    main()
