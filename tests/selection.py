"""Which of the collected cases a run is for: pytest's hooks, taken over by `tests/conftest.py`.

* A case marked ``gpu`` is for a machine with a CUDA device, one marked ``gpus`` for a machine with two. Of these, ``pytest -m gpu`` and
  ``pytest -m gpus`` leave out what is also ``slow``, whose time a machine with GPUs is too dear for, unless the expression names it.
* Of a function with many cases, a run with ``--keep K`` takes K: always the same ones, drawn by their names. It takes all of a table, that
  is where a case has no fixtures but pytest's own, and takes next to no time. ``pytestmark = pytest.mark.keep(N)`` says another number
  for a module, a class or a function; 0 is all of them.
* The modules that ``--first`` names begin, since one that takes long would keep a single core at the end.
* A clause of the conformance suite that measures or moves gigabytes counts as ``slow``, as do all histories of a suite but the first.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections import defaultdict
from ctypes import CDLL
from zlib import crc32

import pytest

CLAUSES = "kvxfer.testing.conformance."
DEAR = ("blocking", "resources", "volume")
"""The files of clauses that are dear: they find faults only where a back end has changed."""

PYTEST_S = ("self", "monkeypatch", "tmp_path", "caplog", "capsys", "capfd", "request")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep", type=int, default=0, metavar="K", help="run at most K cases of a function; 0 runs all")
    parser.addoption("--first", default="", metavar="FILES", help="begin with these files of tests, in this order")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not isinstance(item, pytest.Function) or not item.function.__module__.startswith(CLAUSES):
        return
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    if item.function.__module__.removeprefix(CLAUSES) in DEAR or chosen.get("seed"):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _fits(item, str(config.getoption("markexpr"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    taken = {item for several in cases.values() for item in _some(several, config.getoption("keep"))}
    if left := [item for item in items if item not in taken]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in taken]
    order = {file: at for at, file in enumerate(str(config.getoption("first")).split())}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def _fits(item: pytest.Item, wanted: str) -> bool:
    needs = 2 if item.get_closest_marker("gpus") else int(item.get_closest_marker("gpu") is not None)
    return not needs or (gpus() >= needs and ("slow" in wanted or not item.get_closest_marker("slow")))


def _some(cases: list[pytest.Item], keep: int) -> list[pytest.Item]:
    if keep and (mark := cases[0].get_closest_marker("keep")):
        keep = mark.args[0]
    elif _is_of_a_table(cases[0]):
        keep = 0
    return sorted(cases, key=lambda item: crc32(item.nodeid.encode()))[: keep or None]


def _is_of_a_table(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    return set(inspect.signature(item.function).parameters) <= {*item.callspec.params, *PYTEST_S}


@functools.cache
def gpus() -> int:
    """Return the number of CUDA devices; torch is asked only where there is a driver, since its import takes seconds."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return 0
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())
