"""Memory that the engine knows. It takes no bytes twice, and ours may: two memories may share some."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.geometry.region import Region
from kvxfer_mooncake.library import LibraryEngine

__all__ = ["Spans"]


class Spans:
    """What is registered: by address of each span its bytes, and how many regions lie within it."""

    def __init__(self, engine: LibraryEngine) -> None:
        self._engine = engine
        self._spans: dict[int, tuple[int, int]] = {}

    def add(self, regions: Iterable[Region]) -> None:
        """Register regions, but for those that lie within a span.

        Raises:
            TransportError: One overlaps with a span in part, or the engine does not take it; then nothing has changed.
        """
        added: list[Region] = []
        try:
            for region in sorted(regions, key=lambda r: -r.nbytes):
                at = self._around(region)
                if at is None:
                    self._engine.register(region.address, region.nbytes)
                    at = region.address
                nbytes, users = self._spans.get(at, (region.nbytes, 0))
                self._spans[at] = nbytes, users + 1
                added.append(region)
        except BaseException:
            self.remove(added)
            raise

    def remove(self, regions: Iterable[Region]) -> None:
        """Take regions back; a span is given back with the last region within it."""
        for region in regions:
            at = self._around(region)
            assert at is not None  # it was added
            nbytes, users = self._spans.pop(at)
            if users > 1:
                self._spans[at] = nbytes, users - 1
            else:
                self._engine.unregister(at)

    def clear(self) -> None:
        """Take everything back."""
        for at in self._spans:
            self._engine.unregister(at)
        self._spans.clear()

    def _around(self, region: Region) -> int | None:
        end = region.address + region.nbytes
        return next((at for at, (n, _) in self._spans.items() if at <= region.address and end <= at + n), None)
