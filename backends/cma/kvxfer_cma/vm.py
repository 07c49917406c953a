"""One system call copies many pieces between the memories of two processes: process_vm_readv, _writev.

The kernel finds the other process by its number and holds its address space for the length of one call. Whose number it is, the
kernel has said (``PeerProcess``); a number can go to a new process, so after each call the kernel is asked whether it still is
that process's. ``exec`` changes the address space behind a number, and its owner may close the link or take memory
back. So every call is also tied to a *key*. This side draws it at random, and the owner shows it in its memory as long as the memory
may be reached. A read fetches the key in the same call as the data, which proves whose data they are. A write cannot do
that; there the key is read just before.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

from kvxfer.backend.process import PeerProcess
from kvxfer.block_table import Ints
from kvxfer.errors import PeerError

IOV_MAX = 1024
"""Pieces that one system call takes (``UIO_MAXIOV``)."""

KEY_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    if hasattr(_libc, _name):
        _function = getattr(_libc, _name)
        _table = [ctypes.c_void_p, ctypes.c_ulong]
        _function.argtypes = [ctypes.c_int, *_table, *_table, ctypes.c_ulong]
        _function.restype = ctypes.c_ssize_t


class Pieces:
    """Pieces of memory as ``struct iovec[n + 1]``: the first row is spare, piece ``i`` is row ``i + 1``.

    ``key``: where the peer's key is put by a read into them.
    """

    def __init__(self, addresses: Ints, lengths: Ints) -> None:
        self.rows = np.empty((len(lengths) + 1, 2), np.int64)
        self.rows[1:, 0] = addresses
        self.rows[1:, 1] = lengths
        self._address = self.rows.ctypes.data
        self.key = ctypes.create_string_buffer(KEY_BYTES)

    def row(self, index: int) -> int:
        return self._address + 16 * index

    def nbytes(self, lo: int, hi: int) -> int:
        return int(self.rows[lo + 1 : hi + 1, 1].sum())


class Process:
    """Another process of this host, whose memory may be read and written while it shows its key.

    ``read`` and ``write`` move the pieces ``[lo, hi)`` of two lists of pairwise equal length, at most ``IOV_MAX - 1`` at
    once. They use up the rows before ``hi``: move pieces in order. They fail with ``PeerError`` when the process is gone,
    refuses, shows another key, or has unmapped the memory; what a failed read left behind is worthless. Any thread, several at
    once with lists of their own.
    """

    def __init__(self, owner: PeerProcess, name: str, key_address: int, key: bytes) -> None:
        self._owner, self._pid, self._name, self._key = owner, owner.pid, name, key
        self._key_there = np.array([key_address, KEY_BYTES], np.int64)

    def read(self, local: Pieces, remote: Pieces, lo: int, hi: int) -> None:
        while lo < hi:
            moved = self._read_keyed(local, remote, lo, hi)
            lo = self._after(local, remote, lo, hi, moved)

    def write(self, local: Pieces, remote: Pieces, lo: int, hi: int) -> None:
        while lo < hi:
            self._read_keyed(local, remote, lo, lo)
            moved = self._call(_libc.process_vm_writev, local, remote, lo + 1, hi - lo)
            lo = self._after(local, remote, lo, hi, moved)

    def _read_keyed(self, local: Pieces, remote: Pieces, lo: int, hi: int) -> int:
        """Read the key and the pieces behind it; returns the bytes of the pieces that were moved."""
        local.rows[lo] = ctypes.addressof(local.key), KEY_BYTES  # in the row of the piece before, which is done
        remote.rows[lo] = self._key_there
        local.key.raw = bytes(KEY_BYTES)
        moved = self._call(_libc.process_vm_readv, local, remote, lo, hi - lo + 1)
        if not self._owner.lives():  # the number may have been another's in this call
            raise PeerError(f"{self._name} (process {self._pid}) is gone")
        if local.key.raw != self._key:
            raise PeerError(
                f"process {self._pid} is no longer {self._name}, or that has closed this link or taken back "
                "the memory; connect again"
            )
        return moved - KEY_BYTES

    def _after(self, local: Pieces, remote: Pieces, lo: int, hi: int, moved: int) -> int:
        """Return the first piece that is not done; if it is begun, it is cut to what is left.

        The kernel stops early at memory that is not mapped, and says so only when that memory comes first.
        """
        if moved == local.nbytes(lo, hi):
            return hi
        if moved == 0:
            raise self._error(OSError(errno.EFAULT, os.strerror(errno.EFAULT)))
        ends = np.cumsum(local.rows[lo + 1 : hi + 1, 1])
        done = int(np.searchsorted(ends, moved, side="right"))
        part = moved - (int(ends[done - 1]) if done else 0)
        for pieces in (local, remote):
            pieces.rows[lo + done + 1] += part, -part
        return lo + done

    def _call(self, function: ctypes._NamedFuncPointer, local: Pieces, remote: Pieces, row: int, n: int) -> int:
        moved = function(self._pid, local.row(row), n, remote.row(row), n, 0)
        if moved < 0:
            number = ctypes.get_errno()
            raise self._error(OSError(number, os.strerror(number)))
        return int(moved)

    def _error(self, e: OSError) -> PeerError:
        who = f"{self._name} (process {self._pid})"
        if e.errno == errno.ESRCH:
            return PeerError(f"{who} is gone")
        if e.errno == errno.EPERM:
            return PeerError(_forbidden(who))
        if e.errno == errno.EFAULT:
            return PeerError(f"memory of a batch with {who} is not mapped any more, there or on this side")
        return PeerError(f"copying from or to the memory of {who} failed: {e}")


def refusal(process: PeerProcess, name: str) -> str | None:
    """Return why this process may not touch the memory of that one; ``None`` if it may, or if that one has ended."""
    if not process.pid:
        return (
            f"{name} runs in another pid namespace (container): share one (`--pid=container:NAME`, Kubernetes "
            "`shareProcessNamespace`), or use `mode: shm`"
        )
    if not process.held:
        return f"the kernel, older than 5.3, does not tell of the end of {name}, whose number may be another's by then; use `mode: shm`"
    nowhere = Pieces(np.array([1]), np.array([1]))  # never mapped, so that nothing is read
    here = ctypes.create_string_buffer(1)
    target = Pieces(np.array([ctypes.addressof(here)]), np.array([1]))
    _libc.process_vm_readv(process.pid, target.row(1), 1, nowhere.row(1), 1, 0)
    return _forbidden(f"{name} (process {process.pid})") if ctypes.get_errno() == errno.EPERM else None


def _forbidden(who: str) -> str:
    return (
        f"the kernel refuses access to the memory of {who}. Run both as one user and, where Yama's "
        "ptrace_scope is 1, set `allow_ptrace: true` in the back-end options of both; or grant "
        "CAP_SYS_PTRACE, or use `mode: shm`. `kvxfer doctor` shows what is in force"
    )


def copy_own(write: bool, pieces: Pieces, lo: int, hi: int, address: int) -> int:
    """Copy pieces ``[lo, hi)`` of this very process to contiguous memory (``write``), or back from there; at most ``IOV_MAX``.

    Return the bytes copied.

    Raises:
        OSError: The kernel refuses.
    """
    whole = np.array([address, pieces.nbytes(lo, hi)], np.int64)
    function = _libc.process_vm_writev if write else _libc.process_vm_readv
    moved = function(os.getpid(), pieces.row(lo + 1), hi - lo, whole.ctypes.data, 1, 0)
    if moved != whole[1]:
        number = ctypes.get_errno() if moved < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return int(moved)


def unsupported() -> str | None:
    """Why these calls cannot be used even within this process, or ``None`` when they can."""
    if not hasattr(_libc, "process_vm_readv"):
        return "this system has no process_vm_readv (it is a Linux call)"
    source, target = np.arange(KEY_BYTES, dtype=np.uint8), np.zeros(KEY_BYTES, np.uint8)
    piece = Pieces(np.array([target.ctypes.data]), np.array([KEY_BYTES]))
    try:
        copy_own(False, piece, 0, 1, source.ctypes.data)
    except OSError as e:
        return f"process_vm_readv fails even within this process ({e}); a seccomp filter may forbid it"
    return None
