"""Both scheduler halves, driven through everything that a scheduler does, in any order.

What is checked does not depend on how they work: an offer that is not revoked must hold the right bytes at all
times; a load must never touch a block that anybody else uses; and nothing may be left over.
"""

import os
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Cancel, DeclinedTransfer, Revoke, StepCommands
from kvxfer.values import Fetch, Group, Offer
from tests.schedule.ends import held, released, waiting
from tests.schedule.engine import STATE, WINDOW, Request, Scheduled, ScheduledEngine, ceil

PEER = Source("peer", 1, 7)
OWN = Source("own", 2, 8)
CACHES = [
    [Group(4)],
    [Group(4), Group(6)],
    [Group(4), Group(2, "window", WINDOW)],
    [Group(3, "window", WINDOW)],
    [Group(4), Group(STATE, "state")],
    [Group(STATE, "state")],
    [Group(4), Group(4, "state")],
    [Group(3, "local"), Group(4), Group(2, "window", WINDOW), Group(5, "local")],
    [Group(3, "window", WINDOW), Group(4, "local")],
]


class Giving:
    """A transfer that the producer half took up, until it is forgotten and its last Revoke has come."""

    def __init__(self, transfer: TransferId, request: Request) -> None:
        self.transfer = transfer
        self.request = request
        self.tokens = request.prompt
        self.content = request.tokens[: request.prompt]
        self.latest: Offer | None = None  # what workers may read now
        self.heard = 0  # the newest generation that workers know
        self.withdrawn = False
        self.sharers: list[Request] = []  # running requests that offer the same
        self.inherited = False  # from a request that failed, and not stepped since


class Taking:
    """A transfer that the consumer half took up, shared by some requests."""

    def __init__(self, transfer: TransferId, prompt: list[int]) -> None:
        self.transfer = transfer
        self.prompt = prompt
        self.requests: list[Request] = []
        self.cancelled = False
        self.ends = 0  # a Fetch or a DeclinedTransfer is due: one

    @property
    def alive(self) -> bool:
        return any(not request.over or request.loading for request in self.requests)


