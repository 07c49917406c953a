"""What has become of the last transfers of an agent, for an operator who asks its engine's directory: `kvxfer why`.

A directory asks the agents of its ranks that are in its process. Engines with a ``kvxfer.engine.SchedulerSide`` know more, and tell that
instead.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from kvxfer import clock
from kvxfer.failures import Failure
from kvxfer.identity import Handle, Source, TransferId
from kvxfer.protocol.messages import Explain, Explained, Story
from kvxfer.protocol.messages.bounds import MAX_WORDS
from kvxfer.protocol.values import Ended
from kvxfer.text import escaped, printable
from kvxfer.values import Fetch, Offer, Stages

KEPT = 1000
"""How many requests are remembered of each kind: delivered, failed, without a part in any transfer."""

STAGES = [name for name in Stages.__struct_fields__ if name not in ("moving", "came", "announced_bytes")]
"""The stages that are moments."""

_SECRET = re.compile(r"[0-9a-f]{32,}")
_agents: WeakValueDictionary[int, AgentStories] = WeakValueDictionary()
T = TypeVar("T")


class ClosedStories:
    """The last stories of each kind. One thread closes them; any thread may ask. A story is told when somebody asks for it.

    Attributes:
        good, bad: What was delivered, and what has failed.
        none: Requests without a part in any transfer.
    """

    def __init__(self) -> None:
        self.good: deque[Callable[[], Story]] = deque(maxlen=KEPT)
        self.bad: deque[Callable[[], Story]] = deque(maxlen=KEPT)
        self.none: deque[Callable[[], Story]] = deque(maxlen=KEPT)

    def tell(self, asked: Explain, live: Iterable[Story]) -> list[Story]:
        """Return what is known of the requests that are asked for, ``live`` ones included; of none, what has failed."""
        if not (asked.request or asked.transfers):
            return [told() for told in copied(self.bad)]
        over = (told() for kept in (self.good, self.bad, self.none) for told in copied(kept))
        return list(filter(_about(asked), (*live, *over)))


class _Transfer(msgspec.Struct, gc=False):
    """What there is to tell of a fetch or an offer of an agent: times by ``kvxfer.clock``."""

    handle: Handle
    transfer: TransferId
    at: float
    tokens: int
    source: Source | None  # of a fetch; an offer has none
    whole_at: float = 0.0  # when the last tokens were offered
    over_at: float = 0.0  # when it ended, and how
    failure: Failure | None = None
    nbytes: int = 0
    stages: Stages = Stages()

    def told(self) -> Story:
        """Return its story as it is now."""
        times, state = {"now": 0.0 if self.over_at else clock.now()}, "fetching"
        if self.source is None:
            times |= {"begun": self.at, "computed": self.whole_at, "ended": self.over_at}
            state = "offered"
        else:
            times |= moments(self.stages)
        name, state = self.handle or self.transfer, "" if self.over_at else state
        return transfer_story(
            name, self.transfer, self.source, self.at, times, state, self.failure, self.tokens, self.stages, self.nbytes
        )


class AgentStories:
    """The last transfers of one agent. One thread records; any thread may ask."""

    def __init__(self, epoch: int) -> None:
        self._live: dict[Handle | TransferId, _Transfer] = {}  # fetches by handle, offers by transfer
        self._closed = ClosedStories()
        _agents[epoch] = self

    def fetched(self, fetch: Fetch, called: float) -> None:
        """Record that a fetch begins."""
        tokens = fetch.tokens - fetch.start
        self._live[fetch.handle] = _Transfer(fetch.handle, fetch.transfer, called, tokens, fetch.source)

    def offered(self, offer: Offer, called: float) -> None:
        """Record an offer, or what was added to it."""
        begun = self._live.get(offer.transfer)
        if begun is None:
            begun = self._live[offer.transfer] = _Transfer(offer.handle, offer.transfer, called, 0, None)
        begun.tokens, begun.whole_at = offer.tokens, called if offer.final else 0.0

    def ended(self, event: Ended) -> None:
        """Record the end of either."""
        fetches = event.role == "consumer"
        name = event.handle if fetches else event.transfer
        begun = self._live.get(name)
        if begun is not None:  # the event itself may hold a payload
            how = {"failure": event.outcome.failure, "nbytes": event.nbytes, "stages": event.stages}
            # Another thread may be reading it: that finds it as it was, or as it is now, and never neither.
            over = replace(begun, over_at=clock.now(), **how)
            (self._closed.good if over.failure is None else self._closed.bad).append(over.told)
            del self._live[name]

    def forget(self, transfer: TransferId) -> None:
        """Forget an offer that came too late to be one, and never ends."""
        self._live.pop(transfer, None)

    def tell(self, asked: Explain) -> list[Story]:
        """Return what is known of the requests that are asked for; of none, what has failed. Any thread."""
        return self._closed.tell(asked, (one.told() for one in copied(self._live.values())))


def explain_locally(engine: str, epochs: Iterable[int], asked: Explain) -> Explained:
    """Return what those of these agents tell that are in this process. Of ranks with the same request, the one that matters most counts."""
    agents = [agent for agent in map(_agents.get, epochs) if agent is not None]
    told: dict[tuple[str, str, bytes], Story] = {}
    for story in (story for agent in agents for story in agent.tell(asked)):
        name = story.role, story.request, story.key
        told[name] = story if name not in told else max(told[name], story, key=_weight)
    return Explained(engine, time.time(), KEPT if agents else 0, latest(told.values(), asked.most))


def _weight(story: Story) -> tuple[bool, bool, float]:
    return not story.over, story.outcome != "delivered", max(story.stages.values(), default=0.0)


def latest(stories: Iterable[Story], most: int) -> tuple[Story, ...]:
    """Return at most ``most`` stories, those that ended last first."""
    by_end = sorted(stories, key=lambda story: story.at + max(story.stages.values(), default=0.0), reverse=True)
    return tuple(by_end[:most])


def _about(asked: Explain) -> Callable[[Story], bool]:
    """Return a function that says whether a story is of a request or a transfer that is asked for."""
    keys = frozenset(asked.transfers)
    return lambda story: bool(asked.request and asked.request in story.request) or story.key in keys


def copied(values: Iterable[T]) -> list[T]:
    """Return what another thread may be changing, as it was at some moment."""
    for _ in range(100):
        try:
            return list(values)
        except RuntimeError:  # it was changed meanwhile
            continue
    return []


def transfer_story(
    request: object,
    transfer: TransferId,
    source: Source | None,
    at: float,
    times: Mapping[str, float],
    state: str,
    failure: Failure | None,
    tokens: int,
    stages: Stages,
    nbytes: int = 0,
) -> Story:
    """Return what there is to tell of one transfer from ``at`` on: on its consumer, or without a ``source`` on its producer.

    ``times``: when it reached each stage; 0: never. ``state``: where it is; empty if it is over. ``nbytes``: on a producer, those that
    consumers have confirmed.
    """
    return Story(
        "producer" if source is None else "consumer",
        told_text(request),
        *told_name(transfer),
        "" if source is None else f"{source.host}:{source.port}",
        state or ("delivered" if failure is None else str(failure.kind)),
        not state,
        "" if failure is None else told_text(failure, MAX_WORDS),
        unix_time(at),
        {stage: round(t - at, 6) for stage, t in times.items() if t},
        tokens,
        nbytes if source is None else stages.came,
        stages.announced_bytes,
        round(stages.moving, 6),
    )


def moments(stages: Stages) -> dict[str, float]:
    """Return when a fetch reached each stage."""
    reached = {name: getattr(stages, name) for name in STAGES}
    if not stages.announced:
        reached["heard"] = 0.0  # of one that has heard nothing it is the beginning
    return reached


def unix_time(at: float) -> float:
    """Return a time of ``kvxfer.clock`` by this host's clock as it goes now, which may have been set since."""
    return time.time() - (clock.now() - at)


def told_name(transfer: TransferId) -> tuple[str, bytes]:
    """Return a transfer's name as an operator may see it, and its key.

    A digest in it would let a reader speak for those who know the prompt.
    """
    name = str(transfer)
    return _SECRET.sub(lambda found: found[0][:8] + "...", told_text(name)), hashlib.blake2b(
        name.encode(errors="backslashreplace"), digest_size=8
    ).digest()


def told_text(text: object, most: int = 0) -> str:
    """Return a text as a story may have it."""
    return escaped(str(text)[:most]) if most else printable(text)
