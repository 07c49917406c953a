"""Tagged messages gathered from, and scattered to, many pieces of memory: the part of UCX that ucxx leaves out.

A few functions of the C library on the handles that ucxx gives out. A batch is one message with a list of
pieces (UCX's IOV data type) for each ``MESSAGE_BYTES``, or one message a piece where memory of a GPU is involved, which UCX
moves straight only in one piece. All messages of one tag and link arrive in the order sent.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvxfer.block_table import Ints

MESSAGE_BYTES = 8 << 20
"""UCX tells nothing of a message before it has ended, so a long batch of host memory is several, the last one shorter. Both sides cut
alike. A message costs 5 to 10 us."""

Pieces = Ints | list[tuple[int, int]]
"""Address and length of each piece: int64 ``[n, 2]``, or a plain list, which is quicker where there is only one."""

_STATUS = c_int8  # a packed enum
OK, TRUNCATED = 0, -9
_IN_PROGRESS = 1
_FIRST_ERROR = 2**64 - 100  # pointers from here on are negative status codes

_CONTIGUOUS_BYTES = 1 << 3
_IOV = 2

_FIELD_CALLBACK = 1 << 1
_FIELD_DATATYPE = 1 << 3
_FIELD_FLAGS = 1 << 4
_FIELD_MEMORY_TYPE = 1 << 6
_FIELD_RECV_INFO = 1 << 7
_CLOSE_FORCE = 1
_HOST_MEMORY = 0

_ANY_BYTE = ctypes.c_char(0)

_Callback = ctypes.CFUNCTYPE(None)  # there are arguments, which do not matter


class _RecvInfo(ctypes.Structure):
    _fields_ = [("sender_tag", c_uint64), ("length", c_size_t)]


class _Param(ctypes.Structure):
    """``ucp_request_param_t``; ``fields`` says which of the others count."""

    _fields_ = [
        ("fields", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", _Callback),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


class News:
    """``arrived``: something that was posted to any of our workers has ended, or an endpoint has broken. Set within progress."""

    def __init__(self) -> None:
        self.arrived = False
        self.callback = _Callback(self._come)

    def _come(self) -> None:
        self.arrived = True


class Posted:
    """Messages that were posted together: requests of UCX, with all that they point to.

    ``status`` is the first that was not ``OK``, and counts once ``done``. ``nbytes`` is the bytes of the messages that have been seen to
    have ended well.
    """

    def __init__(self, messages: Messages, keep: object = None, receives: bool = False) -> None:
        self._messages = messages
        self._keep = keep
        self._receives = receives
        self._requests: deque[tuple[int, int]] = deque()  # what has not been seen to have ended, and the bytes of each
        self.status = OK
        self.nbytes = 0

    def done(self) -> bool:
        """Whether UCX has ended all of them: it touches the memory no more."""
        m = self._messages
        while self._requests:
            request, nbytes = self._requests[0]
            status = m._test_recv(request, m._info_ref) if self._receives else m._test(request)
            if status == _IN_PROGRESS:
                return False
            self._requests.popleft()
            m._free(request)
            self._add(status, nbytes)
        self._keep = None
        return True

    def cancel(self) -> None:
        """End receives that no message has met. Nothing else can be cancelled, least of all sends."""
        for request, _ in self._requests if self._receives else ():
            self._messages._cancel(self._messages._worker, request)

    def _take(self, request: int | None, nbytes: int = 0) -> None:
        """Take what a function of UCX returned: nothing when all is done already, a status, or a request."""
        self._messages.posted = True
        if request is None:
            self._add(OK, nbytes)
        elif request >= _FIRST_ERROR:
            self._add(request - 2**64, nbytes)
        else:
            self._requests.append((request, nbytes))

    def _add(self, status: int, nbytes: int) -> None:
        self.status = self.status or status
        if status == OK:
            self.nbytes += self._messages._info.length if self._receives else nbytes


class Messages:
    """Posts messages on one worker (a handle, ``ucp_worker_h``). Only the thread that drives the worker may call.

    ``posted``: something was, and the worker has to be driven before it is left to sleep; the caller that has done so takes it back.
    """

    def __init__(self, ucp: ctypes.CDLL, worker: int, news: News) -> None:
        def function(name: str, result: Any, *arguments: Any) -> Any:
            f = ucp[name]  # an object of our own, so that no other user of the library is disturbed
            f.restype, f.argtypes = result, arguments
            return f

        param = POINTER(_Param)
        self._worker = worker
        self._send = function("ucp_tag_send_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, param)
        self._sync = function("ucp_tag_send_sync_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, param)
        self._recv = function("ucp_tag_recv_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, param)
        self._test = function("ucp_request_check_status", _STATUS, c_void_p)
        self._test_recv = function("ucp_tag_recv_request_test", _STATUS, c_void_p, c_void_p)
        self._free = function("ucp_request_free", None, c_void_p)
        self._cancel = function("ucp_request_cancel", None, c_void_p, c_void_p)
        self._close = function("ucp_ep_close_nbx", c_void_p, c_void_p, param)
        self._probe = function("ucp_tag_probe_nb", c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_void_p)
        self._fetch = function("ucp_tag_msg_recv_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, param)
        self._text = function("ucs_status_string", c_char_p, _STATUS)
        self.posted = False
        self._news = news
        # UCX reads parameters and writes information during a call only, so one of each will do.
        self._info = _RecvInfo()
        self._info_ref = byref(self._info)
        self._list = self._parameters(_FIELD_DATATYPE | _FIELD_MEMORY_TYPE | _FIELD_RECV_INFO, _IOV)
        self._host = self._parameters(_FIELD_DATATYPE | _FIELD_MEMORY_TYPE | _FIELD_RECV_INFO)
        # The kind of other memory is found out by UCX, and with it the device it lies on.
        self._device = self._parameters(_FIELD_DATATYPE | _FIELD_RECV_INFO)
        self._force = self._parameters(_FIELD_FLAGS)

    def describe(self, status: int) -> str:
        return str(self._text(status).decode())

    def send(self, endpoint: int, pieces: Pieces, nbytes: int, tag: int, host: bool) -> Posted:
        """Send ``pieces``, of ``nbytes`` in all, to the peer of an endpoint (a handle).

        ``host``, the same on both sides, says that both have them in host memory; it decides how many messages there
        are.
        """
        messages = _cut(pieces) if host and nbytes > MESSAGE_BYTES else [pieces]
        posted = Posted(self, messages)
        for buffer, count, param, size in self._layout(messages, nbytes, host):
            posted._take(self._send(endpoint, buffer, count, tag, param), size)
        return posted

    def receive(self, pieces: Pieces, nbytes: int, tag: int, host: bool) -> Posted:
        """Receive into ``pieces`` what is sent, or was sent, with this tag."""
        messages = _cut(pieces) if host and nbytes > MESSAGE_BYTES else [pieces]
        posted = Posted(self, messages, receives=True)
        for buffer, count, param, _ in self._layout(messages, nbytes, host):
            posted._take(self._recv(self._worker, buffer, count, tag, 2**64 - 1, param))
        return posted

    def say(self, endpoint: int, tag: int, yes: bool) -> Posted:
        """Send an answer: an empty message for yes, one that does not fit into it for no."""
        posted = Posted(self)
        posted._take(self._send(endpoint, ctypes.addressof(_ANY_BYTE), 0 if yes else 1, tag, self._host))
        return posted

    def greet(self, endpoint: int, tag: int) -> Posted:
        """Say yes, and be done once the peer has received it."""
        posted = Posted(self)
        posted._take(self._sync(endpoint, ctypes.addressof(_ANY_BYTE), 0, tag, self._host))
        return posted

    def hear(self, tag: int) -> Posted:
        """Receive an answer: ``status`` will be ``OK`` for yes, ``TRUNCATED`` for no."""
        posted = Posted(self, receives=True)
        posted._take(self._recv(self._worker, None, 0, tag, 2**64 - 1, self._host))
        return posted

    def close(self, endpoint: int) -> Posted:
        """Close an endpoint (a handle) that UCX has reported as failed."""
        posted = Posted(self)
        posted._take(self._close(endpoint, self._force))
        return posted

    def discard_strange(self, tag: int, mask: int) -> bool:
        """Throw away what arrived for tags that differ from this one within ``mask``: nobody will ever receive it.

        Returns whether there was any.
        """
        return sum(self.discard(~tag & 1 << bit, 1 << bit) for bit in range(64) if mask >> bit & 1) > 0

    def discard(self, tag: int, mask: int) -> bool:
        """Throw away what arrived for these tags and nobody received; whether there was any."""
        found = False
        while message := self._probe(self._worker, tag, mask, 1, self._info_ref):
            request = self._fetch(self._worker, None, 0, message, self._host)
            if request and request < _FIRST_ERROR:
                self._free(request)
            found = True
        return found

    def _parameters(self, fields: int, datatype: int = _CONTIGUOUS_BYTES) -> Any:
        return byref(
            _Param(
                fields=fields | _FIELD_CALLBACK,
                flags=_CLOSE_FORCE,
                callback=self._news.callback,
                datatype=datatype,
                memory_type=_HOST_MEMORY,
                recv_info=ctypes.addressof(self._info),
            )
        )

    def _layout(self, messages: list[Pieces], nbytes: int, host: bool) -> Iterator[tuple[int, int, Any, int]]:
        """Yield buffer, count, parameters and bytes of each message; what is not on the host becomes one a piece."""
        for n, pieces in enumerate(messages):
            if host and not isinstance(pieces, list) and len(pieces) > 1:
                # It is read as an array of ucp_dt_iov_t.
                assert pieces.dtype == np.int64 and pieces.flags.c_contiguous
                yield pieces.ctypes.data, len(pieces), self._list, min(MESSAGE_BYTES, nbytes - n * MESSAGE_BYTES)
                continue
            param = self._host if host else self._device
            for address, length in pieces if isinstance(pieces, list) else pieces.tolist():
                yield address, length, param, length


def _cut(pieces: Pieces) -> list[Pieces]:
    """Return the pieces of each message, of ``MESSAGE_BYTES`` but for the last."""
    if isinstance(pieces, list):
        return [
            [(address + at, min(MESSAGE_BYTES, length - at))]
            for address, length in pieces
            for at in range(0, length, MESSAGE_BYTES)
        ]
    ends = np.cumsum(pieces[:, 1])
    marks = np.arange(MESSAGE_BYTES, ends[-1], MESSAGE_BYTES)
    parts = np.union1d(ends, marks)  # where each part of a piece ends
    starts = np.concatenate(([0], parts[:-1]))
    piece = np.searchsorted(ends, starts, side="right")
    rows = np.stack([pieces[piece, 0] + starts - (ends - pieces[:, 1])[piece], parts - starts], axis=1)
    return np.split(rows, np.searchsorted(parts, marks) + 1)
