"""The consumer's scheduler half: which requests load from outside, into which blocks, and how often."""

from collections.abc import Sequence

from kvxfer.identity import TransferId
from kvxfer.schedule.commands import Group, Release, Source, StepCommands


class Intake:
    """Decides what to load and queues the wants. One per engine; one thread."""

    def __init__(self, groups: Sequence[Group], own: Source | None = None) -> None: ...

    def arrive(self, request: str, transfer: TransferId, digest: bytes, source: Source, tokens: int) -> bool:
        """A request whose first `tokens` tokens can be had from `source`. Siblings (n > 1) share one transfer.

        False if a live request uses the same id for other content or another source: this one will not load.
        """

    def matched(self, request: str, computed: int) -> int | None:
        """How many tokens beyond the `computed` local ones can come from outside; no side effects.

        0: none (unknown, already taken, refused). None: a sibling is loading them; ask again next step."""

    def allocated(self, request: str, table: Sequence[Sequence[int]], computed: int, external: int) -> None:
        """The engine admitted the request with `external` tokens from outside behind `computed` local ones, into
        `table` (whole). A second call with external=0 after the load changes nothing."""

    def loaded(self, request: str, ok: bool) -> None:
        """The workers' verdict on the load."""

    def preempt(self, request: str) -> None:
        """The engine took the blocks away. What was loaded is lost; what was never loaded still can be."""

    def finish(self, request: str, reason: str = "finished") -> None:
        """The request is over, at whatever point (rejected, aborted, done)."""

    @property
    def waiting(self) -> dict[TransferId, Source]:
        """Transfers that nobody has wanted yet: the scheduler half keeps their leases alive."""

    def __len__(self) -> int:
        """Requests known."""

    def commands(self) -> StepCommands:
        """Wants and cancels since the last call."""

    def releases(self) -> tuple[Release, ...]:
        """Transfers given up unread since the last call; to be sent to their producers, not to workers."""
