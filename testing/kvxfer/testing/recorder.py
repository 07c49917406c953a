"""A pytest plugin that writes the result of each clause to a file, line by line, so that it survives the death of the process.

``python -m pytest -p kvxfer.testing.recorder --record FILE``. Each line is a JSON object: ``{"begun": clause, "case": case}``,
then a ``CaseResult`` (a second one if the teardown fails as well), and ``{"over": clause}``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import pytest

SUBJECT = "KVXFER_CONFORMANCE"
"""The environment variable that says what is tested: a JSON object with ``backend``, ``options`` and attributes of the suite."""

_record: TextIO | None = None
_rules: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that turns the record on."""
    parser.addoption("--record", help="File to write the result of each clause to.")


def pytest_configure(config: pytest.Config) -> None:
    """Open the record."""
    global _record
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    path = config.getoption("--record")
    if path:
        _record = open(path, "a", buffering=1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Remember the rule of a clause: the first paragraph of its docstring."""
    doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
    _rules[item.nodeid] = " ".join(doc.strip().partition("\n\n")[0].split())


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Record that a case begins."""
    clause, case = _parts(nodeid)
    _write({"begun": clause, "case": case, "rule": _rules.get(nodeid, "")})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the result of the call, and of setup and teardown only if they did not pass."""
    if report.when != "call" and report.outcome == "passed":
        return
    clause, case = _parts(report.nodeid)
    said = ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        said = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(getattr(crash, "message", report.longrepr)).partition("\n")[0]
    _write(
        {
            "clause": clause,
            "case": case,
            "rule": _rules.get(report.nodeid, ""),
            "outcome": {"passed": "kept", "failed": "broken", "skipped": "left out"}[report.outcome],
            "seconds": round(report.duration, 3),
            "said": said,
        }
    )


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """Record that a case is over."""
    _write({"over": _parts(nodeid)[0]})


def _parts(nodeid: str) -> tuple[str, str]:
    name = nodeid.rpartition("::")[2]
    clause, _, case = name.partition("[")
    return clause, case.removesuffix("]")


def _write(line: dict[str, Any]) -> None:
    if _record is not None:
        _record.write(json.dumps(line) + "\n")
