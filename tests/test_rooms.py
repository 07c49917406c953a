"""The rooms of an engine's scheduler: what they keep of requests and transfers stands on few records, and few tables find these.

A fact about a load is on its ``Load``, about an offering on its ``Offering``, about a question on its ``Ask``. These are on their
``Request``, and vLLM's facts about it on ``RequestFacts``. A table more is a second place in which the same life is kept.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE, SCHEDULE, VLLM = ROOT / "kvxfer/engine", ROOT / "kvxfer/schedule", ROOT / "connectors/vllm/kvxfer_vllm"
BELOW = [ROOT / "kvxfer" / name for name in ("ledger.py", "control/directory.py", "control/inquiries.py")]

CONTAINERS = {"dict", "set", "defaultdict", "OrderedDict", "Counter", "Recent", "IndexedExpiringMap", "Debts"}

BY_REQUEST_OR_TRANSFER = {
    "EngineRequests._requests": "the requests, by name",
    "FetchSchedule._transfers": "the transfers that loads want",
    "Offerings._transfers": "the offerings, by transfer",
    "Asks._sent": "the questions, by the name that each source was given",
    "Notices._over": "offers that are over, for a lease",
    "Notices._early": "offers that were declined before they were made",
    "Directory._awaited": "offers that engines wait for",
    "KnownRequests._last": "vLLM's requests",
    "Batches._by_id": "HTTP requests, by what their prompts have in common",
    "RequestLog.used": "offers that were loaded once, or made for an HTTP request",
}
"""The tables of an engine's scheduler that are keyed by a request or a transfer."""

BY_SOMETHING_ELSE = {
    "Asks._alike": "what is asked, and of whom",
    "Asks._silent": "address",
    "Asks._useless": "address",
    "Asks.counts": "who has named the sources",
    "BlockLedger._claims": "holder",
    "BlockLedger._filled": "block space",
    "BlockLedger._more": "block space",
    "BlockLedger._read": "block space",
    "BlockLedger._spaces": "group",
    "BlockPins._pinned": "holder",
    "Dispatch._begun": "rank",
    "Dispatch._channels": "rank",
    "Dispatch._facts": "name of a fact",
    "Dispatch._prepared": "engine",
    "FetchSchedule.working": "number of a fetch",
    "LinkPaces._links": "address",
    "PrefixAnswers._held": "connection",
    "PrefixAnswers._taken": "offering",
    "PrefixIndex._latest": "link of a chain",
    "PrefixIndex._names": "prefix",
    "PrefixPool._held": "block",
    "PrefixPool._holders": "prefix",
    "RequestCalls._descriptors": "rank",
    "SideChannel._sockets": "rank",
    "StepCost._seen": "size of a step",
    "Directory._beyond": "peer",
    "Directory._paused": "connection",
    "Directory._peers": "engine",
    "Adapters._contents": "adapter",
    "Adapters._first": "adapter",
    "Adapters._replaced": "adapter",
    "Adapters.heard": "rank",
    "Arrivals._warned": "adapter",
    "HintNotes._said": "key of a router's params",
    "LoadedAdapters.contents": "adapter",
    "Media._doubted": "content",
    "Media._known": "content",
    "PrefixNews._asked": "who has named the sources",
    "PrefixNews._told": "name of a count",
}

WORKERS = {"RankEnds", "WorkerSide", "WorkerChannel", "ComputedBands", "WorkerHooks"}
"""Classes of these rooms that live in a worker."""
TOLD = {"Gauges", "KVXferStats", "KVXferPromMetrics", "RankGauges", "RankStats"}
"""Classes that tell of what has been counted."""

LIFE = {"close"}
"""Verbs of Python's own protocols."""


def _classes(*files: Path) -> Iterator[ast.ClassDef]:
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield node


def _rooms() -> list[Path]:
    return [*sorted(ENGINE.glob("*.py")), *sorted(SCHEDULE.glob("*.py"))]


def _container(node: ast.expr | None) -> bool:
    """Return whether this is the type of a table, or makes one."""
    match node:
        case ast.Subscript(ast.Name(name)) | ast.Call(ast.Name(name)) | ast.Call(ast.Subscript(ast.Name(name))):
            return name in CONTAINERS
        case ast.BinOp(left, ast.BitOr(), right):
            return _container(left) or _container(right)
        case ast.Dict() | ast.Set():
            return True
    return False


def _tables(cls: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes of a class that are tables, as its ``__init__`` makes them."""
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
            continue
        for node in ast.walk(method):
            targets: list[tuple[ast.expr, ast.expr | None]] = []
            if isinstance(node, ast.AnnAssign):
                targets = [(node.target, node.annotation)]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                targets = list(zip(node.targets[0].elts, values, strict=False))
            elif isinstance(node, ast.Assign):
                targets = [(node.targets[0], node.value)]
            for target, made in targets:
                if isinstance(target, ast.Attribute) and _container(made):
                    yield f"{cls.name}.{target.attr}"


def test_the_tables_of_a_scheduler_are_few_and_known() -> None:
    files = [*_rooms(), *BELOW, *sorted(VLLM.rglob("*.py"))]
    found = {table for cls in _classes(*files) if cls.name not in WORKERS | TOLD for table in _tables(cls)}
    assert found == BY_REQUEST_OR_TRANSFER.keys() | BY_SOMETHING_ELSE.keys(), "say by what a new table is keyed"
    assert len(BY_REQUEST_OR_TRANSFER) <= 10


def test_no_verb_stands_in_more_than_three_classes() -> None:
    where = defaultdict(set)
    for cls in _classes(*_rooms()):
        for method in cls.body:
            if isinstance(method, ast.FunctionDef) and method.name[0] != "_" and method.name not in LIFE:
                where[method.name].add(cls.name)
    assert not {verb: classes for verb, classes in where.items() if len(classes) > 3}


def _passes_on(method: ast.FunctionDef) -> bool:
    """Return whether a method does nothing but call another with the arguments that it was given."""
    body = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or not isinstance(body[0].value, ast.Call):
        return False
    call = body[0].value
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    taken = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    if not isinstance(call.func, ast.Attribute) or call.func.attr == "get":  # which looks up, in a table of its own
        return False
    return {ast.unparse(one) for one in given} == taken


def test_no_method_only_passes_on() -> None:
    interface = {"WorkerSide.fileno", "LoadOrCompute.loaded"}  # which are one of several that belong together
    found = {
        f"{cls.name}.{method.name}"
        for cls in _classes(*_rooms())
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and _passes_on(method)
    }
    assert not found - interface, found - interface
