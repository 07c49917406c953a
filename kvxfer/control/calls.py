"""Check offers and fetches against the cache before anything is begun, with errors that name the argument."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, bands
from kvxfer.geometry.spaces import block_spaces
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import LAST, Generation, Handle, TransferId
from kvxfer.ledger import BlockLedger
from kvxfer.values import Fetch, Offer, Rank


class CallValidator:
    """Offers and fetches, held to the agent's cache, which has been checked, and to each other: a block is read or filled. Any thread.

    The control thread, which says what is ``over`` or ``free``, waits for no other: that one may be in a signal's handler, and wait
    for it.
    """

    def __init__(self, cache: Cache) -> None:
        self._tables = TableCheck(cache.groups)
        self._tables.learn(cache)
        self._bands = len(bands(cache))
        self._groups = {v.group: cache.groups[v.group] for v in cache.views}  # groups with a view in this cache
        self._spaces = block_spaces(cache)
        self._overlaid = len(set(self._spaces.values())) < len(self._spaces)
        held = next((v.heads for v in cache.views if v.heads is not None and v.heads.count < v.heads.total), None)
        self._part = ""
        if held is not None:
            self._part = f"heads {held.start} to {held.start + held.count - 1} of {held.total}"
        elif cache.rank != Rank():
            self._part = f"the part of rank pp{cache.rank.pp}/tp{cache.rank.tp}"
        self._lock = threading.Lock()
        self._ledger = BlockLedger(self._spaces)  # held by the handles of fetches, and by the transfers of offers
        self._free: deque[tuple[Hashable, Generation]] = deque()  # what the ledger has yet to drop
        self._offers: dict[TransferId, Offer] = {}  # the last of each transfer that is not over
        # Offers that the ledger has not been told of, each with the one before it: it need not be while nothing is filled.
        self._late: dict[Hashable, list[tuple[Offer, Offer | None]]] = {}

    def offer(self, offer: Offer) -> None:
        """Refuse an offer whose blocks cannot hold its tokens or are being filled, or that contradicts an earlier one.

        Raises:
            ArgumentError: One of its arguments is wrong; the message says which, and how.
        """
        if not isinstance(offer, Offer):
            arguments.instance("offer", offer, Offer)
        table, tokens = offer.blocks, offer.tokens
        self._tables.check("blocks", table)
        if offer.bands > self._bands:
            arguments.integer("bands", offer.bands, 0, self._bands)
        for g, group in self._groups.items():
            full = group.kind == "full"
            if full or offer.final:
                self._tables.lists("blocks", table, g, 0 if full else group.blocks(tokens), tokens)
        if self._overlaid:
            apart: dict[int, set[int]] = {}
            for g, group in self._groups.items():
                self._put(apart, g, table.blocks(g, *group.moved(tokens)))
        with self._lock:
            if self._free:
                self._drop()
            last = self._offers.get(offer.transfer)
            if last is not None:
                self._follows(last, offer)
            if self._ledger.filling:
                self._tell()
                self._claim(offer, last)
            else:
                self._late.setdefault(offer.transfer, []).append((offer, last))
            self._offers[offer.transfer] = offer

    def _claim(self, offer: Offer, last: Offer | None) -> None:
        """Have the ledger know what an offer lets others read.

        Raises:
            ArgumentError: Some of it is being filled.
        """
        blocks = self._ledger.blocks(offer.blocks, self._added(offer, last))
        found = self._ledger.overlap(blocks, fills=False)
        if found is not None:
            self._refuse(offer, *found)
        by = offer.handle, offer.transfer
        self._ledger.claim(offer.transfer, blocks, by, fills=False, generation=offer.generation)

    def _tell(self) -> None:
        """Have the ledger know of all offers."""
        while self._late:
            for offer, last in self._late.pop(next(iter(self._late))):
                self._claim(offer, last)

    def _added(self, offer: Offer, last: Offer | None) -> list[tuple[int, tuple[int, int]]]:
        """Return the positions, by group, of the blocks that readers may read by this offer, and could not by the last."""
        if last is None or last.generation != offer.generation:
            tokens, final = 0, False
        else:
            tokens, final = last.tokens, last.final
        return [
            (
                g,
                (group.blocks(tokens), group.blocks(offer.tokens))
                if group.kind == "full"
                else group.moved(offer.tokens),
            )
            for g, group in self._groups.items()
            if group.kind == "full" or (offer.final and not final)
        ]

    def over(self, transfer: TransferId, generation: Generation) -> None:
        """Take in that nothing of this generation of a transfer, or of an older one, is offered any more."""
        last = self._offers.pop(transfer, None)
        if last is not None and last.generation > generation:
            self._offers.setdefault(transfer, last)

    def fetch(self, fetch: Fetch) -> None:
        """Refuse a fetch whose blocks cannot take what it wants, or are being read or filled.

        Raises:
            ArgumentError: Its argument ``blocks``, ``tokens``, ``own`` or ``handle`` is wrong, or another fetch, which is not
                released yet, fills one of its blocks, or an offer lists it; the message says how.
        """
        if not isinstance(fetch, Fetch):
            arguments.instance("fetch", fetch, Fetch)
        if self._part and fetch.own is None:
            raise ArgumentError(
                f"own must name this engine's directory (its 'source'), because this cache holds only {self._part}, and other "
                "ranks fetch the rest"
            )
        table, start, tokens = fetch.blocks, fetch.start, fetch.tokens
        if not self._tables.check("blocks", table):
            raise ArgumentError("blocks must list at least one block to fill")
        blocks: dict[int, set[int]] = {}
        for g, group in self._groups.items():
            if table.rows[g]:
                first, past = start // group.block_tokens, group.blocks(tokens)
                ids = table.blocks(g, 0, past)
                if len(ids) != past:
                    self._tables.lists("blocks", table, g, first if group.kind == "full" else past, tokens)
                # What comes before it is there already, and may be shared.
                self._put(blocks, g, table.blocks(g, first, past) if first else ids)
        with self._lock:
            if self._free:
                self._drop()
            if self._late:
                self._tell()
            if fetch.handle in self._ledger:
                raise ArgumentError(f"handle must be unused; a fetch that is not released yet has {fetch.handle!r}")
            found = self._ledger.overlap(blocks, fills=True)
            if found is not None:
                self._refuse(fetch, *found)
            self._ledger.claim(fetch.handle, blocks, fetch.handle, fills=True)

    def free(self, holder: Handle | TransferId, generation: Generation = LAST) -> None:
        """Take in that the blocks of a fetch, or of an offer up to a generation, may be used for something else."""
        self._free.append((holder, generation))

    def _drop(self) -> None:
        while self._free:
            holder, generation = self._free.popleft()
            late = self._late.pop(holder, None)
            if late is not None and late[-1][0].generation > generation:
                self._late[holder] = [one for one in late if one[0].generation > generation]
            self._ledger.drop(holder, generation)

    def _refuse(self, what: Offer | Fetch, block: int, by: object) -> None:
        """Refuse an offer or a fetch of a block that is being filled, or a fetch into one that is being read.

        Raises:
            ArgumentError: Always; a request would have the bytes of another transfer.
        """
        if isinstance(by, tuple):
            other = f"the offer {_name(*by)} lists until it is revoked or released"
        else:
            other = f"the fetch {by!r} fills until it is released"
        if isinstance(what, Fetch):
            then = f"begin the fetch {what.handle!r} after that, or into other blocks"
        else:
            then = f"make the offer {_name(what.handle, what.transfer)} after that"
        raise ArgumentError(f"blocks must not list block {block}, which {other}: {then}")

    def _put(self, blocks: dict[int, set[int]], g: int, ids: set[int]) -> None:
        """Add the blocks of a group to those of its block space.

        Raises:
            ArgumentError: Another group that shares its blocks has one of them.
        """
        others = blocks.setdefault(self._spaces[g], ids)
        if others is not ids:
            if not others.isdisjoint(ids):
                raise ArgumentError(
                    f"blocks[{g}] must not list block {min(ids & others)}, which another group lists that has its blocks in the "
                    "same memory"
                )
            others |= ids

    def _follows(self, last: Offer, offer: Offer) -> None:
        """Refuse an offer that does not continue the last: a reader may have tokens of both, and would mix them."""
        if offer.generation != last.generation:
            arguments.integer("generation", offer.generation, last.generation)
            return
        again = f"within generation {offer.generation}; what is computed again needs a new generation"
        most = last.tokens if last.final else arguments.MAX_INTEGER
        arguments.integer("tokens", offer.tokens, last.tokens, most)
        arguments.integer("consumers", offer.consumers, 1, last.consumers)
        if offer.digest != last.digest:
            raise ArgumentError(f"digest must stay the same {again}")
        if last.final and not offer.final:
            raise ArgumentError(f"final must stay True {again}")
        if last.payload and offer.payload and offer.payload != last.payload:
            raise ArgumentError(f"payload must stay the same {again}")
        for g, group in self._groups.items():
            if group.kind != "full":
                continue
            first, past = group.moved(last.tokens)
            if not offer.blocks.keeps(last.blocks, g, first, past):
                was, now = (one.blocks[g][first:past] for one in (last, offer))
                at = int(np.flatnonzero(was != now)[0])
                raise ArgumentError(
                    f"blocks[{g}] must keep block {was[at]} at position {first + at}, not have {now[at]} there, {again}"
                )


def _name(handle: Handle, transfer: TransferId) -> str:
    """Return what an offer is called in errors: by the engine's handle, if it gave one, and its transfer."""
    return f"{handle!r} ({transfer})" if handle else str(transfer)
