"""For tests: the suites that back ends and spaces must pass, an in-process fake, and fault injection (``kvxfer.testing.faults``).

``kvxfer.testing.engine`` has a small simulated engine, for tests of engines.

``ConformanceSuite`` and ``SpaceSuite`` need pytest; the rest does not.
"""

from typing import TYPE_CHECKING, Any

from kvxfer.testing.fake import FakeTransport, Network

if TYPE_CHECKING:
    from kvxfer.testing.conformance import ConformanceSuite
    from kvxfer.testing.spaces.suite import SpaceSuite

__all__ = ["ConformanceSuite", "FakeTransport", "Network", "SpaceSuite"]


def __getattr__(name: str) -> Any:
    if name == "ConformanceSuite":
        from kvxfer.testing.conformance import ConformanceSuite

        return ConformanceSuite
    if name == "SpaceSuite":
        from kvxfer.testing.spaces.suite import SpaceSuite

        return SpaceSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
