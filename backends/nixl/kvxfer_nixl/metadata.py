"""Metadata of NIXL agents, which begin with the name that an agent has given itself."""

from __future__ import annotations

import hashlib
import struct

_BEFORE = b"nixlSerDes|Agent"
_SIZE = struct.Struct("<Q")
_AT = len(_BEFORE) + _SIZE.size


def name_in(metadata: bytes) -> bytes:
    """Return the name that an agent claims; empty if these are no metadata of an agent, as NIXL 1.x writes them."""
    if not metadata.startswith(_BEFORE) or len(metadata) <= _AT:
        return b""
    (size,) = _SIZE.unpack_from(metadata, len(_BEFORE))
    return metadata[_AT : _AT + size] if size < len(metadata) - _AT else b""


def renamed(metadata: bytes) -> tuple[str, bytes]:
    """Return a name made of all that the metadata of an agent say, and the metadata under that name.

    NIXL takes one agent of each name, and nothing proves a name. So a peer that claims its neighbour's is another agent here.
    """
    end = _AT + len(name_in(metadata))
    name = hashlib.blake2b(metadata, digest_size=16).hexdigest()
    return name, _BEFORE + _SIZE.pack(len(name)) + name.encode() + metadata[end:]
