"""`kvxfer why`: one request, as both engines tell of it, and what that means."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvxfer import Ticket, TransferId, clock
from kvxfer.cli.main import build
from kvxfer.control import explaining, lookup
from kvxfer.control.explaining import Explainer
from kvxfer.engine.scheduler import SchedulerSide
from kvxfer.identity import Source
from kvxfer.protocol.messages import Explain, Explained, Refused, encode
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.security import make_key
from kvxfer.testing.clock import SetForward
from kvxfer.testing.engine import PagedEngine, until
from kvxfer.testing.engine.memory import PagedMemory
from tests.control.stranger import Stranger

TOKENS = 16


class Pair:
    def __init__(self, stack: ExitStack, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        self.p = stack.enter_context(PagedEngine(prefill, PagedMemory(), name="prefill"))
        self.d = stack.enter_context(PagedEngine(decode, PagedMemory(), name="decode"))

    @staticmethod
    def at(side: SchedulerSide) -> str:
        return f"{side.source.host}:{side.source.port}"

    def why(self, *words: str, **more: str) -> tuple[int, str]:
        options = {"--decode": self.at(self.d.scheduler), **{f"--{k}": v for k, v in more.items()}}
        ran = CliRunner().invoke(build(), ["why", *words, *(w for pair in options.items() for w in pair if pair[1])])
        return ran.exit_code, ran.output

    def story(self, *words: str, **more: str) -> tuple[int, dict[str, Any]]:
        code, text = self.why(*words, "--json", **more)
        return code, json.loads(text)


@pytest.fixture
def ahead() -> Iterator[SetForward]:
    """Is the clock of this process, which the test sets forward."""
    made = SetForward()
    with made.installed():
        yield made


@pytest.fixture
def make(ahead: SetForward, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # A busy machine stands still for longer than an operator waits.
    monkeypatch.setattr("kvxfer.cli.why.ANSWER_S", 60.0)
    with ExitStack() as stack:
        yield lambda prefill=None, decode=None: Pair(stack, prefill or {}, decode or {})


def test_what_was_delivered_is_one_story_of_both_sides(make: Any) -> None:
    pair = make()
    ticket = pair.p.offer("chatcmpl-7", TOKENS)
    pair.d.load("chatcmpl-7-d", ticket, TOKENS)
    pair.d.until("chatcmpl-7-d")
    pair.p.until("chatcmpl-7")
    code, told = pair.story("chatcmpl-7")
    (found,) = told["requests"]
    assert code == 0 and not told["errors"] and found["verdict"]["ok"]
    assert "it was delivered in" in found["verdict"]["says"]
    assert found["decode"]["key"] == found["prefill"]["key"]
    assert found["decode"]["came"] == found["prefill"]["came"] > 0
    assert [*found["decode"]["stages"]] == [
        "fetched",
        "began",
        "asked",
        "announced",
        "heard",
        "arrived",
        "ended",
        "last",
        "seen",
    ]
    assert {"begun", "computed", "ended"} <= found["prefill"]["stages"].keys()
    code, text = pair.why("chatcmpl-7")
    assert code == 0
    for words in (
        "decode",
        "prefill",
        "the producer announced the first part",
        "all tokens were computed",
        "confirmed",
        "ok:",
    ):
        assert words in text


def wait_in_vain(pair: Pair, request: str, name: str, ahead: SetForward) -> Ticket:
    """The consumer asks for what the producer has not computed, and gives it up at once."""
    ticket = pair.p.ask(name, TOKENS)
    pair.d.load(request, ticket, TOKENS)
    until(lambda: pair.d.step() and pair.p.worker.agent._runtime.producer.awaited(ticket.transfer))
    ahead.forward(11.0)
    pair.d.worker.agent._loop.do(lambda now: [])  # it looks at the clock
    pair.d.until(request)
    return ticket


def test_the_last_that_failed(make: Any, ahead: SetForward) -> None:
    pair = make(decode={"start_timeout": 10.0})
    assert pair.why()[0] == 0 and "no request has failed" in pair.why()[1]
    for n in range(3):
        wait_in_vain(pair, f"r-{n}", f"late-{n}", ahead)
    code, told = pair.story(last="2")
    assert code == 1
    assert [found["decode"]["request"] for found in told["requests"]] == ["r-2", "r-1"], "the latest first"
    verdict = told["requests"][0]["verdict"]
    assert not {"announced", "heard", "arrived"} & told["requests"][0]["decode"]["stages"].keys()
    assert "nothing came within 10 s" in verdict["says"] and "still had it in its queue" in verdict["says"]
    assert "start_timeout" in verdict["do"]


def test_a_lease_that_was_too_short(make: Any) -> None:
    pair = make(prefill={"lease": 0.5})
    ticket = pair.p.offer("q", TOKENS)
    pair.p.until("q")
    time.sleep(0.3)
    pair.d.load("r", ticket, TOKENS, offered=True)
    pair.d.until("r")
    code, told = pair.story("r")
    verdict = told["requests"][0]["verdict"]
    assert code == 1 and "its lease had ended" in verdict["says"] and "raise 'lease'" in verdict["do"]


def computed_too_late(make: Any, ahead: SetForward) -> Any:
    """Engines of which the consumer gave a request up before the producer computed it."""
    pair = make(decode={"start_timeout": 10.0})
    ticket = wait_in_vain(pair, "r", "q", ahead)
    time.sleep(0.3)  # longer than a question takes, by which the two clocks are compared
    pair.p.run("q", ticket.digest, 0, TOKENS)
    until(lambda: pair.p.step() and pair.story("r")[1]["requests"][0]["prefill"]["over"])
    return pair


@pytest.mark.parametrize("computed", [False, True])
def test_a_request_that_the_prefill_engine_aborted_is_not_of_another_engine(make: Any, computed: bool) -> None:
    pair = make()
    ticket = pair.p.ask("q", 2 * TOKENS)
    pair.d.load("r", ticket, 2 * TOKENS)
    pair.d.step()
    if computed:
        pair.p.run("q", ticket.digest, 0, TOKENS)
        pair.p.step()
    pair.p.finish("q", complete=False)
    until(lambda: pair.p.step() and pair.d.step().failed)
    found = pair.story("r")[1]["requests"][0]
    assert "was aborted or failed" in found["verdict"]["says"] and "in the log" in found["verdict"]["do"]
    assert found["prefill"]["outcome"] == "withdrawn" and "knows nothing" not in found["verdict"]["says"]
    assert len(pair.story("q", prefill=pair.at(pair.p.scheduler), decode="")[1]["requests"]) == 1, "it is told once"


def test_what_no_engine_knows_and_an_engine_that_is_not_there(make: Any) -> None:
    pair = make()
    code, text = pair.why("nobody")
    assert code == 3 and "no engine that was asked knows request 'nobody'" in text
    code, text = pair.why("nobody", decode="127.0.0.1:1")
    assert code == 3 and "peer_unreachable" in text and "check that the peer runs" in text
    assert "no engine that was asked" not in text, "none has answered"
    assert pair.why("r", decode="")[0] == 2
    assert pair.why("r", decode="nonsense")[0] == 2


def test_what_was_offered_and_never_asked_for(make: Any) -> None:
    pair = make()
    pair.p.offer("lonely", TOKENS)
    code, text = pair.why("lonely", prefill=pair.at(pair.p.scheduler))
    assert code == 1 and "knows nothing of it" in text and "the router sends the request on" in text


def test_what_is_still_under_way(make: Any) -> None:
    pair = make()
    ticket = pair.p.ask("slow", TOKENS)
    pair.d.load("r", ticket, TOKENS)
    pair.d.step()
    code, told = pair.story("r")
    (found,) = told["requests"]
    assert code == 0 and not found["decode"]["over"] and not found["prefill"]["over"]
    assert (
        "it is not over after" in found["verdict"]["says"]
        and "has not computed all of it yet" in found["verdict"]["says"]
    )


@pytest.mark.parametrize(
    ("offered", "now", "then"),
    [
        (False, "it waits for the prefill engine to begin", "before the producer had begun with it"),
        (True, "it waits for free blocks of the decode engine", "its load waited for free blocks of this engine"),
    ],
)
def test_a_request_that_ends_before_its_load_says_for_what_it_waited(
    make: Any, offered: bool, now: str, then: str
) -> None:
    pair = make()
    ticket = (pair.p.offer if offered else pair.p.ask)("q", TOKENS)
    pair.d.step()
    load, named = pair.d.scheduler.load, (ticket.transfer, ticket.digest, ticket.source)
    assert load("r", *named, TOKENS, begun=offered, offered=offered)
    assert bool(pair.d.scheduler.loadable("r", 0)) is offered
    code, told = pair.story("r")
    assert code == 0 and now in told["requests"][0]["verdict"]["says"]
    pair.d.finish("r", complete=False)
    code, told = pair.story("r")
    assert code == 0 and then in told["requests"][0]["verdict"]["says"]


def test_what_takes_no_part(make: Any) -> None:
    pair = make()
    pair.d.scheduler.takes_no_part("bare", "kvxfer_transfer is missing: the router must forward params")
    code, text = pair.why("bare")
    assert code == 1 and "kvxfer_transfer is missing" in text and "conformance --router" in text


def test_only_who_has_the_key_is_told(make: Any, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    make_key(key)
    settings = {"key_file": str(key), "peer_timeout": 30.0}  # a busy machine may need longer than 2 s for the keys
    pair = make(settings, settings)
    ticket = pair.p.offer("q", TOKENS)
    pair.d.load("r", ticket, TOKENS)
    pair.d.until("r")
    pair.p.until("q")
    code, text = pair.why("r")
    assert code == 3 and "r-" not in text and "problem:" in text, text
    code, text = pair.why("r", config=json.dumps({"key_file": str(key)}))
    assert code == 0, text


def test_nobody_learns_a_digest(make: Any) -> None:
    pair = make()
    digest = "5eed" * 16
    transfer = TransferId.mint(pair.p.scheduler.source.epoch, f"cmpl/{digest}")
    pair.p.step()
    assert pair.p.scheduler.offer("q", transfer, bytes.fromhex(digest)[:64], TOKENS)
    _, text = pair.why("q", decode=pair.at(pair.p.scheduler), prefill=pair.at(pair.p.scheduler))
    assert "5eed5eed..." in text and digest not in text


class Slow:
    """A directory whose answers to operators take 50 ms."""

    def __init__(self, pair: Any) -> None:
        self.directory, self.asked, self._tell = pair.d.scheduler.directory, 0, pair.d.scheduler.directory.explain
        self.directory.explain = self._explain

    def _explain(self, question: Explain) -> Any:
        self.asked += 1
        time.sleep(0.05)
        return self._tell(question)


@contextmanager
def repeating(source: Source, host: str) -> Iterator[None]:
    """Put one question after the other from this host, without reading more than there is to read."""
    with socket.create_connection((source.host, source.port), source_address=(host, 0)) as s:
        frame, over = encode(Explain("r")), threading.Event()

        def ask() -> None:
            while not over.is_set():
                s.sendall(len(frame).to_bytes(4, "little") + frame)
                s.recv(1 << 16)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("peers", [1, 20])
def test_questions_repeated_without_end_take_a_share_of_the_thread(peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent, explainer = [0.0], [0.0], Explainer()
    monkeypatch.setattr(clock, "now", lambda: now[0])

    def explain(asked: Explain) -> Any:
        now[0] += 0.05
        spent[0] += 0.05

    connections: list[Any] = [Mock(peer=PeerIdentity(f"127.0.0.{n}")) for n in range(peers)]
    while now[0] < 100.0:
        for connection in connections:
            explainer.answer(Explain("r"), connection, explain)
        now[0] += 0.01
    assert 3.0 < spent[0] < 10.0


def test_a_question_that_is_repeated_at_once_has_to_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "PAUSE_FACTOR", 1e9)
    pair = make()
    with Stranger(f"tcp://{pair.at(pair.d.scheduler)}") as s:
        s.say(Explain("r"))
        assert isinstance(s.answer(), Explained)
        s.say(Explain("r"))
        refused = s.answer()
    assert isinstance(refused, Refused) and refused.again


def test_a_peer_that_repeats_its_question_keeps_no_other_peer_waiting(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's question is answered the first time, so it need not be asked again."""
    monkeypatch.setattr(lookup, "REPEAT_S", 1e9)
    pair = make()
    slow, here = Slow(pair), PeerIdentity("127.0.0.1")
    with repeating(pair.d.scheduler.source, "127.0.0.2"):
        until(lambda: slow.asked > 0)
        for _ in range(2):
            code, text = pair.why("nobody")
            assert code == 3 and "problem" not in text
            until(lambda: not slow.directory._explainer._debts.of(here, clock.now()))  # its own share is back


