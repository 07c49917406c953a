"""Metadata of NIXL agents, which begin with the name that an agent has given itself."""

from __future__ import annotations

import hashlib
import struct

from kvxfer.errors import TransportError

__all__ = ["name_in", "renamed"]

_BEFORE = b"nixlSerDes|Agent"
_SIZE = struct.Struct("<Q")
_AT = len(_BEFORE) + _SIZE.size


def name_in(metadata: bytes) -> bytes:
    """Return the name that an agent claims.

    Raises:
        TransportError: These are no metadata of an agent.
    """
    if metadata.startswith(_BEFORE) and len(metadata) > _AT:
        (size,) = _SIZE.unpack_from(metadata, len(_BEFORE))
        if 0 < size < len(metadata) - _AT:
            return metadata[_AT : _AT + size]
    raise TransportError(
        "it has sent what are no metadata of a NIXL agent; install the same release of NIXL on both sides"
    )


def renamed(metadata: bytes) -> tuple[str, bytes]:
    """Return a name made of all that the metadata say, and the metadata under that name.

    NIXL takes one agent of each name, and nothing proves a name. So a peer that claims its neighbour's is another agent here.

    Raises:
        TransportError: These are no metadata of an agent.
    """
    end = _AT + len(name_in(metadata))
    name = hashlib.blake2b(metadata, digest_size=16).hexdigest()
    return name, _BEFORE + _SIZE.pack(len(name)) + name.encode() + metadata[end:]
