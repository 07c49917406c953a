"""``kvxfer conformance``: what it reports of a back end, and what its exit codes mean."""

import json
import os
import signal
from abc import abstractmethod
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvxfer.testing import report
from kvxfer.testing.command.conformance import conformance
from kvxfer.testing.mutant import Mutant
from kvxfer.testing.mutants import MUTANTS
from kvxfer.testing.report import CaseResult, ConformanceReport
from kvxfer.transport import Probe
from tests.testing.broken.moving import TellsEarly

GOOD = "kvxfer.testing.fake:FakeTransport"


class Dies(TellsEarly):
    """Its process does not live through a call of ``endpoint``."""

    def endpoint(self) -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        return b""


class Idle(TellsEarly):
    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "no such card")


class AsksInVain(TellsEarly):
    @classmethod
    def probe(cls) -> Probe:
        raise RuntimeError("the driver does not answer")


class HalfWritten(TellsEarly):
    @abstractmethod
    def what_is_to_come(self) -> None:
        """Nobody has written it yet."""


class SaysNothing(TellsEarly):
    capabilities = None  # type: ignore[assignment]


def run(*arguments: str):
    app = typer.Typer()
    app.command()(conformance)
    return CliRunner().invoke(app, arguments)


def test_a_report_says_what_was_kept_and_what_was_left_out(tmp_path: Path) -> None:
    files = tmp_path / "report.json", tmp_path / "report.md"
    only = "unknown_option or fresh_and_small or get_quiet or gets_quiet"
    ran = run(GOOD, "--only", only, "--report", str(files[0]), "--report", str(files[1]))
    assert ran.exit_code == 0, ran.output
    report = json.loads(files[0].read_text())
    assert report["conforms"] and report["only"] == only
    assert report["counts"] == {"kept": 2, "broken": 0, "left_out": 3}
    assert (report["backend"], report["class"], report["contract"]) == ("fake", GOOD, 2)
    assert report["capabilities"]["abort"] == "batch"
    outcomes = {(c["clause"], c["case"]): c for c in report["clauses"]}
    small = outcomes["test_endpoints_are_fresh_and_small", ""]
    assert small["outcome"] == "kept" and small["rule"] == "Each call of ``endpoint`` describes one future link."
    quiet = outcomes["test_what_ends_before_it_is_quiet_gets_quiet", "read"]
    assert quiet["outcome"] == "left out" and "later" in quiet["said"]
    page = files[1].read_text()
    assert page.startswith("# Back end `fake` keeps the contract, of which only")
    assert (
        "| `test_endpoints_are_fresh_and_small` | Each call of ``endpoint`` describes one future link. | 1 of 1 |"
        in page
    )


def test_a_broken_clause_is_named(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    ran = run("tests.testing.broken.keeping:TakesAnyOption", "--only", "unknown_option", "--report", str(page))
    assert ran.exit_code == 1
    assert "broken: test_an_unknown_option_is_named: " in ran.output
    assert page.read_text().startswith("# Back end `fake` does not keep the contract")
    assert "## Broken" in page.read_text()


@pytest.mark.parametrize(("more", "kept"), [((), 1), (("--fail-fast",), 0)], ids=["all", "fail fast"])
def test_the_first_failure_may_be_the_last(more: tuple[str, ...], kept: int) -> None:
    options = "--options", json.dumps({"inner": GOOD}), "--only", "unknown_option or fresh_and_small"
    ran = run("kvxfer.testing.mutants:RepeatsItsEndpoint", *options, *more)
    assert ran.exit_code == 1 and f"{kept} cases kept, 1 broken" in ran.output, ran.output


def test_a_process_that_dies_has_broken_the_clause(tmp_path: Path) -> None:
    page = tmp_path / "report.json"
    ran = run("tests.testing.test_report:Dies", "--only", "fresh_and_small", "--report", str(page))
    assert ran.exit_code == 1
    (verdict,) = json.loads(page.read_text())["clauses"]
    assert verdict["outcome"] == "broken" and verdict["said"] == "the process died of SIGSEGV"
    assert verdict["rule"] == "Each call of ``endpoint`` describes one future link."


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_suite_finds_each_mutant_of_a_real_back_end(mutant: type[Mutant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.testing.report.MUTANTS", (mutant,))
    ran = run("tcp", "--mutants", "--suite", '{"patience_s": 3}')
    assert ran.exit_code == 0 and "mutants of back end tcp: 1 found" in ran.output, ran.output


def test_a_mutant_that_is_not_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CaseResult("test_endpoints_are_fresh_and_small", "", "Each is small.", "kept", 0.1, "")
    monkeypatch.setattr(report, "run_suite", lambda *_, **__: ConformanceReport({}, (kept,)))
    monkeypatch.setattr(report, "MUTANTS", MUTANTS[:1])
    ran = run(GOOD, "--mutants")
    assert ran.exit_code == 1 and f"survives {MUTANTS[0].__name__}" in ran.output, ran.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no-such"], 2),
        ([GOOD, "--options", "{"], 2),
        ([GOOD, "--options", "[]"], 2),
        ([GOOD, "--options", '{"lose_": 1}'], 2),
        ([GOOD, "--suite", '{"round": 1}'], 2),
        ([GOOD, "--suite", '{"rounds": true}'], 2),
        ([GOOD, "--suite", '{"rounds": 0}'], 2),
        ([GOOD, "--suite", '{"patience_s": NaN}'], 2),
        ([GOOD, "--suite", '{"memory": "cuda"}'], 2),
        ([GOOD, "--only", "((("], 2),
        ([GOOD, "--memory", "tape"], 2),
        ([GOOD, "--report", "report.txt"], 2),
        ([GOOD, "--report", "no-such-folder/report.md"], 2),
        ([GOOD, "--only", "no_such_clause"], 2),
        ([GOOD, "--mutants", "--only", "leak"], 2),
        ([GOOD, "--mutants", "--report", "report.md"], 2),
        ([GOOD, "--memory", "cuda"], 3),
        (["tests.testing.test_report:Idle"], 3),
        (["tests.testing.test_report:AsksInVain"], 3),
        (["tests.testing.test_report:HalfWritten"], 3),
        (["tests.testing.test_report:SaysNothing"], 3),
    ],
)
def test_what_cannot_be_tried_is_no_broken_clause(arguments: list[str], code: int) -> None:
    ran = run(*arguments)
    assert ran.exit_code == code and isinstance(ran.exception, SystemExit), ran.exception
