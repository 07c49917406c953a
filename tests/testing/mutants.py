"""Broken back ends: each is the reference back end with one defect, and stands beside the clause that must find it.

``python -m tests.testing.mutants`` (``make mutants``) tries them all and prints what found each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvxfer.errors import PeerError
from kvxfer.geometry.cache import Region
from kvxfer.testing import ConformanceSuite, FakeTransport
from kvxfer.testing.conformance import Part, TransferMode, World
from kvxfer.testing.fake import Endpoint
from kvxfer.transport import Batch, Completion, Fence, Verb

__all__ = ["MUTANTS", "LeaksMemory", "clean_up", "complaint"]


class TellsEarly(FakeTransport):
    """Completes a batch before its bytes have moved."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        for side in self.links.values():
            side.posts[-1].due += 0.2
        self.completions.append(Completion(number))
        return number

    def finish(self, completion: Completion) -> None:
        pass


class TellsTwice(FakeTransport):
    def finish(self, completion: Completion) -> None:
        super().finish(completion)
        self.completions.append(completion)


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
        for side in self.links.values():
            for post in side.posts:
                if post.number == batch:
                    post.due += 0.1
                    self.completions.append(Completion(batch, PeerError(f"aborted, with {side.peer_agent}")))
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
        if not self.closed:
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
        for side in self.links.values():
            side.other = None
            side.tokens = frozenset()
        for token in [t for t, owner in self._net._owners.items() if owner is self]:
            del self._net._owners[token]
        super().close()


class FailsAtRoundSizes(FakeTransport):
    """A slot that is filled to its last byte counts as too large."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        if batch.nbytes and batch.nbytes % (1 << 20) == 0:
            for side in self.links.values():
                for post in [p for p in side.posts if p.number == number]:
                    self._net.fail(post, "larger than a slot")
        return number


class TakesTheFirst65536Runs(FakeTransport):
    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        lengths = batch.lengths.copy()
        lengths[1 << 16 :] = 0
        return super().submit(dataclasses.replace(batch, lengths=lengths), after)


class CountsIn32Bits(FakeTransport):
    """Offsets and lengths pass through a field that is too short."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        return super().submit(
            dataclasses.replace(
                batch, lengths=batch.lengths % (1 << 31), local_offsets=batch.local_offsets % (1 << 32)
            ),
            after,
        )


class MixesUpEqualBatches(FakeTransport):
    """Above sixteen in flight, two receives of one length get each other's memory."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        posts = [p for s in self.links.values() for p in s.posts if p.batch.verb is Verb.RECV]
        if batch.verb is Verb.RECV and len(posts) > 16 and posts[-1].lengths.tolist() == posts[-2].lengths.tolist():
            posts[-1].addresses, posts[-2].addresses = posts[-2].addresses, posts[-1].addresses
        return number


class HasEightLinks(FakeTransport):
    def connect(self, mine: bytes, theirs: bytes) -> int:
        peer = super().connect(mine, theirs)
        if len(self.links) > 8:
            self._net.cut(self.links[peer], f"{self.links[peer].peer_agent!r}: too many links")
        return peer


class AbortsTheOldest(FakeTransport):
    def abort(self, batch: int) -> None:
        posts = [p.number for side in self.links.values() for p in side.posts if not p.withdrawn]
        super().abort(min(posts) if batch in posts else batch)


class AbortsAllOfALink(FakeTransport):
    """What it declares is that an abort ends one batch."""

    def abort(self, batch: int) -> None:
        for side in self.links.values():
            if any(p.number == batch for p in side.posts):
                for post in [p for p in side.posts if not p.withdrawn]:
                    super().abort(post.number)


class SwapsResults(FakeTransport):
    """Of two batches that end in one poll, each gets the other's result."""

    def poll(self) -> list[Completion]:
        done = super().poll()
        if len(done) > 1:
            done[0], done[-1] = (
                dataclasses.replace(done[0], error=done[-1].error),
                dataclasses.replace(done[-1], error=done[0].error),
            )
        return done


class SaysItInWords(FakeTransport):
    """Its errors are strings."""

    def finish(self, completion: Completion) -> None:
        error: Any = completion.error and str(completion.error)
        super().finish(dataclasses.replace(completion, error=error))


