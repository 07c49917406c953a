"""The suite that a back end must pass.

A back end's whole test file is one subclass::

    from kvxfer.testing import ConformanceSuite

    class TestMine(ConformanceSuite):
        backend = MyTransport

Each test, called a clause, checks a rule of ``kvxfer.transport.contract``; its docstring has the rule, and what an author
should look at when it fails. Clauses that move bytes run once for every way of moving that the back end's capabilities offer.
"""

import pytest

_THEMES = (
    "declaration",
    "memory",
    "transfers",
    "history",
    "links",
    "forgeries",
    "strangers",
    "endings",
    "deaths",
    "blocking",
    "resources",
    "volume",
    "progress",
)
_SHARED = ("content", "participant_link", "patterns", "suite")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in (*_THEMES, *_SHARED)))

# Only now, so that failed assertions in them explain themselves.
from kvxfer.testing.conformance.blocking import Blocking  # noqa: E402
from kvxfer.testing.conformance.deaths import Deaths  # noqa: E402
from kvxfer.testing.conformance.declaration import Declaration  # noqa: E402
from kvxfer.testing.conformance.endings import Endings  # noqa: E402
from kvxfer.testing.conformance.forgeries import Forgeries  # noqa: E402
from kvxfer.testing.conformance.history import Histories  # noqa: E402
from kvxfer.testing.conformance.links import Links  # noqa: E402
from kvxfer.testing.conformance.memory import Memory  # noqa: E402
from kvxfer.testing.conformance.participant_link import Part, ParticipantLink, Started, TransferMode  # noqa: E402
from kvxfer.testing.conformance.progress import Tellings  # noqa: E402
from kvxfer.testing.conformance.resources import Resources  # noqa: E402
from kvxfer.testing.conformance.strangers import Strangers  # noqa: E402
from kvxfer.testing.conformance.suite import OutOfPatience, RuleBroken, Suite, World  # noqa: E402
from kvxfer.testing.conformance.transfers import Transfers  # noqa: E402
from kvxfer.testing.conformance.volume import Volume  # noqa: E402

__all__ = [
    "RuleBroken",
    "ConformanceSuite",
    "OutOfPatience",
    "Part",
    "ParticipantLink",
    "Started",
    "Suite",
    "TransferMode",
    "World",
]


class ConformanceSuite(
    Declaration,
    Memory,
    Transfers,
    Tellings,
    Histories,
    Volume,
    Links,
    Forgeries,
    Strangers,
    Endings,
    Deaths,
    Blocking,
    Resources,
):
    """All clauses. Subclass it and set ``backend``; see ``Suite`` for the other settings."""


# So that pytest runs only subclasses, although the class itself is imported into an author's file.
ConformanceSuite.__test__ = False
Suite.__test__ = False
