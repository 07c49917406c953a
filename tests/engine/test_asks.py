"""Asking other engines for a prefix: whatever a source does costs a bounded time, no request, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvxfer.control.sockets import ControlSockets
from kvxfer.engine import HeldPrefix, Inquiry, Prefix, ScheduleError
from kvxfer.engine.paces import LoadOrCompute
from kvxfer.errors import ArgumentError, ClosedError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN
from kvxfer.testing.clock import SetForward
from kvxfer.testing.engine import ConversationEngine, Turn, until
from kvxfer.values import BlockTable
from tests.ports import NOBODY

EAGER = {"ask_tokens": 1, "ask_timeout": 60.0}
PROMPT = [*range(64)]
WHOLE = len(PROMPT) // 16 * 16
ASK_S = 0.2
"""How long a silent source may cost, in these tests."""


class World:
    """Engines whose steps are made by turns; those in ``idle`` make none."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.engines: list[ConversationEngine] = []
        self.idle: set[ConversationEngine] = set()

    def engine(self, config: dict[str, object] | None = None, **more: object) -> ConversationEngine:
        made = ConversationEngine(EAGER | (config or {}), name=f"e{len(self.engines)}", **more)  # type: ignore[arg-type]
        self._stack.enter_context(made)
        self.engines.append(made)
        made.step()
        return made

    def holder(self, prompt: list[int] = PROMPT, **more: object) -> ConversationEngine:
        made = self.engine(**more)
        made.finish_turn(made.begin("held", [*prompt, 99], [98]))
        return made

    def step(self) -> None:
        for engine in self.engines:
            if engine not in self.idle:
                engine.step(timeout=0.001)

    def until(self, true: Callable[[], object]) -> None:
        until(lambda: self.step() or true())

    def turn(self, at: ConversationEngine, *sources: Source, prompt: list[int] = PROMPT, **more: object) -> Turn:
        turn = at.begin(f"turn-{len(at.scheduler.asked)}-{time.monotonic()}", [*prompt, 99], [1], sources, **more)  # type: ignore[arg-type]
        self.until(lambda: turn.done)
        return turn

    def over(self) -> None:
        """Nobody holds, remembers or waits for anything, and every byte is right."""
        self.until(lambda: not any(len(e.scheduler) or e.scheduler.waiting or e.pool.used() for e in self.engines))
        self.step()
        for engine in self.engines:
            engine.verify()
            asks = engine.scheduler._asks
            awaited = [one for name in asks._sent.keys() if (one := asks._sent.get(name)) and one[1] is not None]
            assert not len(engine.scheduler._requests) and not awaited and not asks._alike
            assert not engine.scheduler._answers._shares.taken


@pytest.fixture
def clock() -> Iterator[SetForward]:
    made = SetForward()
    with made.installed():
        yield made


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


class Liar:
    """A directory of which there are only answers: what ``answer`` returns for an inquiry, or nothing."""

    def __init__(self, answer: Callable[[m.Inquire], m.Message | None]) -> None:
        self._answer, self._closing, self.asked = answer, False, list[m.Inquire]()
        self._sockets = ControlSockets(OPEN)
        self.source = Source("127.0.0.1", self._sockets.listen("127.0.0.1", 0), 7)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._sockets.poll(0.01)
            for connection in self._sockets.ready():
                while (frame := connection.receive()) is not None:
                    message = m.decode(frame)
                    if isinstance(message, m.Inquire):
                        self.asked.append(message)
                        if (answer := self._answer(message)) is not None:
                            connection.send(answer)
            self._sockets.flush()
        self._sockets.close()

    def close(self) -> None:
        self._closing = True
        self._thread.join()


# --- sources that give nothing -----------------------------------------------------------------------------------------


