"""Worlds of the NIXL back end: over CMA, over TCP, and with several threads that post."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvxfer.testing.conformance import ParticipantLink, World
from kvxfer.testing.participant import LocalParticipant, Participant
from tests.backends.altered import altered_as
from tests.backends.conftest import world_of
from tests.conftest import require

require("nixl")

from kvxfer_nixl.endpoint import Endpoint  # noqa: E402

TCP = {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}}
MIB = 1 << 20

altered = partial(altered_as, Endpoint)


CMA: dict[str, Any] = {"threads": 2}
READ_OVER_TCP: dict[str, Any] = {**TCP, "verbs": ["read", "write"]}
"""With reads, which nobody gets over TCP who does not ask for them."""
CREW: dict[str, Any] = {"threads": 3}
"""Every batch is posted by several threads, however small."""


@pytest.fixture(params=[CMA, READ_OVER_TCP, CREW], ids=["cma", "tcp", "crew"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param is CREW:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)
    with closing(world_of("nixl", **request.param)) as made:
        yield made


@pytest.fixture
def cma() -> Iterator[World]:
    with closing(world_of("nixl", **CMA)) as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[World]:
    with closing(world_of("nixl", **READ_OVER_TCP)) as made:
        yield made


def large(world: World) -> tuple[LocalParticipant, Participant, ParticipantLink]:
    a, b = world.local(), world.other()
    for participant in (a, b):
        participant.allocate([8 * MIB], 1)
    return a, b, world.link(a, b)
