"""Plain sockets by themselves, for ``kvxfer bench transfer``: as many connections, a blocking thread for each."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_tcp.options import Options

__all__ = ["TcpRaw"]


class TcpRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = True

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        parsed = Options.parse(options)
        self._sends, self._count = sends, parsed.connections
        self._memory = memoryview((ctypes.c_uint8 * region.nbytes).from_address(region.address)).cast("B")
        self._listener = socket.create_server((parsed.listen, 0))
        self._address = (parsed.host, self._listener.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._others = ThreadPoolExecutor(self._count)

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def connect(self, theirs: bytes) -> None:
        for _ in range(self._count):
            if self._sends:
                host, port = msgspec.msgpack.decode(theirs)
                self._connections.append(socket.create_connection((host, port)))
            else:
                self._connections.append(self._listener.accept()[0])
            self._connections[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        runs = list(zip(here.tolist(), lengths.tolist(), strict=True))
        if len(runs) == 1:  # an equal share of it for each
            [(at, nbytes)] = runs
            cuts = [nbytes * i // self._count for i in range(self._count + 1)]
            runs = [(at + lo, hi - lo) for lo, hi in zip(cuts, cuts[1:], strict=False)]
        shares = [runs[len(runs) * i // self._count : len(runs) * (i + 1) // self._count] for i in range(self._count)]
        if self._count == 1:
            self._move(self._connections[0], shares[0])
        else:
            list(self._others.map(self._move, self._connections, shares))

    def _move(self, connection: socket.socket, runs: list[tuple[int, int]]) -> None:
        for at, nbytes in runs:
            rest = self._memory[at : at + nbytes]
            if self._sends:
                connection.sendall(rest)
                continue
            while rest:
                count = connection.recv_into(rest)
                if not count:
                    raise ConnectionError("the sender has closed")
                rest = rest[count:]

    def close(self) -> None:
        self._others.shutdown()
        for connection in [*self._connections, self._listener]:
            connection.close()
