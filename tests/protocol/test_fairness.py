"""A short load beside a long one on the same link waits for a bounded number of its parts, whatever the long one holds."""

from __future__ import annotations

import pytest

from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, CopyPlan, Group, Planner, Rank, Region, ShardAssignment, View, route
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol import parts
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import Abort, Action, LinkInfo, Mode, Move, Moved, Send
from kvxfer.testing.engine import PagedMemory
from kvxfer.values import BlockTable, Offer

LONG, SHORT = TransferId("own/1/long", 0), TransferId("own/1/short", 0)
DIGEST = b"digest"
BLOCKS = 20  # of the long one; a block holds four tokens
LINK = b"consumer"


class Producer:
    """A machine with one link, and what it asked for: moves that have not ended, and announcements."""

    def __init__(self, mode: Mode) -> None:
        caches = [PagedMemory(blocks=64).caches[0] for _ in range(2)]
        planner = Planner(caches[0], caches[1], (ShardAssignment(0, 0, caches[0].views[0].layers, 0, 4),))
        self.machine = ProducerMachine(60.0, 60.0)
        self.machine.link_up(LINK, LinkInfo(mode, planner, peer=1), 0.0)
        self.moves: list[Move] = []
        self.said: list[m.PartReady] = []
        self.attempts = 0

    def do(self, actions: list[Action]) -> None:
        self.moves += [a for a in actions if isinstance(a, Move)]
        said = [a.message for a in actions if isinstance(a, Send)]
        assert all(isinstance(msg, m.PartReady) for msg in said), said
        self.said += [msg for msg in said if isinstance(msg, m.PartReady)]

    def load(self, transfer: TransferId, first: int, blocks: int) -> None:
        table, tokens = BlockTable.of([[*range(first, first + blocks)]]), 4 * blocks
        self.attempts += 1
        self.do(self.machine.offer(Offer(transfer, DIGEST, 1, tokens, table, True), 0.0))
        self.do(
            self.machine.message(LINK, m.FetchRequest(transfer, self.attempts, DIGEST, 0, tokens, table, 1, 9.0), 0.0)
        )

    def end_one(self) -> None:
        """Have the oldest move end, as a link does that moves one after the other."""
        move = self.moves.pop(0)
        self.do(self.machine.moved(Moved(move.ref, None, True, move.plan.nbytes), 0.0))


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Producer("sendrecv")
    probe.load(SHORT, 0, 1)
    monkeypatch.setattr(parts, "HOST_BYTES", probe.moves[0].plan.nbytes)


@pytest.mark.usefixtures("one_block")
def test_a_short_load_waits_for_two_parts_of_a_long_one() -> None:
    producer = Producer("sendrecv")
    producer.load(LONG, 0, BLOCKS)
    producer.load(SHORT, 40, 1)
    assert [move.ref.transfer for move in producer.moves] == [LONG, LONG, SHORT]
    ended = 0
    while producer.moves:
        producer.end_one()
        ended += 1
        assert sum(move.ref.transfer == LONG for move in producer.moves) <= parts.AHEAD
    assert ended == BLOCKS + 1
    spans = [(msg.lo, msg.hi) for msg in producer.said if msg.transfer == LONG]
    assert spans == [(4 * i, 4 * i + 4) for i in range(BLOCKS)], "all of it, in its order"
    assert [msg.final for msg in producer.said if msg.transfer == LONG] == [False] * (BLOCKS - 1) + [True]
    assert [msg.stream for msg in producer.said] == [*range(BLOCKS + 1)], (
        "a link's parts are numbered as they are announced"
    )


@pytest.mark.usefixtures("one_block")
def test_more_of_an_offer_waits_for_what_is_being_sent() -> None:
    producer = Producer("sendrecv")
    table = BlockTable.of([[*range(BLOCKS)]])
    producer.do(producer.machine.message(LINK, m.FetchRequest(LONG, 1, DIGEST, 0, 80, table, 1, 9.0), 0.0))
    for tokens in range(4, 84, 4):
        producer.do(producer.machine.offer(Offer(LONG, DIGEST, 1, tokens, table, tokens == 80), 0.0))
    assert len(producer.moves) == parts.AHEAD
    while producer.moves:
        producer.end_one()
    assert producer.said[-1].final and producer.said[-1].hi == 80


