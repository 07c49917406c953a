"""Engines for the tests of this folder, and what must be true of every one of them when a test is over.

vLLM is imported for tests alone: the process that hands them out to others would take seconds for it before those begin.
"""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

if TYPE_CHECKING:
    from tests.vllm.engine import PlayedEngine
    from tests.vllm.wire import Wire

require("vllm")

Make = Callable[..., "PlayedEngine"]
PATIENT = {"ask": "always", "ask_timeout": 10.0}
"""On a busy machine an answer takes its time, and loads look slower than these engines, which compute nothing."""


@pytest.fixture
def wire() -> Wire:
    from tests.vllm.wire import Wire

    return Wire()


@pytest.fixture
def overlap() -> bool:
    """Whether engines plan a step before they see the last one's result; a module may have it both ways."""
    return False


both_ways = pytest.fixture(params=[False, True], ids=["stepwise", "overlapped"])(lambda request: request.param)


@pytest.fixture
def make(wire: Wire, overlap: bool, tmp_path: pathlib.Path) -> Iterator[Make]:
    """Makes engines; afterwards none of them may remember a request or miss a block."""
    with played(wire, tmp_path, overlap) as build:
        yield build


@contextmanager
def played(wire: Wire, tmp_path: pathlib.Path, overlap: bool = False) -> Iterator[Make]:
    """The same for one example of many."""
    from vllm.config import KVTransferConfig

    from tests.vllm import engine as made

    engines: list[PlayedEngine] = []
    names = itertools.count()

    def build(
        groups: Any = made.FULL,
        *,
        role: str = "kv_both",
        policy: str = "recompute",
        introduced: bool = True,
        **more: Any,
    ) -> PlayedEngine:
        folder = tmp_path / str(next(names))
        folder.mkdir()
        transfer = more.pop("transfer", None) or KVTransferConfig(
            kv_connector="KVXferConnector",
            kv_connector_module_path="kvxfer_vllm",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={**PATIENT, "trust_sources": True, **more.pop("extra", {})},
        )
        if any(group.state and not group.aligned for group in groups):
            more["caching"] = False  # vLLM has no prefix caching where it keeps one state for a request
        ours = {key: more.pop(key) for key in made.vllm_config.__kwdefaults__ or () if key in more}
        engine = made.PlayedEngine(
            wire, made.vllm_config(folder, transfer, **ours), groups, **{"overlap": overlap, **more}
        )
        engines.append(engine)
        if introduced:
            engine.step()  # its workers introduce themselves
        return engine

    try:
        yield build
        wire.paused = False
        if engines:
            engines[0].run(*engines[1:])
        for engine in engines:
            engine.assert_clean()
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture(scope="session")
def models_table() -> Any:
    """The script that writes the tables of the page of models, where the families of models stand."""
    script = pathlib.Path(__file__).parents[2] / "docs/models_table.py"
    found = importlib.util.spec_from_file_location("models_table", script)
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
