"""Ports and addresses of this host: which ports this process has open, and which network device has an address."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import ConfigError
from kvxfer.settings import bare, unmapped

__all__ = ["Port", "device_of", "listening", "own_addresses"]

_LISTEN = "0A"
_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, order=True)
class Port:
    """An address and port on which connections are accepted; for a Unix socket, its name and port 0."""

    address: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.address
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def device_of(address: str) -> str:
    """Return the network device that has an address (or host name).

    Raises:
        ConfigError: No device of this host has it.
    """
    try:
        wanted = {
            ipaddress.ip_address(str(found[4][0]).partition("%")[0])
            for found in socket.getaddrinfo(bare(address), None)
        }
    except (OSError, UnicodeError) as e:
        raise ConfigError(
            f"'listen' is {address!r}, which is neither an address nor a name that this host knows: {e}"
        ) from None
    for device, found in _addresses():
        if found in wanted or (found.is_loopback and any(w.is_loopback for w in wanted)):
            return device
    raise ConfigError(f"'listen' is {address!r}, which no network device of this host has")


def own_addresses() -> dict[str, str]:
    """Return the addresses by which other hosts may reach this one, each with its network device; none of the link alone."""
    with suppress(OSError):
        return {str(a): device for device, a in _addresses() if not (a.is_loopback or a.is_link_local)}
    return {}


def listening() -> set[Port]:
    """Return where this process accepts connections: TCP ports, and Unix sockets that have a name."""
    sockets = set(_own_sockets())
    return {port for inode, port in _all_listening() if inode in sockets}


def _own_sockets() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                yield target[8:-1]


def _all_listening() -> Iterator[tuple[str, Port]]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no IPv6 here
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN:
                    raw, _, port = local.partition(":")
                    yield rest[5], Port(_address(raw), int(port, 16))
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
        if int(flags, 16) & 0x10000 and name:  # __SO_ACCEPTCON
            yield inode, Port(f"unix:{name[0]}", 0)


def _address(raw: str) -> str:
    """Read an address as the kernel prints it: words of 32 bits in this host's byte order."""
    packed = b"".join(struct.pack("=I", int(raw[i : i + 8], 16)) for i in range(0, len(raw), 8))
    return str(unmapped(ipaddress.ip_address(packed)))


class _SockAddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _IfAddrs(ctypes.Structure):
    """The first fields of ``struct ifaddrs``."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
]


def _addresses() -> list[tuple[str, _IpAddress]]:
    """Return (network device, address) for every address of this host.

    Raises:
        OSError: The kernel refuses.
    """
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found: list[tuple[str, _IpAddress]] = []
    try:
        at = first
        while at:
            entry = at.contents
            if entry.address:
                family, data = entry.address.contents.family, bytes(entry.address.contents.data)
                if family == socket.AF_INET:  # the port comes first
                    found.append((entry.name.decode(), ipaddress.IPv4Address(data[2:6])))
                elif family == socket.AF_INET6:  # port and flow label
                    found.append((entry.name.decode(), ipaddress.IPv6Address(data[6:22])))
            at = entry.next
    finally:
        libc.freeifaddrs(first)
    return found
