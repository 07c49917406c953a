"""`python -m tests.docs.lint`: what a reader would stumble over in the prose of the project, and pages that are not what the code says.

`make lint` runs it. Some words are kept out of all prose; habits are kept out of the pages, or counted against a budget for each page
where a few are fine. No sentence has to be read twice, and the pages have no more words than people read.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.docs.prose import ROOT, prose, sentences, template

MAX_WORDS = 48
"""Of a sentence; most have 25."""
WORDS = {
    r"\banew\b": "again",
    r"\bwho(m)?ever\b": "the peer that ..., anybody who ...",
    r"\bso many\b": "this number, or the name of the argument",
    r"\bof late\b": "recently",
    r"\bamid\b": "during",
    r"\bfor good\b": "for ever, or what does not come back",
    r"\bin turn\b": "one after the other",
    r",\s+since\b": "because, for a reason",
    r"\b(he|his|him)\b": "the peer, the process, the operator",
    r"\bhas its way\b": "takes precedence",
    r"\b(at the wrong door|costs the right one)\b": "say what happens, without a metaphor",
    r"\bneighbour's door\b": "say what happens, without a metaphor",
    r"\b(scheduler|worker) hal(f|ves)\b": "scheduler side, worker side",
    r"(?<!network )(?<!graphics )\bcards?\b": "descriptor, or network card",
    r"\b(a|an|the|its|their|each|every|no|any|early) wants?\b(?! (to|for)\b)": "fetch request",
    r"\bwants, drops\b": "fetch requests, declines",
}
"""What is kept out of all prose, as a pattern, and what to write instead."""


class Habit(NamedTuple):
    """A way of writing that costs readers time, what to write instead, and how often a page may have it in 1,000 words."""

    pattern: str
    instead: str
    budget: float = 0


HABITS = (
    Habit(
        r"computed (here|where it is)|\b(requests?|loads?|prompts?|the rest) (is|are) computed\b",
        "prefilled, recomputed",
    ),
    Habit(r"^What [^?]*[.:]$|\b(that|those) of\b", "name the thing", 2),
    Habit(r"^(the )?same\.?$|\blikewise\b|\bas (above|below|it says)\b", "repeat the words"),
    Habit(
        r"(^|[.,;:] |\b(and|but|if|that|because|when) )(nobody|nothing(?![:;,])|no (engine|thread|request|peer|one))\b",
        "a sentence with an actor",
        4,
    ),
    Habit(r"\b(told|tells?|telling|hears?|heard)\b", "report, notify, send, query, return", 3),
    Habit(r"\bby (`(tcp|zmq|nixl|ucx|nccl|cma|cuda_ipc)`|hand|another way)", "over, with, manually"),
    Habit(r"\bst(and|ands|ood)\b(?! (for|in)\b)(?![-,])", "is, is listed"),
    Habit(r"\bat once\b", "immediately, or in parallel"),
    Habit(
        r"\b(all the same|in vain|for want of|for ever|lately|meanwhile|beside)\b",
        "anyway, without success, recently, next to",
    ),
    Habit(r"\b(processes|servers|engines) of (transformers|vLLM|SGLang)\b", "vLLM servers"),
    Habit(r"\bmade-up\b|\b(a|this) (sort of|text)\b|\bstory\b", "random, kind, string, report"),
    Habit(r"(?<![\w/.'`-])[PD](?![\w/.&'`-])", "prefill, decode"),
    Habit(r"(\d (ms|s|us|[GM]i?B(/s)?|%).*){4}", "a table"),
    Habit(
        r"\b(since then|since that run|that was before|formerly|at that time)\b", "benchmarks/results has the history"
    ),
)
"""Of pages. Of the fifteen that a review found, one more is about paths of tests, below."""
EVIDENCE = (
    "docs/guarantees",
    "docs/models",
    "docs/states",
    "docs/content",
    "docs/architecture",
    "docs/protocol",
    "CONTRIBUTING",
)
"""Pages that may name tests: what is for authors of kvxfer, and tables with a column for it."""
LETTERS = ("docs/states", "docs/reference/cli", "CONTRIBUTING")
"""Pages that define P, D and other letters."""


MAX_LINE = 250
LOGGED = ("debug", "info", "warning", "error", "critical", "exception")
ADVISES = re.compile(r"[;.] (set|use|install|choose|give|run|raise|update|register|restart|switch) ", re.I)
PROGRAMS = (
    ("vllm", "engine/arg_utils.py", "config", "entrypoints"),
    ("sglang", "srt/arg_groups/fields", "test/server_fixtures"),
    ("vllm_router", "router_args.py", "launch_router.py"),
)
"""Packages that tests install, and where their arguments are."""
_SIDECAR = "llm-d-router, pkg/sidecar/proxy/options.go at 0186107d, read in November 2026"
QUOTED = {
    "connector": "what llm-d's sidecar had before 0.10",
    "kv-connector": _SIDECAR,
    "model-server-port": _SIDECAR,
    "p2p-connector-port": _SIDECAR,
    "secure-serving": _SIDECAR,
    "no-build-isolation": "pip",
    "pid": "docker, podman",
    "ipc": "docker, podman",
    "build": "docker, podman",
    "native": "py-spy",
}
"""Arguments of programs that no environment of this checkout has, and where they were read."""


def words() -> Iterator[str]:
    """Yield what breaks a rule for all prose."""
    for place, text in prose():
        for pattern, instead in WORDS.items():
            if re.search(pattern, text, re.I):
                yield f"{place}: {pattern!r} in {text!r:.200}: write {instead}"
        for sentence in sentences(text):
            if len(sentence.split()) > MAX_WORDS:
                yield f"{place}: more than {MAX_WORDS} words: {sentence}"
        if place.endswith("(cell)") and text.count(";") >= 3:
            yield f"{place}: a cell holds one fact; make it several rows, or a sentence below the table: {text}"


def habits() -> Iterator[str]:
    """Yield the habits of each page, where they are not allowed or more than their budget."""
    pages: dict[str, list[tuple[str, str]]] = {}
    for place, text in prose():
        page = place.partition(":")[0]
        if page.endswith(".md") and (page.startswith("docs/") or "/" not in page) and page != "CHANGELOG.md":
            pages.setdefault(page, []).append((place, text))
    for page, texts in pages.items():
        total = sum(len(text.split()) for _, text in texts)
        for habit in HABITS:
            if "prefill, decode" in habit.instead and page.startswith(LETTERS):
                continue
            flags = re.I if habit.instead != "prefill, decode" else 0
            found = [(at, s) for at, text in texts for s in sentences(text) if re.search(habit.pattern, s, flags)]
            if len(found) > (habit.budget * max(total, 1000) / 1000 if habit.budget else 0):
                yield from (
                    f"{at}: {s!r:.200}: write {habit.instead} (at most {habit.budget} in 1,000 words)"
                    for at, s in found
                )
        tests = re.findall(r"\btests/[\w/]+\.py", (ROOT / page).read_text())
        if tests and not page.startswith(EVIDENCE):
            yield f"{page}: names {', '.join(tests)}, which its readers have no use for"


def errors() -> Iterator[str]:
    """Yield errors and log lines that nobody reads to their end, and those that advise twice: in the text, and by their kind."""
    for folder in ("kvxfer", "backends", "connectors"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for call in ast.walk(ast.parse(file.read_text())):
                if not isinstance(call, ast.Call):
                    continue
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if not name.endswith(("Error", "Failure")) and name not in LOGGED:
                    continue
                said = [text for part in call.args for text in template(part)]
                more = [
                    text for keyword in call.keywords if keyword.arg == "advice" for text in template(keyword.value)
                ]
                at = f"{file.relative_to(ROOT)}:{call.lineno}"
                if len("; ".join(said + more)) >= MAX_LINE:
                    yield f"{at}: {MAX_LINE} characters or more: {said + more}"
                if name in ("TransportError", "PeerError", "Failure") and ADVISES.search(" ".join(said)):
                    yield f"{at}: pass as advice=... what {said} advises, or the advice of the kind follows it"


def arguments() -> Iterator[str]:
    """Yield command-line arguments in pages and examples that no program has: kvxfer's, vLLM's, SGLang's or a router's, as installed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.toml")]
    examples = [file for suffix in ("*.yaml", "*.md") for file in (ROOT / "examples").rglob(suffix)]
    found = [Path(where) / place for name, *places in PROGRAMS for where in _packages(name) for place in places]
    if len(found) < sum(len(places) for _, *places in PROGRAMS):  # an environment without engines says nothing of them
        return
    sources = [
        ROOT / "docs/reference/cli.md",
        *(file for at in found for file in (at.rglob("*.py") if at.is_dir() else [at])),
    ]
    known = "\n".join(file.read_text() for file in sources)
    for page in (*pages, *examples):
        for flag in sorted(set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page.read_text())) - QUOTED.keys()):
            name = flag.removeprefix("no-")
            if not re.search(rf"--{name}\b|^    {name.replace('-', '_')}\b", known, re.M):
                yield f"{page.relative_to(ROOT)}: --{flag} is an argument of no program that is installed; add its source to QUOTED"


