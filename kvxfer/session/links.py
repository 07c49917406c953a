"""Links: the hello, the heartbeat, and the sockets under them. Used by the control thread only.

A consumer dials a producer rank (``Outbound``); the producer takes hellos on its one socket (``Inbound``). Either side
counts a link on which work is pending as lost after ``peer_timeout`` seconds of silence; the consumer pings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from kvxfer.errors import PeerError
from kvxfer.geometry import Cache, Claim, Planner
from kvxfer.session import messages as m
from kvxfer.session import wire
from kvxfer.session.mover import Connected, Endpoint, Mover
from kvxfer.session.terms import Terms
from kvxfer.session.values import LinkId, LinkInfo, PartRef

__all__ = ["Inbound", "Outbound", "Target"]

log = logging.getLogger("kvxfer.links")


@dataclass
class _In:
    heard: float
    info: LinkInfo
    engine: str
    theirs: bytes
    mine: bytes = b""


class Inbound:
    """Links that consumers have dialled to us, by their socket identity."""

    def __init__(
        self, router: zmq.Socket[bytes], mover: Mover, terms: Terms, epoch: int, silence: float
    ) -> None:
        self._router, self._mover, self._terms = router, mover, terms
        self._epoch, self._silence = epoch, silence
        self.links: dict[LinkId, _In] = {}

    def receive(self, link: bytes, msg: m.Message, now: float) -> tuple[bytes, m.Message | None]:
        """Take a message; returns it if it is for the producer's machine or the mover."""
        known = self.links.get(link)
        if known is not None:
            known.heard = now
        match msg:
            case m.Hello():
                self._hello(link, msg, now)
            case m.Ping() if known is not None:
                self.send(link, m.Pong(msg.number))
            case m.Want() | m.Check() | m.Drop() | m.Taken() if known is not None:
                return link, msg
            case _:
                pass
        return link, None

    def _hello(self, link: bytes, hello: m.Hello, now: float) -> None:
        try:
            info = self._terms.agree(hello, self._epoch)
        except PeerError as e:
            log.warning("refused a link from %r: %s", hello.engine, e)
            wire.send(self._router, m.Refused(str(e)), to=link)
            return
        self.links[link] = _In(now, info, hello.engine, hello.endpoint)
        self._mover.endpoint(link)

    def result(self, result: Endpoint | Connected) -> LinkInfo | None:
        """The mover's answer about a link; the link's terms once it is up."""
        link = result.link
        known = self.links.get(link)
        if known is None or not isinstance(link, bytes):
            return None
        if result.error is not None:
            log.warning("cannot link to %r: %s", known.engine, result.error)
            wire.send(self._router, m.Refused(f"the producer's back end: {result.error}"), to=link)
            del self.links[link]
            return None
        if isinstance(result, Endpoint):
            known.mine = result.endpoint
            self._mover.connect(link, known.mine, known.theirs)
            return None
        self.send(link, m.Welcome(self._epoch, known.mine, known.info.piece_bytes))
        return known.info

    def send(self, link: LinkId, msg: m.Message) -> None:
        known = self.links.get(link)
        if known is not None and isinstance(link, bytes) and not wire.send(self._router, msg, to=link):
            log.warning("consumer %r does not take our messages", known.engine)

    def tick(self, busy: set[LinkId], now: float) -> Iterable[tuple[LinkId, str]]:
        """Links that have gone silent with work pending, or were idle for long."""
        for link, known in list(self.links.items()):
            limit = self._silence if link in busy else 100 * self._silence
            if now - known.heard > limit:
                self.drop(link, "silent")
                yield link, f"{known.engine!r} was silent for {limit:g} s"

    def next_tick(self, busy: set[LinkId]) -> float | None:
        return min((k.heard + self._silence for link, k in self.links.items() if link in busy), default=None)

    def drop(self, link: LinkId, reason: str) -> None:
        if self.links.pop(link, None) is not None:
            self._mover.disconnect(link)

    @staticmethod
    def ref(link: LinkId, msg: m.Taken) -> PartRef:
        return PartRef("producer", link, msg.transfer, msg.attempt, msg.part)


@dataclass(frozen=True)
class Target:
    """A producer rank to dial: where, which incarnation, its cache, and what we claim of it."""

    address: str
    epoch: int
    cache: Cache
    claims: tuple[Claim, ...]

    @property
    def link(self) -> LinkId:
        return (self.address, self.epoch)


