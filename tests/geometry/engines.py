"""Pairs of engines drawn by hypothesis, and what must lie in the consumer's memory afterwards, by a naive loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.geometry import Rank
from tests.geometry.layouts import KINDS, SPLIT, Bytes, Spec, Store, build

Ints = NDArray[np.int64]
BLOCKS = 24


@dataclass
class RankStores:
    """The ranks of one engine, and one request's block tables, the same on all of them."""

    stores: dict[Rank, Store]
    tables: list[Ints]


@dataclass
class Case:
    """A transfer of the tokens ``[start, tokens)``."""

    specs: tuple[Spec, ...]
    producer: RankStores
    consumer: RankStores
    start: int
    tokens: int

    def content(self, g: int, layer: str, plane: str, key: tuple[int, ...], size: int) -> Bytes:
        """What every engine computes for one logical piece: bytes that depend on all of its coordinates."""
        words = [g, *layer.encode(), *plane.encode(), *(k + 1 for k in key)]
        return np.random.default_rng(words).integers(0, 256, size, dtype=np.uint8)

    def fill(self) -> None:
        """Write what the producer has computed: all tokens up to ``tokens``, wherever it has blocks."""
        for store in self.producer.stores.values():
            for g, layer, plane, _, cell, key in self.pieces(store, self.producer.tables, 0):
                cell[:] = self.content(g, layer, plane, key, len(cell))

    def expect(self, store: Store) -> tuple[Bytes, Bytes]:
        """The consumer rank's image after the move, and for every byte whether it was to be written."""
        before = store.image.copy()
        store.image[:] = 0
        for g, _, _, at, cell, _ in self.pieces(store, self.consumer.tables, self.start):
            if self.has(g, at):
                cell[:] = 1
        wanted = store.image.copy()
        store.image[:] = before
        for g, layer, plane, at, cell, key in self.pieces(store, self.consumer.tables, self.start):
            if self.has(g, at):
                cell[:] = self.content(g, layer, plane, key, len(cell))
        after = store.image.copy()
        store.image[:] = before
        return after, wanted

    def tail(self, store: Store) -> Bytes:
        """For every byte of a consumer rank's image whether it is of a token behind the last one, in the block that holds that."""
        before = store.image.copy()
        store.image[:] = 0
        for (g, _, _), held in store.held.items():
            n, kind = store.cache.groups[g].block_tokens, held.spec.kind
            block = self.consumer.tables[g][(self.tokens - 1) // n]
            if block < 0 or not kind.cut_tokens:
                continue
            for head in range(*held.heads) if kind.cut_heads else held.heads[:1]:
                for t in range(self.tokens, -(-self.tokens // n) * n):
                    at = held.own(t)
                    if at is not None:
                        held.cell(int(block), head, at % (n // held.turn[1]))[:] = 1
        mask = store.image == 1
        store.image[:] = before
        return mask

    def has(self, g: int, token: int) -> bool:
        """Whether the producer has a block for a token."""
        table, n = self.producer.tables[g], self.block_tokens(self.producer, g)
        return token // n < len(table) and table[token // n] >= 0

    def block_tokens(self, engine: RankStores, g: int) -> int:
        return next(iter(engine.stores.values())).cache.groups[g].block_tokens

    def pieces(self, store: Store, tables: list[Ints], start: int):  # type: ignore[no-untyped-def]
        """(group, layer, plane, last token, cell, logical key) of all that this store holds of the request."""
        for (g, layer, plane), held in store.held.items():
            kind, n = held.spec.kind, store.cache.groups[g].block_tokens
            heads = range(*held.heads) if kind.cut_heads else held.heads[:1]
            for p, block in enumerate(tables[g]):
                last = min((p + 1) * n, self.tokens) - 1
                first = max(p * n, start)
                if block < 0 or first > last:
                    continue
                tokens = range(first, last + 1) if kind.cut_tokens else [last]
                for head in heads:
                    for t in tokens:
                        at = held.own(t) if kind.cut_tokens else 0
                        if at is None:
                            continue
                        where = t if kind.cut_tokens else last if kind.group == "state" else p
                        turn = 0 if kind.cut_tokens else held.turn[0]
                        key = (head, held.heads[1] if not kind.cut_heads else 0, where, turn)
                        yield g, layer, plane, t, held.cell(int(block), head, at % (n // held.turn[1])), key


@st.composite
def specs(draw: st.DrawFn) -> tuple[Spec, ...]:
    out = []
    for i in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from((*KINDS, KINDS[0], KINDS[0])))
        sizes = tuple(draw(st.integers(1, 9)) for _ in kind.planes)
        if draw(st.booleans()):
            sizes = sizes[:1] * len(sizes)
        layers = tuple(f"g{i}.l{j}" for j in range(draw(st.integers(1, 4))))
        window = draw(st.integers(1, 20)) if kind.group == "window" else 0
        out.append(Spec(kind, layers, sizes, draw(st.sampled_from([1, 2, 4])), window))
    return tuple(out)


@st.composite
def engine(
    draw: st.DrawFn,
    of: tuple[Spec, ...],
    start: int,
    tokens: int,
    sizes: tuple[int, ...],
    others: tuple[int, ...],
    tp: int,
    side: str,
    turns: tuple[tuple[int, int], ...],
) -> RankStores:
    """An engine of any layouts and stages. ``sizes``, ``others``: block tokens of each group here and on the other side."""
    cuts = [sorted(draw(st.integers(0, len(s.layers))) for _ in range(draw(st.integers(0, 1)))) for s in of]
    stages = max(len(c) for c in cuts) + 1
    layouts = tuple(
        draw(st.sampled_from(sorted(n for n in s.kind.layouts if n not in SPLIT or len(set(s.sizes)) == 1))) for s in of
    )
    tables = []
    for s, n, other in zip(of, sizes, others, strict=True):
        length = -(-tokens // n)
        if draw(st.booleans()):
            ids = np.arange(length) + draw(st.integers(0, BLOCKS * 4 - length))
        else:
            ids = np.array(draw(st.permutations(range(BLOCKS * 4)))[:length], dtype=np.int64)
        ids = ids.astype(np.int64)
        if (
            s.window
        ):  # blocks wholly before the window may be null, as engines have them; no block of the other side's is cut
            step = math.lcm(n, other)
            ids[: draw(st.integers(0, max(0, tokens - s.window + 1) // step)) * (step // n)] = -1
        if side == "consumer":  # holes: what the consumer has already, or does not want
            for p in range(length):
                if draw(st.integers(0, 9)) == 0:
                    ids[p] = -1
            extra = draw(st.integers(0, 2))
            ids = np.concatenate([ids, np.full(extra, -1, np.int64)])
        tables.append(ids)
    stores = {}
    for pp in range(stages):
        mine = tuple(
            s.layers[(0 if pp == 0 else c[pp - 1]) if pp <= len(c) else len(s.layers) : c[pp] if pp < len(c) else None]
            for s, c in zip(of, cuts, strict=True)
        )
        for rank in range(tp):
            seed = draw(st.integers(0, 1 << 30))
            stores[Rank(pp, rank)] = build(Rank(pp, rank), tp, of, mine, layouts, sizes, BLOCKS * 4, seed, turns)
    return RankStores(stores, tables)


@st.composite
def turns(draw: st.DrawFn, of: tuple[Spec, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """For each group how many ranks take turns with its tokens, and the tokens of a turn."""
    return tuple(
        (ranks, draw(st.integers(1, 3))) if s.kind.group != "state" and draw(st.booleans()) else (1, 1) for s in of
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    of = draw(specs())
    tokens = draw(st.integers(1, 40))
    # How many ranks take turns, and for each group whether they do.
    ranks = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(2)]
    at_src, at_dst = (draw(turns(of, n)) for n in ranks)
    if any(not s.kind.cut_heads or not s.kind.cut_tokens for s in of):
        at_dst = tuple((p[0], d[1]) for p, d in zip(at_src, at_dst, strict=True))
    at_dst = tuple(d if s.kind.cut_tokens else p for s, p, d in zip(of, at_src, at_dst, strict=True))
    ranks = [max(n for n, _ in at) for at in (at_src, at_dst)]
    src = tuple(draw(st.integers(1, 9)) for _ in of)
    dst = tuple(
        n if not s.kind.cut_tokens and s.kind.group != "state" or draw(st.booleans()) else draw(st.integers(1, 9))
        for s, n in zip(of, src, strict=True)
    )
    # A block holds whole rounds.
    src, dst = (
        tuple(n * ranks * span for n, (ranks, span) in zip(of_side, at, strict=True))
        for of_side, at in ((src, at_src), (dst, at_dst))
    )
    # One state for a whole request pairs with any block size; states along the way only with the same.
    for i, s in enumerate(of):
        if s.kind.group == "state" and src[i] != dst[i]:
            src, dst = ((*x[:i], tokens + draw(st.integers(0, 9)), *x[i + 1 :]) for x in (src, dst))
    start = draw(st.one_of(st.integers(0, tokens), st.sampled_from([0, tokens])))
    if any(not s.kind.cut_tokens and s.kind.group != "state" for s in of):
        n = int(np.lcm.reduce([n for s, n in zip(of, dst, strict=True) if not s.kind.cut_tokens]))
        start = start // n * n
    fused = any(not s.kind.cut_heads for s in of)
    tp_src = draw(st.sampled_from([1, 2, 4]))
    tp_dst = draw(st.sampled_from([1, 2, 4])) if not fused else tp_src
    producer = draw(engine(of, start, tokens, src, dst, tp_src * ranks[0], "producer", at_src))
    consumer = draw(engine(of, start, tokens, dst, src, tp_dst * ranks[1], "consumer", at_dst))
    return Case(of, producer, consumer, start, tokens)
