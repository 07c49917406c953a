"""What holds of the product's code as a whole: its imports, its names, and what may stand where."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NewType, get_args, get_type_hints

from kvxfer import Fetch, Offer, Released, TransferId
from kvxfer.protocol.messages import PartReady

ROOT = Path(__file__).parents[1]


@cache
def trees() -> dict[Path, ast.Module]:
    """The product's files, parsed by those who look at them alone: that takes seconds."""
    return {
        file: ast.parse(file.read_text())
        for pattern in ("kvxfer", "backends/*/kvxfer_*", "connectors/*/kvxfer_*", "benchmarks/kvxfer_bench", "testing")
        for top in sorted(ROOT.glob(pattern))
        for file in sorted(top.rglob("*.py"))
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Each can be understood by what lies below it."""
    names = {}
    for top in (ROOT / "kvxfer", *ROOT.glob("backends/*/kvxfer_*"), *ROOT.glob("connectors/*/kvxfer_*")):
        for file in top.rglob("*.py"):
            path = file.relative_to(top.parent).with_suffix("")
            names[".".join(path.parts).removesuffix(".__init__")] = file
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for node in ast.walk(trees().get(file) or ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                arrows[name] |= {alias.name for alias in node.names} & names.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in names:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                arrows[name] |= inner & names.keys() | ({node.module} if inner - names.keys() else set())
        arrows[name].discard(name)
    assert arrows["kvxfer.engine.scheduler"] >= {"kvxfer.schedule", "kvxfer.config"}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as e:
        raise AssertionError(" <- ".join(e.args[1])) from None


# --- kinds of devices ----------------------------------------------------------------------------------------------

DEVICES = "cuda|rocm|hip|xpu|hpu|npu|tpu|mps|mtia|neuron|rbln|xla|musa|gaudi"
VALUE = re.compile(rf"\S*(\b|_)({DEVICES})(\b|_)\S*|cpu")
NAME = re.compile(rf"(^|_)({DEVICES})(s?_|s?$)", re.I)
MAY_NAME_DEVICES = {
    "kvxfer/geometry/tensor.py": "the one definition of HOST, and protocols of other libraries",
    "kvxfer/backend/ucx.py": "UCX's own names of its transports, as in its settings and its log",
}


def test_no_kind_of_device_is_named_outside_memory() -> None:
    """So that any kind is as good as any other."""
    found = defaultdict(set)
    for file, tree in trees().items():
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith("kvxfer/") or path.startswith(("kvxfer/memory/", "kvxfer/testing/")):
            continue
        for node in ast.walk(tree):
            names = [getattr(node, key, None) for key in ("id", "attr", "name", "arg")]
            found[path] |= {name for name in names if isinstance(name, str) and NAME.search(name)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VALUE.fullmatch(node.value):
                found[path].add(node.value)
    assert {path for path, names in found.items() if names} == MAY_NAME_DEVICES.keys(), dict(found)


# --- names ---------------------------------------------------------------------------------------------------------

SHARED = {
    **dict.fromkeys(("Connection", "Endpoint", "Library", "Link", "Options"), "each back end has one"),
    **dict.fromkeys(("check", "decode", "encode", "load", "measure"), "called as a function of its module"),
    **dict.fromkeys(("compare", "Broken", "told_address", "Server"), "no module meets both"),
}
"""Public names that are defined more than once, and why."""


def test_no_two_public_names_are_alike() -> None:
    """But for names of back ends, of which nobody meets two at the same time."""
    where = defaultdict(list)
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                where[node.name].append(file.relative_to(ROOT).parts[:2])

    def apart(tops: list[tuple[str, ...]]) -> bool:
        return all(top[0] == "backends" for top in tops) and max(Counter(tops).values()) == 1

    alike = {name for name, tops in where.items() if len(tops) > 1 and not apart(tops)}
    assert alike <= SHARED.keys(), "rename one of each, or give a reason above"


def annotations(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name and the type of each annotated argument, field and variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            yield getattr(node.target, "id", getattr(node.target, "attr", "")), ast.unparse(node.annotation)


def test_generations_and_handles_have_types_of_their_own() -> None:
    """So that a type checker finds a generation where a number of tokens is meant, or one request's name where another's is."""
    bare = {"generation": "int", "handle": "str"}
    found = [(file, name, kind) for file, tree in trees().items() for name, kind in annotations(tree)]
    assert not [one for one in found if re.search(rf"\b{bare.get(one[1].strip('_'), '!')}\b", one[2])]
    fields = {TransferId: "base", Offer: "generation", Fetch: "handle", Released: "handle", PartReady: "generation"}
    for cls, field in fields.items():
        kind = get_type_hints(cls)[field]
        assert any(isinstance(one, NewType) for one in (kind, *get_args(kind))), f"{cls.__name__}.{field}"


def passes_on(method: ast.FunctionDef) -> bool:
    """Return whether a method does nothing but call another with the arguments that it was given."""
    body = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or not isinstance(body[0].value, ast.Call):
        return False
    call = body[0].value
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    taken = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    looks_up = not isinstance(call.func, ast.Attribute) or call.func.attr == "get"
    return not looks_up and {ast.unparse(one) for one in given} == taken


def test_no_method_of_an_engine_s_scheduler_only_passes_on() -> None:
    found = {
        f"{cls.name}.{method.name}"
        for file, tree in trees().items()
        if file.parent in (ROOT / "kvxfer/engine", ROOT / "kvxfer/schedule")
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and passes_on(method)
    }
    assert found == {"WorkerSide.fileno", "LoadOrCompute.loaded"}, "these are one of several that belong together"


def test_every_logger_is_one_that_escapes() -> None:
    named = {file.relative_to(ROOT).as_posix() for file in trees() if "getLogger(" in file.read_text()}
    configured = {"benchmarks/kvxfer_bench/agents.py", "connectors/vllm/kvxfer_vllm/settings.py"}
    assert named == configured | {"kvxfer/logs.py"}, "use kvxfer.logs.logger"


def test_nobody_catches_msgspec_s_errors_alone() -> None:
    """Where bytes come from a peer, each decoder catches all that it may raise; files of the operator's are not a peer's."""
    for file, tree in trees().items():
        if file.name not in ("settings.py", "hashing.py", "forging.py") and "benchmarks" not in file.parts:
            caught = [ast.unparse(n.type) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type]
            assert not [one for one in caught if "msgspec." in one], f"{file}: catch UNREADABLE"
