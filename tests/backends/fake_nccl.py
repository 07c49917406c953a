"""A stated fake of NCCL at the binding's border, for CPU memory: it lets the back end run where there is no GPU.

As with NCCL: a pair of ranks, one that sends and one that receives, in one process or two; runs match in the order in
which they are enqueued and nothing else; there are no sizes on the way, so halves that differ mix up all that
follows; ``open`` waits for the other side without an end, and fails if that has other ``channels``; a send is over when its
bytes have left; a peer that is gone is never noticed, what waits for it hangs until ``abort``; and ``abort`` ends everything
and takes a while, except an ``open`` that waits for the other side: its thread and its descriptor stay behind.
"""

from __future__ import annotations

import ctypes
import queue
import secrets
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.errors import TransportError
from kvxfer.transport.contract import Fence
from kvxfer_nccl.binding import ID_BYTES, Binding, Pipe, PipeSpec
from kvxfer_nccl.transport import NcclTransport

__all__ = ["FakeBinding", "FakePipe", "FakeNcclTransport"]

MAX_RUNS = 4096
"""Enqueued runs that have not run, above which NCCL would block who enqueues more."""

TICK_MS = 20
"""How often a thread looks whether it was aborted."""

_listeners: dict[bytes, socket.socket] = {}
"""Of unique ids made in this process, until their sender opens."""


class FakeMark:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def passed(self) -> bool:
        return self._reached.is_set()


class FakePipe:
    """Fulfils ``Pipe``. The stream is a thread, the link a Unix socket."""

    def __init__(self, spec: PipeSpec) -> None:
        self._spec = spec
        self._sock: socket.socket | None = None
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._enqueued, self._run_by_now = 0, 0  # runs; each is counted by one thread
        self._stream = threading.Thread(target=self._run, name="fake-nccl-stream", daemon=True)

    def open(self) -> None:
        try:
            sock = self._accept() if self._spec.sends else self._dial()
        except OSError as e:
            raise TransportError(f"unhandled system error: {e}") from e
        with self._lock:
            if self._aborted.is_set():
                sock.close()
                raise TransportError("the communicator was aborted")
            sock.setblocking(False)
            self._sock = sock
            self._stream.start()
        # As the real one does: only when a byte has passed are the two connected, and not with unlike channels.
        channels = self._spec.options.channels
        byte = np.full(1, channels if self._spec.sends else 0, np.uint8)
        self.move([(byte.ctypes.data, 1)])
        mark = self.mark()
        while not mark.passed():
            if self._aborted.wait(0.001):
                # The stream must let go of the byte before this returns.
                self._stream.join()
                raise TransportError("the communicator was aborted")
        if byte[0] != channels:
            raise TransportError("internal error")

    def move(self, runs: Sequence[tuple[int, int]]) -> None:
        act = self._send if self._spec.sends else self._recv
        self._enqueued += len(runs)
        assert self._enqueued - self._run_by_now <= MAX_RUNS, "here NCCL would block, perhaps for good"
        for address, nbytes in runs:
            self._work.put((act, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")))

    def wait(self, fence: Fence) -> None:
        self._work.put((self._wait, fence.event))

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self._work.put((FakeMark.reach, mark))
        return mark

    def error(self) -> str | None:
        return None

    def abort(self) -> None:
        with self._lock:
            self._aborted.set()
            started = self._sock is not None
        self._work.put((None, None))
        if started:
            self._stream.join()
            assert self._sock is not None
            self._sock.close()

    def _accept(self) -> socket.socket:
        with _listeners.pop(self._spec.unique_id) as listener:
            return listener.accept()[0]

    def _dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(_place(self._spec.unique_id))
        except OSError:
            sock.close()
            raise
        return sock

    # The stream's thread

    def _run(self) -> None:
        while not self._aborted.is_set():
            act, what = self._work.get()
            if act is not None:
                act(what)
                self._run_by_now += act in (self._send, self._recv)

    def _send(self, data: memoryview) -> None:
        assert self._sock is not None
        while data and not self._aborted.is_set():
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                _ready(self._sock, select.POLLOUT)
            except OSError:
                self._aborted.wait()

    def _recv(self, data: memoryview) -> None:
        assert self._sock is not None
        while data and not self._aborted.is_set():
            try:
                count = self._sock.recv_into(data)
            except BlockingIOError:
                _ready(self._sock, select.POLLIN)
                continue
            except OSError:
                count = 0
            if not count:
                self._aborted.wait()
            data = data[count:]

    def _wait(self, event: Any) -> None:
        while not event.wait(TICK_MS / 1000) and not self._aborted.is_set():
            pass


class FakeBinding:
    """Fulfils ``Binding``. Each transport counts as a GPU of its own."""

    memory = frozenset({"cpu"})
    release = "fake"

    def __init__(self) -> None:
        self.versions = {"nccl": "a stand-in for CPU memory"}
        self._identity = secrets.token_hex(8)

    def default_device(self) -> str:
        return "cpu"

    def identity(self, device: str) -> str:
        return self._identity

    def unique_id(self) -> bytes:
        name = secrets.token_hex(16).encode().ljust(ID_BYTES, b"\0")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_place(name))
        listener.listen(1)
        _listeners[name] = listener
        return name

    def pipe(self, spec: PipeSpec) -> Pipe:
        return FakePipe(spec)


class FakeNcclTransport(NcclTransport):
    """The back end over the fake: ``"backend": "tests.backends.fake_nccl:FakeNcclTransport"``. For tests."""

    name = "nccl-fake"

    @classmethod
    def load(cls) -> Binding:
        return FakeBinding()


def _place(unique_id: bytes) -> bytes:
    """A name in the abstract namespace of Unix sockets, which dies with its process."""
    return b"\0kvxfer-fake-nccl-" + unique_id.rstrip(b"\0")


def _ready(sock: socket.socket, events: int) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(TICK_MS))
