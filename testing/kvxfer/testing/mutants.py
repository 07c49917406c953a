"""Faults that the conformance suite must find, around any back end: ``kvxfer conformance NAME --mutants`` tries them all.

``{"backend": "kvxfer.testing.mutants:TellsTwice", "backend_options": {"inner": "mine", "inner_options": {}}}``

Each has one defect, and names in ``found_by`` the clause that must find it. Those that spoil bytes do so in host memory only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from kvxfer.errors import PeerError
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.mutant import ARRIVING, Mutant, Spoiling
from kvxfer.transport.contract import Batch, Completion, Fence, PlanBatch, Quieted, Verb

__all__ = ["MUTANTS"]

GIB = 1 << 30
NOTHING = Batch(Verb.WRITE, 0, 0, np.zeros(0, np.int64), np.zeros(0, np.int64))


class FlipsAfterAGigabyte(Spoiling):
    """Inverts a byte of each batch once a link has moved 1 GiB."""

    found_by = "test_gigabytes_over_one_link"

    def bad(self, batch: Batch) -> bool:
        self.moved = self.__dict__.get("moved", Counter())
        self.moved[batch.peer] += batch.nbytes
        return bool(self.moved[batch.peer] > GIB)


class SpoilsEachThousandthBatch(Spoiling):
    found_by = "test_batches_do_not_leak"
    count = 0

    def bad(self, batch: Batch) -> bool:
        self.count += 1
        return self.count % 1000 == 0


class SpoilsAfterIdleTime(Spoiling):
    """Inverts a byte of what comes first after a second without a batch."""

    found_by = "test_idle_costs_nothing"
    last = float("inf")

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        self.idle, self.last = time.monotonic() - self.last > 1, time.monotonic()
        return super().submit(batch, after)

    def bad(self, batch: Batch) -> bool:
        return self.idle


class SpoilsTheFiftiethLink(Spoiling):
    found_by = "test_links_do_not_leak"
    links = 0

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.links += 1
        return super().connect(mine, theirs)

    def bad(self, batch: Batch) -> bool:
        return self.links > 50


class ForgetsTheLastRun(Mutant):
    found_by = "test_exactly_these_bytes"

    def changed(self, batch: Batch) -> Batch:
        lengths = np.array(batch.lengths)
        lengths[1:][-1:] = 0
        return replace(batch, lengths=lengths)


class DropsTheLastByte(Mutant):
    """Of runs of 1 MiB and more."""

    found_by = "test_round_sizes"

    def changed(self, batch: Batch) -> Batch:
        return replace(batch, lengths=batch.lengths - (batch.lengths >= 1 << 20))


class SwapsEqualRuns(Mutant):
    """Two runs of one length get each other's place on this side, unless they are sent."""

    found_by = "test_exactly_these_bytes"

    def changed(self, batch: Batch) -> Batch:
        places = np.array(batch.local_offsets)
        if batch.verb is not Verb.SEND and len(places) > 1 and batch.lengths[0] == batch.lengths[1]:
            places[[0, 1]] = places[[1, 0]]
        return replace(batch, local_offsets=places)


class CountsIn32Bits(Mutant):
    """Offsets of this side pass through a field that is too short."""

    found_by = "test_offsets_beyond_four_gigabytes"

    def changed(self, batch: Batch) -> Batch:
        return replace(batch, local_offsets=batch.local_offsets % (1 << 32))


class IgnoresFences(Mutant):
    found_by = "test_nothing_is_touched_before_the_fence"

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        return super().submit(batch, None)


class TellsEarly(Mutant):
    """Says that a batch has succeeded at the first poll after it was submitted, and nothing later."""

    found_by = "test_nothing_is_touched_before_the_fence"

    def poll(self) -> list[Completion | Quieted]:
        self.told: set[int] = self.__dict__.get("told", set())
        early = self.batches.keys() - self.told
        self.told |= early
        return [*map(Completion, early), *super().poll()]

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        return []


class TellsOfWhatIsToCome(Mutant):
    """Tells of all bytes of a batch as soon as it has it."""

    found_by = "test_what_is_told_has_moved"

    def bytes_moved(self, batch: int) -> int:
        return self.batches[batch].nbytes if batch in self.batches else 0


class ForgetsWhatHasMoved(Mutant):
    """Tells of bytes only every other time."""

    found_by = "test_what_is_told_has_moved"
    asked = 0

    def bytes_moved(self, batch: int) -> int:
        self.asked += 1
        return super().bytes_moved(batch) + self.asked % 2


