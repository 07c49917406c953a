"""The law of copy plans, for every pair of layouts, shards, block sizes, block lists and prefixes that hypothesis
draws: copying along the plan equals indexing both caches by their logical coordinates."""

from __future__ import annotations

import os
from unittest.mock import patch

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.geometry import Cache, CopyPlan, Group, Planner, Rank, ShardAssignment, route
from kvxfer.protocol import parts
from kvxfer.protocol.parts import Span, lacking, plan_part, reached
from kvxfer.protocol.values import LinkInfo
from kvxfer.values import BlockTable
from tests.geometry.engines import Case, cases

LAW = settings(
    max_examples=int(os.environ.get("KVXFER_EXAMPLES", "40")), deadline=None, suppress_health_check=list(HealthCheck)
)


def links(case: Case) -> list[tuple[Rank, Rank, tuple[ShardAssignment, ...]]]:
    """(producer rank, consumer rank, assignments) of every link that the route asks for."""
    routes = route([s.cache for s in case.producer.stores.values()], [s.cache for s in case.consumer.stores.values()])
    return [(p, c, assignments) for c, r in routes.items() for p, assignments in r.assignments.items()]


def tables(case: Case) -> tuple[BlockTable, BlockTable]:
    """The blocks of both sides, as transfers are given them."""
    return BlockTable.of(case.producer.tables), BlockTable.of(case.consumer.tables)


def plan(case: Case, p: Rank, c: Rank, assignments: tuple[ShardAssignment, ...], tail: bool = False) -> CopyPlan:
    planner = Planner(case.producer.stores[p].cache, case.consumer.stores[c].cache, assignments)
    return planner.plan(case.producer.tables, case.consumer.tables, case.start, case.tokens, tail)


@LAW
@given(cases(), st.booleans())
def test_copying_along_the_plan_equals_logical_indexing(case: Case, tail: bool) -> None:
    """And only behind the last token, in its block, may more be written, if the consumer says so."""
    case.fill()
    written = {c: np.zeros(len(s.image), np.int64) for c, s in case.consumer.stores.items()}
    after = {c: case.expect(s) for c, s in case.consumer.stores.items()}
    for p, c, assignments in links(case):
        runs = plan(case, p, c, assignments, tail).runs()
        source, target = case.producer.stores[p].image, case.consumer.stores[c].image
        for a, b, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
            target[b : b + n] = source[a : a + n]
            written[c][b : b + n] += 1
    for c, (image, wanted) in after.items():
        store = case.consumer.stores[c]
        spared = ~case.tail(store) if tail else np.ones(len(image), bool)
        assert np.array_equal(written[c][spared], wanted[spared]), (
            "a byte was written twice, or not at all, or is none of ours"
        )
        assert written[c].max(initial=0) <= 1
        assert np.array_equal(store.image[spared], image[spared])


def mapping(runs_of: CopyPlan) -> dict[int, int]:
    """Destination byte -> source byte."""
    runs = runs_of.runs()
    found: dict[int, int] = {}
    for a, b, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        for i in range(n):
            assert b + i not in found
            found[b + i] = a + i
    return found


def rows(of: CopyPlan) -> list[tuple[int, int, int, int]]:
    """(stream offset, source, destination, bytes) of every row of every segment, as the factored form says."""
    out, at = [], 0
    for s in of.copies:
        base, pitch = s.stream()
        for i in range(len(s.counts)):
            for r in range(len(s.src_rows)):
                out.append(
                    (
                        at + int(base[i] + r * pitch[i]),
                        int(s.src_at[i] + s.src_rows[r]),
                        int(s.dst_at[i] + s.dst_rows[r]),
                        int(pitch[i]),
                    )
                )
        at += s.nbytes
    return out


@LAW
@given(cases(), st.booleans())
def test_factored_form_and_runs_say_the_same(case: Case, tail: bool) -> None:
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments, tail)
        listed = rows(made)
        whole = mapping(made)
        assert {b + i: a + i for _, a, b, n in listed for i in range(n)} == whole
        assert len(listed) == made.rows
        assert sum(n for *_, n in listed) == made.nbytes == made.runs().nbytes == len(whole)
        # The stream has no gap and no overlap.
        ends = sorted((at, at + n) for at, _, _, n in listed)
        assert [lo for lo, _ in ends] == [0, *(hi for _, hi in ends[:-1])][: len(ends)]


