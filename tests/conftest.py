"""What all tests share: how a test says that it needs something which may not be there.

`KVXFER_REQUIRE` (comma-separated names) lists what must be there: a test that needs one of those fails
instead of being skipped, so that a broken environment cannot look like a passing one.

Property tests try the same examples at each run, so that what has failed fails again; `--hypothesis-profile=default`
tries fresh ones, and `make fuzz` many more.
"""

import functools
import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from ctypes.util import find_library

import pytest
from hypothesis import Phase, settings

from kvxfer.errors import ConfigError
from kvxfer.protocol.transitions import IllegalTransition
from kvxfer.transport import registry
from tests import networks, system_libraries
from tests.selection import pytest_addoption, pytest_collection_modifyitems, pytest_itemcollected  # noqa: F401  hooks of pytest
from tests.sglang import overlay
from tests.vllm import kvcached, stacks

gc.disable()  # while test modules are imported: a third of the time that this takes with vLLM
settings.register_profile("same", derandomize=True, deadline=None)  # other work may hold a core for as long as it likes
settings.register_profile(
    "first", settings.get_profile("same"), phases=[Phase.explicit, Phase.generate]
)  # and look for no smaller one
settings.load_profile("same")


def require(name: str) -> None:
    """Skip the calling test (or module) if `name` is missing; fail if `KVXFER_REQUIRE` lists it.

    Args:
        name: a back end, which must be installed and usable here, or one of the packages `vllm`, `torch`, `transformers`, `atheris`,
            `kubernetes_validate`, `grafana_foundation_sdk`, and `sglang`, `kvcached` and `stacks` (Ray and Dynamo), of which the
            Python code in a folder of the environment will do; the program `vllm_router`; `networks`, which is that this
            user may play several hosts; or `system_libraries`, the distribution's RDMA, UCX and ZeroMQ.
    """
    lack = _lack(name)
    if lack is None:
        return
    if name in os.environ.get("KVXFER_REQUIRE", "").split(","):
        pytest.fail(f"KVXFER_REQUIRE lists {name}, but {lack}", pytrace=False)
    pytest.skip(lack, allow_module_level=True)


@functools.cache
def _lack(name: str) -> str | None:
    """Why `name` cannot be used here, or None if it can."""
    if name in ("vllm", "torch", "transformers", "atheris", "kubernetes_validate", "grafana_foundation_sdk"):
        return None if importlib.util.find_spec(name) else f"{name} is not installed"
    if name == "sglang":
        return overlay.lack()
    if name == "kvcached":
        return kvcached.lack()
    if name == "stacks":
        return stacks.lack()
    if name == "vllm_router":
        return None if stacks.router() else f"vllm-router is neither in {stacks.ROUTER} nor a program here"
    if name == "networks":
        return networks.lack()
    if name == "system_libraries":
        return system_libraries.lack()
    try:
        probe = registry.load(name).probe()
    except ConfigError as error:
        return str(error)
    return None if probe.usable else f"back end {name!r} is not usable here: {probe.reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Have the collector look at what tests make, and not at what has been imported."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries complain at the end that they leak


def pytest_report_header() -> str:
    """Which libraries of the system a back end's own copies may meet in this environment."""
    found = [name for name in ("efa", "ibverbs", "nl-route-3", "rdmacm", "ucp", "zmq") if find_library(name)]
    return f"libraries of the system: {', '.join(found) or 'none of those that back ends bring along'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the layers before this one took, where `tests/layers.py` runs them."""
    if took := os.environ.get("KVXFER_LAYERS_TOOK"):
        terminalreporter.section("seconds of the layers before this one", "-")
        terminalreporter.write_line(took)


class _IllegalTransitions(logging.Handler):
    """What an agent logs and survives: an event that a machine's table says never comes about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, IllegalTransition):
            self.seen.append(str(error))


class _Unprintable(logging.Handler):
    """What would be more than one line of a log, or an escape of a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (said := record.getMessage()).isprintable():
            self.seen.append(said)


@pytest.fixture(autouse=True)
def printable_lines() -> Iterator[None]:
    """Whatever is logged while a test runs is one printable line."""
    handler = _Unprintable()
    logging.getLogger("kvxfer").addHandler(handler)
    yield
    logging.getLogger("kvxfer").removeHandler(handler)
    assert not handler.seen, "log through kvxfer.logs.logger"


@pytest.fixture(autouse=True)
def illegal_transitions() -> Iterator[list[str]]:
    """Those of this process while the test runs, which fails for any; a test that brings one about takes it out."""
    handler = _IllegalTransitions()
    logging.getLogger("kvxfer").addHandler(handler)
    yield handler.seen
    logging.getLogger("kvxfer").removeHandler(handler)
    assert not handler.seen, "a machine was given what its table says never comes about"