@pytest.mark.usefixtures("one_block")
def test_of_equal_loads_the_one_that_was_wanted_first_begins_and_ends_first() -> None:
    producer, transfers = Producer("sendrecv"), [TransferId("own/1/equal", i) for i in range(4)]
    for i, transfer in enumerate(transfers):
        producer.load(transfer, 5 * i, 5)
    began = [move.ref.transfer for move in producer.moves]
    assert began == sorted(began, key=transfers.index)
    ended = []
    while producer.moves:
        move = producer.moves[0]
        producer.end_one()
        if all(other.ref.transfer != move.ref.transfer for other in producer.moves):
            ended.append(move.ref.transfer)
    assert ended == transfers


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("chunks", [1, 5])
def test_a_load_is_planned_as_often_however_many_parts_it_has(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    planned = 0
    plan = Planner.plan

    def counted(planner: Planner, src: BlockTable, dst: BlockTable, start: int, tokens: int, tail: bool) -> CopyPlan:
        nonlocal planned
        planned += tokens - start
        return plan(planner, src, dst, start, tokens, tail)

    monkeypatch.setattr(Planner, "plan", counted)
    producer = Producer("sendrecv")
    table, size = BlockTable.of([[*range(BLOCKS)]]), 4 * BLOCKS // chunks
    producer.do(producer.machine.message(LINK, m.FetchRequest(LONG, 1, DIGEST, 0, 80, table, 1, 9.0), 0.0))
    for chunk in range(1, chunks + 1):
        producer.do(producer.machine.offer(Offer(LONG, DIGEST, 1, chunk * size, table, chunk == chunks), 0.0))
        producer.end_one()
    while producer.moves:
        producer.end_one()
    assert [(msg.lo, msg.hi) for msg in producer.said] == [(4 * i, 4 * i + 4) for i in range(BLOCKS)]
    assert planned == 2 * 4 * BLOCKS, "each token once to see where it is cut, and once in its part"


@pytest.mark.usefixtures("one_block")
def test_blocks_that_are_taken_back_under_a_load_end_it_and_nothing_else() -> None:
    producer, tokens = Producer("sendrecv"), 4 * BLOCKS
    request = m.FetchRequest(LONG, 1, DIGEST, 0, tokens, BlockTable.of([[*range(BLOCKS)]]), 1, 9.0)
    producer.do(producer.machine.message(LINK, request, 0.0))
    producer.do(producer.machine.offer(Offer(LONG, DIGEST, 1, tokens // 2, request.blocks, False), 0.0))
    producer.do(producer.machine.offer(Offer(LONG, DIGEST, 1, tokens, BlockTable.of([[0]]), True), 0.0))
    first, second = producer.moves
    aborted = producer.machine.moved(Moved(first.ref, None, True, first.plan.nbytes), 0.0)
    assert aborted == [Abort(second.ref)]
    (closed,) = producer.machine.moved(Moved(second.ref, None, True, second.plan.nbytes), 0.0)
    assert isinstance(closed, Send) and isinstance(closed.message, m.AttemptClosed)
    assert closed.message.kind is FailureKind.MISUSE and "do not join" in closed.message.reason


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("mode", ["read", "write"])
def test_what_is_read_or_written_is_announced_whole(mode: Mode) -> None:
    producer = Producer(mode)
    producer.load(LONG, 0, BLOCKS)
    assert len(producer.said) + len(producer.moves) == 1, "each side cuts that by itself"


@pytest.mark.parametrize(
    ("device", "piece", "most"),
    [("cpu", 0, 32), ("cpu", 8, 32), ("cuda:0", 0, 512), ("cuda:0", 16, 64), ("cuda:0", 1, 32), ("cuda:0", 256, 512)],
)
def test_parts_are_as_long_as_their_way_is_fast(device: str, piece: int, most: int) -> None:
    """A GPU's cache may go through the host's staging memory, which has shorter pieces; all sizes are in MiB."""
    blocks, page = 64, 32 << 20
    cache = Cache(
        (Region(1 << 30, blocks * page, device),),
        (Group(4),),
        (View("kv", 0, ("layer",), (0,), blocks, page, page, "test"),),
    )
    planner = Planner(cache, cache, route([cache], [cache])[Rank()].assignments[Rank()])
    table = BlockTable.of([[*range(blocks)]])
    info = LinkInfo("sendrecv", planner, piece_bytes=piece << 20, stage_below=1 << 48 if piece else 0)
    sizes = {span.hi - span.lo for span in parts.cut(parts.Span(0, 256), planner.plan(table, table, 0, 256), info)}
    assert sizes == {most * 4 // 32}
