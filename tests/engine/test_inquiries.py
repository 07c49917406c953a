"""What other engines may cost with inquiries: a bounded share of a step, of the blocks, and of nobody else's turn."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.control.inquiries import MAX_INQUIRIES, Inquiries, PeerInquiry
from kvxfer.engine import BlockPins, HeldPrefix, Prefix, Report, SchedulerSide
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import Shares
from kvxfer.testing.engine import ConversationEngine, until
from kvxfer.values import BlockTable, Group, Rank
from tests.control.stranger import Stranger
from tests.engine.small import FACTS, Pool

PROMPT = [*range(64)]
EAGER = {"ask_tokens": 1, "ask_timeout": 60.0}
CHAIN = Prefix(PROMPT, model="m").chain()


def named(number: int) -> TransferId:
    return TransferId(f"ask/{number:032x}", 0)


def inquire(number: int = 1, epoch: int = 0, step: int = 16, links: bytes = CHAIN.links) -> m.Inquire:
    return m.Inquire(epoch, named(number), step, links)


class Holder:
    """The scheduler side of an engine that holds the prompt in its first blocks; 100 blocks, of which 40 may be pinned for others."""

    def __init__(self, *groups: Group, limit: int = 40) -> None:
        self.pool = Pool(101)
        self.blocks = self.pool.take(100)
        self.side = SchedulerSide(
            Config(),
            "holder",
            groups or (Group(16),),
            1,
            FACTS,
            pins=BlockPins(limit, self.pool),
            holds=lambda inquiry: self.held,
        )
        self.held: HeldPrefix | None = HeldPrefix(64, BlockTable.of([self.blocks[:4]]))
        self.where = f"tcp://127.0.0.1:{self.side.source.port}"
        self.side.step()

    def answers(self, stranger: Stranger) -> m.InquiryAnswer:
        """Make steps until there is an answer."""
        until(lambda: self.side.directory.noticed)
        self.side.step()
        answer = stranger.answer()
        assert isinstance(answer, m.InquiryAnswer)
        return answer


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.side.close()


def test_an_inquiry_is_answered_with_the_link_up_to_which_the_engine_holds_it(holder: Holder) -> None:
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        assert holder.answers(stranger) == m.InquiryAnswer(named(1), holder.side.source.epoch, 64, CHAIN.digest(64))
        holder.held = HeldPrefix(47, BlockTable.of([holder.blocks[:3]]))
        stranger.say(inquire(2))
        assert holder.answers(stranger).tokens == 32, "there is no link behind the 47th"
        holder.held = HeldPrefix(15, BlockTable.of([holder.blocks[:1]]))
        stranger.say(inquire(3))
        assert not holder.answers(stranger).tokens
    assert holder.side.answered == type(holder.side.answered)(inquiries=3, held=2, tokens=96, refused=0)


@pytest.mark.parametrize("twice", [inquire(), inquire(links=bytes(64))], ids=["alike", "other content"])
def test_the_second_inquiry_of_a_name_gets_nothing(holder: Holder, twice: m.Inquire) -> None:
    with Stranger(holder.where) as stranger, Stranger(holder.where) as other:
        stranger.say(inquire())
        assert holder.answers(stranger).tokens == 64
        other.say(twice)
        assert holder.answers(other).tokens == 0
        stranger.say(twice)
        assert holder.answers(stranger).tokens == 0
        assert len(holder.side._pins) == 4, "once"


@pytest.mark.parametrize(
    "wrong",
    [
        inquire(step=0),
        inquire(step=17),
        inquire(step=1 << 40),
        inquire(links=b"short"),
        inquire(links=b""),
        inquire(epoch=12345),
    ],
    ids=["no step", "an odd step", "a long step", "half a link", "no link", "another epoch"],
)
def test_what_is_no_question_is_answered_with_nothing(holder: Holder, wrong: m.Inquire) -> None:
    with Stranger(holder.where) as stranger:
        stranger.say(wrong)
        until(lambda: (holder.side.step(), select.select([stranger.socket], [], [], 0)[0])[1])
        answer = stranger.answer()
        assert isinstance(answer, m.InquiryAnswer) and not answer.tokens and answer.epoch == holder.side.source.epoch
        stranger.say(inquire(2))
        assert holder.answers(stranger).tokens == 64, "it costs nobody else anything"


@pytest.mark.parametrize(
    "name",
    [TransferId.routed("job"), TransferId.mint(7, "r"), TransferId.derived("r"), TransferId("ask/1", 0)]
    + [TransferId(named(1).base, 1), TransferId(f"own/{0:016x}/ask/1", 0)],
    ids=str,
)
def test_a_question_takes_no_other_name(holder: Holder, name: TransferId) -> None:
    """It is the name of what a router, or an engine, is about to offer."""
    with Stranger(holder.where) as stranger:
        stranger.say(msgspec.structs.replace(inquire(), transfer=name))
        answer = stranger.answer()
        assert isinstance(answer, m.InquiryAnswer) and not answer.tokens and answer.reason
    assert not holder.side.answered.inquiries
    assert holder.side.offer("r", name, b"digest", 64), "the honest one"


def test_the_names_of_questions_cannot_be_guessed() -> None:
    names = {TransferId.asked() for _ in range(100)}
    assert len(names) == 100 and all(one.is_asked for one in names)
    assert len({one.base[:8] for one in names}) > 50


@pytest.mark.parametrize("row", [[1, 1, 2, 3], [1, -1, 2, 3], [1, 2, 3, 2], [1, 2], [1, 2, 3, 999]], ids=str)
def test_what_the_engine_says_wrongly_is_answered_with_nothing_and_told_as_its_own(
    holder: Holder, row: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    holder.side._tables._blocks = [101]
    holder.held = HeldPrefix(64, BlockTable.of([row]))
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        assert not holder.answers(stranger).tokens
    assert "the engine's 'holds'" in caplog.text and not len(holder.side._pins)


def test_a_chain_that_is_too_long_is_no_message(holder: Holder) -> None:
    frame = msgspec.msgpack.encode(["inquire", 0, named(1), 16, bytes((1 << 16) + 16)])
    with Stranger(holder.where) as stranger:
        stranger.send(frame)
        assert isinstance(stranger.answer(), m.Refused)
    assert not holder.side.directory.noticed


def test_a_flood_of_inquiries_costs_each_step_little_and_others_their_turn_only() -> None:
    """One peer asks a thousand times at once, before another asks once."""
    waiting = Inquiries()
    connections = {name: SimpleNamespace(peer=PeerIdentity(name), lost=None) for name in "ab"}

    def asks(name: str, number: int) -> bool:
        return waiting.put(PeerInquiry(inquire(number), connections[name]))  # type: ignore[arg-type]

    taken = sum(asks("a", n) for n in range(1000))
    assert taken == MAX_INQUIRIES * 3 // 4, "the other places are left to others"
    assert asks("b", 1)
    first, second = waiting.get(), waiting.get()
    assert {first and first.peer, second and second.peer} == {("", "a"), ("", "b")}, "each in its turn"
    while waiting.get() is not None:
        pass
    assert not waiting and asks("a", 2)


def test_a_step_spends_a_bounded_time_on_inquiries(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def slow(inquiry: object) -> HeldPrefix | None:
        nonlocal asked
        asked += 1
        time.sleep(0.002)
        return None

    holder.side.holds = slow
    with Stranger(holder.where) as stranger:
        for n in range(50):
            stranger.say(inquire(n))
        until(lambda: len(holder.side.directory.inquiries._turns._waiting.get(("", "127.0.0.1"), ())) == 50)  # type: ignore[union-attr]
        holder.side.step()
        assert asked == 1, "the first, which has used up the step's time"
        assert holder.side.waiting, "the next step goes on"
        for _ in range(49):
            holder.side.step()
        assert asked == 50 and not holder.side.waiting


def test_beyond_its_places_a_peer_is_told_nothing_at_once(holder: Holder) -> None:
    with Stranger(holder.where) as stranger:
        for n in range(MAX_INQUIRIES * 3 // 4 + 1):
            stranger.say(inquire(n))
        answer = stranger.answer()
        assert isinstance(answer, m.InquiryAnswer) and not answer.tokens and "more inquiries" in answer.reason


def test_a_peer_may_hold_three_quarters_of_the_blocks_that_others_leave(holder: Holder) -> None:
    blocks = holder.blocks
    with Stranger(holder.where) as stranger, Stranger(holder.where, source="127.0.0.2") as other:
        for n in range(7):
            holder.held = HeldPrefix(64, BlockTable.of([blocks[4 * n : 4 * n + 4]]))
            stranger.say(inquire(n))
            assert holder.answers(stranger).tokens == 64
        holder.held = HeldPrefix(64, BlockTable.of([blocks[28:32]]))
        stranger.say(inquire(7))
        assert holder.answers(stranger).tokens == 32, "as many as there is room for: 30 of the 40 blocks"
        stranger.say(inquire(8))
        answer = holder.answers(stranger)
        assert not answer.tokens and answer.reason
        assert holder.side.answered.refused == 2
        holder.held = HeldPrefix(64, BlockTable.of([blocks[32:36]]))
        for n, tokens in ((9, 64), (10, 64), (11, 0)):
            other.say(inquire(n))
            assert holder.answers(other).tokens == tokens, "three quarters of ten blocks"


def test_what_is_held_for_a_peer_that_hangs_up_is_given_up(holder: Holder) -> None:
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        assert holder.answers(stranger).tokens == 64
        assert not holder.side.step().commands.revokes
    until(lambda: [r.gone for r in holder.side.step().commands.revokes] == [True])


def test_only_so_many_answers_are_held_for_a_peer_however_small(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.side._answers._places = Shares(4, "nothing")
    holder.held = HeldPrefix(16, BlockTable.of([holder.blocks[:1]]))
    chain = Prefix(PROMPT[:16], model="m").chain().links
    with Stranger(holder.where) as stranger:
        for n in range(5):
            stranger.say(inquire(n, links=chain))
            assert bool(holder.answers(stranger).tokens) is (n < 3)


def test_the_share_of_an_answer_comes_back_once_its_blocks_are_let_go_of(holder: Holder) -> None:
    """With the report that says so: no step looks at what is held."""
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        assert holder.answers(stranger).tokens == 64
        (offer,) = holder.side._schedule.producer
        assert holder.side._answers._shares.taken == 4
        holder.side.report(Report(released={offer.transfer: {Rank(): offer.generation}}))
        assert not holder.side._answers._shares.taken and not holder.side._answers._places.taken
        assert not len(holder.side) and not holder.side._answers._held


def test_the_engine_s_own_requests_go_first(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        assert holder.answers(stranger).tokens == 64
        holder.side.short_of_blocks()
        assert not holder.side.step().commands.revokes, "it is most likely being read"
        monkeypatch.setattr("kvxfer.engine.answers.YIELD_S", 0.0)
        holder.side.short_of_blocks()
        (revoke,) = holder.side.step().commands.revokes
        assert revoke.gone and "own requests" in revoke.reason


def test_a_peer_that_hangs_up_before_its_turn_gets_nothing_held(holder: Holder) -> None:
    with Stranger(holder.where) as stranger:
        stranger.say(inquire())
        until(lambda: holder.side.directory.noticed)
    (waiting,) = holder.side.directory.inquiries._turns._waiting.values()  # type: ignore[union-attr]
    until(lambda: next(iter(waiting)).gone)
    assert not holder.side.step().commands.offers and not len(holder.side)


# --- windows and states ------------------------------------------------------------------------------------------------


def test_of_a_window_its_last_blocks_are_needed() -> None:
    holder = Holder(Group(16), Group(16, "window", 20))
    blocks = holder.blocks
    rows: dict[str, tuple[list[int], int]] = {
        "all of it": ([-1, -1, 7, 8], 64),
        "a block lacks": ([-1, -1, -1, 8], 0),
        "it is short": ([-1, -1, 7], 0),
    }
    try:
        with Stranger(holder.where) as stranger:
            for n, (row, tokens) in enumerate(rows.values()):
                holder.held = HeldPrefix(64, BlockTable.of([blocks[:4], row]))
                stranger.say(inquire(n))
                assert holder.answers(stranger).tokens == tokens
            (offer,) = [p for p in holder.side._schedule.producer if p.offered]
            assert offer.blocks.tolist() == [blocks[:4], [-1, -1, 7, 8]]
    finally:
        holder.side.close()


def test_a_state_is_offered_after_exactly_its_tokens_or_not_at_all() -> None:
    holder = Holder(Group(16), Group(64, "state"))
    try:
        with Stranger(holder.where) as stranger:
            for n, (tokens, answered) in enumerate({64: 64, 63: 0, 48: 48}.items()):
                holder.held = HeldPrefix(tokens, BlockTable.of([holder.blocks[:4], [50 + n]]))
                stranger.say(inquire(n))
                assert holder.answers(stranger).tokens == answered
    finally:
        holder.side.close()


# --- keys, and engines that make no steps ------------------------------------------------------------------------------


def test_an_engine_that_makes_no_steps_is_woken() -> None:
    """Nobody has its steps made but for what wakes it: an answer takes as long as a step."""
    with ConversationEngine(EAGER, name="d") as d, ConversationEngine(EAGER, name="p") as p:
        d.step(), p.step()
        d.finish_turn(d.begin("held", PROMPT, [1, 2]))
        until(lambda: d.step() is not None and not d.scheduler.waiting)
        woken, heard = threading.Event(), threading.Event()
        d.scheduler.wake = woken.set
        turn = p.begin("r", [*PROMPT, 9], [1], [d.scheduler.source])
        assert p.scheduler.loadable("r", 0) is None
        assert woken.wait(60) and d.scheduler.waiting
        p.scheduler.wake = heard.set
        d.step()
        assert heard.wait(60)
        assert p.scheduler.waiting
        p.finish_turn(turn, [d])
        assert turn.loaded == 64


# --- shares ------------------------------------------------------------------------------------------------------------


@given(total=st.integers(0, 60), calls=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20), st.booleans())))
def test_some_is_left_for_a_newcomer_whatever_others_take(total: int, calls: list[tuple[str, int, bool]]) -> None:
    shares: Shares[PeerIdentity, int] = Shares(total, "nothing")
    taken: dict[PeerIdentity, dict[int, int]] = {PeerIdentity(host): {} for host in "abcd"}
    for key, (host, n, back) in enumerate(calls):
        peer = PeerIdentity(host)
        if back and taken[peer]:
            shares.give(peer, taken[peer].popitem()[0])
        elif shares.take(peer, key, n, peer) is not None:
            taken[peer][key] = n
        everything = sum(sum(of.values()) for of in taken.values())
        assert everything == shares.taken <= total
        assert shares.room(PeerIdentity("newcomer")) == -(-3 * (total - everything) // 4)
    for peer, keys in taken.items():
        for key in keys:
            shares.give(peer, key)
    assert shares.room(PeerIdentity("x")) == -(-3 * total // 4) and not shares.taken
