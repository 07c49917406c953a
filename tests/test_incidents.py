"""The incidents of docs/runbook.md, played: each says the words of its row, counts the peer, and `kvxfer why` gives the verdict."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer.engine import Ticket
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.security import RateLimitedWarnings, make_key
from kvxfer.testing.engine import PagedEngine, until
from kvxfer.transport import registry
from tests.conftest import require
from tests.docs.test_troubleshooting import said
from tests.networks import on_slow_link
from tests.ports import NOBODY

PAGE = (Path(__file__).parents[1] / "docs" / "runbook.md").read_text()
ROWS = {
    cells[0]: [cell.strip("`") for cell in cells[1:]]
    for line in PAGE[PAGE.index("## By incident") : PAGE.index("## By symptom")].splitlines()
    if line.startswith("| ") and (cells := [cell.strip(" ") for cell in line.strip("|").split(" | ")])
}
ROWS = {name.strip("| "): cells for name, cells in ROWS.items() if "`" in PAGE and name.strip("| ") != "incident"}
TOKENS = 16
TIMES = {"peer_timeout": 3.0, "transfer_timeout": 3.0, "start_timeout": 4.0, "lease": 60.0}


class Play:
    """Two engines, what D's scheduler logs, and the ends on D's rank."""

    def __init__(self, stack: ExitStack, log: list[str]) -> None:
        self._stack, self.log, self.ends = stack, log, list[Ended]()

    def engine(self, name: str = "e", facts: dict[str, str] | None = None, **config: Any) -> PagedEngine:
        more = {} if facts is None else {"facts": facts}
        made = PagedEngine({**TIMES, **config}, name=name, on_ended=self.ends.append, **more)
        return self._stack.enter_context(made)

    def load(self, d: PagedEngine, ticket: Ticket, **more: Any) -> str:
        """Load, and return the reason that the scheduler's log has."""
        d.load("cmpl-7", ticket, TOKENS, **more)
        d.until("cmpl-7")
        (line,) = [line for line in self.log if line.startswith("request cmpl-7 has not loaded its KV: ")]
        return line

    def counted(self) -> set[str]:
        """The kinds of loads that failed, and their peers without a port: what the metric counts by."""
        failed = [end.outcome.failure for end in self.ends if end.role == "consumer"]
        return {
            f"{why.kind}/{''.join(re.findall(r'[0-9.]+(?=:[0-9])', why.peer))}" for why in failed if why is not None
        }

    def why(self, d: PagedEngine, *more: str) -> tuple[int, str]:
        """Its exit status and words, wherever a terminal would break its lines."""
        source = d.scheduler.source
        ran = CliRunner().invoke(build(), ["why", "cmpl-7", "--decode", f"{source.host}:{source.port}", *more])
        return ran.exit_code, " ".join(ran.output.split())

    def story(self, d: PagedEngine) -> Any:
        return json.loads(self.why(d, "--json")[1])["requests"][0]