class Machine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(CACHES),
        blocks=st.integers(12, 24),
        budget=st.integers(3, 12),
        overlap=st.booleans(),
        patience=st.sampled_from([1, 3, 1000]),
    )
    def start(self, groups: list[Group], blocks: int, budget: int, overlap: bool, patience: int) -> None:
        self.groups = groups
        self.blocks = blocks
        self.overlap = overlap
        self.patience = patience  # how many finished requests may hold blocks before somebody reads the first
        self.engine = ScheduledEngine(groups, OWN, blocks, budget)
        self.producer = self.engine.producer
        self.consumer = self.engine.consumer
        self.stateful = any(group.kind == "state" for group in groups)
        self.requests: list[Request] = []
        self.in_flight: list[list[Scheduled]] = []
        self.giving: dict[TransferId, Giving] = {}
        self.owed: list[Giving] = []  # whose last Revoke must come with the next step
        self.past: list[Giving] = []
        self.taking: dict[TransferId, list[Taking]] = {}
        self.loads: list[tuple[Fetch, Request]] = []

    # What users do

    prompts = st.tuples(
        st.sampled_from([[], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]]),
        st.lists(st.integers(1, 2), min_size=2, max_size=9),
    ).map(lambda halves: halves[0] + halves[1])
    lengths = st.sampled_from([1, 1, 6])
    names = st.sampled_from("abcdef").map(lambda name: TransferId.derived(name))
    samples = st.integers(1, 2)
    soon = st.integers(0, 3)  # steps that follow at once: rules may be left out of an example, steps never

    def new(self, prompt: list[int], max_tokens: int) -> Request:
        request = Request(f"r{len(self.requests)}", list(prompt), len(prompt), max_tokens)
        self.requests.append(request)
        return request

    @rule(prompt=prompts, max_tokens=lengths, soon=soon)
    def plain(self, prompt: list[int], max_tokens: int, soon: int) -> None:
        """A request that is nobody else's business."""
        self.engine.add(self.new(prompt, max_tokens))
        self.run(soon)

    @rule(prompt=prompts, max_tokens=lengths, transfer=names, samples=samples, soon=soon)
    def prefill(self, prompt: list[int], max_tokens: int, transfer: TransferId, samples: int, soon: int) -> None:
        for _ in range(samples):
            request = self.new(prompt, max_tokens)
            self.give(transfer, request)
            self.engine.add(request)
        self.run(soon)

    def give(self, transfer: TransferId, request: Request) -> None:
        known = self.giving.get(transfer)
        same = known is not None and not known.withdrawn and known.content == request.tokens[: request.prompt]
        taken = self.producer.arrive(request.id, transfer, bytes(request.tokens[: request.prompt]), request.prompt)
        assert taken == (known is None or same) == (request.id in self.producer)
        if known is None:
            self.giving[transfer] = Giving(transfer, request)
        elif same:
            known.sharers.append(request)

    @rule(prompt=prompts, max_tokens=lengths, transfer=names, samples=samples, onward=st.none() | names, soon=soon)
    def decode(
        self,
        prompt: list[int],
        max_tokens: int,
        transfer: TransferId,
        samples: int,
        onward: TransferId | None,
        soon: int,
    ) -> None:
        """A recurrent state cannot be stepped back, so with one the last token is left to the consumer."""
        for _ in range(samples):
            request = self.new(prompt, max_tokens)
            known = self.taking.setdefault(transfer, [])
            if not known or not known[-1].alive:
                known.append(Taking(transfer, prompt))
            shared = known[-1]
            welcome = shared.prompt == prompt and (
                not shared.requests or any(not other.over for other in shared.requests)
            )
            tokens = len(prompt) - self.stateful
            assert self.consumer.arrive(request.id, transfer, bytes(prompt), PEER, tokens) == welcome
            if welcome:
                shared.requests.append(request)
            if onward is not None:
                self.give(onward, request)
            self.engine.add(request)
        self.run(soon)

    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.over]

    @precondition(lambda self: len(self.alive()) > 3)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.alive()))
        assert not self.engine.finish(request, False)
        self.given_up(request)

    def given_up(self, request: Request) -> None:
        """A request failed: those that share what it offered offer it from now on."""
        for giving in list(self.giving.values()):
            giving.sharers = [sharer for sharer in giving.sharers if sharer is not request]
            if giving.request is request:
                self.owed.append(self.giving.pop(giving.transfer))
                for sharer in giving.sharers:
                    if not sharer.over:
                        self.give(giving.transfer, sharer)
                        self.giving[giving.transfer].inherited = True
                    elif (
                        giving.transfer not in self.giving
                    ):  # it ended with the same step, just after it had become its turn
                        self.owed.append(Giving(giving.transfer, sharer))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def stop_token(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.alive())).stop = True

    # Steps

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        self.run(steps)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.offers_hold_what_they_say()
            self.requests_have_their_own_bytes()
            held = [giving for giving in self.readable() if giving.request.over]
            if len(held) > self.patience:
                self.read(held[0])

    def step(self) -> None:
        batch = self.engine.plan()
        commands = self.engine.schedule.commands()
        assert bool(commands) == (commands != StepCommands())
        for revoke in commands.revokes:
            self.revoked(revoke)
        assert not self.owed, "a transfer ended without its last Revoke"
        for want in commands.fetches:
            self.wanted(want)
        for cancel in commands.cancels:
            self.cancelled(cancel)
        for decline in self.consumer.declines():
            self.declined(decline)
        self.engine.execute(batch)
        for offer in commands.offers:
            self.announced(offer)
        assert not self.engine.schedule.commands() and not self.consumer.declines()
        self.everything_computed_is_offered()
        self.in_flight.append(batch)
        if len(self.in_flight) > self.overlap:
            for request, held in self.engine.settle(self.in_flight.pop(0)):
                self.finished(request, held)

    def revoked(self, revoke: Revoke) -> None:
        owed = [giving for giving in self.owed if giving.transfer == revoke.transfer]
        giving = owed[0] if owed else self.giving[revoke.transfer]
        assert revoke.generation > self.newest_of_the_past(revoke.transfer)
        if giving.latest is None:
            assert revoke.gone and revoke.generation > giving.heard, "nothing was offered"
        else:
            assert revoke.generation == giving.latest.generation
        assert revoke.gone == bool(owed), "no transfer but a finished one ends"
        giving.heard, giving.latest = revoke.generation, None
        if revoke.gone:
            self.owed.remove(giving)
            if giving.transfer not in self.giving or self.giving[giving.transfer] is not giving:
                self.past.append(giving)

    def newest_of_the_past(self, transfer: TransferId) -> int:
        return max((past.heard for past in self.past if past.transfer == transfer), default=0)

    def announced(self, offer: Offer) -> None:
        giving = self.giving[offer.transfer]
        assert not giving.withdrawn
        assert offer.digest == bytes(giving.request.tokens[: giving.tokens])
        before: Sequence[Sequence[int]] = [()] * len(self.groups)
        if giving.latest is None:
            assert offer.generation > giving.heard
            assert offer.generation > self.newest_of_the_past(offer.transfer)
            assert offer.tokens or offer.final
        else:
            assert offer.generation == giving.latest.generation
            assert offer.consumers <= giving.latest.consumers
            if offer.consumers == giving.latest.consumers:
                assert not giving.latest.final and (offer.tokens > giving.latest.tokens or offer.final)
            before = giving.latest.blocks.tolist()
        assert offer.tokens <= giving.tokens
        for group, old, new in zip(self.groups, before, offer.blocks.tolist(), strict=True):
            assert new[: len(old)] == list(old)
            if group.kind != "local" and (group.kind == "full" or offer.final):
                assert len(new) == ceil(offer.tokens, group.block_tokens)
            else:
                assert not new, "this group is not complete, or nobody else's"
            if group.kind == "state" and new:
                assert set(new[:-1]) <= {-1} and new[-1] != -1
            elif group.kind != "window":
                assert -1 not in new
            elif offer.final and giving.request.computed == giving.tokens:
                assert -1 not in new[self.engine.first_needed(group, giving.tokens) :]
        if offer.final:
            assert offer.tokens == giving.tokens
            for group, row, new in zip(self.groups, giving.request.table, offer.blocks.tolist(), strict=True):
                first = len(new) - 1 if group.kind == "state" else 0
                assert list(new[first:]) == row[first : len(new)]
        giving.heard, giving.latest, giving.inherited = offer.generation, offer, False

    def everything_computed_is_offered(self) -> None:
        """As far as whole blocks of all full groups go, or farther, and all of it once the prompt is done."""
        full = [group for group in self.groups if group.kind == "full"]
        for giving in self.giving.values():
            if giving.request.over:
                assert giving.withdrawn or (giving.latest and giving.latest.final)
            elif full and not giving.inherited:
                ready = giving.request.computed if giving.request in self.engine.running else 0
                tokens = min(ready // group.block_tokens * group.block_tokens for group in full)
                if ready >= giving.tokens:
                    tokens = giving.tokens
                offered = giving.latest.tokens if giving.latest else 0
                assert tokens <= offered <= ready and (offered > 0) == (ready > 0)
                if full == [group for group in self.groups if group.kind != "local"] and tokens == giving.tokens:
                    assert giving.latest and giving.latest.final

    def finished(self, request: Request, held: bool) -> None:
        mine = [giving for giving in self.giving.values() if giving.request is request]
        for giving in mine:
            assert held == (request.computed == giving.tokens or not self.stateful) or giving.inherited
            giving.inherited = False
        assert mine or not held
        for giving in self.giving.values():
            giving.sharers = [sharer for sharer in giving.sharers if sharer is not request]
        if not held:
            self.given_up(request)

    # What workers of the producer report

    def readable(self) -> list[Giving]:
        return [g for g in self.giving.values() if g.latest and g.latest.final and not g.withdrawn]

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def all_is_read(self, data: st.DataObject) -> None:
        """Also while the request still runs."""
        self.read(data.draw(st.sampled_from(self.readable())))

    def read(self, giving: Giving) -> None:
        self.quiet(giving)
        self.owed.append(giving)

    @precondition(lambda self: len(self.giving) > 1)
    @rule(data=st.data())
    def lease_runs_out(self, data: st.DataObject) -> None:
        giving = self.giving[data.draw(st.sampled_from(sorted(self.giving)))]
        self.producer.withdraw(giving.transfer, "its lease ran out")
        if not giving.withdrawn:
            self.owed.append(giving)
        giving.withdrawn = True
        if not giving.request.over:
            del self.giving[giving.transfer]

    def withdrawn(self) -> list[Giving]:
        """Held, and the workers have heard that it is over."""
        return [g for g in self.giving.values() if g.withdrawn and g not in self.owed]

    @precondition(lambda self: self.withdrawn())
    @rule(data=st.data())
    def revoked_readers_are_gone(self, data: st.DataObject) -> None:
        giving = data.draw(st.sampled_from(self.withdrawn()))
        self.quiet(giving)
        self.past.append(giving)

    def quiet(self, giving: Giving) -> None:
        kept = giving.transfer in held(self.producer)
        assert kept == giving.request.over
        freed = released(self.producer, giving.transfer, giving.heard)
        assert freed == (giving.request.id if kept else None)
        if freed is not None:
            self.engine.release(freed)
        assert released(self.producer, giving.transfer, giving.heard) is None
        del self.giving[giving.transfer]

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def late_report_on_an_earlier_request(self, data: st.DataObject) -> None:
        past = data.draw(st.sampled_from(self.past))
        assert released(self.producer, past.transfer, past.heard) is None

    # Loads

    def wanted(self, want: Fetch) -> None:
        taking = self.taking[want.transfer][-1]
        taking.ends += 1
        (request,) = [request for request in taking.requests if request.loading]
        assert (want.digest, want.source, want.own) == (bytes(taking.prompt), PEER, OWN)
        assert 0 <= want.start < want.tokens == request.prompt - self.stateful
        for group, row, table in zip(self.groups, want.blocks.tolist(), request.table, strict=True):
            assert len(row) == (ceil(want.tokens, group.block_tokens) if group.kind != "local" else 0)
            for i, block in enumerate(row):
                others = (i + 1) * group.block_tokens <= want.start or (group.kind == "state" and i + 1 < len(row))
                assert block == (-1 if others else table[i])
                assert block == -1 or self.engine.refs[block] == 1, "somebody else uses this block"
        self.loads.append((want, request))

    def cancelled(self, cancel: Cancel) -> None:
        (loader,) = [request for want, request in self.loads if want.number == cancel.number]
        (taking,) = [t for known in self.taking.values() for t in known if loader in t.requests]
        assert not taking.cancelled
        assert [request.over for request in taking.requests if request.loading] == [True]
        taking.cancelled = True

    def declined(self, decline: DeclinedTransfer) -> None:
        assert decline.source == PEER and decline.reason
        next(taking for taking in self.taking[decline.transfer] if not taking.ends).ends += 1

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), ok=st.booleans())
    def load_ends(self, data: st.DataObject, ok: bool) -> None:
        want, request = data.draw(st.sampled_from(self.loads))
        self.loads.remove((want, request))
        self.engine.load(want, request, ok)

    # Laws

    @invariant()
    def offers_hold_what_they_say(self) -> None:
        for giving in self.giving.values():
            if giving.latest and giving not in self.owed:
                assert self.engine.holds(giving.latest.blocks.tolist(), giving.request.tokens, giving.latest.tokens)

    @invariant()
    def requests_have_their_own_bytes(self) -> None:
        for request in [*self.engine.running, *self.engine.held.values()]:
            assert self.engine.holds(request.table, request.tokens, request.computed)

    @invariant()
    def nothing_outlives_its_request(self) -> None:
        takings = [taking for known in self.taking.values() for taking in known]
        assert len(self.producer) == len(self.giving)
        assert len(self.consumer) == sum(taking.alive for taking in takings)
        assert len(self.engine.schedule) == len(self.producer) + len(self.consumer)
        assert held(self.producer) == {g.transfer for g in self.giving.values() if g.request.over}

    def teardown(self) -> None:
        for request in self.alive():
            self.engine.finish(request, False)
            self.given_up(request)
        self.step()
        for want, request in self.loads:
            self.engine.load(want, request, False)
        for giving in list(self.giving.values()):
            if giving.withdrawn:
                self.quiet(giving)
            else:
                self.read(giving)
        self.step()
        assert len(self.engine.schedule) == 0 and not held(self.producer) and not waiting(self.consumer)
        assert sorted(self.engine.free) == list(range(1, self.blocks + 1)), "a block leaked"
        for known in self.taking.values():
            assert all(taking.ends == 1 for taking in known), "neither wanted nor given up, or twice"


TestBothHalves = Machine.TestCase
TestBothHalves.settings = settings(
    max_examples=int(os.environ.get("KVXFER_EXAMPLES", "80")), stateful_step_count=60, deadline=None
)
