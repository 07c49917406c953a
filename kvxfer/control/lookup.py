"""Ask a directory, from a program that is not an engine: for its engine's descriptor, or what became of requests and of prefixes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvxfer import clock
from kvxfer.control.broken import unanswered
from kvxfer.control.connection import ControlConnection
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.errors import PeerError
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.security import Security
from kvxfer.settings import address_of

T = TypeVar("T")
Ask = Callable[[m.Message], tuple[float, m.Message]]
"""Asks a directory; returns how many seconds its answer took, and the answer."""

REPEAT_S = 0.5
"""Seconds after which the question is repeated, because a directory has no answer until its engine's ranks are known."""

TOKENS, DIGEST = 16, 16
"""Tokens of a prefix that nobody has, and bytes of its digest."""


@dataclass(frozen=True)
class LookupAnswer:
    """What a directory has answered, and how soon."""

    engine: m.EngineDescriptor
    first_s: float  # seconds to the first answer, including the connection and its handshake
    round_trips: tuple[float, ...]  # seconds from each further question to its answer


def look_up(host: str, port: int, security: Security, seconds: float, again: int = 0) -> LookupAnswer:
    """Ask the directory at this address for its engine's descriptor, then ``again`` times more to measure the round trip. Blocks.

    Raises:
        PeerError: It cannot be reached, does not answer within ``seconds``, refuses, or is not a directory of this protocol.
    """
    with _connected(host, port, security, seconds) as ask:
        first, answer = ask(m.Lookup(m.PROTOCOL))
        engine = _engine(answer)
        return LookupAnswer(engine, first, tuple(ask(m.Lookup(m.PROTOCOL))[0] for _ in range(again)))


def explain(host: str, port: int, security: Security, seconds: float, asked: m.Explain) -> m.Explained:
    """Ask the directory at this address what has become of requests. Blocks.

    Raises:
        PeerError: See ``look_up``.
    """
    with _connected(host, port, security, seconds) as ask:
        return _known(ask(asked)[1], m.Explained)


def ask_for_prefix(host: str, port: int, security: Security, seconds: float) -> float | None:
    """Return in how many seconds the engine at this address answers a question for a prefix that nobody has. Blocks.

    None: not within ``seconds``; it makes no steps.

    Raises:
        PeerError: See ``look_up``.
    """
    with _connected(host, port, security, seconds) as ask:
        ask(m.Lookup(m.PROTOCOL))  # what the connection takes does not count
        try:
            took, answer = ask(m.Inquire(0, TransferId.asked(), TOKENS, os.urandom(DIGEST)))
        except PeerError:
            return None
        _known(answer, m.InquiryAnswer)
        return took


@contextmanager
def _connected(host: str, port: int, security: Security, seconds: float) -> Iterator[Ask]:
    """Connect to the directory that an operator names, whose host may have a name, and yield what asks it.

    Raises:
        PeerError: The name leads nowhere. What asks raises it if there is no answer within ``seconds``.
    """
    sockets = ControlSockets(security)
    try:
        try:
            where = address(address_of(host), port)
        except OSError as e:
            raise PeerError(f"its name {host!r} cannot be looked up: {e}", kind=FailureKind.PEER_UNREACHABLE) from None
        yield partial(_ask, sockets, sockets.dial(where, None, m.MAX_BYTES), seconds)
    finally:
        sockets.close()


def _ask(
    sockets: ControlSockets, connection: ControlConnection, seconds: float, question: m.Message
) -> tuple[float, m.Message]:
    """Ask until there is an answer other than that it must be asked again; return how long that took, and the answer."""
    began = now = clock.now()
    repeat = 0.0
    while now < began + seconds:
        if now >= repeat:
            connection.send(question)
            repeat = now + REPEAT_S
        sockets.flush()
        sockets.poll(max(min(repeat, began + seconds) - now, 0.0))
        for ready in sockets.ready():
            frame = ready.receive()
            if frame is not None:
                answer = m.decode(frame)
                if not (isinstance(question, m.Explain) and isinstance(answer, m.Refused) and answer.again):
                    return clock.now() - began, answer
        if connection.lost is not None:
            kind = FailureKind.REFUSED if connection.denied else FailureKind.PEER_UNREACHABLE
            raise PeerError(connection.lost, kind=kind)
        now = clock.now()
    raise PeerError(unanswered(seconds, connection.connected), kind=FailureKind.PEER_UNREACHABLE)


def _known(answer: m.Message, kind: type[T]) -> T:
    """Return an answer of the kind that was asked for.

    Raises:
        PeerError: It is another.
    """
    if isinstance(answer, m.Refused):
        raise PeerError(f"it refused: {answer.reason}", kind=answer.kind)
    if not isinstance(answer, kind):
        raise PeerError(
            f"it answered with a {type(answer).__name__}; is it the port of an engine's directory?",
            kind=FailureKind.MISUSE,
        )
    return answer


def _engine(answer: m.Message) -> m.EngineDescriptor:
    engine = _known(answer, m.EngineDescriptor)
    if engine.protocol != m.PROTOCOL:
        raise PeerError(
            f"it speaks protocol {engine.protocol}, this side {m.PROTOCOL}",
            advice="update one of them",
            kind=FailureKind.INCOMPATIBLE,
        )
    try:
        for rank in engine.ranks:
            rank.cache.check()
    except ValueError as e:
        raise PeerError(f"it describes an impossible cache: {e}", kind=FailureKind.MISUSE) from None
    return engine
