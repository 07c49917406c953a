"""Back ends that use what an endpoint names, whoever it belongs to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
from collections.abc import Collection
from typing import Annotated, Any

from msgspec import Meta

from kvxfer.errors import TransportError
from kvxfer.testing import FakeTransport
from kvxfer.testing.fake import Endpoint
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Batch, Completion, Fence, Verb


class _Naming(FakeTransport):
    """Copies at once, from or to what the peer's endpoint has named; its own peers name it as they should."""

    def connect(self, mine: bytes, theirs: bytes) -> int:
        peer = super().connect(mine, theirs)
        self.__dict__.setdefault("named", {})[id(self.links[peer])] = self.endpoint_type.decode(theirs)
        return peer

    def start(self, number: int, link: Any, batch: Batch, after: Fence | None) -> None:
        if batch.verb not in (Verb.READ, Verb.WRITE) or after is not None:
            super().start(number, link, batch, after)
            return
        assert batch.remote_offsets is not None
        here = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)
        runs = zip(here.tolist(), batch.remote_offsets.tolist(), batch.lengths.tolist(), strict=True)
        for local, remote, nbytes in runs:
            self.copy(self.named[id(link)], batch.verb, local, remote, nbytes)
        self.complete(Completion(number))

    def copy(self, named: Any, verb: Verb, local: int, remote: int, nbytes: int) -> None:
        raise NotImplementedError


class Address(Endpoint, frozen=True):
    """With the place of the first region of memory 0."""

    format = 2
    place: int


class BelievesAnyAddress(_Naming):
    """Its endpoints have an address."""

    endpoint_type = Address

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Address:
        mine = super().make_endpoint(memories, writable)
        return Address(mine.agent, mine.network, mine.token, self.memories.regions(0)[0].address)

    def copy(self, named: Address, verb: Verb, local: int, remote: int, nbytes: int) -> None:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:  # so that an address of nothing is an error
            source, target = (named.place + remote, local) if verb is Verb.READ else (local, named.place + remote)
            try:
                os.pwrite(memory.fileno(), os.pread(memory.fileno(), nbytes, source), target)
            except (OSError, OverflowError) as e:
                raise TransportError(f"{named.agent} names memory that is not there: {e}") from e


class File(Endpoint, frozen=True):
    """With the path of a file in which the peer's memory is to be found."""

    format = 3
    path: str


class OpensAnyFile(_Naming):
    """Its endpoints have a path. It lays a copy of its memory there."""

    endpoint_type = File

    def make_endpoint(self, memories: Collection[int], writable: bool) -> File:
        mine = super().make_endpoint(memories, writable)
        region = self.memories.regions(0)[0]
        self._file = getattr(self, "_file", None) or tempfile.NamedTemporaryFile()  # noqa: SIM115
        os.pwrite(self._file.fileno(), ctypes.string_at(region.address, region.nbytes), 0)
        return File(mine.agent, mine.network, mine.token, self._file.name)

    def copy(self, named: File, verb: Verb, local: int, remote: int, nbytes: int) -> None:
        if verb is Verb.WRITE:
            return
        try:
            with open(os.path.join("/dev/shm", named.path), "rb") as file:
                file.seek(remote)
                found = file.read(nbytes)
        except (OSError, ValueError) as e:
            raise TransportError(f"{named.agent} names a file that is not there: {e}") from e
        ctypes.memmove(local, found, len(found))


class Port(Endpoint, frozen=True):
    """With the port at which it takes messages."""

    format = 4
    port: Annotated[int, Meta(ge=1, le=65535)]


class SendsToAnyPort(FakeTransport):
    """Sends the first bytes of a batch to where the peer's endpoint says, too."""

    endpoint_type = Port
    _socket: socket.socket

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Port:
        if "_socket" not in vars(self):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind(("127.0.0.1", 0))
        mine = super().make_endpoint(memories, writable)
        return Port(mine.agent, mine.network, mine.token, self._socket.getsockname()[1])

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> LinkEnd:
        assert isinstance(theirs, Port)
        link = super().make_link(number, mine, theirs)
        self.__dict__.setdefault("ports", {})[id(link)] = theirs.port
        return link

    def start(self, number: int, link: LinkEnd, batch: Batch, after: Fence | None) -> None:
        if batch.verb in (Verb.WRITE, Verb.SEND):
            [address, *_] = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths).tolist()
            with contextlib.suppress(OSError):  # nobody listens there
                self._socket.sendto(ctypes.string_at(address, 1024), ("127.0.0.1", self.ports[id(link)]))
        super().start(number, link, batch, after)

    def shut_down(self) -> None:
        super().shut_down()
        if "_socket" in vars(self):
            self._socket.close()
