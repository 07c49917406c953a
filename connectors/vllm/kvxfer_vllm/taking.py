"""The consumer's blocks: of a load that has failed, some may still be written to. vLLM is told of the failure at once and
goes on elsewhere, while we keep those blocks until all ranks have reported them quiet."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.geometry import Rank
from kvxfer.schedule import FetchSchedule
from kvxfer_vllm.holds import Holds

__all__ = ["Taking"]


class Taking:
    def __init__(self, intake: FetchSchedule, holds: Holds) -> None:
        self._intake, self._holds = intake, holds
        self._blocks: dict[str, tuple[int, ...]] = {}  # of requests whose load is under way
        self._moving: dict[str, set[Rank]] = {}  # failed, and where it still writes
        self._over: set[str] = set()  # those of them that vLLM knows to be over

    def begins(self, request: str, blocks: tuple[int, ...]) -> None:
        """A load into these blocks is on its way to the workers."""
        self._blocks[request] = blocks

    def blocks(self, request: str) -> tuple[int, ...]:
        """Those of a request whose load is under way."""
        return self._blocks.get(request, ())

    def moving(self, request: str, ranks: Iterable[Rank]) -> None:
        """It has failed, and these ranks still write; vLLM, which has the blocks yet, hears of it next."""
        if request not in self._moving:
            self._holds.keep(request, self.blocks(request))
            self._intake.preempt(request)
        self._moving.setdefault(request, set()).update(ranks)

    def still(self, request: str, ranks: Iterable[Rank]) -> None:
        """Those ranks no longer do."""
        self._moving[request].difference_update(ranks)
        if not self._moving[request]:
            del self._moving[request]
            self._holds.drop(request)
            if request in self._over:
                self._over.remove(request)
                self._intake.loaded(request)

    def over(self, request: str) -> None:
        """All ranks have reported the load to vLLM, well or badly."""
        self._blocks.pop(request, None)
        if request in self._moving:
            self._over.add(request)
        else:
            self._intake.loaded(request)

    @property
    def waiting(self) -> bool:
        """Whether blocks are kept of which vLLM may know no request."""
        return bool(self._moving)

    def __len__(self) -> int:
        return len(self._blocks) + len(self._moving) + len(self._over)
