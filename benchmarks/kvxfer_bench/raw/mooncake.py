"""Mooncake by itself, for ``kvxfer bench transfer``: one blocking READ a transfer, one request a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvxfer.errors import TransportError
from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_mooncake.library import LibraryEngine
from kvxfer_mooncake.options import Options

__all__ = ["MooncakeRaw"]


class MooncakeRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = False

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        self._engine = LibraryEngine(Options.parse(options))
        self._address = region.address
        self._engine.register(region.address, region.nbytes)

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode((self._engine.name, self._address))

    def connect(self, theirs: bytes) -> None:
        self._peer, self._there = msgspec.msgpack.decode(theirs)

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        if not self._engine.read(
            self._peer, (self._address + here).tolist(), (self._there + there).tolist(), lengths.tolist()
        ):
            raise TransportError(f"Mooncake's READ from {self._peer} failed; it has written the reason to stderr")

    def close(self) -> None:
        self._engine.close()