@LAW
@given(cases())
def test_there_are_as_few_runs_as_there_are_contiguous_stretches(case: Case) -> None:
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        whole = mapping(made)
        breaks = sum(1 for b, a in whole.items() if whole.get(b - 1) != a - 1)
        assert len(made.runs()) == breaks


@LAW
@given(cases(), st.booleans())
def test_both_sides_derive_the_same_from_what_they_exchange(case: Case, tail: bool) -> None:
    for p, c, assignments in links(case):
        here = plan(case, p, c, assignments, tail)
        wire = [
            msgspec.msgpack.decode(msgspec.msgpack.encode(x), type=t)
            for x, t in (
                (case.producer.stores[p].cache, Cache),
                (case.consumer.stores[c].cache, Cache),
                (assignments, tuple[ShardAssignment, ...]),
            )
        ]
        there = Planner(*wire).plan(
            [t.tolist() for t in case.producer.tables],
            [t.tolist() for t in case.consumer.tables],
            case.start,
            case.tokens,
            tail,
        )
        assert rows(here) == rows(there)
        one, other = here.runs(), there.runs()
        assert all(np.array_equal(getattr(one, f), getattr(other, f)) for f in ("src", "dst", "length"))


@LAW
@given(cases(), st.booleans())
def test_bytes_are_counted_without_a_plan_as_with_one(case: Case, tail: bool) -> None:
    for p, c, assignments in links(case):
        planner = Planner(case.producer.stores[p].cache, case.consumer.stores[c].cache, assignments)
        src, dst = tables(case)
        made = planner.plan(src, dst, case.start, case.tokens, tail)
        assert planner.nbytes(src, dst, case.start, case.tokens, tail) == made.nbytes
        assert made.nbytes >= planner.least_row * made.rows


@LAW
@given(cases(), st.integers(1, 200))
def test_plans_together_do_what_each_does(case: Case, limit: int) -> None:
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        assert mapping(CopyPlan.together(made.split(limit))) == mapping(made)


@LAW
@given(cases(), st.integers(1, 200), st.floats(0, 1))
def test_pieces_are_exactly_the_whole(case: Case, limit: int, share: float) -> None:
    first = int(limit * share)
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        pieces = list(made.split(limit, first))
        assert all(0 < piece.nbytes <= limit for piece in pieces)
        if pieces and first and all(len(s.pattern) * int(s.row_bytes.max()) <= first for s in made.copies):
            assert pieces[0].nbytes <= first
        found: dict[int, int] = {}
        for piece in pieces:
            part = mapping(piece)
            assert not found.keys() & part.keys()
            found |= part
        assert found == mapping(made)
        if made.nbytes:
            assert len(list(made.split(made.nbytes))) == 1


@LAW
@given(cases(), st.data(), st.booleans())
def test_a_transfer_may_be_cut_wherever_its_planner_says(case: Case, data: st.DataObject, tail: bool) -> None:
    """Whatever is in the caches: planes that no token cuts, windows and states as well, which go with the last part.

    Only that brings anything behind the last token, and never what another has brought.
    """
    middle = data.draw(st.integers(case.start, case.tokens))
    for p, c, assignments in links(case):
        planner = Planner(case.producer.stores[p].cache, case.consumer.stores[c].cache, assignments)
        src, dst = tables(case)
        cut = max(case.start, middle - middle % planner.indivisible)
        assert planner.indivisible == 1 or any(not s.kind.cut_tokens for s in case.specs), "what can be cut is"
        ends = (case.start, cut), (cut, case.tokens)
        first, last = (
            plan_part(planner, src, dst, case.start, case.tokens, *end, end is ends[-1], tail=tail) for end in ends
        )
        moved, wanted = mapping(first + last), mapping(planner.plan(src, dst, case.start, case.tokens))
        behind = np.flatnonzero(case.tail(case.consumer.stores[c])) if tail else ()
        assert {b: a for b, a in moved.items() if b in wanted} == wanted and moved.keys() - wanted.keys() <= {*behind}


