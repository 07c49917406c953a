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
        """Note the generations that some ranks were delivered."""
        self._generations.setdefault(request, set()).update(generations)

    def agreed(self, request: str) -> bool:
        """Whether all that was noted of a load is of one generation."""
        return len(self._generations.get(request, ())) <= 1

    def over(self, request: str) -> tuple[Generation, ...]:
        """Forget a load that all ranks have reported.

        Returns:
            The generations that they were delivered, in order. If there is more than one, the load has failed.
        """
        return tuple(sorted(self._generations.pop(request, ())))

    def __len__(self) -> int:
        """Return how many loads are remembered."""
        return len(self._generations)
