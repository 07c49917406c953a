"""Keys are replaced while engines work, and no request fails; a key that is taken out ends what its holder has open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.keyring import read_keys, write_keys
from kvxfer.protocol.values import Ended
from kvxfer.security import make_key
from tests.control.conftest import until
from tests.control.node import Node, nodes

IN_FLIGHT = 4
CALM = {"transfer_timeout": 30.0, "peer_timeout": 10.0, "lease": 30.0}


def first(path: Path, of: Path) -> None:
    keys = read_keys(path)
    write_keys(path, keys.first(keys.find(read_keys(of).keys[0].id)))


def accept(path: Path, other: Path) -> None:
    write_keys(path, read_keys(path).accept(read_keys(other)))


def drop(path: Path, of: Path) -> None:
    keys = read_keys(path)
    write_keys(path, keys.drop(keys.find(read_keys(of).keys[0].id)))


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    with nodes(**CALM) as make:
        yield make


class Load:
    """Requests without a pause between two engines, on a thread of its own, until it is told to stop."""

    def __init__(self, p: Node, d: Node) -> None:
        self.p, self.d = p, d
        self.ends: list[Ended] = []
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            number = 0
            while not self._over.is_set():
                names = [TransferId(f"own/1/r{number + i}", 0) for i in range(IN_FLIGHT)]
                number += IN_FLIGHT
                self.p.several([("offer", t, [i], 4, 1, True) for i, t in enumerate(names)])
                self.d.several([("fetch", t, self.p.source, [i], 4) for i, t in enumerate(names)])
                self.ends += [self.d.settled(t) for t in names]
                self.p.forget(), self.d.forget()
        except BaseException as e:
            self.error = e

    def go_on(self, seconds: float) -> int:
        """Let it run for so long, and until requests have ended meanwhile; return how many."""
        before = len(self.ends)
        time.sleep(seconds)
        until(lambda: self.error is not None or len(self.ends) > before, 60.0)
        assert self.error is None, self.error
        return len(self.ends) - before

    def stop(self) -> list[Ended]:
        self._over.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.ends


@pytest.mark.keep(1)
@pytest.mark.parametrize("backend, options", [("tcp", {"encrypt": True}), ("zmq", {"encrypt": True}), ("cma", {})])
def test_a_shared_key_is_replaced_under_load(
    node: Callable[..., Node], tmp_path: Path, backend: str, options: dict[str, bool]
) -> None:
    """In the three steps of the page, each done at one engine after the other."""
    make_key(tmp_path / "new")
    files = [tmp_path / "p", tmp_path / "d"]
    make_key(files[0])
    files[1].write_text(files[0].read_text())
    (tmp_path / "old").write_text(files[0].read_text())
    p, d = (
        node(backend, seed=seed, backend_options=options, key_file=str(f))
        for seed, f in zip((1, 0), files, strict=True)
    )
    load = Load(p, d)
    assert load.go_on(0.5)
    for step in (
        lambda f: accept(f, tmp_path / "new"),
        lambda f: first(f, tmp_path / "new"),
        lambda f: drop(f, tmp_path / "old"),
    ):
        for file in files:
            step(file)
            assert load.go_on(1.3)
    failed = [end for end in load.stop() if not end.outcome.delivered]
    assert not failed, failed
    assert p.blocks([0, 1, 2, 3]) == d.blocks([0, 1, 2, 3])
    late = node(backend, seed=3, backend_options=options, key_file=str(tmp_path / "old"))
    t = TransferId("own/1/late", 0)
    p.offer(t, [5], 4, 1, True)
    late.fetch(t, p.source, [5], 4)
    assert late.settled(t).outcome.kind is FailureKind.REFUSED


def test_an_engine_whose_key_is_taken_out_is_cut_off_and_the_others_go_on(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    """Each engine has a key of its own, and accepts those of the others by their certificates alone."""
    names = ("p", "good", "bad")
    for name in names:
        make_key(tmp_path / name)
    public = {name: read_keys(tmp_path / name).keys[0].certificate for name in names}
    with (tmp_path / "p").open("a") as file:
        file.write("# the decode engines\n" + public["good"] + public["bad"])
    for name in ("good", "bad"):
        with (tmp_path / name).open("a") as file:
            file.write(public["p"])
    p, good, bad = (
        node("tcp", seed=seed, key_file=str(tmp_path / name)) for seed, name in zip((1, 0, 0), names, strict=True)
    )
    loads = [Load(p, good)]
    fetched = TransferId("own/1/before", 0)
    p.offer(fetched, [9], 4, 1, True)
    bad.fetch(fetched, p.source, [9], 4)
    assert bad.settled(fetched).outcome.delivered
    open_ = bad.vitals()[1]
    held = TransferId("own/1/held", 0)
    bad.fetch(held, p.source, [10], 4)  # which nobody offers yet
    text = (tmp_path / "p").read_text()
    (tmp_path / "p.new").write_text(text.replace(public["bad"], ""))
    (tmp_path / "p.new").replace(tmp_path / "p")
    end = bad.settled(held, timeout=40.0)
    assert end.outcome.kind is FailureKind.REFUSED, end
    again = TransferId("own/1/again", 0)
    p.offer(again, [11], 4, 1, True)
    bad.fetch(again, p.source, [11], 4)
    assert bad.settled(again).outcome.kind is FailureKind.REFUSED
    until(lambda: bad.vitals()[1] < open_)  # or something is still open
    assert loads[0].go_on(0.5)
    assert all(end.outcome.delivered for end in loads[0].stop())
