"""Worlds of the NIXL back end: over CMA, over TCP, and with several threads that post."""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest

from kvxfer.testing.conformance import ParticipantLink, Suite, World
from kvxfer.testing.participant import LocalParticipant, Participant
from tests.backends.altered import altered_as
from tests.conftest import require

require("nixl")

from kvxfer_nixl import NixlTransport  # noqa: E402  (only where it can be used)
from kvxfer_nixl.endpoint import Endpoint  # noqa: E402

TCP = {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}}
MIB = 1 << 20

altered = partial(altered_as, Endpoint)


class Cma(Suite):
    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 2}
    __test__ = False


class Tcp(Suite):
    """With reads, which nobody gets over TCP who does not ask for them."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {**TCP, "verbs": ["read", "write"]}
    __test__ = False


class Crewed(Suite):
    """Every batch is posted by several threads."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 3}
    __test__ = False


@pytest.fixture(params=[Cma, Tcp, Crewed], ids=["cma", "tcp", "crew"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param is Crewed:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)
    world = World(request.param())
    yield world
    world.close()


@pytest.fixture
def cma() -> Iterator[World]:
    world = World(Cma())
    yield world
    world.close()


@pytest.fixture
def tcp() -> Iterator[World]:
    world = World(Tcp())
    yield world
    world.close()


def large(world: World) -> tuple[LocalParticipant, Participant, ParticipantLink]:
    a, b = world.local(), world.other()
    for participant in (a, b):
        participant.allocate([8 * MIB], 1)
    return a, b, world.link(a, b)
