"""Keys are replaced while engines work, and no request fails; a key that is taken out ends what its holder has open."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.keyfile import KeyFile
from kvxfer.keyring import read_keys, write_keys
from kvxfer.security import make_key
from tests.control.conftest import SeededEngine, fetch, offered, until, works

Make = Callable[..., SeededEngine]
T = TransferId("own/1/x", 0)
LOOKS_S = 1.3
"""Seconds after which an engine has read its key file again."""


def goes_on(p: SeededEngine, d: SeededEngine) -> None:
    """Requests without a pause succeed until both have read their keys again."""
    end = time.monotonic() + LOOKS_S
    while time.monotonic() < end:
        works(p, d)


@pytest.mark.keep(1)
@pytest.mark.parametrize("backend, options", [("tcp", {"encrypt": True}), ("zmq", {"encrypt": True}), ("cma", {})])
def test_a_shared_key_is_replaced_under_load(
    engine: Make, tmp_path: Path, backend: str, options: dict[str, Any]
) -> None:
    """In the three steps of the page, each done at one engine after the other."""
    for name in ("p", "new"):
        make_key(tmp_path / name)
    old, new = read_keys(tmp_path / "p"), read_keys(tmp_path / "new")
    for name in ("d", "old"):
        shutil.copy(tmp_path / "p", tmp_path / name)
    p, d = (
        engine({"backend": backend, **options}, seed=seed, key_file=str(tmp_path / name))
        for seed, name in ((1, "p"), (None, "d"))
    )
    steps: list[Callable[[KeyFile], KeyFile]] = [
        lambda keys: keys.accept(new),
        lambda keys: keys.first(keys.find(new.keys[0].id)),
        lambda keys: keys.drop(keys.find(old.keys[0].id)),
    ]
    for step in steps:
        for name in "pd":
            write_keys(tmp_path / name, step(read_keys(tmp_path / name)))
            goes_on(p, d)
    late = engine({"backend": backend, **options}, key_file=str(tmp_path / "old"))
    late.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    assert late.over("req").outcome.kind is FailureKind.REFUSED


def test_an_engine_whose_key_is_taken_out_is_cut_off_and_the_others_go_on(engine: Make, tmp_path: Path) -> None:
    """Each engine has a key of its own, and accepts those of the others by their certificates alone."""
    names = ("p", "good", "bad")
    for name in names:
        make_key(tmp_path / name)
    public = {name: read_keys(tmp_path / name).keys[0].certificate for name in names}
    accepted = {"p": public["good"] + public["bad"], "good": public["p"], "bad": public["p"]}
    for name, certificates in accepted.items():
        with (tmp_path / name).open("a") as file:
            file.write("# others\n" + certificates)
    p, good, bad = (
        engine({"backend": "tcp"}, seed=seed, key_file=str(tmp_path / name))
        for seed, name in zip((1, None, None), names, strict=True)
    )
    for d in (good, bad):
        works(p, d)
    bad.agents[0].fetch(fetch(p.source, [10], 4, transfer=T, handle="held"))  # which nobody offers yet
    text = (tmp_path / "p").read_text()
    (tmp_path / "p.new").write_text(text.replace(public["bad"], ""))
    (tmp_path / "p.new").replace(tmp_path / "p")
    assert bad.over("held").outcome.kind is FailureKind.REFUSED
    p.agents[0].offer(offered([11], 4, transfer=T))
    bad.agents[0].fetch(fetch(p.source, [11], 4, transfer=T, handle="again"))
    assert bad.over("again").outcome.kind is FailureKind.REFUSED
    until(lambda: len(p.agents[0].links()) == 1)  # or something is still open
    goes_on(p, good)