@dataclass
class _Out:
    socket: zmq.Socket[bytes]
    target: Target
    dialled: float
    heard: float
    pinged: float = 0.0
    pings: int = 0
    up: bool = False
    mine: bytes = b""
    piece_bytes: int = 0


class Outbound:
    """Links that we dial, by (address, epoch)."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], mover: Mover, terms: Terms, epoch: int, engine: str, silence: float
    ) -> None:
        self._context, self._mover, self._terms = context, mover, terms
        self._epoch, self._engine, self._silence = epoch, engine, silence
        self._targets: dict[LinkId, Target] = {}
        self.links: dict[LinkId, _Out] = {}

    def __contains__(self, link: LinkId) -> bool:
        return link in self.links

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [o.socket for o in self.links.values()]

    def know(self, targets: Iterable[Target]) -> None:
        """Where links lead that may be dialled later."""
        for t in targets:
            self._targets[t.link] = t

    def dial(self, link: LinkId, now: float) -> None:
        """Make a link, or make it anew."""
        if link in self.links:
            self.drop(link, "dialled anew")
        target = self._targets[link]
        self.links[link] = _Out(wire.dial(self._context, target.address), target, now, now)
        self._mover.endpoint(link)

    def result(self, result: Endpoint | Connected) -> LinkInfo | str | None:
        """The mover's answer about a link: its terms once it is up, or why it is lost."""
        o = self.links.get(result.link)
        if o is None:
            return None
        if result.error is not None:
            return f"our back end: {result.error}"
        if isinstance(result, Endpoint):
            o.mine = result.endpoint
            t = o.target
            wire.send(o.socket, self._terms.hello(o.mine, t.epoch, self._epoch, self._engine, t.claims))
            return None
        o.up = True
        return LinkInfo(self._terms.mode, Planner(o.target.cache, self._terms.cache, o.target.claims), o.piece_bytes)

    def receive(self, now: float) -> Iterable[tuple[LinkId, m.Message | str]]:
        """Messages for the consumer's machine or the mover; a string is why the link is lost."""
        for link, o in list(self.links.items()):
            for _ in range(256):
                frames = wire.receive(o.socket)
                if frames is None:
                    break
                try:
                    msg = m.decode(frames[-1])
                except PeerError as e:
                    yield link, str(e)
                    break
                o.heard = now
                match msg:
                    case m.Welcome() if not o.up:
                        o.piece_bytes = msg.piece_bytes
                        self._mover.connect(link, o.mine, msg.endpoint)
                    case m.Refused():
                        yield link, f"it refused: {msg.reason}"
                        break
                    case _:
                        yield link, msg

    def send(self, link: LinkId, msg: m.Message) -> None:
        if not wire.send(self.links[link].socket, msg):
            log.warning("producer %s does not take our messages", self.links[link].target.address)

    def tick(self, busy: set[LinkId], now: float) -> Iterable[tuple[LinkId, str]]:
        """Ping the links that matter; links that are silent or never came up are lost."""
        for link, o in list(self.links.items()):
            if not o.up and now - o.dialled > self._silence:
                yield link, f"no answer to our hello within {self._silence:g} s"
            elif o.up and link in busy:
                if o.pinged < now - self._silence:  # it was idle: its silence meant nothing until now
                    o.heard = max(o.heard, now)
                if now - o.heard > self._silence:
                    yield link, f"silent for {self._silence:g} s"
                elif now - o.pinged > self._silence / 4:
                    o.pinged, o.pings = now, o.pings + 1
                    wire.send(o.socket, m.Ping(o.pings))

    def next_tick(self, busy: set[LinkId]) -> float | None:
        times = [o.dialled + self._silence for o in self.links.values() if not o.up]
        times += [o.pinged + self._silence / 4 for link, o in self.links.items() if o.up and link in busy]
        return min(times, default=None)

    def drop(self, link: LinkId, reason: str) -> None:
        o = self.links.pop(link, None)
        if o is not None:
            o.socket.close(0)
            self._mover.disconnect(link)

    def close(self) -> None:
        for o in self.links.values():
            o.socket.close(0)
        self.links.clear()

    @staticmethod
    def ref(link: LinkId, msg: m.Slot) -> PartRef:
        return PartRef("consumer", link, msg.transfer, msg.attempt, msg.part)
