"""Write ``docs/reference/cli.md`` from the commands: ``python docs/cli_page.py``. A test fails if the page is out of date.

Commands are those that the distributions of this checkout declare, so the page does not depend on what is installed.
"""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "reference" / "cli.md"

HEAD = """# Command line

The program `kvxfer` comes with the extra `kvxfer[cli]`. Most benchmarks come with `kvxfer[bench]`. Other distributions add commands of
their own through the entry-point groups `kvxfer.commands` and `kvxfer.benchmarks`; this page lists those of the
distributions in this repository. It is generated from the code by `python docs/cli_page.py`.
"""


def declared(group: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, distribution and function of every entry point of ``group`` in this checkout."""
    siblings = [
        file
        for at in ("backends/*", "benchmarks", "connectors/*", "testing")
        for file in sorted(ROOT.glob(f"{at}/pyproject.toml"))
    ]
    for file in (ROOT / "pyproject.toml", *siblings):
        project = tomllib.loads(file.read_text())["project"]
        for name, target in sorted(project.get("entry-points", {}).get(group, {}).items()):
            module, _, attribute = target.partition(":")
            yield name, project["name"], getattr(importlib.import_module(module), attribute)


def section(level: int, command: str, distribution: str, function: Any) -> str:
    """Return one command's heading, docstring, arguments and options."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    lines = [f"{'#' * level} `{command}`", "", inspect.cleandoc(function.__doc__ or "").replace("\b\n", ""), ""]
    if distribution != "kvxfer":
        lines += [f"From `{distribution}`.", ""]
    shown = [p for p in typer.main.get_command(app).params if p.name != "help"]
    if shown:
        lines += ["| option | default | meaning |", "|---|---|---|", *map(_row, shown), ""]
    return "\n".join(lines)


def _row(option: Any) -> str:
    name = (
        ", ".join(f"`{o}`" for o in (*option.opts, *option.secondary_opts))
        if option.param_type_name == "option"
        else f"`{option.name.upper()}`"
    )
    empty = option.required or option.default is None or callable(option.default)
    default = "" if empty or option.default is False else f"`{option.default}`"
    return f"| {name} | {'required' if option.required else default} | {(option.help or '').replace('|', '/')} |"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, distribution, function in sorted(declared("kvxfer.commands"), key=lambda entry: entry[0]):
        if not isinstance(function, typer.Typer):
            parts.append(section(2, f"kvxfer {name}", distribution, function))
    parts.append("## `kvxfer bench`\n\nMeasure what this machine and a back end can do.\n")
    for name, distribution, function in sorted(declared("kvxfer.benchmarks"), key=lambda entry: entry[0]):
        parts.append(section(3, f"kvxfer bench {name}", distribution, function))
    return "\n".join(parts).rstrip() + "\n"


WRITES = {PAGE: lambda _: page()}
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
