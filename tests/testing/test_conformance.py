"""The suite finds what it is there to find: each mutant has one defect, and the clause for it must fail."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.geometry import HOST
from kvxfer.testing import ConformanceSuite, remote_participant
from kvxfer.testing.conformance.transfers import LAYOUTS
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport import Transport, registry
from tests.selection import CLAUSES, DEAR
from tests.testing.mutants import MUTANTS, SOUND, LeaksMemory, clean_up, complaint, complaint_of_sound


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


def test_freed_memory_hides_no_leak() -> None:
    """An allocator keeps what was freed below something that is in use, and would serve a leak from it."""
    for _ in range(2):  # glibc takes blocks of this size from its heap once one has been freed
        freed = [b"x" * (1300 << 10) for _ in range(100)]
        _above = [bytes(600) for _ in range(1000)]
        del freed
    assert complaint(LeaksMemory, "test_links_do_not_leak", {}) is not None


def test_pages_of_files_that_the_system_takes_away_hide_no_leak(tmp_path: Path) -> None:
    """As it does when it is short of memory: as many as leak."""
    (tmp_path / "library").write_bytes(bytes(64 << 20))

    class AndLosesPages(LeaksMemory):
        """Of whose file 1 MiB less is in memory after each link."""

        def connect(self, mine: bytes, theirs: bytes) -> int:
            if places:
                library.madvise(mmap.MADV_DONTNEED, places.pop(), 1 << 20)
            return super().connect(mine, theirs)

    with open(tmp_path / "library", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert not any(library[:: mmap.PAGESIZE])  # now they are in memory
        places = list(range(0, len(library), 1 << 20))
        assert complaint(AndLosesPages, "test_links_do_not_leak", {}) is not None


def test_memory_that_others_give_back_meanwhile_hides_no_leak() -> None:
    """An agent that ends late gives back its staging memory, say."""
    staging = [b"x" * (64 << 20)]

    class WhileAnotherEnds(LeaksMemory):
        kept: ClassVar[list[bytes]] = []

        def connect(self, mine: bytes, theirs: bytes) -> int:
            if len(self.kept) == 20:
                staging.clear()
            return super().connect(mine, theirs)

    assert complaint(WhileAnotherEnds, "test_links_do_not_leak", {}) is not None
    assert not staging


def test_a_process_that_does_not_stop_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in the kernel for a device, whom no signal reaches."""
    deaf = RemoteParticipant(registry.load("tcp"), {}, "deaf", HOST, lambda: None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(remote_participant, "REPLY_S", 0.0)
            patched.setattr(os, "kill", lambda pid, number: None)
            with pytest.raises(RuntimeError, match="'deaf' did not stand still within 0 s of SIGSTOP"):
                deaf.stop()
        deaf.stop()
        deaf.resume()
    finally:
        deaf.end()


def test_layouts_are_what_they_say() -> None:
    """Runs that overlapped at the destination would make the right answer depend on order."""
    for name, runs in LAYOUTS.items():
        order = np.argsort(runs.dst)
        ends = (runs.dst + runs.length)[order]
        starts, lengths = runs.dst[order], runs.length[order]
        full = lengths > 0
        assert (ends[full][:-1] <= starts[full][1:]).all(), name
