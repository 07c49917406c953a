"""Links: the hello, the heartbeat, and the sockets under them. Used by the control thread only.

A consumer dials a producer rank (``Outbound``); the producer takes hellos on its one socket (``Inbound``). The consumer
pings on every link, busy or not, and either side counts a link as lost after ``silence`` seconds without a word. Each
making of a link has a number, so that the data thread's late word about an earlier one is not taken for the present. Of
several back ends that both have, the consumer tries one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from kvxfer.config import Integrity
from kvxfer.errors import PeerError
from kvxfer.geometry import Cache, Claim, Planner
from kvxfer.session import messages as m
from kvxfer.session import wire
from kvxfer.session.movers import Movers
from kvxfer.session.results import Broken, Connected, Endpoint
from kvxfer.session.tally import Sight
from kvxfer.session.terms import admit
from kvxfer.session.values import LinkId, LinkInfo, PartRef, link_name

__all__ = ["Inbound", "Lost", "Outbound", "Target"]

log = logging.getLogger("kvxfer.links")

_numbers = count(1)

MOST = 1024
"""Links that may be dialled to us, that strangers cannot fill our memory with hellos."""


@dataclass(frozen=True)
class Lost:
    """A link is lost. ``again``: it was up, and dialling anew may help."""

    reason: str
    again: bool


@dataclass
class _In:
    number: int
    heard: float
    hello: m.Hello
    planner: Planner
    info: LinkInfo | None = None  # agreed on once our back end is there
    mine: bytes = b""
    up: bool = False
    deaf: bool = False  # does not take our messages


class Inbound:
    """Links that consumers have dialled to us, by their socket identity."""

    def __init__(
        self, router: wire.Socket, movers: Movers, cache: Cache, epoch: int, silence: float, tally: str
    ) -> None:  # fmt: skip
        self._router, self._movers, self._cache = router, movers, cache
        self._epoch, self._silence, self._tally = epoch, silence, tally
        self._links: dict[LinkId, _In] = {}

    def receive(self, frames: list[bytes], now: float) -> tuple[LinkId, m.Message] | None:
        """Take what came in; returns what is for the producer's machine or the mover. Raises ``PeerError`` for what
        makes no sense; its sender has been told if it might be a consumer of another version."""
        link = frames[0]
        if not link.startswith(b"\0"):
            raise PeerError("a peer chose its own socket identity, and with it could take another's place")
        known = self._links.get(link)
        try:
            if len(frames) != 2:
                raise PeerError(f"{len(frames)} frames where two were expected")
            msg = m.decode(frames[1])
        except PeerError as e:
            if known is None:
                self._refuse(link, f"not understood by kvxfer protocol {m.PROTOCOL}", again=False)
            raise PeerError(f"{known.hello.engine if known else 'a stranger'!r}: {e}") from None
        if known is not None:
            known.heard = now
        match msg:
            case m.Hello() if known is None:
                self._hello(link, msg, now)
            case m.Ping() if known is not None:
                self.send(link, m.Pong(msg.number))
            case m.Want() | m.Check() | m.Drop() | m.Slot() | m.Taken() if known is not None and known.up:
                return link, msg
            case m.Want() | m.Check() | m.Drop() | m.Slot() | m.Taken() | m.Ping() if known is None:
                self._refuse(link, "this link is not known here (any more)", again=True)
            case _:
                raise PeerError(f"a {type(msg).__name__} makes no sense here")
        return None

    def _hello(self, link: LinkId, hello: m.Hello, now: float) -> None:
        try:
            if len(self._links) >= MOST and self._alive() >= MOST:
                raise PeerError(f"{MOST} links are open already")
            planner = admit(hello, self._movers.lineup, self._cache, self._epoch)
        except PeerError as e:
            self._refuse(link, str(e), again=False)
            raise PeerError(f"refused a link from {hello.engine!r}: {e}") from None
        number = next(_numbers)
        self._links[link] = _In(number, now, hello, planner)
        self._movers.endpoint(link, number, hello.backend)

    def _alive(self) -> int:
        """How many links still have a connection; the others are dropped at the next ``tick``."""
        for link in list(self._links):
            self.send(link, m.Pong(0))
        return sum(not known.deaf for known in self._links.values())

    def result(self, result: Endpoint | Connected | Broken, now: float) -> LinkInfo | Lost | None:
        """The mover's word about a link: its terms once it is up, or that it is lost."""
        link, known = result.link, self._links.get(result.link)
        if known is None or known.number != result.number:
            return None
        why = result.error
        if why is None and isinstance(result, Endpoint):
            try:
                known.info = self._movers.terms(known.hello.backend).agree(known.hello, known.planner)
                known.mine = result.endpoint
                self._movers.connect(link, known.number, known.mine, known.hello.endpoint)
                return None
            except PeerError as e:
                why = str(e)
        if why is not None:
            self._refuse(link, f"the producer's back end: {why}", again=known.up, backend=not known.up)
            self.drop(link)
            return Lost(why, False)
        assert known.info is not None
        known.up = True
        info = known.info
        self.send(link, m.Welcome(self._epoch, known.mine, info.piece_bytes, info.integrity, self._tally))
        return known.info

    def send(self, link: LinkId, msg: m.Message) -> None:
        """Send if the link is still there; one that takes no messages is lost at the next ``tick``."""
        known = self._links.get(link)
        if known is not None and isinstance(link, bytes) and not wire.send(self._router, msg, to=link):
            known.deaf = True

    def _refuse(self, link: LinkId, reason: str, again: bool, backend: bool = False) -> None:
        if isinstance(link, bytes):
            wire.send(self._router, m.Refused(reason, again, backend), to=link)

    def tick(self, now: float) -> Iterator[tuple[LinkId, str]]:
        """Links that have gone silent or deaf, closed here already."""
        for link, known in list(self._links.items()):
            if known.deaf or now - known.heard > self._silence:
                what = "does not take our messages" if known.deaf else f"was silent for {self._silence:g} s"
                self.drop(link)
                yield link, f"{known.hello.engine!r} {what}"

    def next_tick(self) -> float | None:
        return min((0.0 if k.deaf else k.heard + self._silence for k in self._links.values()), default=None)

    def pardon(self, seconds: float) -> None:
        """For so long nobody could be heard."""
        for known in self._links.values():
            known.heard += seconds

    def reset(self, backend: str, reason: str) -> list[LinkId]:
        """Give all links of a back end up; their consumers are told to dial anew."""
        gone = [link for link, known in self._links.items() if known.hello.backend == backend]
        for link in gone:
            self.close(link, reason)
        return gone

    def close(self, link: LinkId, reason: str) -> None:
        """Give a link up; its consumer is told to dial anew."""
        if link in self._links:
            self._refuse(link, reason, again=True)
            self.drop(link)

    def drop(self, link: LinkId) -> None:
        if self._links.pop(link, None) is not None:
            self._movers.disconnect(link)

    @staticmethod
    def ref(link: LinkId, msg: m.Slot | m.Taken) -> PartRef:
        return PartRef("producer", link, msg.transfer, msg.attempt, msg.part)


