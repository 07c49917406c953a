"""`kvxfer conformance`: runs the conformance suite on a back end and writes a report that its author can publish."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvxfer.errors import ArgumentError, ConfigError, TransportError
from kvxfer.geometry import HOST
from kvxfer.settings import json_object
from kvxfer.testing.report import run_mutants, run_suite
from kvxfer.transport import registry

__all__ = ["conformance"]

_FORMS = {".json": "json", ".md": "markdown"}
_SETTINGS = {
    "in_process": bool,
    "revokes": bool,
    "gigabytes": bool,
    "patience_s": float,
    "notice_s": float,
    "closing_s": float,
    "rounds": int,
}


def conformance(
    backend: Annotated[str, typer.Argument(help="Name of the back end, or module:Class.")],
    options: Annotated[str, typer.Option(help="Options of the back end (backend_options), as a JSON object.")] = "{}",
    memory: Annotated[str, typer.Option(help="Kind of memory to move: cpu, or a kind of device such as cuda.")] = HOST,
    suite: Annotated[
        str, typer.Option(help='Attributes of the suite, as a JSON object such as {"rounds": 1000}.')
    ] = "{}",
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Write the result of each clause to this file: FILE.md or FILE.json. May be repeated."),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Test only the clauses whose names match this expression, as with pytest -k.")
    ] = "",
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first clause that is broken.")] = False,
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants", help="Break the back end on purpose, in many ways, and check that the suite finds each."
        ),
    ] = False,
) -> None:
    """Test a back end against the contract of back ends, and write a report that can be published.

    Exits with 0 if every clause that was tested is kept, 1 if one is broken (or the process died or hung during its test), 2 if
    the arguments are wrong, 3 if the back end cannot be tested here. With --mutants, exits with 1 if the suite does not find one of
    them. Needs pytest.
    """
    attributes = _object(suite, "--suite")
    for name, value in attributes.items():
        if not _fits(name, value):
            known = ", ".join(f"{known} ({kind.__name__})" for known, kind in _SETTINGS.items())
            what = f"{name!r} cannot be {value!r}; the attributes are {known}; all numbers but closing_s are above 0"
            raise typer.BadParameter(what, param_hint="--suite")
    for path in report or ():
        if path.suffix not in _FORMS or not path.parent.is_dir():
            raise typer.BadParameter(
                f"{path} must end in .md or .json and lie in a folder that exists", param_hint="--report"
            )
    if mutants and (only or report):
        raise typer.BadParameter("each mutant has the clause that must find it, and no report", param_hint="--mutants")
    chosen = _object(options, "--options")
    try:
        cls = registry.load(backend)
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint="BACKEND") from None
    probe = registry.probed(cls)
    if importlib.util.find_spec("pytest") is None:
        _cannot("the suite needs pytest: pip install pytest")
    if not probe.usable or memory not in probe.memory:
        _cannot(f"back end {cls.name} does not work here on {memory} memory: {probe.reason}")
    try:
        if mutants:
            _break(backend, chosen, {"memory": memory, **attributes})
            return
        found = run_suite(backend, chosen, {"memory": memory, **attributes}, only, fail_fast)
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint="--options") from None
    except TransportError as e:
        _cannot(str(e))
    except ArgumentError as e:
        raise typer.BadParameter(str(e), param_hint="--only") from None
    if not found.results:
        raise typer.BadParameter(f"no clause matches {only!r}", param_hint="--only")
    for path in report or ():
        path.write_text(found.json() if _FORMS[path.suffix] == "json" else found.markdown())
        typer.echo(f"wrote {path}")
    for result in found.results:
        if result.outcome == "broken":
            case = f" [{result.case}]" if result.case else ""
            typer.echo(f"broken: {result.clause}{case}: {result.said}", err=True)
    kept, broken, left = (found.count(outcome) for outcome in ("kept", "broken", "left out"))
    typer.echo(f"back end {cls.name}: {kept} cases kept, {broken} broken, {left} left out")
    if not found.conforms:
        raise typer.Exit(1)


def _break(backend: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Try all mutants of a back end, and print what became of each."""
    results, lines = Counter[str](), []
    for mutant, report in run_mutants(backend, options, settings):
        broken = [case.said for case in report.results if case.outcome == "broken"]
        result = "found" if broken else "survives" if report.conforms else "left out"
        results[result] += 1
        lines.append(f"{result:8} {mutant.__name__}, {mutant.found_by}: {broken[0] if broken else '-'}")
    typer.echo("\n".join(lines))
    typer.echo(f"mutants of back end {backend}: {', '.join(f'{n} {result}' for result, n in sorted(results.items()))}")
    if results["survives"]:
        raise typer.Exit(1)


def _object(text: str, hint: str) -> dict[str, Any]:
    try:
        return json_object(text, "it")
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint=hint) from None


def _fits(name: str, value: object) -> bool:
    kind = _SETTINGS.get(name)
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    return kind is not None and 0 <= value < math.inf and (value > 0 or name == "closing_s")


def _cannot(why: str) -> NoReturn:
    typer.echo(f"kvxfer: {why}", err=True)
    raise typer.Exit(3)
