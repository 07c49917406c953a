"""The settings of a suite, and how a clause is run once for each mode that its back end offers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from kvxfer.geometry import HOST
from kvxfer.memory import devices_of
from kvxfer.testing.conformance.participant_link import PARTS, Part, TransferMode
from kvxfer.testing.conformance.world import World
from kvxfer.testing.participant import Participant
from kvxfer.transport.contract import Capabilities, Transport, Verb

__all__ = ["Suite", "present"]


class Suite:
    """Settings of a suite; a subclass sets them as class attributes.

    Attributes:
        backend: The class under test.
        options: The options of every instance.
        memory: The kind of memory to test with: ``cpu``, or a kind of device such as ``cuda``.
        in_process: False for a back end that cannot have two instances in one process (or not in one thread).
        patience_s: Seconds that anything may take, as ``thread_clock`` counts them.
        notice_s: Seconds for which the death of a peer may go unnoticed.
        rounds: Rounds of connecting, moving and closing, after which nothing may have leaked.
        revokes: Whether deregistered memory is out of the reach of peers although their links live on. False if a network card or
            the kernel moves the bytes without asking anybody: then these links have to be closed first.
        closing_s: Seconds for which the library may go on closing a link after ``disconnect`` has returned. Until then,
            what it holds is not counted as a leak.
        gigabytes: Whether batches of gigabytes are tried, which take seconds. Once for each back end is enough.
    """

    __test__ = False

    backend: ClassVar[type[Transport]]
    options: ClassVar[Mapping[str, Any]] = {}
    memory: ClassVar[str] = HOST
    in_process: ClassVar[bool] = True
    patience_s: ClassVar[float] = 20.0
    notice_s: ClassVar[float] = 15.0
    rounds: ClassVar[int] = 200
    revokes: ClassVar[bool] = True
    closing_s: ClassVar[float] = 0.0
    gigabytes: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = hasattr(cls, "backend")

    @classmethod
    @functools.cache  # each clause asks, three times as it is collected
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of an instance made for this purpose, once for a suite."""
        transport = cls.backend("capabilities", cls.options)
        try:
            return transport.capabilities
        finally:
            transport.close()

    @classmethod
    def ways(cls) -> list[TransferMode]:
        """Return the ways of moving that the back end offers."""
        return [way for way in TransferMode if Verb(way.value) in cls.capabilities().verbs]

    def device(self, participant: int) -> str:
        """Return the device of the memory of a test's first, second ... participant.

        The first participant has one device and all others another (if there is one), so that every transfer goes from
        device to device.
        """
        found = devices_of(self.memory)
        return found[0 if participant == 0 else -1]

    def make_mortal(self, world: World, name: str) -> Participant:
        """Make a participant that can be killed and stopped. A back end that lives in one process overrides this."""
        return world.process(name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a clause once for each value of those of its arguments that stand for modes of the back end.

        ``way`` is each way of moving bytes, ``one_sided`` each of those that only one side submits, and ``part`` each part
        that a participant can have in them.
        """
        choices: dict[str, tuple[Any, ...]] = {
            "way": tuple(TransferMode),
            "one_sided": (TransferMode.READ, TransferMode.WRITE),
            "part": PARTS,
        }
        for name in choices.keys() & metafunc.fixturenames:
            try:
                ways = self.ways()
            except Exception:
                # The library is missing or cannot start. The clauses then fail one by one when they make a
                # transport, unless a mark (such as gpu) keeps them from running here at all.
                ways = list(TransferMode)
            values = [v for v in choices[name] if (v.way if isinstance(v, Part) else v) in ways]
            ids = [f"{v.way.value}-{v.role}" if isinstance(v, Part) else v.value for v in values]
            metafunc.parametrize(name, values, ids=ids)

    @pytest.fixture
    def world(self) -> Iterator[World]:
        """Give a test its participants, and end them afterwards."""
        world = World(self)
        yield world
        world.close()


def present(kind: str) -> str | None:
    """Return a device of this host with this kind of memory; ``None`` if there is none that this suite can allocate on."""
    return next(iter(devices_of(kind)), None)
