"""Fences for clauses: one that is opened by hand, and one that passes between two checks."""


class HostFence:
    """A fence that a clause opens by hand."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    @property
    def event(self) -> None:
        return None


class CountedFence:
    """A fence that has passed once it has been asked a given number of times."""

    event = None

    def __init__(self, asks: int) -> None:
        self._left = asks

    def passed(self) -> bool:
        self._left -= 1
        return self._left < 0