class ResumesOnTheNextLink(Mutant):
    """What is left of an aborted batch goes on with the next link: its first bytes are zeroed here, or written again there."""

    found_by = "test_any_history"

    def abort(self, batch: int) -> None:
        self.__dict__.setdefault("left", []).extend([self.batches[batch]] if batch in self.batches else [])
        super().abort(batch)

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        for old in self.__dict__.get("resuming", []):
            if old.verb in ARRIVING and old.local in self.memories:
                self.spoil(old)
            elif old.verb is Verb.WRITE and old.local in self.memories:
                self.own = {*self.__dict__.get("own", ()), self.inner.submit(replace(old, peer=batch.peer))}
        self.resuming: list[Batch] = []
        return super().submit(batch, after)

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.resuming = [*self.__dict__.get("resuming", []), *self.__dict__.pop("left", [])]
        return super().connect(mine, theirs)

    def poll(self) -> list[Completion | Quieted]:
        own = self.__dict__.get("own", ())
        self.batches.update((number, NOTHING) for number in own)
        return [word for word in super().poll() if word.batch not in own]


class LandsAfterTheAbort(Mutant):
    """Of the first batch that fails here, a byte changes 0.1 s after the end."""

    found_by = "test_aborted_batches_end_and_stay_ended"
    late = False

    def poll(self) -> list[Completion | Quieted]:
        due: list[tuple[float, Batch]] = self.__dict__.setdefault("due", [])
        while due and due[0][0] < thread_clock():
            batch = due.pop(0)[1]
            if batch.local in self.memories:
                self.spoil(batch)
        return super().poll()

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        if word.error is not None and not self.late:  # one alone: two on the same byte would leave it as it was
            self.late = True
            self.__dict__.setdefault("due", []).append((thread_clock() + 0.1, batch))
        return [word]

    def fileno(self) -> int | None:
        return None

    @property
    def poll_interval_s(self) -> tuple[float, float]:
        return 0.01, 0.01


class TellsTwice(Mutant):
    found_by = "test_every_batch_ends_once"

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        return [word, word]


class NeverTells(Mutant):
    found_by = "test_every_batch_ends_once"

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        return []


class IgnoresAborts(Mutant):
    found_by = "test_an_abort_ends_its_batch_and_no_other"

    def abort(self, batch: int) -> None:
        pass


class AbortsTheOldest(Mutant):
    found_by = "test_an_abort_ends_its_batch_and_no_other"

    def abort(self, batch: int) -> None:
        super().abort(min(self.batches) if batch in self.batches else batch)


class NamesNobody(Mutant):
    found_by = "test_any_history"

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        return [replace(word, error=word.error and PeerError("the transfer has failed"))]


class CallsFailuresSuccess(Mutant):
    found_by = "test_the_peer_is_killed"

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        return [replace(word, error=None)]


class LeaksMemory(Mutant):
    found_by = "test_links_do_not_leak"

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.__dict__.setdefault("kept", []).append(b"x" * (1 << 20))
        return super().connect(mine, theirs)


class LeaksDescriptors(Mutant):
    """One with each link."""

    found_by = "test_links_do_not_leak"

    def disconnect(self, peer: int) -> None:
        self.__dict__.setdefault("kept", []).append(os.dup(0))
        super().disconnect(peer)

    def close(self) -> None:
        for descriptor in self.__dict__.pop("kept", []):
            os.close(descriptor)
        super().close()


class LeaksThreads(Mutant):
    """One with each link, until it is closed."""

    found_by = "test_links_do_not_leak"

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.closed: threading.Event = self.__dict__.get("closed", threading.Event())
        threading.Thread(target=self.closed.wait, daemon=True).start()
        return super().connect(mine, theirs)

    def close(self) -> None:
        self.__dict__.get("closed", threading.Event()).set()
        super().close()


class Spins(Mutant):
    """Wants to be polled all the time."""

    found_by = "test_idle_costs_nothing"

    @property
    def poll_interval_s(self) -> tuple[float, float]:
        return 1e-5, 1e-5

    def fileno(self) -> int | None:
        return None


class SleepsInPoll(Mutant):
    found_by = "test_no_call_blocks"

    def poll(self) -> list[Completion | Quieted]:
        time.sleep(1.2 * self.capabilities.may_block_s)
        return super().poll()


class ForgetsToWake(Mutant):
    """Its descriptor is never readable."""

    found_by = "test_every_batch_ends_once"

    def fileno(self) -> int | None:
        self.silent: tuple[int, int] = self.__dict__.get("silent") or os.pipe()
        return self.silent[0]

    def close(self) -> None:
        for descriptor in self.__dict__.pop("silent", ()):
            os.close(descriptor)
        super().close()


class ServesWhatWasGivenBack(Mutant):
    found_by = "test_deregistered_memory_is_forgotten"

    def deregister(self, memory: int) -> None:
        pass


class LendsEverything(Mutant):
    found_by = "test_memory_that_was_not_lent_is_out_of_reach"

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        return self.endpoint()


class RepeatsItsEndpoint(Mutant):
    found_by = "test_endpoints_are_fresh_and_small"

    def endpoint(self) -> bytes:
        self.once: bytes = self.__dict__.get("once") or super().endpoint()
        return self.once


MUTANTS: tuple[type[Mutant], ...] = tuple(
    kind for kind in list(vars().values()) if isinstance(kind, type) and issubclass(kind, Mutant) and kind.found_by
)
"""All of them."""
