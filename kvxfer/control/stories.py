"""What has become of the last transfers of an agent, for an operator who asks its engine's directory: `kvxfer why`.

A directory asks the agents of its ranks that are in its process. Engines with a ``kvxfer.engine.SchedulerSide`` know more, and tell that
instead.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

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


class _Begun(msgspec.Struct, gc=False):
    """A transfer that has begun: times by ``kvxfer.clock``."""

    handle: Handle
    transfer: TransferId
    at: float
    tokens: int
    source: Source | None  # of a fetch; an offer has none
    whole_at: float = 0.0  # when the last tokens were offered


class _Over(msgspec.Struct, frozen=True, gc=False):
    """How one has ended; the event itself may hold a payload."""

    failure: Failure | None
    nbytes: int
    stages: Stages
    at: float


class AgentStories:
    """The last transfers of one agent. One thread records; any thread may ask. A story is told when somebody asks for it."""

    def __init__(self, epoch: int) -> None:
        self._live: dict[Handle | TransferId, _Begun] = {}  # fetches by handle, offers by transfer
        self._good: deque[tuple[_Begun, _Over]] = deque(maxlen=KEPT)
        self._bad: deque[tuple[_Begun, _Over]] = deque(maxlen=KEPT)
        _agents[epoch] = self

    # --- the control thread ------------------------------------------------------------------------------------------

    def fetched(self, fetch: Fetch, called: float) -> None:
        """Record that a fetch begins."""
        tokens = fetch.tokens - fetch.start
        self._live[fetch.handle] = _Begun(fetch.handle, fetch.transfer, called, tokens, fetch.source)

    def offered(self, offer: Offer, called: float) -> None:
        """Record an offer, or what was added to it."""
        begun = self._live.get(offer.transfer)
        if begun is None:
            begun = self._live[offer.transfer] = _Begun(offer.handle, offer.transfer, called, 0, None)
        begun.tokens, begun.whole_at = offer.tokens, called if offer.final else 0.0

    def ended(self, event: Ended) -> None:
        """Record the end of either."""
        fetches = event.role == "consumer"
        begun = self._live.pop(event.handle if fetches else event.transfer, None)
        if begun is not None:
            failure = event.outcome.failure
            over = _Over(failure, event.nbytes, event.stages, clock.now())
            (self._good if failure is None else self._bad).append((begun, over))

    def forget(self, transfer: TransferId) -> None:
        """Forget an offer that came too late to be one, and never ends."""
        self._live.pop(transfer, None)

    # --- any thread ----------------------------------------------------------------------------------------------------

    def tell(self, asked: Explain) -> list[Story]:
        """Return what is known of the requests that are asked for; of none, what has failed."""
        if not (asked.request or asked.transfers):
            return [_story(*one) for one in copied(self._bad)]
        now = [_story(begun, None) for begun in copied(self._live.values())]
        over = [_story(*one) for kept in (self._good, self._bad) for one in copied(kept)]
        return list(filter(about(asked), (*now, *over)))


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


def about(asked: Explain) -> Callable[[Story], bool]:
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


def _story(begun: _Begun, over: _Over | None) -> Story:
    now, source = clock.now(), begun.source
    failure, stages = (None, Stages()) if over is None else (over.failure, over.stages)
    times = {} if over is not None else {"now": now}
    if source is not None:
        times |= {name: getattr(stages, name) for name in STAGES}
        if not stages.announced:
            times["heard"] = 0.0  # of a fetch that has heard nothing it is the beginning
    else:
        times |= {"begun": begun.at, "computed": begun.whole_at, "ended": 0.0 if over is None else over.at}
    came = 0 if over is None else over.nbytes if source is None else stages.came
    return Story(
        "producer" if source is None else "consumer",
        told_text(begun.handle or begun.transfer),
        *told_name(begun.transfer),
        "" if source is None else f"{source.host}:{source.port}",
        ("offered" if source is None else "fetching")
        if over is None
        else "delivered"
        if failure is None
        else str(failure.kind),
        over is not None,
        "" if failure is None else told_text(failure, MAX_WORDS),
        time.time() - (now - begun.at),
        {stage: round(t - begun.at, 6) for stage, t in times.items() if t},
        begun.tokens,
        came,
        stages.announced_bytes,
        round(stages.moving, 6),
    )


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