def _packages(name: str) -> list[str]:
    """Return the folders of an installed package; SGLang and the router have environments of their own."""
    own = importlib.util.find_spec(name)
    if own and own.submodule_search_locations:
        return list(own.submodule_search_locations)
    return [
        str(path) for path in (*ROOT.glob(f".venv/*/{name}"), *ROOT.glob(f".venv-router/lib/*/site-packages/{name}"))
    ]


def script(name: str) -> ModuleType:
    """Return a program of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages() -> Iterator[str]:
    """Yield pages that are not what the code and the data say, and say if all of them have too many words."""
    for program in ("cli_page", "diagrams", "errors_page", "router_table", "snippets", "tables"):
        for page, write in script(program).WRITES.items():
            if page.read_text() != write(page.read_text()):
                yield f"{page.relative_to(ROOT)}: run python docs/{program}.py"
    tables = script("tables")
    marked = {name for page in tables.WRITES for _, name, _ in tables.MARKS.findall(page.read_text())}
    yield from (f"no page has the table {name!r} of docs/tables.py" for name in tables.names() - marked)
    for row in tables.RUNS:
        yield from (
            f"docs/runs.toml: {row['part']}: there is no {path}"
            for path in row.get("tests", ())
            if not (ROOT / path).exists()
        )
        if bool(row.get("ci")) != bool(row.get("tests")):
            yield f"docs/runs.toml: {row['part']}: what is in CI names its tests"
    count = script("words")
    if (total := sum(map(count.by_hand, count.pages()))) > count.MOST:
        yield f"README and docs have {total:,} words, and at most {count.MOST:,}: python docs/words.py"


def findings() -> list[str]:
    """Return all that is to be mended, one line each."""
    return [*words(), *habits(), *errors(), *arguments(), *pages()]


if __name__ == "__main__":
    found = findings()
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
