"""Tagged messages gathered from, and scattered to, many pieces of memory: the part of UCX that ucxx leaves out.

A few functions of the C library on the handles that ucxx gives out. A batch is *one* message with a list of
pieces (UCX's IOV data type), or one message a piece where memory of a GPU is involved, which UCX moves
straight only in one piece. All messages of one tag and link arrive in the order sent.
"""

from __future__ import annotations

import ctypes
from collections import deque
from ctypes import POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvxfer.geometry.plan import Ints

__all__ = ["OK", "TRUNCATED", "Messages", "Posted"]

_STATUS = c_int8  # a packed enum
OK, TRUNCATED = 0, -9
_IN_PROGRESS = 1
_FIRST_ERROR = 2**64 - 100  # pointers from here on are negative status codes

_CONTIGUOUS_BYTES = 1 << 3
_IOV = 2

_FIELD_DATATYPE = 1 << 3
_FIELD_FLAGS = 1 << 4
_FIELD_MEMORY_TYPE = 1 << 6
_FIELD_RECV_INFO = 1 << 7
_CLOSE_FORCE = 1
_HOST_MEMORY = 0


class _RecvInfo(ctypes.Structure):
    _fields_ = [("sender_tag", c_uint64), ("length", c_size_t)]


class _Param(ctypes.Structure):
    """``ucp_request_param_t``; ``fields`` says which of the others count."""

    _fields_ = [
        ("fields", c_uint32), ("flags", c_uint32), ("request", c_void_p), ("callback", c_void_p),
        ("datatype", c_uint64), ("user_data", c_void_p), ("reply_buffer", c_void_p), ("memory_type", c_int),
        ("recv_info", c_void_p), ("memh", c_void_p),
    ]  # fmt: skip


class Posted:
    """Messages that were posted together: requests of UCX, with all that they point to.

    ``status`` is the first that was not ``OK``, ``nbytes`` the number of bytes received; both count once ``done``.
    """

    def __init__(self, messages: Messages, keep: object = None, receives: bool = False) -> None:
        self._messages = messages
        self._keep = keep
        self._receives = receives
        self._requests: deque[int] = deque()
        self.status = OK
        self.nbytes = 0

    def done(self) -> bool:
        """Whether UCX has ended all of them: it touches the memory no more."""
        info = _RecvInfo()
        while self._requests:
            request = self._requests[0]
            if self._receives:
                status = self._messages._test_recv(request, byref(info))
            else:
                status = self._messages._test(request)
            if status == _IN_PROGRESS:
                return False
            self._requests.popleft()
            self._messages._free(request)
            self._add(status, info.length)
        self._keep = None
        return True

    def cancel(self) -> None:
        """End receives that no message has met. Nothing else can be cancelled, least of all sends."""
        for request in self._requests if self._receives else ():
            self._messages._cancel(self._messages._worker, request)

    def _add(self, status: int, nbytes: int) -> None:
        self.status = self.status or status
        self.nbytes += nbytes


class Messages:
    """Posts messages on one worker (a handle, ``ucp_worker_h``). Only the thread that drives the worker may call."""

    def __init__(self, ucp: ctypes.CDLL, worker: int) -> None:
        def function(name: str, result: Any, *arguments: Any) -> Any:
            f = ucp[name]  # an object of our own, so that no other user of the library is disturbed
            f.restype, f.argtypes = result, arguments
            return f

        param = POINTER(_Param)
        self._worker = worker
        self._send = function("ucp_tag_send_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, param)
        self._recv = function("ucp_tag_recv_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, param)
        self._test = function("ucp_request_check_status", _STATUS, c_void_p)
        self._test_recv = function("ucp_tag_recv_request_test", _STATUS, c_void_p, c_void_p)
        self._free = function("ucp_request_free", None, c_void_p)
        self._cancel = function("ucp_request_cancel", None, c_void_p, c_void_p)
        self._close = function("ucp_ep_close_nbx", c_void_p, c_void_p, param)
        self._probe = function("ucp_tag_probe_nb", c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_void_p)
        self._fetch = function("ucp_tag_msg_recv_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, param)
        self._text = function("ucs_status_string", c_char_p, _STATUS)

    def describe(self, status: int) -> str:
        return str(self._text(status).decode())

    def send(self, endpoint: int, pieces: Ints, tag: int, host: bool) -> Posted:
        """Send ``pieces`` (int64 ``[n, 2]``: address, length) to the peer of an endpoint (a handle). ``host``, the same
        on both sides, says that both have it in host memory; it decides how many messages there are."""
        posted = Posted(self, pieces)
        for buffer, count, param in _layout(pieces, host):
            self._take(posted, self._send(endpoint, buffer, count, tag, byref(param)), 0)
        return posted

    def receive(self, pieces: Ints, tag: int, host: bool) -> Posted:
        """Receive into ``pieces`` what is sent, or was sent, with this tag."""
        posted, info = Posted(self, pieces, receives=True), _RecvInfo()
        for buffer, count, param in _layout(pieces, host):
            param.fields |= _FIELD_RECV_INFO
            param.recv_info = ctypes.addressof(info)
            self._take(posted, self._recv(self._worker, buffer, count, tag, 2**64 - 1, byref(param)), info.length)
        return posted

    def close(self, endpoint: int) -> Posted:
        """Close an endpoint (a handle) that UCX has reported as failed."""
        posted = Posted(self)
        self._take(posted, self._close(endpoint, byref(_Param(fields=_FIELD_FLAGS, flags=_CLOSE_FORCE))), 0)
        return posted

    def discard(self, tag: int, mask: int) -> None:
        """Throw away what arrived for these tags and nobody received."""
        info = _RecvInfo()
        while message := self._probe(self._worker, tag, mask, 1, byref(info)):
            request = self._fetch(self._worker, None, 0, message, byref(_Param()))
            if request and request < _FIRST_ERROR:
                self._free(request)

    @staticmethod
    def _take(posted: Posted, request: int | None, nbytes: int) -> None:
        if request is None:
            posted._add(OK, nbytes)
        elif request >= _FIRST_ERROR:
            posted._add(request - 2**64, 0)
        else:
            posted._requests.append(request)


def _layout(pieces: Ints, host: bool) -> list[tuple[int, int, _Param]]:
    """(buffer, count, parameters) of each message."""
    if host and len(pieces) > 1:
        assert pieces.dtype == np.int64 and pieces.flags.c_contiguous  # it is read as an array of ucp_dt_iov_t
        param = _Param(fields=_FIELD_DATATYPE | _FIELD_MEMORY_TYPE, datatype=_IOV, memory_type=_HOST_MEMORY)
        return [(pieces.ctypes.data, len(pieces), param)]
    # The kind of other memory is found out by UCX, and with it the device it lies on.
    fields = _FIELD_DATATYPE | (_FIELD_MEMORY_TYPE if host else 0)
    return [
        (address, length, _Param(fields=fields, datatype=_CONTIGUOUS_BYTES, memory_type=_HOST_MEMORY))
        for address, length in pieces.tolist()
    ]
