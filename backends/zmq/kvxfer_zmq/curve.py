"""CurveZMQ (ZeroMQ's RFC 26): everything that travels is encrypted, and each side knows that the other is who it is meant to be.

A process has one pair of keys, made when it starts. The public key is told in endpoints alone and never travels with the bytes, so
a peer that was given no endpoint does not get past the handshake. The link's tokens show which link a peer belongs to.
"""

from __future__ import annotations

from typing import Any

import zmq

from kvxfer.errors import TransportError


class Keys:
    """The keys of one agent.

    Raises:
        TransportError: This build of ZeroMQ cannot encrypt.
    """

    def __init__(self) -> None:
        if not zmq.has("curve"):
            raise TransportError("option 'encrypt' of back end 'zmq' needs a libzmq with CURVE, which this one lacks")
        self.public, self._secret = zmq.curve_keypair()

    def listen(self, socket: zmq.Socket[Any]) -> None:
        """Let those in who know our public key."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def dial(self, socket: zmq.Socket[Any], theirs: bytes) -> None:
        """Speak to nobody but the holder of this public key."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, theirs)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
