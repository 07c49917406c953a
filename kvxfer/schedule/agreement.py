"""When a load that several ranks took part in is whole."""

from collections.abc import Iterable

from kvxfer.identity import Generation

__all__ = ["RankAgreement"]


class RankAgreement:
    """What the ranks of one engine were delivered of each load.

    Every rank knows that all it has is of one generation. The ranks do not know of each other, and a producer that
    preempts a request between two of them gives them different ones: then none of it may be used together.
    """

    def __init__(self) -> None:
        self._generations: dict[str, set[Generation]] = {}

    def delivered(self, request: str, generations: Iterable[Generation]) -> None:
        """Some ranks were delivered these generations; -1 stands for a rank that had nothing to fetch."""
        self._generations.setdefault(request, set()).update(g for g in generations if g >= 0)

    def over(self, request: str) -> tuple[Generation, ...]:
        """All ranks have reported the load: the generations that they were delivered, in order. More than one: it failed.
        The load is forgotten."""
        return tuple(sorted(self._generations.pop(request, ())))

    def __len__(self) -> int:
        """Loads remembered."""
        return len(self._generations)
