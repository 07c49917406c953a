"""What of a prompt a block table holds, and whether that can be offered."""

from collections.abc import Sequence

from kvxfer.ledger import BlockLedger
from kvxfer.schedule.commands import check_table
from kvxfer.schedule.offering import Offering
from kvxfer.values import NULL, BlockTable, Group


class Coverage:
    """Reads the block tables of one engine."""

    def __init__(self, groups: Sequence[Group], ledger: BlockLedger) -> None:
        self._groups, self._ledger = tuple(groups), ledger
        self.fulls = any(group.kind == "full" for group in self._groups)
        self.windows = any(group.kind == "window" for group in self._groups)
        self.states = any(group.kind == "state" for group in self._groups)
        self._nothing = BlockTable((b"",) * len(self._groups))

    def complete(self, offering: Offering, table: BlockTable) -> tuple[int, BlockTable]:
        """Return the tokens complete in all ``full`` groups once the step is over, and the blocks that hold them.

        These are whole blocks, which move best, or parts of one if a step completes none, as with one block for each request.
        """
        check_table(self._groups, table)
        ready = min(offering.progress, offering.total)
        full = [(group, table.count(g)) for g, group in enumerate(self._groups) if group.kind == "full"]
        tokens = min((_whole(group, present, ready, ready == offering.total) for group, present in full), default=0)
        if tokens <= offering.tokens:
            tokens = min((min(ready, present * group.block_tokens) for group, present in full), default=0)
        return tokens, self.full(table, tokens)

    def last(self, offering: Offering, table: BlockTable, end: BlockTable | None) -> BlockTable | None:
        """Return the table of a prompt that this step completes, if all of it will stay as it is; else None, until ``finish``."""
        if self.windows and end is None:
            return None
        if self.states and not (
            offering.stops and offering.progress == offering.total and self._has_state(offering, table)
        ):
            return None
        return table if end is None else self._join(table, end)

    def unusable(self, offering: Offering, table: BlockTable) -> str | None:
        """Return why a finished request cannot be offered whole; None if it can."""
        if offering.progress < offering.total:
            return f"the producer finished with {offering.progress} of {offering.total} tokens computed"
        check_table(self._groups, table)
        total = offering.total
        if any(table.count(g) < group.moved(total)[1] for g, group in enumerate(self._groups)):
            return f"the producer finished with too few blocks for {total} tokens"
        if not self._has_state(offering, table):
            return f"the producer finished without its recurrent state of {total} tokens"
        filled = self.filled(offering, table, total)
        if filled is not None:
            return f"the producer finished with {filled}"
        if offering.progress > offering.total and self.states:
            return (
                f"the producer's recurrent state holds {offering.progress} tokens instead of {offering.total}: "
                "limit the prefill request to one output token"
            )
        return None

    def filled(self, offering: Offering, table: BlockTable, tokens: int) -> str | None:
        """Return which block of a table, up to this token, a load fills. What is offered already none may fill."""
        offered = offering.blocks if table.continues(offering.blocks) else self._nothing
        spans = [group.moved(tokens) for group in self._groups]
        new = [(g, (max(first, offered.count(g)), past)) for g, (first, past) in enumerate(spans)]
        found = self._ledger.overlap(self._ledger.blocks(table, new), fills=False)
        return None if found is None else f"block {found[0]}, which {found[1]} still fills"

    def _has_state(self, offering: Offering, table: BlockTable) -> bool:
        """Return whether each recurrent state after the prompt has its block."""
        last = table.only(group.moved(offering.total) for group in self._groups)
        rows = [last[g] for g, group in enumerate(self._groups) if group.kind == "state"]
        return all(len(row) and row[-1] != NULL for row in rows)

    def full(self, table: BlockTable, tokens: int) -> BlockTable:
        """Return the blocks of ``tokens`` tokens, of ``full`` groups only."""
        return table.only(group.moved(tokens) if group.kind == "full" else (0, 0) for group in self._groups)

    def _join(self, table: BlockTable, late: BlockTable) -> BlockTable:
        """Return a table with its window groups taken from another."""
        rows = zip(self._groups, table.rows, late.rows, strict=True)
        return BlockTable(tuple(b if group.kind == "window" else a for group, a, b in rows))


def _whole(group: Group, present: int, ready: int, last: bool) -> int:
    """Return how many of ``ready`` tokens are in full blocks of the ``present`` ones; if ``last``, in any of them."""
    if last and present >= group.blocks(ready):
        return ready
    return min(ready // group.block_tokens, present) * group.block_tokens
