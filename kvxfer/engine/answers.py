"""What other engines ask for of this engine's cache, and what they get."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile

import msgspec

from kvxfer import arguments, clock
from kvxfer.control.connection import ControlConnection
from kvxfer.control.directory import Directory
from kvxfer.control.inquiries import PeerInquiry
from kvxfer.engine.offers import Offers, kept_blocks, lacks_window
from kvxfer.errors import KvxferError
from kvxfer.identity import TransferId
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import Shares
from kvxfer.schedule import Chain, Offering, OfferSchedule
from kvxfer.security import RateLimitedWarnings
from kvxfer.values import MAX_TOKENS, BlockTable, Group

log = logger("kvxfer.engine")

ANSWER_S = 0.001
"""Seconds of a step that may be spent on inquiries."""
YIELD_S = 0.5
"""Seconds for which blocks are held for a peer though the engine lacks some: most loads are over by then."""

MAX_HELD = 4096
"""The most answers for which blocks are held at a time; each peer may have three quarters of what the others leave."""

REMEMBERED = 100
"""Of how many inquiries it is remembered how soon they were answered."""


class Inquiry(msgspec.Struct, frozen=True):
    """Another engine asks what this one holds of a prompt that it is about to compute.

    Attributes:
        transfer: The name of the transfer if something is held. The consumer has made it.
        chain: The tokens that are of use.
    """

    transfer: TransferId
    chain: Chain


class HeldPrefix(msgspec.Struct, frozen=True):
    """What an engine has in its cache of the tokens that an inquiry names.

    Attributes:
        tokens: How many of the first tokens; of what a ``state`` group holds, exactly those. They are cut to the last link of the
            chain before them (``Chain.floor``), with the blocks that they need.
        table: Their blocks, one row for each group. They must not be given to anybody before the call that asked for them has returned;
            whether a request uses them does not matter. Of a window, the blocks that the token behind the last one attends to: it
            may list more, and must list those that fewer tokens need, if it can. Of a state, the one that holds it after exactly
            these tokens.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    tokens: int
    table: BlockTable

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 0, MAX_TOKENS))
        arguments.instance("table", self.table, BlockTable)


Holds = Callable[[Inquiry], "HeldPrefix | None"]
"""An engine's answer to an inquiry, on the thread that calls the scheduler side. None: it holds nothing of it."""


class AnswerCounts(msgspec.Struct):
    """What other engines have asked of this one."""

    inquiries: int = 0  # inquiries that the engine was asked to answer
    held: int = 0  # those of them for which something was offered
    tokens: int = 0  # tokens that were offered for them
    # those that were answered with "nothing", or with less than is held, because the peer's share of the blocks is used up
    refused: int = 0


