"""What announcements carry of an offer's block table: each block once, however many parts it comes in and whoever comes late."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import Cache, Group, Heads, Planner, Rank, Region, View, route
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol import parts
from kvxfer.protocol.parts import Span
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import Action, LinkInfo, Send
from kvxfer.values import BlockTable, Offer

T, DIGEST = TransferId("own/1/long", 0), b"digest"
TOKENS, BLOCK, PARTS, UNIT = 128 << 10, 16, 64, 16
IDS = np.random.default_rng(1).permutation(TOKENS // BLOCK)
HERE, LATE = b"consumer", b"late"


def make_cache(*groups: Group) -> Cache:
    """Blocks that can be cut by token."""
    views = tuple(
        View(
            f"kv{g}",
            g,
            (f"layer.{g}",),
            (g << 30,),
            1 << 16,
            UNIT * of.block_tokens,
            UNIT,
            "test",
            Heads(0, 1, 1, UNIT * of.block_tokens),
            UNIT,
        )
        for g, of in enumerate(groups)
    )
    return Cache((Region(4096, len(groups) << 30),), groups, views, Rank())


def planner(*groups: Group) -> Planner:
    src, dst = make_cache(*groups), make_cache(*groups)
    return Planner(src, dst, route([src], [dst])[Rank()].assignments[Rank()])


def said(actions: list[Action]) -> list[m.PartReady]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, m.PartReady)]


def test_a_long_prompt_in_many_parts_has_its_table_told_once() -> None:
    producer = ProducerMachine(60.0, 60.0)
    request = m.FetchRequest(T, 1, DIGEST, 0, TOKENS, BlockTable.of([IDS]), 1, 50.0)
    for link in (HERE, LATE):
        producer.link_up(link, LinkInfo("read", planner(Group(BLOCK)), peer=1), 0.0)
    producer.message(HERE, request, 0.0)
    heard: list[m.PartReady] = []
    for part in range(1, PARTS + 1):
        tokens = TOKENS * part // PARTS
        table = BlockTable.of([IDS[: tokens // BLOCK]])
        heard += said(producer.offer(Offer(T, DIGEST, 1, tokens, table, part == PARTS), 0.0))
    (late,) = said(producer.message(LATE, request, 0.0))
    assert [*late.blocks[0]] == [*IDS], "who comes late is told all of it"
    assert [(msg.lo, msg.hi) for msg in heard] == [
        (TOKENS // PARTS * i, TOKENS // PARTS * (i + 1)) for i in range(PARTS)
    ]
    assert [*np.concatenate([msg.blocks[0] for msg in heard])] == [*IDS]
    nbytes = sum(len(m.encode(msg)) for msg in heard)
    assert nbytes <= len(m.encode(late)) + 64 * PARTS, "the table, and a little for each part"


@pytest.mark.parametrize("groups", [(Group(16),), (Group(16), Group(4)), (Group(16), Group(16, "window", 40))])
@pytest.mark.parametrize("final", [False, True])
def test_both_sides_plan_a_part_alike(groups: tuple[Group, ...], final: bool) -> None:
    """From the whole table and from what the announcement carries of it, also where a part cuts blocks."""
    known, tokens, start = planner(*groups), 160, 5
    rng = np.random.default_rng(3)
    src, dst = (
        BlockTable.of([rng.permutation(1000)[: g.blocks(tokens)] if final or g.kind == "full" else [] for g in groups])
        for _ in range(2)
    )
    for lo, hi in ((5, 160), (5, 32), (16, 32), (32, 100), (37, 59), (100, 160), (160, 160)):
        carried = parts.carried(known, src, Span(lo, hi), final)
        told = parts.placed(known, carried, lo, final)
        there, here = (parts.plan_part(known, table, dst, start, tokens, lo, hi, final) for table in (src, told))
        assert np.array_equal(there.runs().src, here.runs().src) and np.array_equal(there.runs().dst, here.runs().dst)
        assert there.nbytes == here.nbytes and (there.nbytes or lo == hi or not final)
        if not final:
            assert carried.nbytes <= 4 * sum((hi - lo) // g.block_tokens + 2 for g in groups)
