"""A simulated network link with long latency and packet loss, on one host and without privileges: for what loopback does not show.

A tun device has address ``HERE``. Whatever is sent to ``THERE`` comes back from the device later, with the two addresses swapped, so
a program that listens on ``HERE`` can be reached at ``THERE`` over this link. (The checksums of IP and TCP stay right, because they do
not depend on the order of what they add up.) All of this is in a network namespace of its own.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from kvxfer.errors import KvxferError

__all__ = ["HERE", "THERE", "SlowLink", "apart"]

HERE, THERE = "10.77.0.1", "10.77.0.2"
MTU = 1500
MAX_AT_ONCE = 64

_TUNSETIFF, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x400454CA, 0x8914, 0x8916, 0x891C
_IFF_TUN, _IFF_NO_PI, _IFF_UP = 0x0001, 0x1000, 0x0001
_ALLOWED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True)
class SlowLink:
    """The properties of a link.

    Attributes:
        round_trip_s: Round-trip time.
        loss: Share of packets that are lost, in each direction.
        bytes_per_s: Rate of both directions together. Packets that come faster are queued, and dropped if they would wait for longer
            than a round trip.
        congestion: TCP's congestion control, as Linux names it; ``None`` for the host's own.
    """

    round_trip_s: float
    loss: float
    bytes_per_s: float
    congestion: str | None

    @contextmanager
    def up(self) -> Iterator[None]:
        """Have the link up within the block, in a namespace of this process's own (see ``apart``).

        Raises:
            KvxferError: The host does not permit it.
        """
        try:
            device = _device()
        except OSError as e:
            raise KvxferError(
                f"cannot make a tun device in a network namespace: {e}; this needs /dev/net/tun and a host that permits user namespaces"
            ) from e
        if self.congestion is not None:
            try:
                _CONGESTION.write_text(self.congestion)
            except OSError as e:
                raise KvxferError(
                    f"congestion control {self.congestion!r} cannot be set here ({e}); {_ALLOWED} lists those that can"
                ) from e
        relay = get_context("fork").Process(target=self._relay, args=(device,), daemon=True)
        relay.start()
        os.close(device)
        try:
            yield
        finally:
            relay.kill()
            relay.join()

    def _relay(self, device: int) -> None:
        """Take packets and give them back, forever."""
        dice, waiting = random.Random(1), deque[tuple[float, bytes]]()
        free = 0.0  # when the link will have sent all that it was given
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            select.select([device], [], [], timeout)
            with suppress(BlockingIOError):
                for _ in range(MAX_AT_ONCE):
                    packet, now = os.read(device, MTU), time.monotonic()
                    sent = max(now, free) + len(packet) / self.bytes_per_s
                    if sent - now > self.round_trip_s or dice.random() < self.loss:
                        continue
                    free = sent
                    if packet[0] >> 4 == 4:  # what IPv6 sends by itself is dropped
                        waiting.append(
                            (sent + self.round_trip_s / 2, packet[:12] + packet[16:20] + packet[12:16] + packet[20:])
                        )
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(device, waiting.popleft()[1])


def _device() -> int:
    """Return a tun device that is up, and bring loopback up as well."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"slow", _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for request, address in ((_SIOCSIFADDR, HERE), (_SIOCSIFNETMASK, "255.255.255.0")):
                fcntl.ioctl(
                    s, request, struct.pack("16sHH4s16x", b"slow", socket.AF_INET, 0, socket.inet_aton(address))
                )
            for name in (b"slow", b"lo"):
                fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH22x", name, _IFF_UP))
    except OSError:
        os.close(device)
        raise
    return device


def apart(module: str, argument: str) -> int:
    """Run a module as a program with one argument, as root in a network namespace of its own; return its exit status.

    Raises:
        KvxferError: There is no program ``unshare`` (of util-linux).
    """
    command: Sequence[str] = ("unshare", "--map-root-user", "--net", sys.executable, "-m", module, argument)
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError as e:
        raise KvxferError("the program 'unshare' is not installed; it comes with util-linux") from e