def test_a_program_that_repeats_its_question_keeps_no_operator_on_its_host_waiting(make: Any) -> None:
    pair = make()
    slow = Slow(pair)
    with repeating(pair.d.scheduler.source, "127.0.0.1"):
        until(lambda: slow.asked > 0)
        code, text = pair.why("nobody")
    assert code == 3 and "no engine that was asked knows request 'nobody'" in text and "problem" not in text


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_that_differ_change_neither_the_story_nor_the_verdict(
    make: Any, monkeypatch: pytest.MonkeyPatch, ahead: SetForward, skew: float
) -> None:
    """Times are shown by the clock of the host on which `why` runs."""
    pair = computed_too_late(make, ahead)

    def skewed(host: str, port: int, *more: Any) -> Any:
        found = lookup.explain(host, port, *more)
        if f"{host}:{port}" == pair.at(pair.d.scheduler):
            return found
        return replace(found, now=found.now + skew, stories=tuple(replace(s, at=s.at + skew) for s in found.stories))

    monkeypatch.setattr("kvxfer.cli.why.explain", skewed)
    _, told = pair.story("r")
    (found,) = told["requests"]
    assert "still had it in its queue" in found["verdict"]["says"]
    assert abs(found["prefill"]["at"] - found["decode"]["at"]) < 600
