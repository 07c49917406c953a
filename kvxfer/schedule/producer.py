"""The producer's scheduler half: what of each prefill may be read, and until when."""

from collections.abc import Sequence

from kvxfer.identity import TransferId
from kvxfer.schedule.commands import Group, StepCommands


class PrefillTracker:
    """Turns a scheduler's steps into offers and revocations. One per engine; one thread."""

    def __init__(self, groups: Sequence[Group]) -> None: ...

    def arrive(self, request: str, transfer: TransferId, digest: bytes, tokens: int) -> bool:
        """A request whose first `tokens` tokens somebody will ask for.

        False (and the request is not tracked) if another request offers the same transfer: a sibling of n > 1.
        """

    def step(self, request: str, computed: int, scheduled: int, table: Sequence[Sequence[int]]) -> None:
        """The request runs in this step: `computed` tokens came before (prefix-cache hits included), `scheduled`
        are added, `table` is the WHOLE block table after allocation. Unknown requests are ignored."""

    def preempt(self, request: str) -> None:
        """The engine took the blocks away and will start the request again."""

    def finish(self, request: str, table: Sequence[Sequence[int]], complete: bool) -> bool:
        """The request is over; `complete`: normally, so that its KV is good. True: keep the blocks until
        `released` names the request. False: free them now."""

    def expire(self, transfer: TransferId, reason: str) -> None:
        """The lease on finished blocks has run out: revoke them. They stay held until `released`."""

    def released(self, transfer: TransferId) -> str | None:
        """All readers are done (or revoked and quiet). Returns the request whose held blocks are to be freed now,
        None if it still runs or holds none."""

    @property
    def held(self) -> frozenset[TransferId]:
        """Transfers whose request has finished and whose blocks are not released."""

    def __len__(self) -> int:
        """Requests tracked, held ones included."""

    def commands(self) -> StepCommands:
        """What has come up since the last call; call once per step, after all `step` and `preempt` calls."""
