"""What tests of back ends have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.transport import registry


def world_of(backend: str, **options: Any) -> World:
    """Return a place for participants of a back end, which is named as an operator names it."""
    return World(type("Here", (Suite,), {"backend": registry.load(backend), "options": options, "__test__": False})())


def way_of(world: World) -> TransferMode:
    """Return a way of moving bytes that the back end of a world offers."""
    return world._suite.ways()[0]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The participants of a test, of the back end that its module calls ``BACKEND``, with ``OPTIONS`` if it has any."""
    with closing(world_of(request.module.BACKEND, **getattr(request.module, "OPTIONS", {}))) as made:
        yield made
