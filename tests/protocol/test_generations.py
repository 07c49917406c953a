"""A transfer is delivered of one generation, or not: over all producer ranks that a consumer rank reads from, and over all
consumer ranks of an engine. Ranks lag: each hears of its engine's offers and revocations in the same order, at its own time.

The machines are real; between them there is nothing but queues, and no clock.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner, Rank, ShardAssignment
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import (
    Abort,
    Action,
    Dial,
    Emit,
    Ended,
    GenerationReleased,
    LinkInfo,
    Move,
    Moved,
    RankRoute,
    Released,
    Resolved,
    Send,
)
from kvxfer.values import BlockTable, Fetch, Offer
from tests.protocol.world.base import D_TOKENS, P_TOKENS, make_cache

T, SOURCE, TOKENS, DIGEST = TransferId("t", 0), Source("p", 1, 1), 4, b"digest"
FOREVER = 1e6
P_MEMORY, D_MEMORY = np.zeros(1024, np.uint8), np.zeros(4096, np.uint8)
P_CACHES = [make_cache(P_MEMORY, (f"layer.{r}",), P_TOKENS, r) for r in range(2)]
D_CACHE = make_cache(D_MEMORY, ("layer.0", "layer.1"), D_TOKENS, 0)
PLANNERS = [Planner(P_CACHES[r], D_CACHE, (ShardAssignment(0, 0, (f"layer.{r}",), 0, 1),)) for r in range(2)]  # type: ignore[arg-type]
BLOCKS = BlockTable.of([range(TOKENS // P_TOKENS)])


class Ranks:
    """Two producer ranks and two consumer ranks, each of which reads from both. ``seen``: whether by the tally."""

    def __init__(self, rng: random.Random, mode: str = "read", seen: bool = False, generations: int = 4) -> None:
        self.rng, self.mode, self.seen = rng, mode, seen
        self.moments = count()
        self.tallies = [RevocationCounter(), RevocationCounter()]
        self.producers = [ProducerMachine(FOREVER, FOREVER, t) for t in self.tallies]
        self.consumers = [ConsumerMachine(FOREVER, FOREVER), ConsumerMachine(FOREVER, FOREVER)]
        # What either engine says to its ranks, and how far each has come; then what its machine has still to hear.
        script = [what for g in range(1, generations + 1) for what in (("offer", g), ("revoke", g))][:-1]
        self.orders = [deque(script), deque(script)]
        self.inboxes: list[deque[Callable[[], list[Action]]]] = [deque(), deque()]
        self.current = [-1, -1]  # the generation that is in each rank's blocks
        self.revoked: dict[tuple[int, int], int] = {}
        self.queues: dict[Any, deque[m.Message]] = defaultdict(deque)
        self.moves: list[tuple[tuple[str, int], Move]] = []
        self.read: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # consumer and rank -> generation and moment of the last read
        self.ended: dict[int, Ended] = {}
        self.soon: deque[Callable[[], None]] = deque()
        self.names: dict[tuple[int, int], bytes] = {}  # consumer and rank -> the producer's name of their link
        self.haste = rng.choice((0.01, 0.02, 0.05, 0.1))
        for c, consumer in enumerate(self.consumers):
            self.act(("c", c), consumer.fetch(Fetch("req", T, DIGEST, SOURCE, BlockTable.of([[0]]), 0, TOKENS), 0.0))
            ranks = tuple(RankRoute(r, 2, Rank(0, r)) for r in range(2))
            self.act(("c", c), consumer.resolved(SOURCE, Resolved(ranks), 0.0))

    def act(self, who: tuple[str, int], actions: list[Action]) -> None:
        side, i = who
        for action in actions:
            match action:
                case Dial(link=r):
                    self.soon.append(lambda r=r: self.dial(i, r))
                case Send(link=link, message=msg):
                    c, r = (i, link) if side == "c" else (self.consumer(link), i)
                    self.queues[side, c, r].append(m.decode(m.encode(msg)))
                    if self.rng.random() < 0.1:  # comes twice, the second time at any moment
                        self.queues[side, c, r, "late"].append(msg)
                case Move():
                    self.moves.append((who, action))
                case Abort(ref=ref):
                    for move in [x for x in self.moves if x[0] == who and x[1].ref == ref]:
                        self.moves.remove(move)
                        self.soon.append(
                            lambda ref=ref: self.moved(
                                who, Moved(ref, Failure(FailureKind.CANCELLED, "aborted"), True, 0)
                            )
                        )
                case Emit(event=Ended() as end) if side == "c":
                    assert i not in self.ended
                    self.ended[i] = end
                    self.check(i, end)
        while self.soon:
            self.soon.popleft()()

    def consumer(self, link: Any) -> int:
        return int(link.split(b".")[0])

    def dial(self, c: int, r: int) -> None:
        self.names[c, r] = b"%d.%d" % (c, next(self.moments))
        view = (lambda: self.tallies[r].declared) if self.seen else None
        self.act(("p", r), self.producers[r].link_up(self.names[c, r], LinkInfo(self.mode, PLANNERS[r], 100 + c), 0.0))  # type: ignore[arg-type]
        self.act(("c", c), self.consumers[c].link_closed(r, 0.0))
        self.act(("c", c), self.consumers[c].link_up(r, LinkInfo(self.mode, PLANNERS[r], r, revocations=view), 0.0))  # type: ignore[arg-type]

    def cut(self, c: int, r: int) -> None:
        """A link breaks, and can be had again."""
        for key in [k for k in self.queues if k[1:3] == (c, r)]:
            del self.queues[key]
        self.act(("p", r), self.producers[r].link_down(self.names[c, r], Failure(FailureKind.PEER_LOST, "cut"), 0.0))
        self.act(("c", c), self.consumers[c].link_reset(r, Failure(FailureKind.PEER_LOST, "cut"), 0.0))

    def moved(self, who: tuple[str, int], moved: Moved) -> None:
        machine = self.consumers[who[1]] if who[0] == "c" else self.producers[who[1]]
        self.act(who, machine.moved(moved, 0.0))

    def order(self, r: int) -> None:
        """A producer rank does what its engine said next, and its machine will hear of it."""
        if not self.orders[r]:
            return
        what, g = self.orders[r].popleft()
        producer, revocations = self.producers[r], self.tallies[r]
        if what == "offer":
            self.current[r] = g
            revocations.offered(T, g)
            offer = Offer(T, DIGEST, g, TOKENS, BLOCKS, True)
            self.inboxes[r].append(lambda: producer.offer(offer, 0.0))
            return
        self.current[r] = -1
        self.revoked[r, g] = next(self.moments)
        declared = revocations.declare(T)

        def revoke() -> list[Action]:
            out = producer.revoke(T, g, Failure(FailureKind.REVOKED, "preempted"), False, 0.0)
            if declared:
                revocations.take_in()
            return out

        self.inboxes[r].append(revoke)

    def hear(self, r: int) -> None:
        if self.inboxes[r]:
            self.act(("p", r), self.inboxes[r].popleft()())

    def deliver(self, key: Any) -> None:
        side, c, r = key[:3]
        if not self.queues[key]:
            return
        msg = self.queues[key].popleft()
        if side == "p":
            self.act(("c", c), self.consumers[c].message(r, msg, 0.0))
            return
        while self.inboxes[r]:
            self.hear(r)
        self.act(("p", r), self.producers[r].message(self.names[c, r], msg, 0.0))

    def move(self) -> None:
        """Some bytes pass: those that are in the producer's blocks now."""
        who, move = self.moves.pop(self.rng.randrange(len(self.moves)))
        link: Any = move.ref.link
        c, r = (who[1], link) if who[0] == "c" else (self.consumer(link), who[1])
        self.read[c, r] = self.current[r], next(self.moments)
        self.moved(who, Moved(move.ref, None, True, 1))

    def check(self, c: int, end: Ended) -> None:
        if not end.outcome.delivered:
            return
        for r in range(2):
            generation, moment = self.read[c, r]
            assert generation == end.generation, f"rank {r} gave {generation}, {end.generation} was delivered"
            last = max(self.read[c, x][1] for x in range(2))
            assert self.revoked.get((r, generation), last + 1) > last, (
                f"rank {r} gave {generation} up before the last byte"
            )

    def step(self, behind: int) -> None:
        chance = self.rng.random()
        if chance < self.haste:
            self.order(behind if self.rng.random() < 0.2 else 1 - behind)
        elif chance < self.haste + 0.03:
            self.cut(*self.rng.choice(list(self.names)))
        elif chance < 0.3:
            self.hear(self.rng.randrange(2))
        elif chance < 0.5 and self.moves:
            self.move()
        elif keys := [k for k, q in self.queues.items() if q]:
            self.deliver(self.rng.choice(keys))

    def run(self, steps: int) -> None:
        behind = self.rng.randrange(2)
        for _ in range(steps):
            if len(self.ended) == 2:
                break
            if self.rng.random() < 0.02:
                behind = 1 - behind
            self.step(behind)
        self.end()

    def end(self) -> None:
        """All catch up; then it must come to an end."""
        while any(self.orders) or any(self.inboxes) or self.moves or any(self.queues.values()):
            for r in range(2):
                self.order(r)
                self.hear(r)
            if self.moves:
                self.move()
            for key in list(self.queues):
                self.deliver(key)


