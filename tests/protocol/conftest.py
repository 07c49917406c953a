"""The engines that the tests of ``tests/control`` make."""

from tests.control.conftest import engine

__all__ = ["engine"]
