"""The programs of `test_impostors.py`: a process with a secret, a transport on its host, and a peer elsewhere that claims to be it.

Each is told what to do and tells what has come of it in lines of JSON. The peer holds its own bytes at the address at which the other
process has the secret, and its UCX address is genuine but for that process's number. Two hosts of these tests have one kernel, so that
UCX takes them for one host: as if the peer had claimed the other's host as well.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.backend.ucx import Split
from kvxfer.geometry.region import Region
from kvxfer.testing.forging import _put_together, _taken_apart
from kvxfer.transport import Batch, Verb

ADDRESS = 0x5A00_0000_0000
NBYTES = 1 << 20
SECRET, OWN = b"the secret of another process...", b"what the peer says itself......."
_MAP_FIXED_NOREPLACE = 0x100000


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def mapped(content: bytes) -> Any:
    """Return memory at ``ADDRESS``, full of this."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    at = libc.mmap(ADDRESS, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert at == ADDRESS, f"there is no room at {ADDRESS:#x}"
    found = np.frombuffer((ctypes.c_uint8 * NBYTES).from_address(ADDRESS), np.uint8)
    found[:] = np.frombuffer(content * (NBYTES // len(content)), np.uint8)
    return found


def transport(backend: str, listen: str, **options: Any) -> Any:
    if backend == "ucx":
        from kvxfer_ucx import UcxTransport

        return UcxTransport(f"{backend} at {listen}", {"listen": listen, "connect_timeout_s": 5, **options})
    from kvxfer_nixl import NixlTransport

    return NixlTransport(f"{backend} at {listen}", {"listen": listen, "verbs": ["read", "write"], **options})


def shared(content: bytes) -> tuple[int, Any]:
    """Return a System V segment full of this, and its number."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, ctypes.c_size_t(NBYTES), 0o1600)
    at = libc.shmat(number, None, 0)
    libc.shmctl(number, 0, None)  # it goes with those who have attached it
    found = np.frombuffer((ctypes.c_uint8 * NBYTES).from_address(at), np.uint8)
    found[:] = np.frombuffer(content * (NBYTES // len(content)), np.uint8)
    return number, found


def segments() -> set[int]:
    """Return the numbers of the System V segments that this process has attached."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/SYSV" in line}


def holder() -> None:
    secret, (segment, lent) = mapped(SECRET), shared(SECRET)
    say(pid=os.getpid(), segment=segment)
    sys.stdin.readline()
    say(whole=all(memory.tobytes() == SECRET * (NBYTES // len(SECRET)) for memory in (secret, lent)))


def undivide(backend: str) -> None:
    """Have UCX use shared memory and a network in one context, as it does by itself."""
    options = importlib.import_module(f"kvxfer_{backend}.options")
    options.split = lambda settings, gpus: Split(None, dict(settings))  # type: ignore[attr-defined]


def victim(backend: str, listen: str, undivided: str = "", control: str = "") -> None:
    """Receive, or read, what the peer has; tell what has come. ``undivided``: as if UCX's transports were not divided."""
    if undivided:
        undivide(backend)
    memory = np.zeros(NBYTES, np.uint8)
    side = transport(backend, listen)
    number = side.register([Region(memory.ctypes.data, NBYTES)])
    mine = side.endpoint()
    say(endpoint=mine.hex(), pid=os.getpid())
    theirs = bytes.fromhex(hear()["endpoint"])
    error = None
    try:
        peer = side.connect_over(mine, theirs, control.encode())
        verb = Verb.RECV if backend == "ucx" else Verb.READ
        lengths, zero = np.array([NBYTES]), np.array([0])
        side.submit(Batch(verb, peer, number, lengths, zero, 0, None if backend == "ucx" else zero))
        until, done = time.monotonic() + 12, list[Any]()
        while not done and time.monotonic() < until:
            done += side.poll()
            time.sleep(0.001)
        lost = side.lost(peer)
        error = (
            lost.detail if lost else str(done[0].error) if done and done[0].error else None if done else "nothing came"
        )
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    found = memory.tobytes()
    say(secret=SECRET in found, own=found[: len(OWN)] == OWN, error=error, segments=sorted(segments()))
    sys.stdin.readline()
    side.close()


def altered(field: Any, numbers: dict[int, int]) -> Any:
    for own, other in numbers.items() if isinstance(field, bytes) else ():
        field = field.replace(own.to_bytes(4, "little"), other.to_bytes(4, "little"))
    return field


def peer(backend: str, listen: str, allowed: str, pid: str, segment: str) -> None:
    """Offer one's own bytes at the address of the secret, as the process with this number and this shared memory.

    Args:
        allowed: What its own UCX may use; the victim's then takes the same.
    """
    mapped(OWN)
    undivide(backend)
    side = transport(backend, listen, ucx={"TLS": allowed})
    number = side.register([Region(ADDRESS, NBYTES)])
    mine = side.endpoint()
    said = _taken_apart(mine)
    assert said is not None
    fields = [altered(f, {os.getpid(): int(pid), **dict.fromkeys(segments(), int(segment))}) for f in said[1]]
    say(endpoint=_put_together(said[0], fields).hex(), forged=fields != said[1])
    give(backend, side, number, mine)


def honest(backend: str, listen: str) -> None:
    """Offer one's own bytes, as who one is."""
    own = np.frombuffer(bytearray(OWN * (NBYTES // len(OWN))), np.uint8)
    side = transport(backend, listen)
    number = side.register([Region(own.ctypes.data, NBYTES)])
    mine = side.endpoint()
    say(endpoint=mine.hex())
    give(backend, side, number, mine)


def give(backend: str, side: Any, number: int, mine: bytes) -> None:
    theirs = bytes.fromhex(hear()["endpoint"])
    link = side.connect(mine, theirs)
    if backend == "ucx":
        side.submit(Batch(Verb.SEND, link, number, np.array([NBYTES]), np.array([0])))
    until = time.monotonic() + 15
    while time.monotonic() < until:
        side.poll()
        time.sleep(0.001)


if __name__ == "__main__":
    {"holder": holder, "victim": victim, "peer": peer, "honest": honest}[sys.argv[1]](*sys.argv[2:])