WAYS = [("read", False), ("read", True), ("write", False)]


def runs(seeds: int) -> Iterator[Ranks]:
    for seed in range(seeds):
        for mode, seen in WAYS:
            ranks = Ranks(random.Random(f"{seed} {mode} {seen}"), mode, seen)
            try:
                ranks.run(400)
            except AssertionError as e:
                raise AssertionError(f"seed {seed}, {mode}, tally {seen}: {e}") from e
            yield ranks


def test_no_transfer_is_delivered_of_two_generations() -> None:
    """And most are delivered, each generation now and then: the last one is not given up."""
    generations: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    for ranks in runs(200):
        assert len(ranks.ended) == 2
        quorum: set[int] = set()
        for end in ranks.ended.values():
            if end.outcome.delivered:
                generations[end.generation] += 1
                quorum.add(end.generation)
        whole[len(quorum)] += 1
    assert min(generations[g] for g in (1, 2, 3, 4)) > 20, generations
    assert whole[1] > 300, whole
    assert whole[2] > 10, "ranks of one consumer with different generations must come up, for the quorum to see"


def late_answer() -> Ranks:
    """All ranks of consumer 0 have been checked; then one of them begins anew, and the other rank gives its blocks up."""
    ranks = Ranks(random.Random(0))

    def talk(r: int) -> None:
        for side in ("c", "p"):
            while ranks.queues[side, 0, r]:
                ranks.deliver((side, 0, r))

    def move(r: int) -> None:
        [mine] = [x for x in ranks.moves if x[0] == ("c", 0) and x[1].ref.link == r]
        ranks.moves = [mine, *(x for x in ranks.moves if x is not mine)]
        ranks.rng.randrange = lambda n: 0  # type: ignore[method-assign, assignment]
        ranks.move()

    for r in (0, 1):
        ranks.order(r)
        talk(r)
        move(r)
    for r in (0, 1):
        ranks.deliver(("c", 0, r))  # both are checked, and say yes; that of rank 0 is long on its way
    ranks.cut(0, 1)
    talk(1)  # the next link knows nothing of it, so that rank 1 is asked for it anew
    talk(1)
    ranks.order(0)
    move(1)
    ranks.deliver(("p", 0, 0))
    talk(1)
    return ranks


