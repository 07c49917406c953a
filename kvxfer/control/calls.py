"""Whether a call fits the cache that it is about: answered before anything of it is begun, in the words of its arguments.

A wrong table would otherwise show after the whole timeout, on the other host, as tables that do not join.
"""

from __future__ import annotations

import threading

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache
from kvxfer.identity import Generation, TransferId
from kvxfer.values import NULL, BlockTable, Fetch, Offer, Rank

__all__ = ["Calls"]

MOST_TABLE = 3 << 20
"""Bytes of a block table's ids: 780,000 blocks, with which a message stays below what a peer takes."""


class Calls:
    """Offers and fetches, held to one cache. Any thread.

    Args:
        cache: The agent's; it has been checked.
    """

    def __init__(self, cache: Cache) -> None:
        self._groups = cache.groups
        self._blocks = [
            min((v.blocks for v in cache.views if v.group == g), default=1 << 31) for g in range(len(cache.groups))
        ]
        held = next((v.heads for v in cache.views if v.heads is not None and v.heads.count < v.heads.total), None)
        self._part = ""
        if held is not None:
            self._part = f"heads {held.start} to {held.start + held.count - 1} of {held.total}"
        elif cache.rank != Rank():
            self._part = f"what is of rank pp{cache.rank.pp}/tp{cache.rank.tp}"
        self._lock = threading.Lock()
        self._handles: set[str] = set()
        self._offers: dict[TransferId, Offer] = {}  # the last of each transfer that is not over

    def offer(self, offer: Offer) -> None:
        """Refuse an offer whose blocks cannot hold what it says, or are others than its generation has had.

        Raises:
            ArgumentError: Its argument ``blocks``, ``tokens`` or ``digest`` is wrong; the message says how.
        """
        arguments.instance("offer", offer, Offer)
        self._table(offer.blocks)
        for g, group in enumerate(self._groups):
            if group.kind != "full" and not offer.final:
                continue
            first, past = group.moved(offer.tokens)
            self._lists(offer.blocks, g, first if group.kind == "full" else past, past, offer.tokens)
        with self._lock:
            last = self._offers.get(offer.transfer)
            if last is not None and last.generation == offer.generation:
                self._continues(last, offer)
            if last is None or last.generation <= offer.generation:
                self._offers[offer.transfer] = offer

    def over(self, transfer: TransferId, generation: Generation) -> None:
        """Take in that nothing of this generation of a transfer, or of an older one, is offered any more."""
        with self._lock:
            last = self._offers.get(transfer)
            if last is not None and last.generation <= generation:
                del self._offers[transfer]

    def fetch(self, fetch: Fetch) -> None:
        """Refuse a fetch whose blocks cannot take what it wants.

        Raises:
            ArgumentError: Its argument ``blocks``, ``tokens``, ``own`` or ``handle`` is wrong; the message says how.
        """
        arguments.instance("fetch", fetch, Fetch)
        if fetch.own is None and self._part:
            raise ArgumentError(
                f"own must name this engine's directory (its 'source'), since this cache holds {self._part} only, and other "
                "ranks fetch the rest"
            )
        self._table(fetch.blocks)
        for g, group in enumerate(self._groups):
            past = group.moved(fetch.tokens)[1]
            if fetch.blocks.count(g):
                self._lists(fetch.blocks, g, past, past, fetch.tokens)
        with self._lock:
            if fetch.handle in self._handles:
                raise ArgumentError(f"handle must be unused, and that of a fetch not released yet is {fetch.handle!r}")
            self._handles.add(fetch.handle)

    def released(self, handle: str) -> None:
        """Take in that a fetch is over, so that its handle may be used again."""
        with self._lock:
            self._handles.discard(handle)

    def _table(self, table: BlockTable) -> None:
        if len(table) != len(self._groups):
            raise ArgumentError(
                f"blocks must have one row for each of the cache's {len(self._groups)} groups, not {len(table)}"
            )
        if table.nbytes > MOST_TABLE:
            raise ArgumentError(f"blocks must be at most {MOST_TABLE} bytes of ids, not {table.nbytes}")
        for g, limit in enumerate(self._blocks):
            most = int(np.frombuffer(table.rows[g], "<i4").max(initial=NULL))
            if most >= limit:
                raise ArgumentError(f"blocks[{g}] must be ids below {limit}, the cache's blocks, not {most}")

    def _continues(self, last: Offer, offer: Offer) -> None:
        """Refuse what is not a continuation: a reader may have had the tokens of both, and would mix them."""
        anew = f"within generation {offer.generation}; what is computed anew is of a new generation"
        if offer.digest != last.digest:
            raise ArgumentError(f"digest must stay the same {anew}")
        tokens = min(last.tokens, offer.tokens)
        for g, group in enumerate(self._groups):
            if group.kind != "full":
                continue
            first, past = group.moved(tokens)
            was, now = (np.frombuffer(one.blocks.rows[g], "<i4")[first:past] for one in (last, offer))
            if was.tobytes() != now.tobytes():
                at = int(np.flatnonzero(was != now)[0])
                raise ArgumentError(
                    f"blocks[{g}] must keep block {was[at]} at position {first + at}, not have {now[at]} there, {anew}"
                )

    def _lists(self, table: BlockTable, g: int, first: int, past: int, tokens: int) -> None:
        """Refuse a row of fewer than ``past`` blocks, or with none at a position from ``first`` on."""
        if table.count(g) < past:
            size = self._groups[g].block_tokens
            raise ArgumentError(
                f"blocks[{g}] must list {past} blocks of {size} tokens for {tokens} tokens, not {table.count(g)}"
            )
        lacking = np.flatnonzero(np.frombuffer(table.rows[g], "<i4")[first:past] == NULL)
        if len(lacking):
            raise ArgumentError(f"blocks[{g}] must have a block at position {first + int(lacking[0])}, not {NULL}")
