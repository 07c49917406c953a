"""Decide whether the shares of a load that several ranks were delivered belong together."""

from collections.abc import Iterable

from kvxfer.identity import Generation

__all__ = ["RankAgreement"]


class RankAgreement:
    """The generations that the ranks of one engine were delivered of each load.

    Every rank knows that everything it has is of one generation. But the ranks do not know of each other, and a producer that
    preempts a request between two of them gives them different ones, which may not be used together.
    """

    def __init__(self) -> None:
        self._generations: dict[str, set[Generation]] = {}

    def delivered(self, request: str, generations: Iterable[Generation]) -> None:
        """Record the generations that some ranks were delivered."""
        self._generations.setdefault(request, set()).update(generations)

    def agreed(self, request: str) -> bool:
        """Return whether everything recorded of a load is of one generation."""
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
