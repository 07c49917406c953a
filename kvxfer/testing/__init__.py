"""For tests: the suite that a back end must pass, an in-process fake, and fault injection (``kvxfer.testing.faults``).

``kvxfer.testing.engine`` has a small simulated engine, for tests of engines.

``ConformanceSuite`` needs pytest; the rest does not.
"""

from typing import TYPE_CHECKING, Any

from kvxfer.testing.fake import FakeTransport, Network

if TYPE_CHECKING:
    from kvxfer.testing.conformance import ConformanceSuite

__all__ = ["ConformanceSuite", "FakeTransport", "Network"]


def __getattr__(name: str) -> Any:
    if name == "ConformanceSuite":
        from kvxfer.testing.conformance import ConformanceSuite

        return ConformanceSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
