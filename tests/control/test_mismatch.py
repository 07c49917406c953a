"""Engines whose keys do not go together are told so at once, and fill nobody's log."""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer.config import Config
from kvxfer.control.broken import spoken
from kvxfer.control.lookup import look_up
from kvxfer.errors import PeerError
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.security import Security, make_key
from kvxfer.testing.clock import SetForward
from tests.control.conftest import SeededEngine, fetch
from tests.control.stranger import framed

PAIRS = {"another": ("a", "b"), "only there": ("", "a"), "only here": ("a", ""), "not accepted there": ("b+a", "a")}
SILENCE_S = 60.0
"""Far less than ``peer_timeout``, and enough for a machine that is busy."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str | None]:
    """Key files by the names of their keys, the first one presented."""
    for name in "ab":
        make_key(tmp_path / name)
    (tmp_path / "b+a").write_text((tmp_path / "b").read_text() + (tmp_path / "a").read_text())
    (tmp_path / "b+a").chmod(0o600)
    return {"": None, **{name: str(tmp_path / name) for name in ("a", "b", "b+a")}}


@pytest.mark.parametrize("here, there", PAIRS.values(), ids=PAIRS)
def test_a_mismatch_is_refused_at_once_and_logged_a_few_times(
    clock: SetForward,
    engine: Callable[..., SeededEngine],
    files: dict[str, str | None],
    here: str,
    there: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    d, p = (
        engine({}, peer_timeout=SILENCE_S, transfer_timeout=SILENCE_S, key_file=files[which]) for which in (here, there)
    )
    for number in range(3):
        d.agents[0].fetch(fetch(p.source, [number], 4, transfer=TransferId(f"own/1/{number}", 0), handle=f"r{number}"))
        failure = d.wait(Ended, count=number + 1, timeout=SILENCE_S)[number].outcome.failure
        assert failure is not None and failure.kind is FailureKind.REFUSED, failure
        assert " key" in failure.detail and "'key_file'" in failure.advice
        clock.forward(1.1)  # in which a limit by time alone would let a line pass
    lines = [r.getMessage() for r in caplog.records if r.name == "kvxfer.security" and r.levelno >= logging.WARNING]
    assert len(lines) <= 2, lines


@pytest.mark.parametrize("here, there", PAIRS.values(), ids=PAIRS)
def test_a_program_that_asks_is_told_the_same(
    engine: Callable[..., SeededEngine], files: dict[str, str | None], here: str, there: str
) -> None:
    p = engine({}, key_file=files[there])
    with pytest.raises(PeerError, match=" key") as caught:
        look_up("127.0.0.1", p.source.port, Security.of(Config(key_file=files[here])), SILENCE_S)
    assert caught.value.kind is FailureKind.REFUSED


def test_no_frame_is_taken_for_tls() -> None:
    for length in (0x0316, 0x010316, 0x03010316, 0x0315, 0x00030315):
        frame = framed(b"\x93" + bytes(min(length, 100)))
        assert not spoken(length.to_bytes(4, "little") + frame[4:])
    for message in (m.Lookup(m.PROTOCOL), m.Ping(1)):
        assert not spoken(framed(m.encode(message)))


@pytest.mark.parametrize("first, last, said", [(2000, 2001, "has expired"), (2900, 9999, "is not yet valid")])
def test_a_key_out_of_its_dates_is_not_called_another_one(
    engine: Callable[..., SeededEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    last: int,
    said: str,
) -> None:
    """Two engines with the same file, as made by another tool, or under a clock that is wrong."""
    years = {2020: first, 9999: last}
    made = SimpleNamespace(datetime=lambda year, month, day: datetime.datetime(years[year], month, day))
    monkeypatch.setattr("kvxfer.security.datetime", made)
    make_key(tmp_path / "key")
    d, p = (engine({}, key_file=str(tmp_path / "key")) for _ in range(2))
    d.agents[0].fetch(fetch(p.source, [1], 4, transfer=TransferId("own/1/r", 0)))
    failure = d.wait(Ended)[0].outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED
    assert "clock" in failure.detail and said in failure.detail and "another key" not in failure.detail


def test_a_peer_that_vanishes_in_its_handshake_is_no_mismatch(
    engine: Callable[..., SeededEngine], files: dict[str, str | None]
) -> None:
    """It may have been restarted: asking again helps."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    port = listener.getsockname()[1]
    import threading

    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                listener.accept()[0].close()
            except TimeoutError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(PeerError) as caught:
            look_up("127.0.0.1", port, Security.of(Config(key_file=files["a"])), 2.0)
        assert caught.value.kind is FailureKind.PEER_UNREACHABLE
    finally:
        over.set()
        thread.join()
        listener.close()
