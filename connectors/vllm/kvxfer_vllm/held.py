"""What this engine's prefix cache holds of a prompt that another engine is about to compute.

vLLM finds blocks by hashes of its own, whose seed and algorithm differ between engines. So the hashes of requests that this engine has
seen are remembered under names that all engines compute alike (``kvxfer.engine.Prefix``). vLLM's own lookup then says what is still
there in all groups: the blocks of full attention, the last ones of windows, the block of a state. Nothing is held for that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.engine import HeldPrefix, Inquiry, PrefixIndex
from kvxfer.values import BlockTable, Group
from kvxfer_vllm.requests import Naming, RequestFacts

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["HeldPrefixes"]

TIMES = 2
"""How many tokens are remembered for each that the cache has room for: vLLM may keep blocks of requests that ended long ago."""


_Known = tuple[Sequence[Any], tuple[tuple[int, str], ...]]
"""The hashes of a request's blocks; and where each of its media begins, and vLLM's name for it."""


class HeldPrefixes:
    """The requests that an engine has computed, and what its cache still has of them. One thread.

    ``null``: vLLM's number of the block that stands for none.

    Attributes:
        is_ambiguous: Whether vLLM may take one of two items of media for the other, because they have had this name.
    """

    def __init__(self, groups: Sequence[Group], blocks: int, null: int) -> None:
        self._groups, self._null = tuple(groups), null
        self._index: PrefixIndex[_Known] = PrefixIndex(TIMES * blocks * min(g.block_tokens for g in groups))
        self._new: list[RequestFacts] = []  # those that are computed and that no inquiry could find yet
        self._coordinator: Any = None
        self._pool: Any = None
        self._sparse: list[int] = []  # windows, of which vLLM may not cache all full blocks
        self.is_ambiguous: Callable[[str], bool] = lambda name: False
        self._hashed = 0  # tokens for which vLLM has one hash
        self._dropped = 0  # tokens that its lookup drops at the end, for the sake of drafts

    def bind(self, manager: Any) -> None:
        """Use vLLM's manager of the KV cache, until which nothing is held."""
        self._pool = manager.block_pool
        self._hashed = getattr(self._pool, "hash_block_size", 0)
        if not self._hashed or not getattr(self._pool, "enable_caching", False):
            return
        self._coordinator = manager.coordinator
        if len(self._groups) == 1 and getattr(self._coordinator, "eagle_group_ids", None):
            self._dropped = self._hashed  # with several groups it looks further by itself
        cacheable = [one.kv_cache_spec.prefix_cacheable for one in self._coordinator.single_type_managers]
        self._sparse = [g for g, group in enumerate(self._groups) if group.kind == "window" and cacheable[g]]

    def arrived(self, facts: RequestFacts, naming: Naming) -> None:
        """Take in a request that is to be computed; its blocks count as soon as vLLM can find them."""
        facts.naming = naming
        self._new.append(facts)

    def keep_findable(self, request: Request, unfilled: Collection[int]) -> None:
        """Have vLLM's prefix cache find the windows at the end of an answer, until their blocks are used again.

        By default it finds those at the end of a prompt only (``prefix_cache_retention_interval``). Call it while the request has its
        blocks. Those of a window that is a multiple of the block are enough for all full blocks. States are left alone: vLLM may
        write to the block of one that it does not cache. So are blocks that its load has left ``unfilled``.
        """
        if self._coordinator is None or not self._sparse:
            return
        computed = min(request.num_computed_tokens, request.num_tokens - 1)  # more may be under way, which is given up
        for g in self._sparse:
            manager = self._coordinator.single_type_managers[g]
            blocks = manager.req_to_blocks.get(request.request_id, ())
            full = min(computed // manager.block_size, len(blocks))
            left = [block.is_null or block.block_id in unfilled for block in blocks[:full]]
            fresh = [not out and block.block_hash is None for out, block in zip(left, blocks, strict=False)]
            if any(fresh):
                first = fresh.index(True)
                self._pool.cache_full_blocks(
                    request, blocks, first, full, manager.block_size, g, block_mask=fresh[first:]
                )

    def finished(self, facts: RequestFacts) -> None:
        """Record that a request is over; what it has computed can still be found."""
        if facts in self._new:
            self._new.remove(facts)
        self._add(facts)
        facts.naming = None

    def _add(self, facts: RequestFacts) -> None:
        if facts.naming is not None:
            tokens = array("i", facts.request.all_token_ids[:])
            media = tuple((item.mm_position.offset, item.identifier) for item in facts.request.mm_features or ())
            self._index.add(facts.naming(tokens), (facts.request.block_hashes, media))

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        """Return what is in the cache now of the tokens that an inquiry names; None if nothing is."""
        if self._coordinator is None:
            return None
        for facts in self._new:
            self._add(facts)
        self._new.clear()
        found, chain = self._index.find(inquiry.chain), inquiry.chain
        if found is None:
            return None
        hashes, media = found.name
        tokens = chain.floor(min([found.tokens, *(at for at, name in media if self.is_ambiguous(name))]))
        while tokens:
            blocks, cached = self._coordinator.find_longest_cache_hit(hashes, tokens + self._dropped)[:2]
            if cached == tokens and not self._changes(blocks):
                rows = [[b.block_id for b in row] for row in blocks]
                self._fill_windows(rows, hashes, tokens)
                return HeldPrefix(tokens, BlockTable.of(rows, self._null))
            # What windows and states need for fewer tokens are other blocks.
            tokens = chain.floor(min(cached, tokens - 1))
        return None

    def _changes(self, blocks: Sequence[Sequence[Any]]) -> bool:
        """Return whether a request is about to compute on in the block of a state: vLLM copies that away first, with the next step."""
        for g, group in enumerate(self._groups):
            unsaved = getattr(self._coordinator.single_type_managers[g], "_partial_hit_reqs", {})
            if group.kind == "state" and any(block in blocks[g] for _, block in unsaved.values()):
                return True
        return False

    def _fill_windows(self, rows: list[list[int]], hashes: Sequence[Any], tokens: int) -> None:
        """Add blocks of windows that vLLM's lookup leaves out, because another block begins with the next token, if they are cached."""
        for g, group in enumerate(self._groups):
            if group.kind != "window" or group.block_tokens != self._hashed:
                continue
            for at in range(group.kept(tokens)[0], len(rows[g])):
                if rows[g][at] == self._null and (cached := self._pool.get_cached_block(hashes[at], [g])):
                    rows[g][at] = cached[0].block_id

    def clear(self, live: Iterable[RequestFacts]) -> None:
        """Forget all but those of these requests that have a name, as when the cache is dropped."""
        self._index.clear()
        self._new = [facts for facts in live if facts.naming is not None]