@pytest.fixture
def play(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "kvxfer.engine":
                lines.append(record.getMessage())

    handler, ours = Lines(), logging.getLogger("kvxfer")
    ours.addHandler(handler)
    with ExitStack() as stack:
        yield Play(stack, lines)
    ours.removeHandler(handler)


@pytest.mark.parametrize("incident", ROWS)
def test_what_a_row_quotes_is_said(incident: str) -> None:
    assert len(ROWS) == 20
    words = ROWS[incident][0]
    assert words in said() or words in said().replace("…", "")


def check(play: Play, incident: str, said: str, host: str = "127.0.0.1") -> None:
    words = ROWS[incident][0]
    assert words in said, said
    assert ROWS[incident][2] == "kvxfer_failures_total"
    assert play.counted() and all(key.endswith("/" + host) for key in play.counted()), play.counted()


def test_wrong_key(play: Play, tmp_path: Path) -> None:
    keys = [tmp_path / f"{n}.pem" for n in range(2)]
    for key in keys:
        make_key(key)
    p, d = (play.engine(key_file=str(key)) for key in keys)
    check(play, "wrong key", play.load(d, p.offer("q", TOKENS)))
    code, text = play.why(d, "--config", json.dumps({"key_file": str(keys[1])}))
    assert code == 1 and ROWS["wrong key"][0] in text


def test_wrong_model(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = {"tcp": registry.available()["tcp"]}
    # Doctor makes each that is installed, and the others cost time.
    monkeypatch.setattr(registry, "available", lambda: tcp)
    p, d = play.engine(), play.engine(facts={"model": "another"})
    check(play, "wrong model", play.load(d, p.offer("q", TOKENS)))
    code, text = play.why(d)
    assert code == 1 and "the models differ: " in text
    at = [f"{e.scheduler.source.host}:{e.scheduler.source.port}" for e in (d, p)]
    ran = CliRunner().invoke(build(), ["doctor", "--peer", at[0], "--peer", at[1]])
    assert ran.exit_code == 1 and "the models differ: " in ran.output


@pytest.mark.parametrize("way", ["read", "write", "sendrecv", "read packed", "write packed", "sendrecv packed"])
def test_a_slow_link_says_how_far_it_got_whoever_moves_the_bytes(play: Play, way: str) -> None:
    verb, _, packed = way.partition(" ")
    inner = {"verbs": ["send", "recv"] if verb == "sendrecv" else [verb], "run_bytes": 1 << 20 if packed else 1}
    slow = {
        "backend": "kvxfer.testing.faults:Faulty",
        "backend_options": {"inner": "kvxfer.testing.fake:FakeTransport", "inner_options": inner, "bytes_per_s": 40.0},
    }
    p, d = play.engine(**slow), play.engine(**slow)
    said = play.load(d, p.offer("q", TOKENS))
    if verb == "sendrecv":  # the receiving side of this back end does not tell
        assert re.search(
            r"timed_out.*; 0 of [\d.]+ k?B had come after [3-9]\.\d s; the link is slow, or stands still", said
        ), said
        return
    assert re.search(r"timed_out.*; [\d.]+ B of [\d.]+ k?B.* had come in \d\.\d s, [\d.]+ B/s", said), said
    assert "at that rate it takes" in said
    assert play.counted() == {"timed_out/127.0.0.1"}
    code, text = play.why(d)
    assert code == 1 and "at that rate it takes" in " ".join(text.split())
    assert play.story(d)["decode"]["came"] > 0


@pytest.mark.parametrize(
    ("backlog", "why"),
    [
        (9, "though it took the connection"),
        (0, "no connection was made: its host is down, or a firewall or route drops"),
    ],
    ids=["taken", "dropped"],
)
def test_nobody_answers(play: Play, backlog: int, why: str) -> None:
    """As behind a firewall: connections are taken, and nothing comes back; or what asks for one is dropped, as by a full queue."""
    p, d = play.engine(), play.engine()
    ticket = p.offer("q", TOKENS)
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as silent, ExitStack() as queue:
        for _ in range(0 if backlog else 8):
            one = queue.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        source = Source("127.0.0.1", silent.getsockname()[1], ticket.source.epoch)
        said = play.load(d, Ticket(ticket.transfer, ticket.digest, source))
        check(play, "a firewall that lets one direction through", said)
        code, text = play.why(d)
    assert why in said and code == 1 and "peer_unreachable" in text and "problem:" in text


def test_a_peer_that_is_gone(play: Play) -> None:
    p, d = play.engine(), play.engine()
    ticket = p.offer("q", TOKENS)
    p.close()
    said = play.load(d, ticket)
    check(play, "dead peer", said)
    assert play.why(d)[0] == 1


def test_the_port_of_something_else(play: Play) -> None:
    p, d = play.engine(), play.engine()
    ticket = p.offer("q", TOKENS)
    elsewhere = Source("127.0.0.1", NOBODY, 0)  # as a router names an engine, which does not know its epoch
    check(play, "wrong port", play.load(d, Ticket(ticket.transfer, ticket.digest, elsewhere)))
    code, text = play.why(d)
    assert code == 1 and "peer_unreachable" in text


def test_another_release(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = play.engine(), play.engine()
    ticket = p.offer("q", TOKENS)
    engine = m.decode(p.scheduler.directory._descriptor)
    assert isinstance(engine, m.EngineDescriptor)
    p.scheduler.directory._descriptor = m.encode(
        m.EngineDescriptor(m.PROTOCOL - 1, engine.engine, engine.epoch, engine.ranks, engine.facts)
    )
    check(play, "another release", play.load(d, ticket))


def test_a_lease_that_is_too_short(play: Play) -> None:
    p, d = play.engine(lease=0.5), play.engine()
    ticket = p.offer("q", TOKENS)
    p.until("q")
    failure = next(end.outcome.failure for end in play.ends if end.role == "producer")
    assert failure is not None and ROWS["lease too short"][0] in failure.detail
    play.load(d, ticket, offered=True)
    code, text = play.why(d)
    assert code == 1 and "raise 'lease' on the prefill engine" in text


@contextmanager
def web_server() -> Iterator[int]:
    """A server that answers anything as HTTP servers do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as there:
                        there.recv(1 << 10)
                        there.sendall(
                            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received."
                        )

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("incident", "found"),
    [
        ("an engine's HTTP port for its directory", "it answers in HTTP"),
        ("a worker's port for its directory", "not of its engine's directory"),
    ],
)
def test_the_port_of_something_else_that_answers(play: Play, incident: str, found: str) -> None:
    p, d = play.engine(), play.engine()
    ticket, worker = p.offer("q", TOKENS), int(p.worker.agent.descriptor.address.rpartition(":")[2])
    with web_server() as http:
        elsewhere = Source("127.0.0.1", http if "HTTP" in incident else worker, 0)  # whose epoch no router knows
        check(play, incident, play.load(d, Ticket(ticket.transfer, ticket.digest, elsewhere)))
        code, text = play.why(d)
    assert code == 1 and found in text


TURNED_AWAY = "turned away a connection from 127.0.0.1: "
CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "key on one side only": (
        {"key_file": "KEY"},
        {},
        "the peer has a key, and this engine has none",
        f"{TURNED_AWAY}the peer speaks without a key",
    ),
    "`peers` of the prefill engine lacks this host": (
        {"peers": ["192.0.2.0/24"]},
        {},
        "do its 'peers' list this host",
        f"{TURNED_AWAY}it is not in the list of allowed peers",
    ),
    "different back ends": ({}, {"backend": "zmq"}, "configure the same on both", ""),
}
"""Settings of both engines, what `kvxfer doctor` finds, and what the prefill engine logs."""


@pytest.mark.parametrize("incident", CONFIGURED)
def test_engines_that_are_configured_differently(
    play: Play, incident: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Which says nothing for a while once it has said much, as in another test.
    monkeypatch.setattr("kvxfer.security._turned_away", RateLimitedWarnings(logging.getLogger("kvxfer.security"), 0.0))
    make_key(tmp_path / "key.pem")
    of_p, of_d, found, logged = CONFIGURED[incident]
    of_p = {name: str(tmp_path / "key.pem") if value == "KEY" else value for name, value in of_p.items()}
    p, d = play.engine(**of_p), play.engine(**of_d)
    check(play, incident, play.load(d, p.offer("q", TOKENS)))
    until(lambda: logged in caplog.text)
    at, config = p.scheduler.source, json.dumps({**TIMES, "backend": "tcp", **of_d})
    ran = CliRunner().invoke(build(), ["doctor", "--peer", f"{at.host}:{at.port}", "--config", config])
    assert ran.exit_code == 1 and found in " ".join(ran.output.split())


def test_a_prefill_engine_that_has_restarted_on_its_port(play: Play) -> None:
    p, d = play.engine(), play.engine()
    ticket = p.offer("q", TOKENS)
    p.close()
    again = play.engine(port=ticket.source.port)
    again.step()
    check(play, "prefill engine restarted on its port", play.load(d, ticket))
    code, text = play.why(d)
    assert code == 1 and "has restarted since it was named" in text
    d.load("next", again.offer("r", TOKENS), TOKENS)
    assert "next" in d.until("next").loaded, "and the next one is served"


def test_the_address_of_another_engine(play: Play) -> None:
    """As by a name that resolves to the wrong host, or by the decode engine's own address."""
    p, other, d = (play.engine() for _ in range(3))
    other.step()
    ticket, there = p.offer("q", TOKENS), other.scheduler.source
    elsewhere = Ticket(ticket.transfer, ticket.digest, Source(there.host, there.port, 0))
    check(play, "a name or an address of another engine", play.load(d, elsewhere))
    code, text = play.why(d)
    assert code == 1 and "knows nothing of it" in text and "this address, and the name" in text


SLOW = """
import json
from typer.testing import CliRunner
from kvxfer.cli.main import build
from kvxfer.testing.engine import PagedEngine, until
from kvxfer.testing.engine.memory import PagedMemory

BLOCKS, TOKENS = 260, 16
ended = []
config = {"backend": "tcp", "transfer_timeout": 4.0}
unit = 512
with PagedEngine(config, PagedMemory(blocks=BLOCKS, tokens=TOKENS, unit=unit), on_ended=ended.append) as p:
    with PagedEngine(config, PagedMemory(blocks=BLOCKS, tokens=TOKENS, unit=unit), on_ended=ended.append) as d:
        d.load("cmpl-7", p.offer("q", 256 * TOKENS), 256 * TOKENS)
        d.until("cmpl-7", timeout=60.0)
        where = f"{d.scheduler.source.host}:{d.scheduler.source.port}"
        ran = CliRunner().invoke(build(), ["why", "cmpl-7", "--decode", where])
        (end,) = [end for end in ended if end.role == "consumer"]
        print(json.dumps([str(d.failed["cmpl-7"]), end.nbytes, ran.exit_code, ran.output]))
"""


def test_a_link_of_two_megabits_says_so(tmp_path: Path) -> None:
    require("networks")
    done = on_slow_link(SLOW, 2, tmp_path)
    failure, came, code, story = json.loads(done.splitlines()[-1])
    assert ROWS["slow link"][0] in failure and re.search(
        r"; [\d.]+ [kM]B of [\d.]+ MB had come in [4-9]\.\d s, [\d.]+ kB/s", failure
    )
    assert came > 100_000, "the metric of bytes that came in vain has them"
    rate = float(re.search(r", ([\d.]+) kB/s", failure)[1])  # type: ignore[index]
    assert 50 < rate < 300
    assert code == 1 and "at that rate it takes" in story and "'transfer_timeout'" in story


def test_a_full_disk_where_the_trace_is_written(play: Play, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    p, d = play.engine(), play.engine(trace=str(trace))
    for n, disk in enumerate(["/dev/full", "/dev/full", str(tmp_path / "free")]):
        trace.unlink()
        trace.symlink_to(disk)
        d.load(f"r{n}", p.offer(f"q{n}", TOKENS), TOKENS)
        d.until(f"r{n}")
    assert d.loaded == {"r0", "r1", "r2"}, "no request fails for it"
    (line,) = [line for line in play.log if ROWS["disk full where `trace` writes"][0] in line]
    assert f"{trace}: No space left on device" in line
    assert [json.loads(line)["request"] for line in trace.read_text().splitlines()] == ["r2"]
