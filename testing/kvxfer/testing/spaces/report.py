"""Run the suite of spaces in a process of its own, and report the result of each clause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvxfer.memory.registry import load, space_for
from kvxfer.memory.space import SPACE_CONTRACTS, Space
from kvxfer.testing.report import ConformanceReport, release_of, run_clauses
from kvxfer.testing.spaces.mutants import SPACE_MUTANTS, SpaceMutant

_FILE = Path(__file__).with_name("under_test.py")


def space_named(name: str) -> type[Space]:
    """Return the space for a kind of device, or this ``module:Class``.

    Raises:
        ArgumentError: The kind is unknown.
        ConfigError: It cannot be loaded.
    """
    return load(name, "under test") if ":" in name else space_for(name)


def run_space_suite(
    name: str, device: str, only: str = "", fail_fast: bool = False, mutant: str = ""
) -> ConformanceReport:
    """Run the suite against a space; pytest prints its progress on standard output.

    A clause in which the process dies or hangs is broken, and those after it are not tried.

    Raises:
        ArgumentError: The kind is unknown, or ``only`` is no expression.
        ConfigError: The space cannot be loaded.
    """
    cls = space_named(name)
    about: Mapping[str, Any] = {
        "space": name,
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "release": release_of(cls),
        "contract": cls.contract,
        "device": device,
        "suite contracts": sorted(SPACE_CONTRACTS),
    }
    return run_clauses(_FILE, about, {"space": name, "device": device, "mutant": mutant}, only, fail_fast)


def run_space_mutants(name: str, device: str) -> Iterator[tuple[type[SpaceMutant], ConformanceReport]]:
    """Break a space in each of the ways of ``kvxfer.testing.spaces.mutants``, and run the clause that must find it.

    The arguments and errors are the same as in ``run_space_suite``.
    """
    for mutant in SPACE_MUTANTS:
        yield mutant, run_space_suite(name, device, mutant.found_by, fail_fast=True, mutant=mutant.__name__)
