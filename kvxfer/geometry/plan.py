"""Copy plans: which bytes of one cache go where in another, for two block tables; kept as products, not as lists of bytes.

Assignments that share strides and block tables form a *view group*. A request is cut into *segments*, the tokens that
one source block and one destination block have in common; a segment's place is the flat offset of its first token on
either side. A view group times its segments is a *logical copy*, which knows the logical coordinates; its *copies* are
the same with everything contiguous merged. What depends on the pair of caches alone is computed once; a request costs
only its segments.

Law (tests/geometry): copying along the plan equals indexing both caches by their logical coordinates; every
destination byte is written once; nothing else is touched. Only if the consumer says that its last block is its own, what that
holds of later tokens may be written as well, with what the producer's block has there: if both blocks are alike, and all of one is
fewer rows than a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import lcm

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace

from kvxfer.geometry.assignment import ShardAssignment, check_assignments
from kvxfer.geometry.cache import Cache, bands
from kvxfer.geometry.segments import Cut, PlanError, Rows, Segments, cut_states, cut_tokens, cut_turns, greatest, join
from kvxfer.geometry.strided_copy import Runs, StridedCopy, joined, materialise
from kvxfer.geometry.turns import Shared
from kvxfer.geometry.view_group import LogicalCopy, ViewGroup, view_groups
from kvxfer.values import BlockTable

_Key = tuple[int, int, bool, Shared | None]
"""Groups of the source and the destination, whether tokens are opaque, and which tokens both ranks hold; ``None`` for all."""


class CopyPlan(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What to copy for one transfer between one producer rank and one consumer rank.

    Attributes:
        copies: What to copy.
        logical: What is wanted of that, by logical coordinates, for checksums. Empty in the pieces that ``split`` cuts.
        nbytes: The number of bytes to copy, computed from ``copies``.
    """

    copies: tuple[StridedCopy, ...]
    logical: tuple[LogicalCopy, ...] = ()
    nbytes: int = 0
    _runs: Runs | None = None  # once they have been made

    def __post_init__(self) -> None:
        force_setattr(self, "nbytes", sum([s.nbytes for s in self.copies]))

    @property
    def rows(self) -> int:
        """The number of runs if no two segments coalesced, which costs nothing to compute."""
        return sum(map(len, self.copies))

    def runs(self) -> Runs:
        """Return the copy as coalesced byte runs, for a back end that wants them.

        The first call makes them, later ones return the same object. Producer and consumer get equal lists.
        """
        runs = self._runs
        if runs is None:
            runs = materialise(self.copies)
            force_setattr(self, "_runs", runs)
        return runs

    @classmethod
    def together(cls, plans: Iterable[CopyPlan]) -> CopyPlan:
        """Return one plan for several of the same pair of caches, into different blocks; without logical coordinates."""
        return cls(tuple(joined(s for plan in plans for s in plan.copies)))

    def split(self, max_bytes: int, first: int = 0) -> Iterator[CopyPlan]:
        """Cut the plan into pieces that fit a staging slot, or one stage of a pipeline. A plan that fits whole is its only piece.

        Both sides cut equal plans alike. Each piece has a packed stream of its own; these streams, one after the other,
        need not be the plan's stream.

        Args:
            max_bytes: The largest size of a piece.
            first: If not 0, the largest size of the first piece, which is kept to unless a segment is larger.

        Raises:
            ValueError: ``max_bytes`` is not positive.
        """
        if max_bytes <= 0:
            raise ValueError(f"pieces of {max_bytes} bytes hold nothing")
        if 0 < self.nbytes <= (first or max_bytes):
            yield self
            return
        held: list[StridedCopy] = []
        room = first or max_bytes
        for i, strided in enumerate(self.copies):
            for piece in strided.split(max_bytes, 0 if i else first):
                if held and piece.nbytes > room:
                    yield CopyPlan(tuple(held))
                    held, room = [], max_bytes
                held.append(piece)
                room -= piece.nbytes
        if held:
            yield CopyPlan(tuple(held))

    def __add__(self, other: CopyPlan) -> CopyPlan:
        """Return a plan that copies what this one does, then what the other does."""
        return CopyPlan(self.copies + other.copies, self.logical + other.logical)


