"""`kvxfer conformance`: tests a back end or a kind of memory, and writes a report to publish; or tests a router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta, Struct

from kvxfer.errors import ArgumentError, ConfigError, TransportError
from kvxfer.geometry import HOST
from kvxfer.memory.registry import space_for
from kvxfer.settings import json_object, read
from kvxfer.testing.command.router import cannot, try_router
from kvxfer.testing.mutant import Mutant
from kvxfer.testing.report import ConformanceReport, run_mutants, run_suite
from kvxfer.testing.spaces.mutants import SpaceMutant
from kvxfer.testing.spaces.report import run_space_mutants, run_space_suite, space_named
from kvxfer.transport import registry

_FORMS = {".json": "json", ".md": "markdown"}
_Seconds = Annotated[float, Meta(gt=0, le=86400)]


class _Attributes(Struct, forbid_unknown_fields=True, kw_only=True):
    """What attributes of the suite may be; ``kvxfer.testing.conformance.Suite`` has their defaults."""

    in_process: bool = True
    revokes: bool = True
    gigabytes: bool = True
    patience_s: _Seconds = 1.0
    notice_s: _Seconds = 1.0
    closing_s: Annotated[float, Meta(ge=0, le=86400)] = 1.0
    rounds: Annotated[int, Meta(gt=0)] = 1


def conformance(
    backend: Annotated[
        str,
        typer.Argument(
            help="Name of the back end, or module:Class. None with --space or --router.", show_default=False
        ),
    ] = "",
    space: Annotated[
        str,
        typer.Option(help="Test a kind of memory instead of a back end: a kind of device, or module:Class of a space."),
    ] = "",
    options: Annotated[str, typer.Option(help="Options of the back end (backend_options), as a JSON object.")] = "{}",
    memory: Annotated[
        str,
        typer.Option(
            help="Kind of memory to move: cpu (the default), or a kind of device such as cuda. With --space, a device or its kind."
        ),
    ] = "",
    suite: Annotated[
        str, typer.Option(help='Attributes of the suite, as a JSON object such as {"rounds": 1000}.')
    ] = "{}",
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Write the result of each clause to this file: FILE.md or FILE.json. May be repeated."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Test only the clauses whose names match this expression, as with pytest -k; or the cases with it in their names."
        ),
    ] = "",
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first clause that is broken.")] = False,
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants", help="Break what is tested on purpose, in many ways, and check that the suite finds each."
        ),
    ] = False,
    router: Annotated[
        str, typer.Option(metavar="URL", help="Test this router instead, with requests of the OpenAI API.")
    ] = "",
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="With --router: a prefill engine behind it. May be repeated."),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="With --router: a decode engine behind it. May be repeated.")
    ] = None,
    plain: Annotated[
        str,
        typer.Option(
            metavar="URL", help="With --router: a server that gives the right answers. [default: the first --prefill]"
        ),
    ] = "",
    within: Annotated[
        float,
        typer.Option(
            help="With --router: seconds after which nothing may be held, much less than the lease.", min=0.1, max=3600
        ),
    ] = 5.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --router: print the results as one JSON object.")
    ] = False,
) -> None:
    """Test a back end, or with --space a kind of memory, against its contract, and write a report to publish. Or test a router.

    With --router, requests of many kinds go through the router, and after each the answer must be the plain server's, KV must have moved,
    and no engine may hold anything. The engines must serve nobody else during that.

    Exits with 0 if every clause or case that was tested is kept. Exits with 1 if one is broken, or if the process died or hung during
    its test. Exits with 2 if the arguments are wrong, and with 3 if it cannot be tested, as when a server does not answer. With
    --mutants, exits with 1 if the suite does not find one of them.
    """
    if router:
        if backend or space or report or mutants:
            raise typer.BadParameter(
                "it takes neither a back end nor a space nor --report or --mutants", param_hint="--router"
            )
        if not prefill or not decode:
            raise typer.BadParameter("it needs --prefill and --decode, whose metrics it reads", param_hint="--router")
        try_router(router, plain or prefill[0], prefill, decode, within, only, fail_fast, as_json)
        return
    if prefill or decode or plain or as_json:
        raise typer.BadParameter("--prefill, --decode, --plain and --json need --router", param_hint="--router")
    if bool(backend) == bool(space):
        raise typer.BadParameter("name a back end, or --space, or a router with --router", param_hint="BACKEND")
    attributes = _object(suite, "--suite", _Attributes)
    for path in report or ():
        if path.suffix not in _FORMS or not path.parent.is_dir():
            raise typer.BadParameter(
                f"{path} must end in .md or .json and lie in a folder that exists", param_hint="--report"
            )
    if mutants and (only or report):
        raise typer.BadParameter("each mutant has the clause that must find it, and no report", param_hint="--mutants")
    chosen = _object(options, "--options")
    if space:
        if attributes or chosen:
            raise typer.BadParameter("a space has no options, and its suite no attributes", param_hint="--space")
        device = _device(space, memory)
        if mutants:
            _break(f"space {space}", run_space_mutants(space, device))
            return
        _tell(_found(lambda: run_space_suite(space, device, only, fail_fast), only), report or (), f"space {space}")
        return
    memory = memory or HOST
    try:
        space_for(memory)
    except (ArgumentError, ConfigError) as e:
        raise typer.BadParameter(str(e), param_hint="--memory") from None
    try:
        cls = registry.load(backend)
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint="BACKEND") from None
    probe = registry.probed(cls)
    if not probe.usable or memory not in probe.memory:
        cannot(f"back end {cls.name} does not work here on {memory} memory: {probe.reason}")
    settings = {"memory": memory, **attributes}
    try:
        if mutants:
            _break(f"back end {backend}", run_mutants(backend, chosen, settings))
            return
        found = _found(lambda: run_suite(backend, chosen, settings, only, fail_fast), only)
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint="--options") from None
    except TransportError as e:
        cannot(str(e))
    _tell(found, report or (), f"back end {cls.name}")


def _device(space: str, memory: str) -> str:
    """Return the device on which a space is tested: the given one, or the first of its kind that is here."""
    try:
        cls = space_named(space)
    except (ArgumentError, ConfigError) as e:
        raise typer.BadParameter(str(e), param_hint="--space") from None
    if ":" in space and not memory:
        raise typer.BadParameter("name the device whose memory is tested, such as vault:0", param_hint="--memory")
    kind, _, number = (memory or space).partition(":")
    try:
        here = list(cls.devices(kind))
    except Exception as e:
        cannot(f"{space} cannot say which devices of kind {kind} are here: {type(e).__name__}: {e}")
    if number and memory not in here:
        cannot(f"there is no device {memory} here, but {', '.join(here) or 'none'}")
    if not here:
        cannot(f"there is no device of kind {kind} here")
    return memory if number else here[0]


def _found(run: Callable[[], ConformanceReport], only: str) -> ConformanceReport:
    try:
        found = run()
    except ArgumentError as e:
        raise typer.BadParameter(str(e), param_hint="--only") from None
    if not found.results:
        raise typer.BadParameter(f"no clause matches {only!r}", param_hint="--only")
    return found


def _tell(found: ConformanceReport, files: Iterable[Path], subject: str) -> None:
    """Write a report, and print what is broken."""
    for path in files:
        path.write_text(found.json() if _FORMS[path.suffix] == "json" else found.markdown())
        typer.echo(f"wrote {path}")
    for result in found.results:
        if result.outcome == "broken":
            case = f" [{result.case}]" if result.case else ""
            typer.echo(f"broken: {result.clause}{case}: {result.said}", err=True)
    kept, broken, left = (found.count(outcome) for outcome in ("kept", "broken", "left out"))
    typer.echo(f"{subject}: {kept} cases kept, {broken} broken, {left} left out")
    if not found.conforms:
        raise typer.Exit(1)


def _break(subject: str, tried: Iterable[tuple[type[Mutant] | type[SpaceMutant], ConformanceReport]]) -> None:
    """Print what became of each mutant."""
    results, lines = Counter[str](), []
    for mutant, report in tried:
        broken = [case.said for case in report.results if case.outcome == "broken"]
        result = "found" if broken else "survives" if report.conforms else "left out"
        results[result] += 1
        lines.append(f"{result:8} {mutant.__name__}, {mutant.found_by}: {broken[0] if broken else '-'}")
    typer.echo("\n".join(lines))
    typer.echo(f"mutants of {subject}: {', '.join(f'{n} {result}' for result, n in sorted(results.items()))}")
    if results["survives"]:
        raise typer.Exit(1)


def _object(text: str, hint: str, kind: type[Struct] | None = None) -> dict[str, Any]:
    """Return an option that is a JSON object, with the fields of a struct if one is given."""
    try:
        found = json_object(text, "it")
        if kind is not None:
            read(kind, found, "attribute {!r} of the suite")
        return found
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint=hint) from None
