"""What other engines ask for of this engine's cache, and what they get."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvxfer import arguments
from kvxfer.identity import TransferId
from kvxfer.schedule.chain import Chain
from kvxfer.values import MOST_TOKENS, BlockTable

__all__ = ["AnswerCounts", "Held", "Holds", "Inquiry"]


class Inquiry(msgspec.Struct, frozen=True):
    """Another engine asks what this one holds of a prompt that it is about to compute.

    Attributes:
        transfer: The name of the transfer if something is held. The consumer has made it.
        chain: The tokens that are of use.
    """

    transfer: TransferId
    chain: Chain


class Held(msgspec.Struct, frozen=True):
    """What an engine has in its cache of the tokens that an inquiry names.

    Attributes:
        tokens: How many of the first tokens; of what a ``state`` group holds, exactly those. They are cut to the last link of the
            chain before them (``Chain.floor``), with the blocks that they need.
        table: Their blocks, one row for each group, as for ``SchedulerSide.offer_computed``. They must not be given to anybody
            before the call that asked for them has returned; whether a request uses them does not matter.
            Of a window it may list more blocks than ``tokens`` need, and must list those that fewer tokens need, if it can.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    tokens: int
    table: BlockTable

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 0, MOST_TOKENS))
        arguments.instance("table", self.table, BlockTable)


Holds = Callable[[Inquiry], "Held | None"]
"""An engine's answer to an inquiry, on the thread that calls the scheduler side. None: it holds nothing of it."""


class AnswerCounts(msgspec.Struct):
    """What other engines have asked of this one.

    Attributes:
        inquiries: Inquiries that were answered.
        held: Those of them for which something was offered.
        tokens: Tokens that were offered for them.
        refused: Those that were answered with "nothing" since too many waited, or their share of the blocks was used up.
    """

    inquiries: int = 0
    held: int = 0
    tokens: int = 0
    refused: int = 0
