"""Answers to operators (``kvxfer why``), whose cost is bounded: each looks at thousands of records, on the directory's thread."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.failures import FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import Debts

PAUSE_FACTOR = 10
"""After an answer its peer gets none for this many times as long as it took, and its connection for twice that time."""
_BUSY = m.Refused(FailureKind.OVERLOADED, "it has just answered another question", again=True)


class Explainer:
    """Answers operators' questions, and has those who repeat one wait.

    A connection that repeats one does not keep other peers waiting, nor others of its host for long; and all who ask have one share of
    the thread together.
    """

    def __init__(self) -> None:
        self._debts: Debts[ControlConnection | PeerIdentity] = Debts()

    def answer(
        self, asked: m.Explain, connection: ControlConnection, explain: Callable[[m.Explain], m.Explained]
    ) -> m.Explained | m.Refused:
        """Return what ``explain`` says, or that this connection has to wait."""
        began, debts = clock.now(), self._debts
        if debts.of(connection, began) or debts.of(connection.peer, began):
            return _BUSY
        try:
            return explain(asked)
        finally:
            now = clock.now()
            wait = PAUSE_FACTOR * (now - began) * (1 + debts.owing(now))
            debts.add(connection.peer, wait, now)
            debts.add(connection, 2 * wait, now)