class Planner:
    """Plans copies from ``src`` into ``dst`` for the assigned layers and heads.

    Both caches must have passed ``Cache.check``. Any thread may call ``plan``, but only one at a time, because patterns are
    cached inside.

    Attributes:
        all_full: Whether all groups of the destination are of kind ``full``.
        indivisible: A copy of part of a request's tokens must end at a multiple of this number: the tokens of a block if
            blocks are not cut between tokens, else 1.
        bands: How many bands of layers the source has (``kvxfer.geometry.bands``); 1 if it has none.
        token_bytes: Bytes of a token in all groups of kind ``full``.
        least_row: Bytes of the shortest row of any plan; 0 if there is nothing to copy.

    Raises:
        Incompatible: The assignments do not fit the caches.
    """

    def __init__(self, src: Cache, dst: Cache, assignments: Sequence[ShardAssignment]) -> None:
        check_assignments(src, dst, assignments)
        self.src, self.dst, self._assignments = src, dst, tuple(assignments)
        self._bands, self._of = bands(src), dict[tuple[int, int], Planner]()
        self.bands = max(len(self._bands), 1)
        self.all_full = all(g.kind == "full" for g in dst.groups)
        self._view_groups: dict[_Key, list[ViewGroup]] = defaultdict(list)
        for b in view_groups(src, dst, assignments):
            shared = None if b.shared == Shared() else b.shared
            self._view_groups[b.src_group, b.dst_group, b.opaque, shared].append(b)
        self.indivisible = lcm(
            *(
                src.groups[sg].block_tokens
                for sg, _, opaque, _ in self._view_groups
                if opaque and src.groups[sg].kind == "full"
            )
        )
        self.token_bytes = sum(
            b.shared.share
            * len(b.names)
            * b.heads[0]
            * b.unit
            / (src.groups[b.src_group].block_tokens if b.opaque else 1)
            for members in self._view_groups.values()
            for b in members
            if src.groups[b.src_group].kind == "full"
        )
        every = [b for members in self._view_groups.values() for b in members]
        self.least_row = min((b.least_row for b in every), default=0)
        # Destination group and its tokens a block, with what is moved of each token; empty if the size of a plan does not follow from
        # the number of tokens.
        self._sizes: list[tuple[int, int, ViewGroup]] = []
        if self.all_full and not any(
            shared is not None or (opaque and src.groups[sg].block_tokens != dst.groups[dg].block_tokens)
            for sg, dg, opaque, shared in self._view_groups
        ):
            self._sizes += [(b.dst_group, dst.groups[b.dst_group].block_tokens, b) for b in every]
        self._limits = {
            key: (min(b.src_blocks for b in of), min(b.dst_blocks for b in of), min(b.most_tokens for b in of))
            for key, of in self._view_groups.items()
        }
        self._alike = {key: self._alike_tokens(*key) for key in self._view_groups}
        self._seen = np.empty(max((v.blocks for v in dst.views), default=0), np.int32)

    def of(self, first: int, past: int) -> Planner:
        """Return a planner for the layers of the bands ``[first, past)`` only (all in groups of kind ``full``)."""
        found = self._of.get((first, past))
        if found is None:
            layers = frozenset[str]().union(*self._bands[first:past])
            full = [a for a in self._assignments if self.src.groups[self.src.views[a.src_view].group].kind == "full"]
            some = [replace(a, layers=tuple(layer for layer in a.layers if layer in layers)) for a in full]
            found = self._of[first, past] = Planner(self.src, self.dst, [a for a in some if a.layers])
        return found

    def plan(self, src_blocks: Rows, dst_blocks: Rows, start: int, tokens: int, tail: bool = False) -> CopyPlan:
        """Plan one request: join the block tables of both sides.

        The tokens ``[start, tokens)`` go into every destination block that is not null; of a state group, the states
        after those tokens do. A window group needs blocks only for what token ``tokens``, which the consumer computes
        next, attends to: ``[tokens - window + 1, tokens)``.

        Args:
            src_blocks: The producer's block table, one row of block ids for each group.
            dst_blocks: The consumer's; a negative id is a null block, which is not filled.
            start: First token to move.
            tokens: The token after the last.
            tail: Whether the last block may be written to its end, where that makes fewer rows.

        Raises:
            PlanError: A wanted token has no source block, a block id is outside the cache, a destination block stands
                at two positions, or ``start`` cuts an opaque block.
        """
        logical: list[LogicalCopy] = []
        moved: list[LogicalCopy] = []
        for key, members in self._view_groups.items():
            sg, dg, _, _ = key
            if sg >= len(src_blocks) or dg >= len(dst_blocks):
                raise PlanError(f"no block table for group {sg} of the producer or group {dg} of the consumer")
            src, dst = np.asarray(src_blocks[sg], np.int64), np.asarray(dst_blocks[dg], np.int64)
            if not len(dst) or greatest(dst) < 0:
                continue
            *limits, most = self._limits[key]
            found = join(src, dst, self._cut(key, most, len(dst), start, tokens), dg)
            if len(found.count):
                self._check_blocks(found, *limits)
                parts = [b.at(found) for b in members]
                block = self._alike[key] if tail and self._ends_in_front(found, dg, tokens) else 0
                logical += parts
                moved += [part.filled(block) for part in parts] if block else parts
        return CopyPlan(tuple([s for p in moved for s in p.copies()]), tuple(logical))

    def _alike_tokens(self, src_group: int, dst_group: int, opaque: bool, shared: Shared | None) -> int:
        """Return the tokens of a block that are here, if they are the same on both sides and one segment can hold them; else 0."""
        block, turns = self.dst.groups[dst_group].block_tokens, shared or Shared()
        if opaque or block != self.src.groups[src_group].block_tokens or turns.src != turns.dst:
            return 0
        here = block // turns.src.count
        return here if here <= self._limits[src_group, dst_group, opaque, shared][2] else 0

    def _ends_in_front(self, found: Segments, group: int, tokens: int) -> bool:
        """Return whether the last segment holds the first tokens of the block in which the last token lies."""
        last = int(found.dst_pos[-1]) == (tokens - 1) // self.dst.groups[group].block_tokens
        return last and not (found.src_token[-1] or found.dst_token[-1])

    def nbytes(
        self, src_blocks: BlockTable, dst_blocks: BlockTable, start: int, tokens: int, tail: bool = False
    ) -> int:
        """Return the bytes of the plan that ``plan`` would make, without making it if every token has a destination block.

        Raises:
            PlanError: The plan had to be made, and the tables cannot be joined. Without making it, they are not compared.
        """
        total = 0
        for g, block, b in self._sizes:
            front, step = tokens - tokens % block, block if b.opaque else 1
            if not dst_blocks.there(g, start // block, -(-tokens // block)):
                break
            past = tokens
            if tail and start <= front < tokens and self._alike[b.src_group, g, b.opaque, None]:
                past = front + b.filled(tokens - front, block)
            total += (-(-past // step) - start // step) * b.segment_bytes
        else:
            if self._sizes:
                return total
        return self.plan(src_blocks, dst_blocks, start, tokens, tail).nbytes

    def _cut(self, key: _Key, most: int, table: int, start: int, tokens: int) -> Cut:
        """Return where the tokens fall in both sides' blocks."""
        sg, dg, opaque, shared = key
        group, bs, bd = self.dst.groups[dg], self.src.groups[sg].block_tokens, self.dst.groups[dg].block_tokens
        if not 0 <= start <= tokens:
            raise PlanError(f"group {dg}: tokens [{start}, {tokens}) are not a span")
        if table * bd < tokens:
            raise PlanError(f"group {dg}: {tokens} tokens do not fit a table of {table} x {bd} tokens")
        if group.kind == "state":
            return cut_states(start, tokens, bs, bd)
        if opaque and start % bd and start < tokens:
            raise PlanError(f"group {dg}: start {start} cuts a block of {bd} tokens whose tokens are opaque")
        needed = group.behind(tokens) if group.window else start
        if shared is not None and not opaque:
            return cut_turns(start, tokens, bs, bd, needed, most, shared)
        return cut_tokens(start, tokens, bs, bd, needed, most)

    def _check_blocks(self, found: Segments, src_blocks: int, dst_blocks: int) -> None:
        """Refuse blocks outside either cache, and a destination block at two positions of its table."""
        for side, block, limit in (
            ("source", found.src_block, src_blocks),
            ("destination", found.dst_block, dst_blocks),
        ):
            worst = greatest(block)
            if worst >= limit:
                raise PlanError(f"{side} block {worst} is outside the cache's {limit} blocks")
        if len(found.dst_block) == 1:
            return
        self._seen[found.dst_block] = found.dst_pos
        twice = self._seen[found.dst_block] != found.dst_pos
        if np.logical_or.reduce(twice):
            culprit = int(found.dst_block[int(np.argmax(twice))])
            raise PlanError(f"destination block {culprit} stands at two positions of its table")
