"""What tests of a back end have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.testing.conformance import World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The participants of a test, of the back end that its module sets up as ``Ours``."""
    made = World(request.module.Ours())
    yield made
    made.close()