def test_a_source_that_is_silent_costs_a_bounded_time(world: World) -> None:
    p = world.engine({"ask_timeout": ASK_S})
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        there = Source("127.0.0.1", silent.getsockname()[1], 0)
        turn = world.turn(p, there)
        assert ASK_S <= time.monotonic() - began < ASK_S + 10.0
        assert not turn.loaded and p.scheduler.asked[""].unanswered == 1
        p.scheduler._asks._config = replace(p.config, ask_timeout=60.0)
        assert not world.turn(p, there, prompt=[7, *PROMPT]).loaded, "and the next request no time"
    world.over()


def test_a_source_that_was_slow_is_waited_for_again_once_it_has_answered(world: World) -> None:
    d, p = world.holder(), world.engine({"ask_timeout": 0.05})
    world.idle.add(d)
    assert not world.turn(p, d.scheduler.source, prompt=[7, *PROMPT]).loaded
    world.idle.clear()
    world.until(lambda: d.scheduler.answered.inquiries and not p.scheduler._asks._silent.keys())
    p.scheduler._asks._config = replace(p.config, ask_timeout=60.0)
    assert world.turn(p, d.scheduler.source).loaded == WHOLE
    world.over()


def test_a_source_that_is_not_there_costs_no_time(world: World) -> None:
    p = world.engine({"ask_timeout": 60.0})
    assert not world.turn(p, Source("127.0.0.1", NOBODY, 0)).loaded
    world.over()


def test_an_engine_that_was_started_again_has_nothing(world: World) -> None:
    d, p = world.holder(), world.engine({"ask_timeout": 60.0})
    there = d.scheduler.source
    assert not world.turn(p, Source(there.host, there.port, there.epoch ^ 1)).loaded
    assert d.scheduler.answered.inquiries == 0, "its engine is not asked"
    assert world.turn(world.engine(), Source(there.host, there.port, 0)).loaded == WHOLE, (
        "but the engine that is there now is"
    )
    world.over()


