"""Mooncake's transfer engine: loaded only when it is needed, and called by what it does.

Three things about it shape this back end (0.3.13):

- ``transfer_check_status`` looks at the *first* request of a batch alone, and nothing else tells without blocking how one is
  doing. So every request is a batch of its own.
- A batch cannot be cancelled. Its number is a pointer, freed by the call that says how it ended: nobody may ask again.
- The first request to a peer opens a connection under the engine's lock, for up to a minute if the peer does not answer.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvxfer.backend.environment import environment
from kvxfer.errors import ConfigError, TransportError
from kvxfer_mooncake.options import Options

__all__ = ["LibraryEngine", "load", "version_of"]

PIP_LINE = (
    "pip install 'kvxfer-mooncake[non-cuda]', and the system's libibverbs (Debian and Ubuntu: apt install libibverbs1)"
)
PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")

CARDS = Path("/sys/class/infiniband")
HURRY_US = 5000
SIX = "MC_USE_IPV6"
"""Without it, Mooncake looks every address up as one of IPv4, each time that it dials."""


@cache
def load() -> Any:
    """Load Mooncake and return its class of engines.

    Raises:
        TransportError: It is missing, or a library that it needs is; the message has the lines that install them.
    """
    try:
        # What it writes to stderr is decided when it is loaded.
        with environment({"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")}):
            from mooncake.engine import TransferEngine
    except ImportError as e:
        raise TransportError(
            f"back end 'mooncake' needs Mooncake's transfer engine, which cannot be imported ({e}); {PIP_LINE}"
        ) from e
    return TransferEngine


def version_of() -> str:
    """Return the version of Mooncake, and of which package it is."""
    for name in PACKAGES:
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "unknown"


class LibraryEngine:
    """One engine, with ports of its own, which peers reach by ``name``.

    Any thread may call ``probe`` and ``post``; the others are for its owner.
    """

    def __init__(self, options: Options) -> None:
        """Start an engine.

        Raises:
            ConfigError: The address is one that Mooncake does not use as it is set.
            TransportError: It does not start.
        """
        kind = load()
        if options.protocol == "rdma" and not any(CARDS.glob("*")):
            raise TransportError(
                "option 'protocol' of back end 'mooncake' is 'rdma', and this host has no RDMA device: Mooncake would take TCP instead"
            )
        six = ":" in options.advertise
        if six and not os.environ.get(SIX):
            raise ConfigError(
                f"option 'advertise' of back end 'mooncake' is the IPv6 address {options.advertise!r}, and Mooncake uses IPv6 only if "
                f"{SIX}=1 is in the environment of every engine; set it, or advertise an IPv4 address"
            )
        host, self._here = (f"[{options.advertise}]", "[::1]") if six else (options.advertise, "127.0.0.1")
        with environment({"MC_FORCE_TCP": "1"} if options.protocol == "tcp" else {}):
            self._engine: Any = kind()
            failed = self._engine.initialize(host, "P2PHANDSHAKE", options.protocol, "")
        if failed:
            raise TransportError(
                f"Mooncake's engine does not start (code {failed}): is {options.advertise!r} an address of this host? It writes "
                "the reason to stderr"
            )
        self.name = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known.

        Raises:
            TransportError: The engine does not take it.
        """
        if self._engine.register_memory(address, nbytes):
            raise TransportError(
                f"Mooncake does not take {nbytes} bytes at {address:#x}: it takes none that overlap in part with what it has, and "
                "over RDMA none that cannot be pinned"
            )

    def unregister(self, address: int) -> None:
        """Take back memory that was registered from this address on. Peers get no more of it."""
        self._engine.unregister_memory(address)

    def probe(self, peer: str) -> bool:
        """Whether a peer answers. Blocks for up to a minute if it does not."""
        return bool(self._engine.send_probe(peer) == 0)

    def post(self, write: bool, peer: str, here: int, there: int, nbytes: int) -> int:
        """Start one request, and return its number, for ``ended``. Blocks when it is the first one to a peer.

        Raises:
            TransportError: The peer cannot be reached.
        """
        post = self._engine.batch_transfer_async_write if write else self._engine.batch_transfer_async_read
        number = int(post(peer, [here], [there], [nbytes]))
        if not number:
            raise TransportError(f"Mooncake cannot reach its engine at {peer}; it has written the reason to stderr")
        return number

    def ended(self, number: int) -> bool | None:
        """Whether a request has succeeded (true) or failed (false); ``None`` while it is on its way. Not to be asked again then."""
        status = self._engine.transfer_check_status(number)
        return {1: True, -1: False}.get(status)

    def read(self, peer: str, here: list[int], there: list[int], lengths: list[int]) -> bool:
        """Read runs, and wait until they are here, with a processor kept busy. Returns whether that went well."""
        return bool(self._engine.batch_transfer_sync_read(peer, here, there, lengths) == 0)

    def close(self) -> None:
        """End all requests and give everything back. No Python runs meanwhile."""
        self._hurry()
        self._engine = None

    def _hurry(self) -> None:
        """Keep the engine's end short.

        Its listener looks once a second whether it shall end, and the destructor waits for that with Python's lock held. So
        the listener's socket gets a shorter wait, and a question, after which it counts.
        """
        port = self._engine.get_rpc_port()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since, or no port
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        if found.getsockname()[1:2] == (port,):
                            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, HURRY_US))
        self._engine.send_probe(f"{self._here}:{port}")