@dataclass(frozen=True)
class Target:
    """A producer rank to dial: where, which incarnation, its cache, what we claim of it, and the back ends that both have,
    by our preference."""

    address: str
    epoch: int
    cache: Cache
    claims: tuple[Claim, ...]
    backends: tuple[str, ...]

    @property
    def link(self) -> LinkId:
        return (self.address, self.epoch)


@dataclass
class _Out:
    number: int
    backend: str
    socket: wire.Socket
    target: Target
    heard: float
    pinged: float
    pings: int = 0
    up: bool = False
    deaf: bool = False
    mine: bytes = b""
    piece_bytes: int = 0
    integrity: Integrity = "off"
    tally: Sight | None = None


class Outbound:
    """Links that we dial, by (address, epoch)."""

    def __init__(
        self, hub: wire.Hub, movers: Movers, cache: Cache, epoch: int, engine: str, silence: float
    ) -> None:  # fmt: skip
        self._hub, self._movers, self._cache = hub, movers, cache
        self._epoch, self._engine, self._silence = epoch, engine, silence
        self._targets: dict[LinkId, Target] = {}
        self._unfit: dict[LinkId, dict[str, str]] = {}  # back ends that could not make it, and why
        self._links: dict[LinkId, _Out] = {}

    def __contains__(self, link: LinkId) -> bool:
        return link in self._links

    def of(self, backend: str) -> list[LinkId]:
        """The links of a back end."""
        return [link for link, o in self._links.items() if o.backend == backend]

    def know(self, targets: Iterable[Target]) -> None:
        """Where links lead that may be dialled later."""
        for t in targets:
            self._targets[t.link] = t

    def dial(self, link: LinkId, now: float) -> None:
        """Make a link, or make it anew, with the first back end that has not failed to. Raises ``PeerError`` when its
        address is none."""
        self.drop(link)
        if link not in self._targets:
            raise PeerError(f"the way to {link_name(link)} is not known any more")
        target = self._targets[link]
        backend = next((b for b in target.backends if b not in self._unfit.get(link, {})), target.backends[-1])
        number = next(_numbers)
        self._links[link] = _Out(number, backend, self._hub.dial(target.address), target, now, now)
        self._movers.endpoint(link, number, backend)

    def _without(self, o: _Out, why: str, now: float) -> Lost | None:
        """This back end cannot make the link: try the next, if there is one."""
        link = o.target.link
        failed = self._unfit.setdefault(link, {})
        failed[o.backend] = why
        if all(b in failed for b in o.target.backends):
            return Lost("; ".join(f"{b}: {w}" for b, w in failed.items()) if len(failed) > 1 else why, again=False)
        log.info("the link to %s cannot be made with back end %s: %s", link_name(link), o.backend, why)
        try:
            self.dial(link, now)
        except PeerError as e:
            return Lost(str(e), again=False)
        return None

    def result(self, result: Endpoint | Connected | Broken, now: float) -> LinkInfo | Lost | None:
        """The mover's word about a link: its terms once it is up, or that it is lost."""
        o = self._links.get(result.link)
        if o is None or o.number != result.number:
            return None
        if result.error is not None:
            why = f"our back end: {result.error}"
            return Lost(why, again=True) if o.up else self._without(o, why, now)
        if isinstance(result, Endpoint):
            o.mine, o.heard = result.endpoint, now
            t = o.target
            terms = self._movers.terms(o.backend)
            self.send(t.link, terms.hello(o.mine, t.epoch, self._epoch, self._engine, t.claims))
            return None
        o.up = True
        planner = Planner(o.target.cache, self._cache, o.target.claims)
        mode = self._movers.terms(o.backend).mode
        return LinkInfo(mode, planner, o.target.epoch, o.piece_bytes, integrity=o.integrity, tally=o.tally)

    def receive(self, ready: set[wire.Socket], now: float) -> Iterator[tuple[LinkId, m.Message | Lost]]:
        """Messages for the consumer's machine or the mover. Links may be dropped and dialled meanwhile."""
        for link, o in [(link, o) for link, o in self._links.items() if o.socket in ready]:
            for _ in range(256):
                if self._links.get(link) is not o:
                    break
                frames = wire.receive(o.socket)
                if frames is None:
                    break
                o.heard = now
                try:
                    msg = m.decode(frames[-1])
                except PeerError as e:
                    yield link, Lost(str(e), again=False)
                    break
                match msg:
                    case m.Welcome() if not o.up and o.mine:
                        try:
                            self._movers.terms(o.backend).accept(msg)
                        except PeerError as e:
                            yield link, Lost(f"its welcome: {e}", again=False)
                            break
                        o.piece_bytes, o.integrity, o.tally = msg.piece_bytes, msg.integrity, Sight.of(msg.tally)
                        self._movers.connect(link, o.number, o.mine, msg.endpoint)
                    case m.Refused(backend=True) if not o.up:
                        lost = self._without(o, f"it refused: {msg.reason}", now)
                        if lost is not None:
                            yield link, lost
                    case m.Refused():
                        yield link, Lost(f"it refused: {msg.reason}", again=msg.again and o.up)
                    case m.Have() | m.Slot() | m.Sum() | m.Verdict() | m.Gone() if o.up:
                        yield link, msg
                    case _:
                        pass  # a Pong, which has been heard, or nonsense

    def send(self, link: LinkId, msg: m.Message) -> None:
        """Send if the link is still there; one that takes no messages is lost at the next ``tick``."""
        o = self._links.get(link)
        if o is not None and not wire.send(o.socket, msg):
            o.deaf = True

    def tick(self, now: float) -> Iterator[tuple[LinkId, Lost]]:
        """Ping all that have been sent a hello; those that are silent or deaf are lost."""
        for link, o in [(link, o) for link, o in self._links.items() if o.mine]:
            if o.deaf:
                yield link, Lost("it does not take our messages", again=False)
            elif now - o.heard > self._silence:
                what = "silent" if o.up else "no answer to our hello"
                yield link, Lost(f"{what} for {self._silence:g} s", again=False)
            elif now - o.pinged >= self._silence / 4:
                o.pinged, o.pings = now, o.pings + 1
                self.send(link, m.Ping(o.pings))

    def next_tick(self) -> float | None:
        waits = (min(o.pinged + self._silence / 4, o.heard + self._silence) for o in self._links.values() if o.mine)
        return min(waits, default=None)

    def pardon(self, seconds: float) -> None:
        """For so long nobody could be heard."""
        for o in self._links.values():
            o.heard += seconds

    def drop(self, link: LinkId) -> None:
        """Close a link; it may be dialled again."""
        o = self._links.pop(link, None)
        if o is not None:
            self._hub.drop(o.socket)
            self._movers.disconnect(link)

    def forget(self, link: LinkId) -> None:
        """Close a link for good."""
        if link not in self._links:
            self._movers.disconnect(link)  # for its answer
        self.drop(link)
        self._targets.pop(link, None)
        self._unfit.pop(link, None)

    @staticmethod
    def ref(link: LinkId, msg: m.Slot) -> PartRef:
        return PartRef("consumer", link, msg.transfer, msg.attempt, msg.part)
