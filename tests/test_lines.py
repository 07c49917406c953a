"""What others say forges no line of a log, no escape of a terminal and no markup, wherever it is shown."""

from __future__ import annotations

import io
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvxfer.cli.terminal import verbatim
from kvxfer.cli.visit import show_visit
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.facts import difference
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.text import escaped
from tests.control.conftest import Ended, Released, fetch, offered
from tests.control.conftest import engine as engine
from tests.control.stranger import Stranger, framed

ROOT = Path(__file__).parents[1]

EVIL = "a\n2026-01-01 ERROR forged\r\x1b[2J\x9b31m\u202e[red]x[/red]\u2028\x00\udcff"
TOLD = r"a\n2026-01-01 ERROR forged\r\x1b[2J\x9b31m\u202e[red]x[/red]\u2028\x00"
WIRE = EVIL.removesuffix("\udcff")
"""The same as valid Unicode, which all that goes over a connection is."""

texts = st.text(st.characters(codec=None), max_size=60) | st.just(EVIL)


class Lines(logging.Handler):
    """What a handler of the application writes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, ours = Lines(), logging.getLogger("kvxfer")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler
    ours.removeHandler(handler)
    ours.setLevel(before)


@given(texts)
def test_a_text_becomes_one_printable_line_and_a_printable_one_stays(text: str) -> None:
    assert escaped(text).isprintable() and len(escaped(text)) >= len(text)
    assert escaped(escaped(text)) == escaped(text)
    assert not text.isprintable() or escaped(text) == text


@given(texts, texts)
def test_each_record_is_one_line(text: str, more: str) -> None:
    log, handler = logger("kvxfer.test.lines"), Lines()
    logging.getLogger("kvxfer").addHandler(handler)
    try:
        log.warning("request %s: %s", text, Failure(FailureKind.REFUSED, more, text))
        log.warning(text)
        log.warning("a mapping %(x)s", {"x": text})
    finally:
        logging.getLogger("kvxfer").removeHandler(handler)
    assert len(handler.written) == 3 and all(line.isprintable() for line in handler.written)


@given(texts)
def test_a_traceback_keeps_its_lines_and_gets_no_others(text: str) -> None:
    log, handler = logger("kvxfer.test.lines"), Lines()
    logging.getLogger("kvxfer").addHandler(handler)
    try:
        try:
            try:
                raise ValueError(text)
            except ValueError as e:
                raise ExceptionGroup(text, [OSError(5, text), e]) from e
        except ExceptionGroup:
            log.exception("it failed for %s", text)
    finally:
        logging.getLogger("kvxfer").removeHandler(handler)
    (written,) = handler.written
    assert all(line.isprintable() for line in written.split("\n"))
    assert written.count("Traceback (most recent call last):") >= 2 and "raise ValueError(text)\n" in written
    assert not [line for line in written.split("\n") if line.startswith(("2026", "ERROR forged"))]


@given(texts)
def test_what_is_raised_and_how_it_ended_is_one_line(text: str) -> None:
    for error in (KvxferError(text), PeerError(text), TransportError(ValueError(text))):
        assert str(error).isprintable()
        assert str(Failure.of(error)).isprintable()
    failure = Failure.of(RuntimeError(text), peer=text).about(text, text)
    assert failure.detail.isprintable() and failure.peer.isprintable() and str(failure).isprintable()
    assert str(msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)).isprintable()
    assert (difference({}, {text: text}, "there") or "").isprintable()


def test_a_record_that_cannot_be_formatted_is_left_to_its_handler() -> None:
    """And ends nothing in the thread that logs it."""
    log, seen = logger("kvxfer.test.odd"), list[logging.LogRecord]()
    log.propagate = False
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log.addHandler(handler)
    log.warning("%d", "no number")
    log.removeHandler(handler)
    assert seen[0].args == ("no number",)


def test_an_error_s_own_advice_is_given_in_place_of_its_kind_s() -> None:
    said = str(Failure.of(TransportError("no link", advice="set `mode: auto` there"), peer="d").about("it refused: "))
    assert said == "backend_failed (peer d): it refused: no link; set `mode: auto` there"
    assert str(Failure.of(TransportError("no link"))).endswith("or choose another back end")


def test_names_that_clients_and_peers_choose(engine, lines: Lines) -> None:
    p, d = engine({}, seed=1), engine({})
    transfer = TransferId(f"own/1/{WIRE}", 0)
    p.agents[0].offer(msgspec.structs.replace(offered([3], 4, transfer=transfer, final=False), handle=WIRE))
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=transfer, handle=WIRE))
    p.agents[0].revoke(transfer, 1, WIRE, True)
    (ended,) = d.wait(Ended)
    assert str(ended.outcome).isprintable() and ended.handle == WIRE
    p.wait(Released)
    assert any("2026-01-01 ERROR forged" in line for line in lines.written), "both are logged"
    assert all(line.isprintable() for line in lines.written)


def test_what_a_stranger_sends_and_is(engine, lines: Lines) -> None:
    p = engine({})
    said = WIRE.encode()
    junk = [
        said,
        b"\x81\xa4" + said[:4] + b"\x01",
        msgspec.msgpack.encode({WIRE: WIRE}),
        msgspec.msgpack.encode([WIRE, WIRE]),
        msgspec.msgpack.encode({"type": WIRE}),
        m.encode(m.Refused(FailureKind.REFUSED, WIRE, False)),
        m.encode(m.Await(p.source.epoch, (m.Named(TransferId(WIRE, 0), b"d"),))),
    ]
    for address in (p.agents[0].descriptor.address, f"tcp://127.0.0.1:{p.source.port}"):
        for frame in junk:
            with Stranger(address) as s:
                s.socket.sendall(framed(frame))
                s.socket.settimeout(0.1)
                s.hung_up_on()
    assert all(line.isprintable() for line in lines.written)


def test_a_directory_that_answers_with_anything(engine, lines: Lines) -> None:
    d = engine({}, transfer_timeout=2.0, peer_timeout=1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(4):
            met, _ = listener.accept()
            with met, suppress(OSError):  # it may have heard enough
                met.recv(1 << 16)
                met.sendall(framed(m.encode(m.Refused(FailureKind.REFUSED, WIRE, False))))
                met.sendall(framed(msgspec.msgpack.encode({WIRE: WIRE})))
                met.sendall(framed(WIRE.encode()))

    threading.Thread(target=serve, daemon=True).start()
    d.agents[0].fetch(
        fetch(Source("127.0.0.1", listener.getsockname()[1], 1), [1], 4, transfer=TransferId("own/1/x", 0))
    )
    (ended,) = d.wait(Ended)
    listener.close()
    assert not ended.outcome.delivered and str(ended.outcome).isprintable()
    assert all(line.isprintable() for line in lines.written)


def test_what_is_shown_in_a_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, width=4000, force_terminal=True, color_system="truecolor", highlight=False)
    console.print(verbatim(EVIL))
    found = {
        "peer": EVIL,
        "engine": EVIL,
        "ranks": 1,
        "first_answer_ms": 1,
        "round_trip_ms": 1,
        "links": [{"round_trip": None, "transport": EVIL, "peer": EVIL, "backend": EVIL, "up": False}],
        "memory": "cpu",
        "peer_memory": EVIL,
        "peer_elastic": True,
        "candidates": [{"backend": EVIL, "against": EVIL}],
        "measured": {"bytes": (1, 1), "from_peer": {"failure": EVIL}, "to_peer": {"failure": EVIL}},
    }
    show_visit(console, found)
    lines = written.getvalue().splitlines()
    assert all(line.isprintable() for line in lines), "neither an escape nor a colour"
    assert sum(TOLD in line for line in lines) == 7
