"""The suite finds what it is there to find: each of these back ends has one defect, and the clause for it must fail."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import PeerError
from kvxfer.testing import ConformanceSuite, FakeTransport
from kvxfer.testing.conformance import Part, TransferMode, World
from kvxfer.testing.conformance.transfers import LAYOUTS
from kvxfer.testing.fake import Endpoint
from kvxfer.transport import Batch, Completion, Fence


class TellsEarly(FakeTransport):
    """Completes a batch before its bytes have moved."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        for side in self.sides.values():
            side.posts[-1].due += 0.2
        self._completions.append(Completion(number))
        return number

    def finish(self, completion: Completion) -> None:
        pass


class TellsTwice(FakeTransport):
    def finish(self, completion: Completion) -> None:
        super().finish(completion)
        super().finish(completion)


class NeverTells(FakeTransport):
    def finish(self, completion: Completion) -> None:
        pass


class MovesTooMuch(FakeTransport):
    """Rounds lengths up to eight bytes."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        return super().submit(dataclasses.replace(batch, lengths=-(-batch.lengths // 8) * 8), after)


class ForgetsTheLastRun(FakeTransport):
    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        lengths = batch.lengths.copy()
        if len(lengths) > 1:
            lengths[-1] = 0
        return super().submit(dataclasses.replace(batch, lengths=lengths), after)


class BelievesAnyOffset(FakeTransport):
    """Takes offsets on trust, as most libraries do."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        inside = np.clip(batch.local_offsets, 0, 100), np.clip(batch.lengths, 0, 100)
        return super().submit(dataclasses.replace(batch, local_offsets=inside[0], lengths=inside[1]), after)


class IgnoresFences(FakeTransport):
    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        return super().submit(batch, None)


class ForgetsToAskTheFence(FakeTransport):
    """Waits for the fence, but does not wake its thread to look."""

    def _next_look(self) -> float | None:
        return None


class IgnoresAborts(FakeTransport):
    def abort(self, batch: int) -> None:
        pass


class SaysQuietTooSoon(FakeTransport):
    """Bytes of an aborted batch come late, although it was said to be quiet."""

    def abort(self, batch: int) -> None:
        for side in self.sides.values():
            for post in side.posts:
                if post.number == batch:
                    post.due += 0.1
                    self._completions.append(Completion(batch, PeerError(f"aborted, with {side.peer_agent}")))
                    self.wake()

    def finish(self, completion: Completion) -> None:
        pass


class NamesNobody(FakeTransport):
    def finish(self, completion: Completion) -> None:
        error = completion.error and PeerError("the transfer failed")
        super().finish(dataclasses.replace(completion, error=error))


class Spins(FakeTransport):
    """Its descriptor is always readable."""

    def poll(self) -> list[Completion]:
        done = super().poll()
        self.wake()
        return done


class LeaksMemory(FakeTransport):
    kept: ClassVar[list[bytes]] = []

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.kept.append(b"x" * (1 << 20))
        return super().connect(mine, theirs)


class LeaksDescriptors(FakeTransport):
    def close(self) -> None:
        if not self._closed:
            os.dup(0)
        super().close()


class RepeatsItsEndpoint(FakeTransport):
    def endpoint(self) -> bytes:
        self._once = getattr(self, "_once", None) or super().endpoint()
        return self._once


class KeepsEndpoints(FakeTransport):
    def withdraw(self, endpoint: bytes) -> None:
        self.__dict__.setdefault("kept", []).append(Endpoint.decode(endpoint))
        super().withdraw(endpoint)


class TakesAnyOption(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, {k: v for k, v in options.items() if k != "no_such_option"})


class TakesUsedMemoryBack(FakeTransport):
    def deregister(self, memory: int) -> None:
        self.memories.remove(memory)


class ClosesQuietly(FakeTransport):
    """Tells its peers nothing when it closes."""

    def close(self) -> None:
        for side in self.sides.values():
            side.other = None
            side.tokens = frozenset()
        for token in [t for t, owner in self._net._owners.items() if owner is self]:
            del self._net._owners[token]
        super().close()