class TakesAnyMemory(FakeTransport):
    """Registers memory of kinds that it cannot move."""

    def register(self, regions: Sequence[Region]) -> int:
        return super().register([msgspec.structs.replace(r, device="cpu") for r in regions])


class SleepsInPoll(FakeTransport):
    def poll(self) -> list[Completion]:
        time.sleep(0.1)
        return super().poll()


class SleepsInConnect(FakeTransport):
    def connect(self, mine: bytes, theirs: bytes) -> int:
        time.sleep(0.2)
        return super().connect(mine, theirs)


class LeaksWithEachBatch(FakeTransport):
    kept: ClassVar[list[bytes]] = []

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self.kept.append(bytes(512))
        return super().submit(batch, after)


class LeavesAFile(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        descriptor, path = tempfile.mkstemp(prefix="kvxfer-mutant-", dir="/dev/shm")
        os.close(descriptor)
        LEFT.append(path)


class LeavesAChild(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        CHILDREN.append(subprocess.Popen(["sleep", "60"]))


class SpinsAtFences(FakeTransport):
    def _next_look(self) -> float | None:
        fenced = any(p.fenced for side in self.links.values() for p in side.posts)
        return time.monotonic() if fenced else super()._next_look()


LEFT: list[str] = []
"""Files that mutants have left behind."""
CHILDREN: list[subprocess.Popen[bytes]] = []
"""Processes that mutants have left behind."""


def clean_up() -> None:
    """Take away what mutants keep and leave."""
    LeaksMemory.kept.clear()
    LeaksWithEachBatch.kept.clear()
    while LEFT:
        os.unlink(LEFT.pop())
    while CHILDREN:
        child = CHILDREN.pop()
        child.kill()
        child.wait()


WAYS = {"way": TransferMode.READ}
PART = {"part": Part(TransferMode.READ, "target")}

MUTANTS: list[tuple[type[FakeTransport], str, dict[str, Any]]] = [
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
    (FailsAtRoundSizes, "test_round_sizes", WAYS),
    (TakesTheFirst65536Runs, "test_a_hundred_thousand_runs", WAYS),
    (CountsIn32Bits, "test_offsets_beyond_four_gigabytes", {}),
    (CountsIn32Bits, "test_a_run_longer_than_two_gigabytes", {}),
    (MixesUpEqualBatches, "test_hundreds_of_equal_batches_at_once", {"way": TransferMode.SEND}),
    (HasEightLinks, "test_dozens_of_links_at_once", WAYS),
    (AbortsTheOldest, "test_an_abort_ends_its_batch_and_no_other", PART),
    (AbortsAllOfALink, "test_an_abort_ends_its_batch_and_no_other", PART),
    (SwapsResults, "test_each_result_is_of_its_batch", PART),
    (SaysItInWords, "test_disconnecting_in_flight", {"part": Part(TransferMode.SEND, "source"), "closer": "near"}),
    (TakesAnyMemory, "test_kinds_that_are_not_declared_are_refused", {}),
    (SleepsInPoll, "test_no_call_blocks", {}),
    (SleepsInConnect, "test_no_call_blocks", {}),
    (LeaksWithEachBatch, "test_batches_do_not_leak", {}),
    (LeavesAFile, "test_nothing_is_left_in_the_system", {}),
    (LeavesAChild, "test_nothing_is_left_in_the_system", {}),
    (SpinsAtFences, "test_waiting_for_a_fence_does_not_spin", {}),
]


def complaint(transport: type[FakeTransport], clause: str, arguments: dict[str, Any]) -> str | None:
    """Run a clause of the suite against a back end; returns what it complains of, ``None`` if it passes."""

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
    except (AssertionError, pytest.fail.Exception) as e:
        return str(e).partition("\n")[0] or "an assertion"
    finally:
        with contextlib.suppress(Exception):  # a defect may show again here
            world.close()
    return None


def main() -> int:
    """Try all mutants; returns how many no clause has found."""
    survivors = 0
    for backend, clause, arguments in MUTANTS:
        found = complaint(backend, clause, arguments)
        clean_up()
        survivors += found is None
        print(
            f"{'SURVIVES' if found is None else 'found':8} {backend.__name__:24} {clause}: {found or '-'}", flush=True
        )
    print(f"{len(MUTANTS)} mutants, {survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