LIES: dict[str, Callable[[m.Inquire], m.Message | None]] = {
    "more tokens than are asked for": lambda q: m.InquiryAnswer(q.transfer, 7, 1 << 20, q.links[-16:]),
    "tokens between two links": lambda q: m.InquiryAnswer(q.transfer, 7, 17, q.links[:16]),
    "the digest of fewer": lambda q: m.InquiryAnswer(q.transfer, 7, 32, q.links[:16]),
    "no digest": lambda q: m.InquiryAnswer(q.transfer, 7, 32, b""),
    "an offer that it does not have": lambda q: m.InquiryAnswer(q.transfer, 7, 32, q.links[16:32]),
    "another name": lambda q: m.InquiryAnswer(TransferId("own/1", 0), 7, 32, q.links[16:32]),
    "another message": lambda q: m.Begun((m.Named(q.transfer, q.links[:16]),)),
    "a refusal": lambda q: m.Refused(FailureKind.MISUSE, "no", False),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_source_that_lies_costs_a_computation(
    clock: SetForward, lie: Callable[[m.Inquire], m.Message | None], world: World
) -> None:
    p = world.engine({"peer_timeout": 60.0, "transfer_timeout": 60.0})
    with closing(Liar(lie)) as liar:
        turn = p.begin("r", [*PROMPT, 99], [1], [liar.source])
        world.until(lambda: liar.asked)
        for _ in range(200):  # by which its answer has come
            world.step()
        clock.forward(61.0)
        world.until(lambda: turn.done)
        assert not turn.loaded and len(liar.asked) == 1
        world.over()


def test_an_answer_counts_from_whom_it_was_asked_of_only(world: World) -> None:
    """A source that is asked as well answers for another one."""
    d, p = world.holder(), world.engine()
    told: list[m.Inquire] = []

    def lie(asked: m.Inquire) -> m.Message:
        told.append(asked)
        other = next(name for name in p.scheduler._asks._sent.keys() if name != asked.transfer)
        return m.InquiryAnswer(other, 7)

    with closing(Liar(lie)) as liar:
        assert world.turn(p, d.scheduler.source, liar.source).loaded == WHOLE
        assert told
        world.over()


def test_a_source_that_offers_nothing_after_its_answer_costs_no_more_and_is_remembered(
    clock: SetForward, world: World
) -> None:
    """It takes connections, answers at once that it has everything, and that is all it ever says."""
    p = world.engine({"peer_timeout": 600.0, "transfer_timeout": 600.0})
    with closing(Liar(lambda q: m.InquiryAnswer(q.transfer, 7, 64, q.links[-16:]))) as liar:
        turn = p.begin("r", [*PROMPT, 99], [1], [liar.source])
        world.until(p.pool.used)
        clock.forward(61.0)
        world.until(lambda: turn.done)
        assert not turn.loaded and len(liar.asked) == 1
        counts = p.scheduler.asked[""]
        assert counts.recomputed == WHOLE and not counts.unanswered
        assert not world.turn(p, liar.source, prompt=[7, *PROMPT]).loaded
        assert len(liar.asked) == 1, "it is not asked again so soon"
        assert not counts.unanswered
        d = world.holder([8, *PROMPT])
        p.scheduler._asks._config = replace(p.config, ask_timeout=60.0)
        assert world.turn(p, liar.source, d.scheduler.source, prompt=[8, *PROMPT]).loaded, "and another one is"
        world.over()


def test_a_holder_whose_answer_fails_answers_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    d, p = world.holder(), world.engine({"ask_timeout": 60.0})

    def fails(inquiry: Inquiry) -> HeldPrefix | None:
        raise RuntimeError("a bug of the engine's")

    d.scheduler.holds = fails
    assert not world.turn(p, d.scheduler.source).loaded
    assert "a bug of the engine's" in caplog.text
    for wrong in (None, HeldPrefix(48, BlockTable.of([[0, 1]])), HeldPrefix(16, BlockTable.of([[0], [1]]))):
        d.scheduler.holds = lambda inquiry, wrong=wrong: wrong  # type: ignore[misc]
        assert not world.turn(world.engine({"ask_timeout": 60.0}), d.scheduler.source).loaded
    d.scheduler.holds = None
    assert not world.turn(world.engine({"ask_timeout": 60.0}), d.scheduler.source).loaded
    assert d.scheduler.answered.inquiries == 5 and not d.scheduler.answered.held
    world.over()


# --- sources that change their mind ------------------------------------------------------------------------------------


def test_a_source_that_dies_during_the_load(world: World) -> None:
    d, p = world.holder(), world.engine({"peer_timeout": 0.5, "transfer_timeout": 2.0})
    turn = p.begin("r", [*PROMPT, 99], [1], [d.scheduler.source])
    assert p.scheduler.loadable("r", 0) is None
    until(lambda: (d.step(timeout=0.001), p.scheduler.directory.noticed)[1])
    world.engines.remove(d)
    d.close()
    world.until(lambda: turn.done)
    assert not turn.loaded and turn.fresh == 65
    counts = p.scheduler.asked[""]
    assert counts.found == counts.recomputed == WHOLE and not counts.loaded
    world.over()


def test_an_engine_that_is_about_to_stop_is_asked_until_its_deadline(clock: SetForward, world: World) -> None:
    """A client whose request it has cut off goes on elsewhere."""
    d, p = world.holder(), world.engine()
    d.scheduler.drain(600.0)
    until(lambda: d.step(timeout=0.001) and False or not d.scheduler.offers.unfinished)
    clock.forward(500.0)
    assert d.scheduler.waiting, "though nobody has asked yet"
    turn = p.begin("r", [*PROMPT, 99], [1], [d.scheduler.source])
    world.until(lambda: turn.done)
    clock.forward(100.0)
    world.until(lambda: not d.scheduler.waiting)
    assert turn.loaded == WHOLE
    world.over()
    p.scheduler.holds = None
    p.scheduler.drain(60.0)
    assert not p.scheduler.waiting, "it would answer nothing"


# --- several sources ---------------------------------------------------------------------------------------------------


def test_of_several_sources_the_longest_is_taken(world: World, caplog: pytest.LogCaptureFixture) -> None:
    short, long, none = world.holder(PROMPT[:32]), world.holder(), world.engine()
    p = world.engine()
    sources = [e.scheduler.source for e in (short, none, long)]
    assert world.turn(p, *sources, p.scheduler.source).loaded == WHOLE
    assert p.scheduler.asked[""].found == WHOLE
    world.over()  # what the others had offered is declined
    warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert all(one.startswith("this process stalled") for one in warned), "nothing has gone wrong"


def test_an_answer_that_comes_too_late_is_declined(world: World) -> None:
    d, p = world.holder(), world.engine({"ask_timeout": 0.05})
    world.idle.add(d)
    turn = world.turn(p, d.scheduler.source)
    assert not turn.loaded and p.scheduler.asked[""].unanswered == 1
    world.idle.clear()
    world.until(lambda: d.scheduler.answered.held)
    world.over()


def test_a_request_that_ends_while_others_are_asked(world: World) -> None:
    d, p = world.holder(), world.engine()
    for admitted in (False, True):
        world.idle = {d}
        turn = p.begin(f"r{admitted}", [*PROMPT, 99], [1], [d.scheduler.source])
        assert p.scheduler.asking(turn.request) and p.scheduler.loadable(turn.request, 0) is None
        if admitted:
            p.pool.grow(turn.table, 65)
            p.scheduler.allocated(turn.request, BlockTable.of([turn.table]), 0)
            assert not p.scheduler.asking(turn.request) and p.scheduler.loadable(turn.request, 0) == 0
        del p.open[turn.request]
        assert not p.scheduler.finished(turn.request, BlockTable.of([turn.table]), complete=False)
        p._give_back(turn.request)
        world.idle.clear()
        world.until(lambda: d.scheduler.answered.held == 1 + admitted)  # noqa: B023
        world.over()


@pytest.mark.parametrize(
    "ends", ["none", "the first, while others are asked", "the one that loads, at first", "the one that loads, later"]
)
def test_samples_of_one_prompt_ask_once_and_one_of_them_loads(ends: str, world: World) -> None:
    """If it ends before it has begun to, another does; later the others compute."""
    loader = ends.startswith("the one that loads")
    d, p = world.holder(), world.engine({"step_budget": 0.0} if loader else None, blocks=128)
    world.idle = {d}
    turns = [p.begin(f"r{n}", [*PROMPT, 99], [n], [d.scheduler.source]) for n in range(4)]
    gone: list[Turn] = []

    def end(turn: Turn) -> None:
        del p.open[turn.request]
        p.scheduler.finished(turn.request, BlockTable.of([turn.table]), complete=False)
        gone.append(turn)

    assert [p.scheduler.loadable(turn.request, 0) for turn in turns] == [None] * 4
    if ends == "the first, while others are asked":
        end(turns[0])
    until(lambda: (d.step(timeout=0.001), p.scheduler.directory.noticed)[1])
    if loader:
        assert p.scheduler.loadable("r0", 0) == WHOLE
        if ends.endswith("later"):
            p._admit_turn(turns[0])
        end(turns[0])
    world.idle.clear()
    world.until(lambda: all(turn.done for turn in turns if turn not in gone))
    assert d.scheduler.answered.inquiries == 1
    loaded = [turn.loaded for turn in turns if turn not in gone]
    assert sum(loaded) == (0 if ends.endswith("later") else WHOLE), loaded
    for turn in gone:
        world.until(lambda: not turn.admitted or turn.request in {*p.failed, *p.loaded})  # noqa: B023
        p._give_back(turn.request)
    world.over()


# --- whether it pays ---------------------------------------------------------------------------------------------------


def test_a_load_that_would_not_end_before_the_tokens_are_computed_is_not_begun(world: World) -> None:
    d = world.holder()
    for mode, loads in (("auto", False), ("always", True)):
        p = world.engine({"ask": mode})
        p.scheduler.takes(64, 1e-6)
        p.scheduler._choice._links.delivered(d.scheduler.source, 64, 10.0)
        monkey = p.scheduler._choice.computing
        p.scheduler._choice.computing = lambda tokens, ask, f=monkey: max(f(tokens, ask), 1.0)  # type: ignore[method-assign,misc]
        assert bool(world.turn(p, d.scheduler.source).loaded) is loads
        counts = p.scheduler.asked[""]
        assert (counts.found, counts.refused) == (WHOLE, 0 if loads else WHOLE)
        world.over()


def test_a_short_prompt_whose_patience_is_over_says_nothing_of_a_source(world: World) -> None:
    """It would be computed sooner than any source could answer. Others wait for their answer as before."""
    d, p = world.holder(), world.engine({"ask_timeout": 60.0})
    world.idle.add(d)
    p.scheduler.takes(64, 1e-6)
    assert not world.turn(p, d.scheduler.source, prompt=[7] * 32).loaded
    p.scheduler._choice = p.scheduler._asks._choice = LoadOrCompute()
    turn = p.begin("long", [*PROMPT, 99], [1], [d.scheduler.source])
    p.step(timeout=0.001)
    assert p.scheduler.asking("long"), "it has not waited for an answer"
    world.idle.clear()
    world.until(lambda: turn.done)
    assert turn.loaded == WHOLE
    world.over()


@pytest.mark.parametrize("config", [{"ask": "never"}, {"ask_tokens": 65}], ids=str)
def test_nobody_is_asked_if_the_settings_say_so(config: dict[str, object], world: World) -> None:
    d, p = world.holder(), world.engine(config)
    assert not world.turn(p, d.scheduler.source).loaded
    assert not p.scheduler.asked and not d.scheduler.answered.inquiries
    world.over()


def test_nobody_is_asked_for_what_is_cached_or_loaded_already(world: World) -> None:
    d, p = world.holder(), world.engine()
    side, prefix, there = p.scheduler, Prefix(PROMPT, model="m"), d.scheduler.source
    assert not side.ask("r", prefix, [there], 64, computed=64)
    assert not side.ask("r", prefix, [side.source], 64), "it is asked of this engine itself"
    assert not side.ask("r", prefix, [], 64)
    assert side.ask("r", prefix, [there], 64) and side.ask("r", prefix, [there], 64), "once"
    for other in (Prefix([*range(1000, 1064)], model="m"), Prefix(PROMPT, model="m", salt="s")):
        with pytest.raises(ScheduleError, match="asks others already"):
            side.ask("r", other, [there], 64)
    with pytest.raises(ScheduleError, match="asks others already"):
        side.ask("r", prefix, [there, Source("127.0.0.1", 1, 1)], 64)
    side.finished("r", BlockTable.of([[]]), complete=False)
    assert p.scheduler.asked[""].requests == 1
    assert side.load("s", TransferId("own/1", 0), b"d", there, 64)
    assert not side.ask("s", prefix, [there], 64)
    side.finished("s", BlockTable.of([[]]), complete=False)
    world.over()


def test_nobody_is_asked_for_a_request_that_waits_in_a_queue(world: World) -> None:
    """What others hold for it would be held in vain. They are asked once the engine looks for blocks for it."""
    d, p = world.holder(), world.engine()
    assert p.scheduler.ask("r", p.prefix(Turn("", PROMPT, [0], "", ())), [d.scheduler.source], 64)
    for _ in range(20):
        world.step()
    assert p.scheduler.asking("r") and not d.scheduler.answered.inquiries
    assert p.scheduler.loadable("r", 0) is None
    world.until(lambda: d.scheduler.answered.held)
    p.scheduler.finished("r", BlockTable.of([[]]), complete=False)
    assert p.scheduler.ask("s", p.prefix(Turn("", PROMPT, [0], "", ())), [d.scheduler.source], 64)
    assert p.scheduler.loadable("s", 64) == 0 and not p.scheduler.asking("s"), "all is here by now"
    p.scheduler.finished("s", BlockTable.of([[]]), complete=False)
    assert d.scheduler.answered.inquiries == 1
    world.over()


def test_a_question_ends_when_the_engine_confirms_that_its_load_is_over(world: World) -> None:
    """No rank has reported it, or will: an engine may hear of the end from elsewhere."""
    d, p = world.holder(), world.engine()
    side = p.scheduler
    assert side.ask("r", p.prefix(Turn("", PROMPT, [0], "", ())), [d.scheduler.source], 64)
    assert side.loadable("r", 0) is None
    until(lambda: (d.step(timeout=0.001), side.directory.noticed)[1])
    assert side.loadable("r", 0) == WHOLE
    side.allocated("r", BlockTable.of([[*range(16)]]), WHOLE)
    assert not side.asked[""].loaded
    side.confirm_load_ended("r")
    assert side.asked[""].loaded == WHOLE
    side.finished("r", BlockTable.of([[]]), complete=False)
    world.until(lambda: not any(len(e.scheduler) or e.scheduler.waiting for e in world.engines))
    assert side.asked[""].loaded == WHOLE and not side.asked[""].recomputed, "once"


def test_questions_end_with_the_cache(world: World) -> None:
    """What is asked under earlier weights is of no use."""
    d, p = world.holder(), world.engine()
    prefix = p.prefix(Turn("", PROMPT, [0], "", ()))
    world.idle.add(d)
    for request in ("new", "out"):
        assert p.scheduler.ask(request, prefix, [d.scheduler.source], 64)
        prefix = p.prefix(Turn("", [7, *PROMPT], [0], "", ()))
    assert p.scheduler.loadable("new", 0) is None
    p.scheduler.withdraw_all("other weights")
    for request in ("new", "out"):
        assert not p.scheduler.asking(request) and p.scheduler.loadable(request, 0) == 0
        p.scheduler.finished(request, BlockTable.of([[]]), complete=False)
    world.idle.clear()
    world.until(lambda: d.scheduler.answered.held == 1)
    world.over()


def test_wrong_calls(world: World) -> None:
    p = world.engine()
    prefix, there = Prefix(PROMPT, model="m"), Source("127.0.0.1", 1, 1)
    for wrong in (
        lambda: p.scheduler.ask("r", PROMPT, [there], 64),  # type: ignore[arg-type]
        lambda: p.scheduler.ask("r", prefix, there, 64),  # type: ignore[arg-type]
        lambda: p.scheduler.ask("r", prefix, ["h:1"], 64),  # type: ignore[list-item]
        lambda: p.scheduler.ask("r", prefix, [there], -1),
        lambda: p.scheduler.ask("r", prefix, [there], 65),
        lambda: p.scheduler.ask("r", prefix, [Source("127.0.0.1", n, 1) for n in range(1, 18)], 64),
        lambda: p.scheduler.drain(-1),
        lambda: p.worker.drain(-1),
        lambda: p.worker.agent.drain(-0.5),
        lambda: p.scheduler.ask("", prefix, [there], 64),
        lambda: p.scheduler.ask("r", prefix, [there], 64, kind=3),  # type: ignore[arg-type]
        lambda: p.scheduler.ask("r", prefix, [there], 64, computed=-1),
        lambda: p.scheduler.takes(-1, 1.0),
        lambda: p.scheduler.takes(1, "s"),  # type: ignore[arg-type]
        lambda: HeldPrefix(-1, BlockTable.of([[]])),
        lambda: HeldPrefix(1, [[]]),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError):
            wrong()
    p.scheduler.close()
    with pytest.raises(ClosedError):
        p.scheduler.ask("r", prefix, [there], 64)


def test_the_trace_tells_who_named_the_source_and_when_it_had_answered(world: World, tmp_path: Path) -> None:
    d, p = world.holder(), world.engine({"trace": str(tmp_path / "trace")})
    turn = world.turn(p, d.scheduler.source, prompt=[*PROMPT])
    (line,) = map(json.loads, (tmp_path / "trace").read_text().splitlines())
    assert line["kind"] == "" and line["tokens"] == turn.loaded and line["failure"] is None
    assert 0 < line["us"]["found"] <= line["us"]["fetched"] <= line["us"]["seen"]


# --- what is told ------------------------------------------------------------------------------------------------------
