"""The engines that the tests of ``tests/control`` make, and their clock."""

from tests.control.conftest import clock, engine

__all__ = ["clock", "engine"]
