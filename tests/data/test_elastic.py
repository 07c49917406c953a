"""An elastic cache: its pages are unmapped and replaced under load, and every byte that moves is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from kvxfer.geometry import Region
from kvxfer.memory import with_elastic
from tests.conftest import require
from tests.data.elastic_cache import LAYOUTS, KeepsPages
from tests.data.elastic_engine import Setup, Two, two_here

BACKENDS = [("zmq", False), ("tcp", False), ("cma", False), ("nixl", True)]
"""And whether they stage. ``ucx`` in ``tests/backends``: it has a process of its own."""


@pytest.fixture
def room() -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def make(*args: Any, **more: Any) -> Two:
        made.append(two_here(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize(("backend", "staged"), BACKENDS)
def test_pages_come_and_go_under_load(room: Callable[..., Two], backend: str, staged: bool, layouts: Any) -> None:
    """Straight where a back end follows the pages, and through staging memory where its registration may keep them."""
    if backend in ("nixl", "cma"):
        require(backend)
    engines = room(backend, layouts)
    assert engines.move(300) == {"right": 300}
    assert engines.staged is staged


@pytest.mark.parametrize(("backend", "staged"), BACKENDS)
def test_between_two_processes(backend: str, staged: bool) -> None:
    """As above, where what one side exports is another process's memory."""
    if backend in ("nixl", "cma"):
        require(backend)
    with closing(Two(Setup(backend, "contiguous"), Setup(backend, "apart"))) as engines:
        assert engines.move(100) == {"right": 100}
        assert engines.staged is staged


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
@pytest.mark.parametrize("elastic", [(True, False), (False, True)], ids=["producer", "consumer"])
def test_either_side_has_it_staged(room: Callable[..., Two], verbs: list[str], elastic: tuple[bool, bool]) -> None:
    """A back end that keeps pages moves nothing straight if one of the two caches is elastic."""
    options: Mapping[str, Any] = {"verbs": verbs, "elastic": False}
    engines = room("kvxfer.testing.fake:FakeTransport", elastic=elastic, options=options)
    assert engines.move(20) == {"right": 20}
    assert engines.staged


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_a_kept_registration_is_caught(room: Callable[..., Two], layouts: Any) -> None:
    """What these tests are for: a back end that goes on with old pages delivers what was there before, with a success."""
    engines = room(f"{KeepsPages.__module__}:{KeepsPages.__name__}", layouts)
    assert engines.move(40)["wrong"]


def test_what_an_operator_says_counts() -> None:
    plain, elastic = Region(4096, 4096), Region(1 << 20, 4096, elastic=True)
    assert [r.elastic for r in with_elastic([plain, elastic])] == [False, True]
    assert [r.elastic for r in with_elastic([plain, elastic], True)] == [True, True]
    assert [r.elastic for r in with_elastic([plain, elastic], False)] == [False, False]