def test_an_answer_is_one_to_the_last_question() -> None:
    ranks = late_answer()
    assert not ranks.ended
    ranks.end()
    assert ranks.ended[0].generation == 4


def test_blocks_that_were_revoked_before_anybody_heard_of_them_are_released_at_once() -> None:
    """An engine that waits for that word (of blocks whose memory it is to unmap) waits for every revocation."""
    preempted, aborted = Failure(FailureKind.REVOKED, "preempted"), Failure(FailureKind.WITHDRAWN, "aborted")
    producer = ProducerMachine(FOREVER, FOREVER)
    released = Emit(GenerationReleased("producer", T, str(T), 3))
    assert producer.revoke(T, 3, preempted, False, 0.0) == [released]
    producer.offer(Offer(T, DIGEST, 4, 2, BLOCKS, False), 0.0)
    assert producer.revoke(T, 4, preempted, False, 0.0) == [Emit(GenerationReleased("producer", T, str(T), 4))]
    ends = [action.event for action in producer.revoke(T, 5, aborted, True, 0.0) if isinstance(action, Emit)]
    assert [type(event) for event in ends] == [Ended, Released], "for good: that is the release of all"


def test_a_revocation_does_not_release_what_still_moves_of_an_end_that_is_forgotten() -> None:
    """An abort may take longer than ends are remembered, where a peer stands still."""
    producer = ProducerMachine(1.0, 1.0)
    producer.link_up(b"d", LinkInfo("sendrecv", PLANNERS[0], peer=1), 0.0)
    wanted = BlockTable.of([range(TOKENS // D_TOKENS)])
    actions = producer.offer(Offer(T, DIGEST, 1, TOKENS, BLOCKS, True), 0.0)
    actions += producer.message(b"d", m.FetchRequest(T, 1, DIGEST, 0, TOKENS, wanted, 1, 9.0), 0.0)
    (moving,) = [action.ref for action in actions if isinstance(action, Move)]
    producer.message(b"d", m.CloseAttempt(T, 1, DIGEST, FailureKind.CANCELLED, "the client left", False), 0.0)
    producer.tick(10.0)
    assert producer.revoke(T, 2, Failure(FailureKind.REVOKED, "preempted"), False, 10.0) == []
    actions = producer.moved(Moved(moving, Failure(FailureKind.CANCELLED, "aborted"), True, 0), 10.0)
    events = [action.event for action in actions if isinstance(action, Emit)]
    assert [(type(event), event.generation) for event in events] == [(Released, 1)]