@LAW
@given(cases(), st.data())
def test_bands_of_layers_add_up_to_the_whole(case: Case, data: st.DataObject) -> None:
    """In whatever steps tokens and bands become ready, each byte is moved once."""
    for p, c, assignments in links(case):
        planner = Planner(case.producer.stores[p].cache, case.consumer.stores[c].cache, assignments)
        src, dst = tables(case)
        ready, sent, moved, seen = [case.start] * planner.bands, [case.start] * planner.bands, {}, []
        for final in (False, False, False, True):
            tokens = data.draw(st.integers(max(ready), case.tokens))
            tokens = case.tokens if final else max(case.start, tokens - tokens % planner.indivisible)
            some = planner.bands if final else data.draw(st.integers(0, planner.bands))
            ready = [max(tokens, old) if band < some else old for band, old in enumerate(ready)]
            spans = lacking(sent, ready) or [Span(tokens, tokens)]
            for span in spans:
                last = final and span is spans[-1]
                part = mapping(
                    plan_part(planner, src, dst, case.start, case.tokens, span.lo, span.hi, last, span.bands)
                )
                assert not part.keys() & moved.keys()
                moved |= part
                seen.append(span)
                arrived = reached(seen, case.start, planner.bands)
                assert arrived <= min(ready) and (span is not spans[-1] or arrived == min(ready))
            sent = ready
        assert moved == mapping(planner.plan(src, dst, case.start, case.tokens))


@LAW
@given(cases(), st.data())
def test_parts_that_are_sent_add_up_to_the_whole(case: Case, data: st.DataObject) -> None:
    """Wherever a load is cut to be sent, its parts follow each other without a gap, and each byte is moved once."""
    for p, c, assignments in links(case):
        planner = Planner(case.producer.stores[p].cache, case.consumer.stores[c].cache, assignments)
        src, dst = tables(case)
        whole = Span(case.start, case.tokens)
        made = plan_part(planner, src, dst, *whole[:2], *whole[:2], True)
        most = data.draw(st.integers(max(1, made.nbytes // 10), made.nbytes + 1))
        with patch.object(parts, "HOST_BYTES", most):
            spans = parts.cut(whole, made, LinkInfo("sendrecv", planner))
        wanted = -(-made.nbytes // most)
        assert len(spans) == max(wanted, 1) or planner.indivisible > 1 or wanted > whole.hi - whole.lo, (
            "what can be cut is"
        )
        assert [span.lo for span in spans] + [whole.hi] == [whole.lo] + [span.hi for span in spans]
        moved: dict[int, int] = {}
        for span in spans:
            part = mapping(plan_part(planner, src, dst, *whole[:2], span.lo, span.hi, span is spans[-1]))
            assert not part.keys() & moved.keys()
            moved |= part
        assert moved == mapping(made)


def elsewhere(cache: Cache, order: tuple[int, ...]) -> Cache:
    """The same cache with its groups in another order; -1 is one of the engine's own, which nobody else has."""
    groups = tuple(Group(7) if g < 0 else cache.groups[g] for g in order)
    views = tuple(msgspec.structs.replace(v, group=order.index(v.group)) for v in cache.views)
    return msgspec.structs.replace(cache, groups=groups, views=views)


@LAW
@given(cases(), st.data())
def test_where_groups_stand_in_the_tables_does_not_matter(case: Case, data: st.DataObject) -> None:
    """An engine may have groups that the other has not, and the rest in another order."""
    orders, sides = [], (case.producer, case.consumer)
    for _ in sides:
        own = data.draw(st.lists(st.just(-1), max_size=1))
        orders.append(tuple(data.draw(st.permutations([*range(len(case.specs)), *own]))))
    moved = [
        [elsewhere(s.cache, order) for s in side.stores.values()] for side, order in zip(sides, orders, strict=True)
    ]
    tables = [[[5, 6] if g < 0 else side.tables[g] for g in order] for side, order in zip(sides, orders, strict=True)]
    producers, consumers = ({c.rank: c for c in caches} for caches in moved)
    routes = route(*moved)
    for p, c, assignments in links(case):
        planner = Planner(producers[p], consumers[c], routes[c].assignments[p])
        found = planner.plan(tables[0], tables[1], case.start, case.tokens)
        assert mapping(found) == mapping(plan(case, p, c, assignments))
