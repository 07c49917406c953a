"""Requests that look for a prefix of their prompt at other engines, from the question to the load or to "nothing"."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.notices import Answered, Unheard
from kvxfer.engine.loads import Loads
from kvxfer.engine.notices import Notices
from kvxfer.engine.paces import LoadOrCompute
from kvxfer.errors import ArgumentError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.protocol.timers import Recent
from kvxfer.schedule import (
    Ask,
    AskEvent,
    AskState,
    EngineRequest,
    FetchSchedule,
    Load,
    Prefix,
    PrefixOffer,
    ScheduleError,
)
from kvxfer.schedule.ask import DECIDED
from kvxfer.security import RateLimitedWarnings
from kvxfer.text import printable

log = logger("kvxfer.engine")

_S, _E = AskState, AskEvent

MAX_SOURCES = 16
"""The most sources that may be named for one request."""
SILENT_S, MAX_SILENT = 5.0, 1024
"""Seconds for which no request waits for a source that has not answered one in time, unless it answers, and for which none asks one whose
answer was good for nothing; and the most of each."""
GAVE_UP = frozenset({FailureKind.CANCELLED, FailureKind.WITHDRAWN})
"""How a load fails that one of the two engines has given up: that says nothing of others from the same source."""
ANSWER_LOOK_S = 0.0002
"""Seconds from one look for answers to the next while nothing else is to be done."""
BEGIN_S = 0.75
"""Seconds in which a load may begin though ``ask_timeout`` is less: it may have to make its link first."""
MAX_SENT = 100_000
"""The most questions whose answers are awaited, or still declined when they come too late."""


class AskCounts(msgspec.Struct):
    """What has come of looking for prefixes at other engines."""

    requests: int = 0  # requests that have asked
    unanswered: int = 0  # questions that no source has answered in time
    found: int = 0  # tokens that the best source held beyond what was cached here, of all requests
    loaded: int = 0  # those of them that were loaded
    refused: int = 0  # those that were computed, because no load would have ended sooner
    recomputed: int = 0  # those whose load failed, so that they were computed


class Asks:
    """The questions of an engine's requests. One thread."""

    def __init__(
        self,
        config: Config,
        directory: Directory,
        notices: Notices,
        schedule: FetchSchedule,
        loads: Loads,
        choice: LoadOrCompute,
    ) -> None:
        self._config, self._directory, self._notices = config, directory, notices
        self._schedule, self._loads, self._choice = schedule, loads, choice
        self._alike: dict[Hashable, Ask] = {}  # by what is asked, and of whom
        # What has yet to be answered, by the name that it was given; None: nobody needs an answer any more.
        self._sent: Recent[TransferId, tuple[Source, Ask | None]] = Recent(config.lease, MAX_SENT)
        # Addresses that have not answered in time.
        self._silent: Recent[tuple[str, int], bool] = Recent(SILENT_S, MAX_SILENT)
        # Addresses whose answers could not be loaded.
        self._useless: Recent[tuple[str, int], bool] = Recent(SILENT_S, MAX_SILENT)
        self._complain = RateLimitedWarnings(log)
        self.counts: dict[str, AskCounts] = {}
        notices.answered, notices.unheard = self._answered, self._unheard

    def ask(
        self, request: EngineRequest, prefix: Prefix, sources: Sequence[Source], tokens: int, computed: int, kind: str
    ) -> bool:
        """Accept a question; see ``SchedulerSide.ask``.

        Raises:
            ArgumentError: There are too many sources.
            ScheduleError: The request has asked something else.
        """
        if len(sources) > MAX_SOURCES:
            raise ArgumentError(f"sources must be at most {MAX_SOURCES}, not {len(sources)}")
        here = self._directory.source
        others = dict.fromkeys(one for one in sources if (one.host, one.port) != (here.host, here.port))
        if (known := request.ask) is not None:
            if (known.chain, set(known.sources)) != (prefix.chain(tokens), set(others)):
                raise ScheduleError(
                    f"request {request.name} asks others already, and not about other tokens or of other engines too"
                )
            return True
        if self._config.ask == "never" or not others or tokens - computed < self._config.ask_tokens:
            return False
        chain = prefix.chain(tokens)
        if not len(chain) or request.load is not None:
            return False
        what = chain, tuple(others)
        ask = self._alike.get(what)
        if ask is None or ask.state is _S.CLOSED:
            ask = self._alike[what] = Ask(kind, *what)
        request.ask = ask
        ask.requests.add(request.name)
        self._counts(ask).requests += 1
        return True

    def _counts(self, ask: Ask) -> AskCounts:
        return self.counts.setdefault(ask.kind, AskCounts())

    def advance(self, request: EngineRequest, computed: int) -> bool:
        """Go on with a question: ask, wait while the engine has nothing else to do, and begin the load of the best answer if that pays.

        Returns:
            Whether answers are still to come.
        """
        ask = request.ask
        if ask is None or ask.state is _S.CLOSED:
            return False
        if ask.taken is not None:
            if request.load is None and computed < ask.taken.tokens:
                self._load(request, ask, ask.taken)  # it waits for the one that fetches, and finds the blocks cached
            return False
        wanted = ask.chain.tokens - computed
        if request.load is not None:  # it has been told to load from a producer of its own
            self._leave(request, ask)
            return False
        if ask.state is _S.NEW:
            if wanted < self._config.ask_tokens:
                self._leave(request, ask)
                return False
            self._send(ask)
        self._notices.take_in()
        if not ask.done and self._speaks(ask) and wanted >= self._config.ask_tokens:
            most = self._config.ask_timeout
            until = ask.asked_at + min(most, self._choice.computing(wanted, self._config.ask))
            self._wait_alone(ask, until)
            now = clock.now()
            if now < until and not ask.done:
                return True
            if now >= ask.asked_at + most and not ask.done:  # a short prompt has waited too short a time to tell
                for source in ask.asked.values():
                    self._silent.put((source.host, source.port), True, now)
        self._decide(request, ask, computed)
        return False

    def _wait_alone(self, ask: Ask, until: float) -> None:
        """Wait for answers within a step while the engine has nothing else to do: an empty step takes longer than an answer."""
        others = [one.ask for one in self._schedule.requests if one.asking]
        if any(one is not None and one.state is _S.NEW for one in others):
            return  # those are to be sent first
        self._loads.step_wait.wait(lambda: ask.done or clock.now() >= until, self._look, asking=len(others))

    def _look(self, seconds: float) -> None:
        clock.wait(min(seconds, ANSWER_LOOK_S))
        self._notices.take_in()

    def _speaks(self, ask: Ask) -> bool:
        """Return whether a source that has yet to answer is not known to be silent."""
        self._silent.forget(clock.now())
        return any(not self._silent.get((source.host, source.port)) for source in ask.asked.values())

    def _send(self, ask: Ask) -> None:
        self._on(ask, _E.SEND)
        ask.asked_at = clock.now()
        self._useless.forget(ask.asked_at)
        for source in ask.sources:
            if self._useless.get((source.host, source.port)):
                continue
            name = TransferId.asked()
            ask.asked[name], ask.sent = source, ask.sent + 1
            self._sent.put(name, (source, ask), ask.asked_at)
            self._directory.inquire(source, m.Inquire(source.epoch, name, ask.chain.step, ask.chain.links))

    def _decide(self, request: EngineRequest, ask: Ask, computed: int) -> None:
        ask.decided_at = clock.now()
        counts = self._counts(ask)
        if ask.sent and not ask.heard and ask.chain.tokens - computed >= self._config.ask_tokens:
            counts.unanswered += 1
        most = max((one.tokens - computed for one in ask.answers), default=0)
        counts.found += max(most, 0)
        best = self._best(ask, computed)
        log.debug(
            "request %s has asked other engines: found=%d kind=%s", printable(request.name), max(most, 0), ask.kind
        )
        if best is not None and self._load(request, ask, best):
            ask.taken = best
            self._on(ask, _E.TAKE, "another source is better")
        else:
            self._on(ask, _E.NOTHING if most <= 0 else _E.NOT_WORTH_IT, "the consumer computes the prompt")
            counts.refused += max(most, 0)

    def _best(self, ask: Ask, computed: int) -> PrefixOffer | None:
        """Return the answer whose load saves most time; None if none saves any."""
        saves = [
            (self._choice.saves(one.source, one.tokens - computed, self._config.ask), one)
            for one in ask.answers
            if one.tokens - computed >= self._config.ask_tokens
        ]
        seconds, best = max(saves, key=lambda pair: (pair[0], pair[1].tokens), default=(0.0, None))
        return best if seconds > 0 else None

    def _load(self, request: EngineRequest, ask: Ask, best: PrefixOffer) -> bool:
        what = request, best.transfer, best.digest, best.source, best.tokens
        load = self._schedule.arrive(*what, offered=True)
        if load is None:
            return False
        self._loads.arrived(load)
        load.came_at, load.found_at, load.kind = ask.asked_at, ask.decided_at, ask.kind
        ask.transfer = load.transfer
        load.transfer.patience = min(max(self._config.ask_timeout, BEGIN_S), self._config.start)
        return True

    def _on(self, ask: Ask, event: AskEvent, reason: str = "") -> None:
        """Make the move of a question that an event leads to, with what is done with it.

        This is the one door to a question. ``reason``: why answers are declined, for their sources.
        """
        if ask.on(event) and ask.state in DECIDED:
            self._decline(ask, reason)

    def _decline(self, ask: Ask, reason: str) -> None:
        """Decline the answers that are not taken, and from now on those that are still to come."""
        for one in ask.answers:
            if one is not ask.taken:
                self._schedule.decline(one.transfer, one.digest, one.source, reason)
        ask.answers.clear()
        now = clock.now()
        self._sent.forget(now)
        for name, source in ask.asked.items():
            self._sent.put(name, (source, None), now)
        ask.asked.clear()

    def forget(self, request: EngineRequest) -> None:
        """Record that a request is over."""
        ask, request.ask = request.ask, None
        if ask is None:
            return
        what = ask.chain, ask.sources
        if not ask.requests - {request.name} and self._alike.get(what) is ask:
            del self._alike[what]
        self._leave(request, ask)

    def give_up(self, request: EngineRequest) -> None:
        """Record that a request does not load what is found for it."""
        if request.ask is not None:
            self._leave(request, request.ask)

    def _leave(self, request: EngineRequest, ask: Ask) -> None:
        """Let a request have nothing to do with a question any more; that of the last one is given up."""
        ask.requests.discard(request.name)
        fetches = ask.loads(request.load)
        if fetches or not ask.requests:
            self._end_now(request, ask, "the consumer does not need it")
        elif ask.taken is not None and request.load is not None and request.load.transfer is ask.transfer:
            if all(load is request.load or load.over for load in request.load.transfer.loads):
                self._hand_on(ask, ask.taken)

    def _hand_on(self, ask: Ask, taken: PrefixOffer) -> None:
        """Have another request load what the only one that has begun to leaves before its fetch, so that it is not declined."""
        for name in sorted(ask.requests):
            other = self._schedule.requests.find(name)
            if other is not None and other.load is None and self._load(other, ask, taken):
                return

    def _end_now(self, request: EngineRequest, ask: Ask, reason: str) -> None:
        """Close a question, whatever its table says, so that nothing is held for it any more."""
        with self._schedule.door.of(request.name):
            self._on(ask, _E.GIVE_UP, reason)
            return
        ask.state = _S.CLOSED
        self._decline(ask, reason)

    def admitted(self, request: EngineRequest, external: int) -> None:
        """Record that a request is about to be given blocks, and counts on ``external`` tokens from outside."""
        ask, load = request.ask, request.own_load
        if ask is None or ask.state is _S.CLOSED:
            return
        if load is None or load.transfer is not ask.transfer:
            self._leave(request, ask)
        elif load.is_sync and external:
            self._end(ask, _E.DELIVERED, load, external)
        elif not external and ask.loads(load):
            self._end(ask, _E.FAILED, load, load.end - load.start)

    def withdraw_all(self, reason: str) -> None:
        """Give up all questions, though their requests go on."""
        for request in self._schedule.requests:
            if request.ask is not None:
                self._end_now(request, request.ask, reason)

    def load_ended(self, load: Load) -> None:
        """Close the question whose load is over; that of a sync load is closed when its request is admitted."""
        request = self._schedule.requests.find(load.request)
        ask = None if request is None else request.ask
        if ask is not None and ask.state is _S.LOADING and ask.loads(load) and not load.is_sync:
            with self._schedule.door.of(load.request):
                self._end(ask, _E.DELIVERED if load.failure is None else _E.FAILED, load, load.end - load.start)

    def _end(self, ask: Ask, event: AskEvent, load: Load, tokens: int) -> None:
        self._on(ask, event)
        counts = self._counts(ask)
        if event is _E.DELIVERED:
            counts.loaded += tokens
            self._choice.loaded(load.transfer.source, tokens, clock.now() - load.fetched_at)
        else:
            counts.recomputed += tokens
            if load.failure is not None and load.failure.kind not in GAVE_UP:
                source = load.transfer.source
                self._useless.put((source.host, source.port), True, clock.now())

    # --- what directories answer -------------------------------------------------------------------------------------

    def _answered(self, answer: Answered) -> None:
        told = answer.holding
        found = self._sent.get(told.transfer)
        if found is None or (found[0].host, found[0].port) != (answer.host, answer.port):
            return  # nobody has asked it that
        source, ask = found
        self._sent.pop(told.transfer)
        self._silent.pop((answer.host, answer.port))
        if ask is None:
            if told.tokens:
                late = Source(source.host, source.port, told.epoch)
                self._schedule.decline(told.transfer, told.digest, late, "the answer came too late")
            return
        if ask.answered(told.transfer, told.epoch, told.tokens, told.digest) is None and told.tokens:
            self._complain(
                "request %s takes nothing from %s: it has answered with tokens that the request does not have",
                printable(min(ask.requests, default="")),
                source,
            )

    def _unheard(self, lost: Unheard) -> None:
        for name in self._sent.keys():
            source, ask = self._sent.get(name) or (None, None)
            if source is not None and (source.host, source.port) == (lost.host, lost.port):
                self._sent.pop(name)
                if ask is not None:
                    del ask.asked[name]