class PrefixAnswers:
    """Answers other engines' inquiries with what the engine's cache holds. The scheduler side's thread.

    What is held for them is bounded by the limit of ``BlockPins``, and by ``MAX_HELD``. Each peer may have three quarters of what the
    others leave. It is given up if the peer hangs up, and if the engine lacks blocks (``short_of_blocks``).
    """

    def __init__(
        self, directory: Directory, offers: Offers, schedule: OfferSchedule, groups: Sequence[Group], limit: int
    ) -> None:
        self._directory, self._offers, self._schedule, self._groups = directory, offers, schedule, tuple(groups)
        self._exact = any(group.kind == "state" for group in groups)
        self._shares: Shares[PeerIdentity, Offering] = Shares(limit, "nothing")  # of the blocks
        self._places: Shares[PeerIdentity, Offering] = Shares(MAX_HELD, "nothing")
        self._taken: dict[Offering, PeerInquiry] = {}  # what has a share, and what it answers
        # Those that may be given up, the oldest first.
        self._held: dict[ControlConnection, dict[Offering, None]] = {}
        offers.let_go = self._give_back
        self._complain = RateLimitedWarnings(log)
        self.counts = AnswerCounts()
        self.took: deque[float] = deque(maxlen=REMEMBERED)

    def answer(self, holds: Holds | None) -> None:
        """Answer those that wait, for ``ANSWER_S`` at the most but for the first; the next call goes on."""
        waiting = self._directory.inquiries
        if waiting is not None and waiting.hung_up:
            waiting.hung_up = False
            for connection in [one for one in self._held if one.lost is not None]:
                self._hung_up(connection)
        if not waiting:
            return
        until = clock.now() + ANSWER_S
        while (inquiry := waiting.get()) is not None:
            if not inquiry.gone:
                self._directory.answer(inquiry, self._answer(inquiry, holds))
                self.took.append(clock.now() - inquiry.came_at)
            if clock.now() >= until:
                break

    def _answer(self, inquiry: PeerInquiry, holds: Holds | None) -> m.InquiryAnswer:
        """Offer what is held, and return what the peer is to be told."""
        asked, epoch = inquiry.message, self._directory.epoch
        self.counts.inquiries += 1
        nothing = m.InquiryAnswer(asked.transfer, epoch)
        if holds is None:
            return nothing
        try:
            chain = Chain(asked.step, asked.links)
        except KvxferError as error:
            self._complain("an inquiry of %s is answered with nothing: %s", inquiry.connection.host, error)
            return nothing
        try:
            held = holds(Inquiry(asked.transfer, chain))
            if held is None:
                return nothing
            tokens = chain.floor(held.tokens)
            if not tokens or (self._exact and tokens != held.tokens):
                return nothing
            eligible = self._eligible(inquiry, chain, tokens, held.table)
            if eligible < tokens:
                self.counts.refused += 1
                if not eligible:
                    return m.InquiryAnswer(asked.transfer, epoch, reason="as much is held for this peer as may be")
            return self._offer(inquiry, chain, eligible, held.table) or nothing
        except KvxferError as error:
            what = "an inquiry of %s is answered with nothing: what the engine's 'holds' has returned cannot be offered: %s"
            self._complain(what, inquiry.connection.host, error)
        except Exception:
            log.exception(
                "an inquiry of %s is answered with nothing: the engine's 'holds' failed", inquiry.connection.host
            )
        return nothing

    def _eligible(self, inquiry: PeerInquiry, chain: Chain, tokens: int, table: BlockTable) -> int:
        """Return how many of the tokens the peer's share of the blocks has room for."""
        if not self._places.room(inquiry.connection.peer):
            return 0
        room = self._shares.room(inquiry.connection.peer)
        if self._blocks(tokens, table) <= room:
            return tokens
        if any(group.kind != "full" for group in self._groups):
            return 0  # what a window or a state holds is of use after exactly these tokens
        return chain.floor(room // len(self._groups) * min(group.block_tokens for group in self._groups))

    def _blocks(self, tokens: int, table: BlockTable) -> int:
        return len(kept_blocks(self._groups, table, tokens).ids())

    def _offer(self, inquiry: PeerInquiry, chain: Chain, tokens: int, table: BlockTable) -> m.InquiryAnswer | None:
        transfer, digest = inquiry.message.transfer, chain.digest(tokens)
        if self._schedule.current(transfer) is not None:
            return None  # the first peer that named it has it
        if lacks_window(self._groups, table, tokens):
            return None
        blocks = self._blocks(tokens, table)
        if not self._offers.computed(transfer, digest, tokens, table):
            self.counts.refused += 1
            return None
        offering, peer = self._schedule.current(transfer), inquiry.connection.peer
        assert offering is not None
        self._shares.take(peer, offering, blocks, peer)
        self._places.take(peer, offering, 1, peer)
        self._taken[offering] = inquiry
        self._held.setdefault(inquiry.connection, {})[offering] = None
        self.counts.held += 1
        self.counts.tokens += tokens
        return m.InquiryAnswer(transfer, self._directory.epoch, tokens, digest)

    def _give_back(self, offering: Offering) -> None:
        """Give back the share of an answer whose blocks are let go of."""
        inquiry = self._taken.pop(offering, None)
        if inquiry is None:
            return
        self._shares.give(inquiry.connection.peer, offering)
        self._places.give(inquiry.connection.peer, offering)
        held = self._held.get(inquiry.connection, {})
        if offering in held:
            del held[offering]
            if not held:
                del self._held[inquiry.connection]

    def short_of_blocks(self) -> None:
        """Give up what has been held for a while: the engine's own requests go first."""
        now = clock.now()
        for connection, held in list(self._held.items()):
            for offering in list(takewhile(lambda one: now - one.came_at >= YIELD_S, held)):
                del held[offering]
                self._schedule.withdraw(offering.transfer, "the producer's own requests need the blocks")
            if not held:
                del self._held[connection]

    def _hung_up(self, connection: ControlConnection) -> None:
        """Give up what is held for a peer that has hung up."""
        for offering in self._held.pop(connection):
            self._schedule.withdraw(offering.transfer, "its consumer has hung up")
