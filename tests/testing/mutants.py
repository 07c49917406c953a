"""Broken back ends: each is the reference back end with one defect, and stands beside the clause that must find it.

``python -m tests.testing.mutants`` (``make mutants``) tries them all and prints what found each.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

from kvxfer.testing import ConformanceSuite, FakeTransport
from kvxfer.testing.conformance import Part, TransferMode, World
from tests.testing.broken.ending import (
    AbortsAllOfALink,
    AbortsTheOldest,
    ClosesQuietly,
    IgnoresAborts,
    LeavesItsWritesBehind,
    NamesNobody,
    NeverGetsQuiet,
    NeverTells,
    SaysItInWords,
    SaysQuietedTooSoon,
    SaysQuietedTwice,
    SaysQuietTooSoon,
    SwapsResults,
    TellsTwice,
)
from tests.testing.broken.keeping import (
    ClaimsAGpu,
    HasEightLinks,
    KeepsEndpoints,
    LeaksDescriptors,
    LeaksMemory,
    LeaksWithEachBatch,
    LeavesAChild,
    LeavesAFile,
    RepeatsItsEndpoint,
    SealsItsMemory,
    ServesWhatWasGivenBack,
    SleepsInConnect,
    SleepsInPoll,
    Spins,
    SpinsAtFences,
    TakesAnyMemory,
    TakesAnyOption,
    TakesUsedMemoryBack,
    TakesWhoComesFirst,
    clean_up,
)
from tests.testing.broken.moving import (
    BelievesAnyOffset,
    CountsIn32Bits,
    CountsStreams,
    FailsAtRoundSizes,
    ForgetsTheLastRun,
    ForgetsToAskTheFence,
    IgnoresFences,
    MixesUpEqualBatches,
    MovesTooMuch,
    TakesTheFirst65536Runs,
    TellsEarly,
)
from tests.testing.sound import WithdrawsLate

__all__ = ["MUTANTS", "SOUND", "LeaksMemory", "clean_up", "complaint"]


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
    (ServesWhatWasGivenBack, "test_memory_given_back_is_out_of_reach", {"one_sided": TransferMode.READ}),
    (ServesWhatWasGivenBack, "test_memory_given_back_is_out_of_reach", {"one_sided": TransferMode.WRITE}),
    (SealsItsMemory, "test_memory_may_come_late", WAYS),
    (CountsStreams, "test_streams_may_have_gaps", {}),
    (ClaimsAGpu, "test_kinds_that_are_declared_are_moved", WAYS),
    (TakesWhoComesFirst, "test_an_endpoint_opens_its_own_link_only", {"part": Part(TransferMode.WRITE, "source")}),
    (TakesWhoComesFirst, "test_an_endpoint_opens_its_own_link_only", {"part": Part(TransferMode.SEND, "source")}),
    (NeverGetsQuiet, "test_what_ends_before_it_is_quiet_gets_quiet", WAYS),
    (SaysQuietedTwice, "test_what_ends_before_it_is_quiet_gets_quiet", WAYS),
    (SaysQuietedTooSoon, "test_aborted_batches_end_and_stay_ended", WAYS),
    (LeavesItsWritesBehind, "test_an_aborted_write_does_not_land_later", {}),
]

SOUND: list[tuple[type[FakeTransport], str, dict[str, Any]]] = [
    (WithdrawsLate, "test_a_withdrawn_endpoint_is_forgotten", WAYS)
]
"""Back ends of which a clause might think that they are broken, and must not."""


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
