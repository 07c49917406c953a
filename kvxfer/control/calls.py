"""Check offers and fetches against the cache before anything is begun, with errors that name the argument."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, bands
from kvxfer.geometry.spaces import block_spaces
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Generation, TransferId
from kvxfer.values import BlockTable, Fetch, Offer, Rank

__all__ = ["Calls"]


class Calls:
    """Offers and fetches, held to the agent's cache, which has been checked. Any thread.

    The control thread, which says what is ``over`` or ``released``, waits for no other: that one may be in a signal's handler, and wait
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
        self._filled: dict[int, set[int]] = {space: set() for space in self._spaces.values()}
        # By block space, the blocks that each fetch fills until it is released; above, those of all of them.
        self._fetches: dict[str, dict[int, set[int]]] = {}
        self._offers: dict[TransferId, Offer] = {}  # the last of each transfer that is not over

    def offer(self, offer: Offer) -> None:
        """Refuse an offer whose blocks cannot hold its tokens, or that contradicts an earlier one.

        Raises:
            ArgumentError: One of its arguments is wrong; the message says which, and how.
        """
        arguments.instance("offer", offer, Offer)
        self._tables.check("blocks", offer.blocks)
        arguments.integer("bands", offer.bands, 0, self._bands)
        for g, group in self._groups.items():
            full = group.kind == "full"
            if full or offer.final:
                self._tables.lists("blocks", offer.blocks, g, 0 if full else group.blocks(offer.tokens), offer.tokens)
        if self._overlaid:
            self._by_space(offer.blocks, {g: group.moved(offer.tokens) for g, group in self._groups.items()})
        with self._lock:
            last = self._offers.get(offer.transfer)
            if last is not None:
                self._follows(last, offer)
            self._offers[offer.transfer] = offer

    def over(self, transfer: TransferId, generation: Generation) -> None:
        """Take in that nothing of this generation of a transfer, or of an older one, is offered any more."""
        last = self._offers.pop(transfer, None)
        if last is not None and last.generation > generation:
            self._offers.setdefault(transfer, last)

    def fetch(self, fetch: Fetch) -> None:
        """Refuse a fetch whose blocks cannot take what it wants.

        Raises:
            ArgumentError: Its argument ``blocks``, ``tokens``, ``own`` or ``handle`` is wrong, or another fetch, which is not
                released yet, fills one of its blocks; the message says how.
        """
        arguments.instance("fetch", fetch, Fetch)
        if fetch.own is None and self._part:
            raise ArgumentError(
                f"own must name this engine's directory (its 'source'), since this cache holds only {self._part}, and other "
                "ranks fetch the rest"
            )
        self._tables.check("blocks", fetch.blocks)
        if fetch.blocks.empty:
            raise ArgumentError("blocks must list at least one block to fill")
        for g, group in self._groups.items():
            if fetch.blocks.count(g):
                first = fetch.start // group.block_tokens if group.kind == "full" else group.blocks(fetch.tokens)
                self._tables.lists("blocks", fetch.blocks, g, first, fetch.tokens)
        # What comes before it is there already, and may be shared.
        spans = {g: (fetch.start // of.block_tokens, of.blocks(fetch.tokens)) for g, of in self._groups.items()}
        blocks = self._by_space(fetch.blocks, spans)
        with self._lock:
            if fetch.handle in self._fetches:
                raise ArgumentError(f"handle must be unused, and that of a fetch not released yet is {fetch.handle!r}")
            for space, ids in blocks.items():
                if not self._filled[space].isdisjoint(ids):
                    self._refuse(space, ids)
            for space, ids in blocks.items():
                self._filled[space].update(ids)
            self._fetches[fetch.handle] = blocks

    def _by_space(self, table: BlockTable, spans: Mapping[int, tuple[int, int]]) -> dict[int, set[int]]:
        """Return the blocks of a table at these positions of its groups, by block space.

        Raises:
            ArgumentError: Two groups that share their blocks have the same one.
        """
        out: dict[int, set[int]] = {}
        for g, span in spans.items():
            ids, others = table.blocks(g, *span), out.setdefault(self._spaces[g], set())
            if not others.isdisjoint(ids):
                raise ArgumentError(
                    f"blocks[{g}] must not list block {min(ids & others)}, which another group lists that has its blocks in the "
                    "same memory"
                )
            others |= ids
        return out

    def _refuse(self, space: int, ids: set[int]) -> None:
        """Refuse a fetch into blocks that another one fills, if that has not been released meanwhile.

        Raises:
            ArgumentError: It has not: one of the two would have the other's bytes.
        """
        for handle, blocks in self._fetches.copy().items():
            both = ids & blocks.get(space, set())
            if both:
                raise ArgumentError(
                    f"blocks must not list block {min(both)}, which the fetch {handle!r} fills until it is released"
                )

    def released(self, handle: str) -> None:
        """Take in that a fetch is over, so that its handle and blocks may be used again."""
        for space, ids in self._fetches.get(handle, {}).items():
            self._filled[space].difference_update(ids)
        self._fetches.pop(handle, None)

    def _follows(self, last: Offer, offer: Offer) -> None:
        """Refuse an offer that does not continue the last: a reader may have tokens of both, and would mix them."""
        if offer.generation != last.generation:
            arguments.integer("generation", offer.generation, last.generation)
            return
        anew = f"within generation {offer.generation}; what is computed anew needs a new generation"
        most = last.tokens if last.final else arguments.MOST_INTEGER
        arguments.integer("tokens", offer.tokens, last.tokens, most)
        arguments.integer("consumers", offer.consumers, 1, last.consumers)
        if offer.digest != last.digest:
            raise ArgumentError(f"digest must stay the same {anew}")
        if last.final and not offer.final:
            raise ArgumentError(f"final must stay True {anew}")
        if last.payload and offer.payload and offer.payload != last.payload:
            raise ArgumentError(f"payload must stay the same {anew}")
        for g, group in self._groups.items():
            if group.kind != "full":
                continue
            first, past = group.moved(last.tokens)
            if not offer.blocks.keeps(last.blocks, g, first, past):
                was, now = (one.blocks[g][first:past] for one in (last, offer))
                at = int(np.flatnonzero(was != now)[0])
                raise ArgumentError(
                    f"blocks[{g}] must keep block {was[at]} at position {first + at}, not have {now[at]} there, {anew}"
                )
