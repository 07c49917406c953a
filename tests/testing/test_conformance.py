"""The suite finds what it is there to find: each mutant has one defect, and the clause for it must fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from kvxfer.errors import KvxferError
from kvxfer.geometry import HOST, Runs
from kvxfer.testing import ConformanceSuite, remote
from kvxfer.testing.conformance import TransferMode
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport import Transport, registry
from tests.backends.conftest import world_of
from tests.selection import CLAUSES, DEAR
from tests.testing.mutants import MUTANTS, SOUND, clean_up, complaint, complaint_of_sound


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    clean_up()


def each(mutants: list[tuple[type[Transport], str, dict[str, Any]]]) -> Any:
    """Run a test for each mutant; in `make test` not for those that only dear clauses find."""
    cases = [
        pytest.param(
            *mutant, id=f"{mutant[0].__name__}-{mutant[1]}", marks=[pytest.mark.slow] if dear(mutant[1]) else []
        )
        for mutant in mutants
    ]
    return pytest.mark.parametrize("backend, clause, arguments", cases)


def dear(clause: str) -> bool:
    return getattr(ConformanceSuite, clause).__module__.removeprefix(CLAUSES) in DEAR


@pytest.mark.keep(24)
@each(MUTANTS)
def test_a_defect_is_found(backend: type[Transport], clause: str, arguments: dict[str, Any]) -> None:
    """It is found as what it is: by the rule that it breaks, not because the suite ran out of patience."""
    assert complaint_of_sound(backend, clause, arguments) is None, "the clause fails for a good back end as well"
    found = complaint(backend, clause, arguments)
    assert found is not None and found.kind == "rule", found


@each(SOUND)
def test_what_the_contract_leaves_is_let_pass(backend: type[Transport], clause: str, arguments: dict[str, Any]) -> None:
    assert complaint(backend, clause, arguments) is None


def test_patience_lasts_while_the_host_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound back end was called broken: the clock had gone on by more than the patience, and nothing else."""
    with closing(world_of("kvxfer.testing.fake:FakeTransport", delay_s=0.1)) as world:
        a, b, link = world.pair()
        monkeypatch.setattr("kvxfer.testing.conformance.suite.thread_clock", count(0, 1000).__next__)
        world.move(link, TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))


def test_a_process_that_does_not_stop_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in the kernel for a device, whom no signal reaches."""
    deaf = RemoteParticipant(registry.load("tcp"), {}, "deaf", HOST, lambda: None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(remote, "STOP_S", 0.0)
            patched.setattr(os, "kill", lambda pid, number: None)
            with pytest.raises(KvxferError, match="the deaf did not stand still within 0 s of SIGSTOP"):
                deaf.stop()
        deaf.stop()
        deaf.resume()
    finally:
        deaf.end()