WAYS = {"way": TransferMode.READ}
PART = {"part": Part(TransferMode.READ, "target")}

DEFECTS: list[tuple[type[FakeTransport], str, dict[str, Any]]] = [
    (TellsEarly, "test_complete_means_visible", WAYS),
    (TellsTwice, "test_back_and_forth", WAYS),
    (NeverTells, "test_back_and_forth", WAYS),
    (MovesTooMuch, "test_exactly_these_bytes", {**WAYS, "layout": "thousands of short runs"}),
    (ForgetsTheLastRun, "test_exactly_these_bytes", {**WAYS, "layout": "thousands of short runs"}),
    (BelievesAnyOffset, "test_offsets_outside_are_refused", WAYS),
    (IgnoresFences, "test_nothing_is_touched_before_the_fence", WAYS),
    (ForgetsToAskTheFence, "test_nothing_is_touched_before_the_fence", WAYS),
    (IgnoresAborts, "test_a_half_without_its_other_half_can_be_aborted", {"part": Part(TransferMode.SEND, "target")}),
    (SaysQuietTooSoon, "test_aborted_batches_end_and_stay_ended", WAYS),
    (NamesNobody, "test_disconnecting_in_flight", {"part": Part(TransferMode.SEND, "source"), "closer": "far"}),
    (Spins, "test_idle_costs_nothing", {}),
    (LeaksMemory, "test_nothing_leaks", {}),
    (LeaksMemory, "test_links_do_not_leak", {}),
    (LeaksDescriptors, "test_nothing_leaks", {}),
    (KeepsEndpoints, "test_a_withdrawn_endpoint_is_forgotten", WAYS),
    (RepeatsItsEndpoint, "test_endpoints_are_fresh_and_small", {}),
    (TakesAnyOption, "test_an_unknown_option_is_named", {}),
    (TakesUsedMemoryBack, "test_memory_in_use_cannot_be_deregistered", PART),
    (ClosesQuietly, "test_closing_in_flight", {"part": Part(TransferMode.SEND, "target"), "closer": "far"}),
]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    LeaksMemory.kept.clear()


@pytest.mark.parametrize("backend, clause, arguments", DEFECTS, ids=[f"{d[0].__name__}-{d[1]}" for d in DEFECTS])
def test_a_defect_is_found(backend: type[FakeTransport], clause: str, arguments: dict[str, Any]) -> None:
    assert _passes(FakeTransport, clause, arguments), "the clause fails for a good back end as well"
    assert not _passes(backend, clause, arguments)


def test_freed_memory_hides_no_leak() -> None:
    """An allocator keeps what was freed below something that is in use, and would serve a leak from it."""
    for _ in range(2):  # glibc takes blocks of this size from its heap once one has been freed
        freed = [b"x" * (1300 << 10) for _ in range(100)]
        _above = [bytes(600) for _ in range(1000)]
        del freed
    assert not _passes(LeaksMemory, "test_links_do_not_leak", {})


def _passes(transport: type[FakeTransport], clause: str, arguments: dict[str, Any]) -> bool:
    class Suite(ConformanceSuite):
        backend = transport
        patience_s = 1.5
        notice_s = 1.5
        rounds = 30
        __test__ = False

    suite = Suite()
    world = World(suite)
    try:
        getattr(suite, clause)(**({} if clause == "test_an_unknown_option_is_named" else {"world": world}), **arguments)
    except (AssertionError, pytest.fail.Exception):
        return False
    finally:
        with contextlib.suppress(Exception):  # a defect may show again here
            world.close()
    return True


def test_layouts_are_what_they_say() -> None:
    """Runs that overlapped at the destination would make the right answer depend on order."""
    for name, runs in LAYOUTS.items():
        order = np.argsort(runs.dst)
        ends = (runs.dst + runs.length)[order]
        starts, lengths = runs.dst[order], runs.length[order]
        full = lengths > 0
        assert (ends[full][:-1] <= starts[full][1:]).all(), name
