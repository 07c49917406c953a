"""What must hold for any bytes at the decoder.

A frame is a message or a ``PeerError``, nothing else; what was decoded encodes to something that decodes to the same;
and what is done with a message first (tables, caches, routes) fails in its own words too.
"""

from __future__ import annotations

from kvxfer.errors import PeerError
from kvxfer.geometry import Incompatible, Planner
from kvxfer.protocol import messages as m
from tests.fuzz.frames import CACHE


def one(frame: bytes) -> bool:
    """Whether it was a message."""
    try:
        msg = m.decode(frame)
    except PeerError:
        return False
    assert m.decode(m.encode(msg)) == msg
    match msg:
        case m.FetchRequest() | m.PartReady():
            for row in msg.blocks:
                assert int(row.min(initial=0)) >= -1
        case m.Hello():
            try:
                msg.cache.check()
                Planner(CACHE, msg.cache, msg.assignments)
            except (ValueError, Incompatible):
                pass  # said in words
        case m.EngineDescriptor():
            for rank in msg.ranks:
                try:
                    rank.cache.check()
                except ValueError:
                    pass  # said in words
    return True
