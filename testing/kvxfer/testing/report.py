"""Run the suite against a back end in a process of its own, and report the result of each clause, as JSON and as Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvxfer
from kvxfer.errors import ArgumentError, KvxferError, TransportError
from kvxfer.testing.mutant import Mutant
from kvxfer.testing.mutants import MUTANTS
from kvxfer.testing.recorder import SUBJECT
from kvxfer.transport import Capabilities, Transport, registry
from kvxfer.transport.contract import CONTRACT_VERSION

_WELL = tuple(f"exit status {status}" for status in (0, 1, 5))
"""How pytest ends if it was able to run: all passed, some failed, none was selected."""
_MISUSED = "exit status 4"
"""How it ends if it does not understand how it was called: of that, only ``only`` is not ours."""
_TITLES = {"backend": "Back end", "space": "Space for"}
"""How a report calls what was tested, by the first key of ``about``."""
STUCK_S = 300.0
"""A clause that takes longer has hung, because its own timeouts are shorter."""
_FILE = Path(__file__).with_name("under_test.py")


@dataclass(frozen=True)
class CaseResult:
    """The result of one case of a clause."""

    clause: str  # the clause's name in the suite
    case: str  # the verb or other parameter of the case; empty if there is only one
    rule: str  # the clause in words
    outcome: str  # ``kept``, ``broken`` or ``left out``
    seconds: float  # how long it took
    said: str  # why it is broken or left out


@dataclass(frozen=True)
class ConformanceReport:
    """What the suite has found."""

    about: Mapping[str, Any]  # what was tested (the first key says what it is), where, with what, and when
    results: tuple[CaseResult, ...]  # one for each case, in the order in which they ran

    def count(self, outcome: str) -> int:
        """Return how many cases had this outcome."""
        return sum(v.outcome == outcome for v in self.results)

    @property
    def conforms(self) -> bool:
        """Whether some clause was kept, and none broken."""
        return self.count("kept") > 0 and not self.count("broken")

    def json(self) -> str:
        counts = {name.replace(" ", "_"): self.count(name) for name in ("kept", "broken", "left out")}
        results = [asdict(v) for v in self.results]
        return json.dumps(
            {"format": 1, **self.about, "conforms": self.conforms, "counts": counts, "clauses": results}, indent=1
        )

    def markdown(self) -> str:
        about = self.about
        result = "keeps the contract" if self.conforms else "does not keep the contract"
        partly = f", of which only `{about['only']}` was tried" if about["only"] else ""
        kind, name = next(iter(about.items()))
        lines = [f"# {_TITLES[kind]} `{name}` {result}{partly}", ""]
        lines += [
            f"{self.count('kept')} cases kept, {self.count('broken')} broken, {self.count('left out')} left out, "
            f"in {about['seconds']:.0f} s.",
            "",
            "| | |",
            "|---|---|",
        ]
        lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in about.items() if name != "only"]
        for title, outcome in (("Broken", "broken"), ("Left out", "left out")):
            found = [v for v in self.results if v.outcome == outcome]
            if found:
                lines += ["", f"## {title}", "", "| clause | case | why |", "|---|---|---|"]
                lines += [f"| `{v.clause}` | {_cell(v.case)} | {_cell(v.said)} |" for v in found]
        lines += ["", "## All clauses", "", "| clause | rule | cases kept | longest |", "|---|---|---|---|"]
        for clause in dict.fromkeys(v.clause for v in self.results):
            cases = [v for v in self.results if v.clause == clause and v.outcome != "left out"]
            kept, longest = sum(v.outcome == "kept" for v in cases), max((v.seconds for v in cases), default=0.0)
            rule = next(v.rule for v in self.results if v.clause == clause)
            lines.append(f"| `{clause}` | {_cell(rule)} | {kept} of {len(cases)} | {longest:.1f} s |")
        return "\n".join(lines) + "\n"


def run_suite(
    backend: str, options: Mapping[str, Any], settings: Mapping[str, Any], only: str = "", fail_fast: bool = False
) -> ConformanceReport:
    """Run the suite against a back end; pytest prints its progress on standard output.

    A clause in which the process dies or hangs is broken, and those after it are not tried.

    Raises:
        ConfigError: There is no such back end, or it refuses the options.
        TransportError: The back end cannot start.
        ArgumentError: ``only`` is no expression.
    """
    about = _about(registry.load(backend), options, settings)
    return run_clauses(_FILE, about, {**settings, "backend": backend, "options": options}, only, fail_fast)


def run_clauses(
    file: Path, about: Mapping[str, Any], subject: Mapping[str, Any], only: str, fail_fast: bool
) -> ConformanceReport:
    """Run the suite ``file`` in a process of its own, as ``run_suite`` does.

    ``about``: what the report says of the subject first. ``subject``: what ``file`` finds in the environment.

    Raises:
        ArgumentError: ``only`` is no expression.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvxfer-conformance-") as folder:
        record = Path(folder, "record")
        record.touch()
        ended = _pytest(file, folder, record, subject, only, fail_fast)
        if only and ended == _MISUSED:
            raise ArgumentError(f"only cannot be {only!r}, which pytest -k does not understand")
        results = _results(record.read_text().splitlines(), ended)
    where = {"only": only, "host": _host(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return ConformanceReport({**about, **where, "seconds": round(time.monotonic() - begun, 1)}, tuple(results))


def run_mutants(
    backend: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[type[Mutant], ConformanceReport]]:
    """Break a back end in each of the ways of ``kvxfer.testing.mutants``, and have the clause that must find it run.

    The arguments and errors are the same as in ``run_suite``. A report that ``conforms`` is of a fault that was not found; one without a
    broken case or a kept one, of a fault that this back end cannot have.
    """
    for mutant in MUTANTS:
        name, made_of = f"{mutant.__module__}:{mutant.__qualname__}", {"inner": backend, "inner_options": dict(options)}
        yield mutant, run_suite(name, made_of, settings, mutant.found_by, fail_fast=True)


def _pytest(file: Path, folder: str, record: Path, subject: Mapping[str, Any], only: str, fail_fast: bool) -> str:
    """Run pytest in a process of its own; return in words how that ended."""
    command = [sys.executable, "-P", "-m", "pytest", str(file), "-q", "-rN", "--tb=short"]
    command += ["-c", os.devnull, "--rootdir", folder]
    command += ["-p", "no:cacheprovider", "-p", "kvxfer.testing.recorder", "--record", str(record)]
    # Plugins and options from the environment are meant for other tests.
    environment = {**os.environ, SUBJECT: json.dumps(subject), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # It imports what this process does, whatever lies in the current folder: a checkout of kvxfer, say.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment.pop("PYTEST_ADDOPTS", None)
    command += [*(["-k", only] if only else []), *(["-x"] if fail_fast else [])]
    child = subprocess.Popen(command, env=environment, process_group=0)  # which Ctrl-C does not reach
    size, until = 0, time.monotonic() + STUCK_S
    try:
        while True:
            try:
                status = child.wait(0.2)
            except subprocess.TimeoutExpired:
                if (grown := record.stat().st_size) != size:
                    size, until = grown, time.monotonic() + STUCK_S
                if time.monotonic() < until:
                    continue
                return f"it hangs: no result in {STUCK_S:g} s"
            return f"the process died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _results(lines: Iterable[str], ended: str) -> Iterable[CaseResult]:
    """Read the record. A case that has begun and is not over is the one in which the process ended."""
    begun: dict[str, Any] | None = None
    found: dict[tuple[str, str], CaseResult] = {}
    for line in map(json.loads, lines):
        if "begun" in line:
            begun = line
        elif "over" in line:
            begun = None
        else:
            result = CaseResult(**line)
            if found.setdefault((result.clause, result.case), result).outcome != "broken":
                found[result.clause, result.case] = result
    if begun is not None:
        clause, case = begun["begun"], begun["case"]
        found[clause, case] = CaseResult(clause, case, begun["rule"], "broken", 0.0, ended)
    elif ended not in _WELL:
        found["the whole suite", ""] = CaseResult("the whole suite", "", "It can be run.", "broken", 0.0, ended)
    return found.values()


def _about(cls: type[Transport], options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    probe, can = registry.probed(cls), _capabilities(cls, options)
    return {
        "backend": cls.name,
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "release": release_of(cls),
        "contract": cls.contract,
        "options": dict(options),
        "capabilities": {
            name: sorted(map(str, value)) if isinstance(value, frozenset) else value
            for name, value in asdict(can).items()
        },
        "probe": probe.reason,
        "facts": dict(probe.facts),
        "suite": f"kvxfer {kvxfer.__version__}, contract {CONTRACT_VERSION}",
        "settings": dict(settings),
    }


def _capabilities(cls: type[Transport], options: Mapping[str, Any]) -> Capabilities:
    try:
        transport = cls("report", options)
        try:
            can = transport.capabilities
        finally:
            transport.close()
    except KvxferError:
        raise
    except Exception as e:  # an author's mistake, such as a method that is not there yet
        raise TransportError(f"back end {cls.name!r} cannot be made: {type(e).__name__}: {e}") from e
    if not isinstance(can, Capabilities):
        raise TransportError(f"the capabilities of back end {cls.name!r} are {can!r}, no kvxfer.transport.Capabilities")
    return can


def release_of(cls: type) -> str:
    """Return the distribution that a class comes from, with its version."""
    names = importlib.metadata.packages_distributions().get(cls.__module__.partition(".")[0], [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names)) or "none"


def _host() -> str:
    import platform

    cpus = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.release()} {platform.machine()}, {cpus} CPUs, Python {platform.python_version()}"


def _cell(value: object) -> str:
    """Return a value as the text of a table cell."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{k}: {_cell(v)}" for k, v in value.items())
    elif isinstance(value, list):
        value = ", ".join(map(str, value))
    return " ".join(str(value).split()).replace("|", "\\|")
