"""The data thread: makes a back end, and is the only thread that calls it.

It opens the back end, and opens it again whenever it had to be reset; commands are answered even meanwhile. ``Traffic`` handles
what goes over the opened back end. Neither this thread nor those that post to it ever wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import assert_never

from kvxfer import clock
from kvxfer.data.command_queue import CommandQueue
from kvxfer.data.commands import (
    Command,
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    EndpointMade,
    MakeEndpoint,
    Reset,
    Result,
    SlotNews,
    Stop,
    ThreadDied,
)
from kvxfer.data.jobs import in_rounds, shares
from kvxfer.data.part_ends import Limits, PartEnds, backend_failed, shut, unmoved
from kvxfer.data.staging import Staging
from kvxfer.data.traffic import Traffic
from kvxfer.errors import TransportError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Region
from kvxfer.logs import logger
from kvxfer.protocol.parts import most_bytes
from kvxfer.protocol.values import Abort, LinkId, Move, RemoteWritesEnded
from kvxfer.security import OPEN, Security
from kvxfer.threads import NamedThread
from kvxfer.transport import Capabilities, Transport

log = logger("kvxfer.data")

REOPEN_S = 1.0
"""The shortest time between two openings of the back end; doubles while it cannot be opened, up to ``REOPEN_MAX_S``."""
REOPEN_MAX_S = 30.0
HANGS_S = 2.0
"""Seconds after which a call of the device or of the back end counts as hanging."""

_UNENDED: set[Staging] = set()
"""Staging memory, with its tables, that must never be freed: of a back end that did not close, or with a device at work at the end."""


class DataThread:
    """The data thread of one back end.

    Begin with ``start`` or ``begin``. Any thread may call any method; only ``start`` and ``close`` block.

    Args:
        name: The back end's name.
        make: Builds the back end, on the data thread (again after a reset).
        regions: The cache's memory, number 0.
        stage: Makes staging memory, number 1, given the back end's capabilities.
        post: Called on the data thread with each result; must not block.
        limits: When a link or the back end is given up.
        security: Which hosts the back end may dial because a peer names them.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Transport],
        regions: tuple[Region, ...],
        stage: Callable[[Capabilities], Staging],
        post: Callable[[Result], None],
        limits: Limits,
        security: Security = OPEN,
    ) -> None:
        self._name, self._limits, self._security = name, limits, security
        self._make, self._regions, self._stage, self._post = make, regions, stage, post
        self._most = most_bytes(regions)
        self._commands: CommandQueue[Command] = CommandQueue()
        self._ready = threading.Event()  # the back end has been made, or could not be
        self._unmade: Exception | None = None  # why it could not be
        self._made: tuple[Capabilities, Staging] | None = None
        self._staging: Staging | None = None  # for this back end and the next; None: to be replaced
        self._traffic: Traffic | None = None  # None: the back end is down
        self._reopen, self._wait = 0.0, REOPEN_S
        self._asked: list[MakeEndpoint] = []  # while the back end is down
        self._exposed: set[LinkId] = set()
        self._ends = PartEnds(regions, limits, post)
        self._stopping = False
        self._turn_began = inf
        self._thread = NamedThread(target=self._run, name="kvxfer-data")

    # --- any thread ------------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> tuple[Capabilities, Staging]:
        """Make the back end, and wait for that for up to ``timeout`` seconds. If this raises, call ``close``.

        Raises:
            TimeoutError: It takes longer.
            Exception: What the back end's constructor or ``stage`` raised.
        """
        self.begin()
        if not self._ready.wait(timeout):
            raise TimeoutError(f"the back end did not start within {timeout:g} s")
        return self.made

    def begin(self) -> None:
        """Begin to make the back end. If that fails, every endpoint is answered with the reason.

        Raises:
            RuntimeError: No thread is to be had.
        """
        self._thread.start()

    def cannot_begin(self, asked: MakeEndpoint, why: Exception) -> None:
        """Answer that there is no endpoint, because ``begin`` has failed."""
        self._no_endpoint(asked, Failure.of(why).about("it cannot be started: "))

    @property
    def made(self) -> tuple[Capabilities, Staging]:
        """Return the capabilities and staging memory of a back end that has started.

        Raises:
            Exception: What kept it from starting.
        """
        if self._unmade is not None:
            raise self._unmade
        assert self._made is not None
        return self._made

    def post(self, command: Command) -> None:
        """Queue a command. Its results go to the constructor's ``post``."""
        if isinstance(command, Move) and not command.piece_bytes and self._made is not None:
            can = self._made[0]
            if not (can.factored or shares(command, can) or in_rounds(command, self._most)):
                with suppress(Exception):  # then it fails there, which ends the part
                    command.plan.runs()  # made here, so that the data thread, which serves all links, has only to move
        self._commands.post(command)

    def close(self, timeout: float) -> None:
        """End everything, and wait for the thread for up to ``timeout`` seconds (it is a daemon).

        The end of each part that has not ended is posted, after that if the back end does not let go in time.
        """
        self.post(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("the back end did not close within %g s; its thread is abandoned", timeout)
                return
        self._commands.close()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory the back end or the device may still touch."""
        return self._ends.unquiet_bytes

    @property
    def hangs(self) -> bool:
        """Whether its device or its library has not come back from a call for seconds."""
        return clock.now() - self._turn_began > HANGS_S

    def exposes(self, link: LinkId) -> bool:
        """Return whether the peer of a link may write into the cache at any time, because a back end could not be closed."""
        return link in self._exposed

    # --- the data thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Make the back end and do what is posted, until ``Stop``; then every part has ended.

        Whatever a back end raises, even if it is not an ``Exception``, ends its parts at the most.
        """
        try:
            try:
                self._open()
            except BaseException as e:
                odd = TransportError(f"back end {self._name!r} raised {e!r}")
                self._unmade = e if isinstance(e, Exception) else odd
            self._ready.set()
            while not self._stopping:
                try:
                    self._turn()
                except BaseException:
                    log.exception("the back end raised an unexpected error")
                    self._reset(backend_failed("it raised an unexpected error"))
            self._end()
        except BaseException as e:
            self._post(ThreadDied(backend_failed(f"the data thread of back end {self._name!r} has died: {e!r}")))
            raise

    def _turn(self) -> None:
        traffic = self._traffic
        wait, self._turn_began = self._wait_s(traffic), inf
        self._commands.sleep(None if traffic is None else traffic.fd, wait)
        self._turn_began = clock.now()
        for command in self._commands.take():
            self._do(command)
            if self._stopping:
                return
        self._ends.look()
        if self._traffic is None:
            self._try_open()
            return
        why = self._traffic.go_on()
        if why is not None:
            self._reset(why)

    def _wait_s(self, traffic: Traffic | None) -> float:
        if traffic is not None:
            wait = traffic.wait_s
        else:
            wait = 1.0 if self._unmade is not None else min(max(self._reopen - clock.now(), 0.0), 1.0)
        return min(wait, self._ends.wait_s)

    def _do(self, command: Command) -> None:
        match command:
            case Stop():
                self._stopping = True
            case MakeEndpoint():
                self._endpoint(command)
            case Disconnect():
                self._disconnect(command)
            case _ if self._traffic is None:
                self._refuse(command)
            case Move():
                self._traffic.move(command)
            case Connect():
                self._traffic.connect(command)
            case Abort():
                self._traffic.abort(command.ref)
            case RemoteWritesEnded():
                self._traffic.remote_writes_ended(command.ref)
            case SlotNews():
                self._traffic.heard(command)
            case _:
                assert_never(command)

    def _refuse(self, command: Connect | Move | Abort | RemoteWritesEnded | SlotNews) -> None:
        """Answer a command while the back end is down, when nothing is left of its links."""
        match command:
            case Connect():
                self._post(Connected(command.link, command.number, backend_failed("the back end is down")))
            case Move():
                self._post(unmoved(command.ref))
            case Abort() | RemoteWritesEnded() | SlotNews():
                pass
            case _:
                assert_never(command)

    def _endpoint(self, asked: MakeEndpoint) -> None:
        if self._unmade is not None:
            self._no_endpoint(asked, Failure.of(self._unmade).about("it cannot be started: "))
        elif self._traffic is None:
            self._asked.append(asked)
        else:
            try:
                self._post(EndpointMade(asked.link, asked.number, self._traffic.endpoint(asked.link, asked.role)))
            except BaseException as e:
                self._no_endpoint(asked, Failure.of(e))

    def _no_endpoint(self, asked: MakeEndpoint, why: Failure) -> None:
        self._post(EndpointMade(asked.link, asked.number, b"", why))

    def _disconnect(self, command: Disconnect) -> None:
        self._asked = [one for one in self._asked if one.link != command.link]
        try:
            if self._traffic is not None:
                self._traffic.disconnect(command.link)
        except BaseException as e:
            log.exception("a link could not be closed")
            self._reset(Failure.of(e).about("a link could not be closed: "))
        self._post(Disconnected(command.link))

    # --- the life of the back end ----------------------------------------------------------------------------------

    def _open(self) -> None:
        transport = self._make()
        try:
            can = transport.capabilities
            staging = self._staging or self._stage(can)
            # A cache that the back end cannot move is not registered: all of it goes through staging memory, number 1, and what a
            # peer moves straight all the same finds nothing.
            movable = all(map(can.moves, self._regions))
            transport.register(self._regions if movable else ())
            transport.register((staging.region,))
            traffic = Traffic(transport, self._regions, staging, self._post, self._ends, self._limits, self._security)
        except BaseException:
            shut(transport)
            raise
        self._made, self._staging, self._traffic = (can, staging), staging, traffic

    def _try_open(self) -> None:
        """Open the back end, unless that was tried a moment ago, or it could not be opened to begin with.

        Links that were asked for meanwhile are then made, or fail.
        """
        now = clock.now()
        if now < self._reopen or self._unmade is not None:
            return
        self._reopen, self._wait = now + self._wait, min(2 * self._wait, REOPEN_MAX_S)
        asked, self._asked = self._asked, []
        try:
            self._open()
            self._wait = REOPEN_S
            for one in asked:
                self._endpoint(one)
        except BaseException as e:
            log.exception("the back end cannot be opened; trying again in %g s", self._reopen - now)
            for one in asked:
                self._no_endpoint(one, Failure.of(e).about("it cannot be opened: "))

    def _reset(self, why: Failure) -> None:
        """Close the back end, which makes all memory quiet, and open it again as soon as possible."""
        log.warning("resetting back end %s: %s", self._name, why.detail)
        self._void(why.about("the back end was reset: "))
        self._post(Reset(self._name, why))
        self._try_open()

    def _end(self) -> None:
        """Close the back end, and report the end of each part and whether its memory is quiet."""
        self._void(Failure(FailureKind.CANCELLED, "it was closed"))
        done = self._device_done()
        self._ends.wait()
        self._ends.look()
        if not done and self._staging is not None:
            _UNENDED.add(self._staging)

    def _void(self, why: Failure) -> None:
        """Close the back end, which ends all parts.

        The device may still be at work for them, which takes as long as it takes: nobody waits for that here.
        """
        traffic, self._traffic = self._traffic, None
        staging = self._staging
        if traffic is None or staging is None:
            return
        closed = traffic.close()
        if not closed:
            self._exposed |= traffic.exposed
        traffic.void(why, closed, staging.work())
        if closed:
            staging.reset()
        else:
            _UNENDED.add(staging)
            self._staging = None if staging.used else staging

    def _device_done(self) -> bool:
        """Wait up to ``grace`` seconds until the device neither packs nor unpacks; return whether that is so."""
        grace = self._limits.grace
        done = self._staging is None or self._staging.wait(clock.now() + grace)
        if not done:
            log.error("the device did not finish packing or unpacking within %g s", grace)
        return done
