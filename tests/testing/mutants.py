"""Broken back ends: each is the reference back end with one defect, and stands beside the clause that must find it.

``python -m tests.testing.mutants`` (``make mutants``) tries them all and prints what found each.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections import Counter
from typing import Any, ClassVar, Literal, NamedTuple

import pytest

from kvxfer.testing import FakeTransport, Network
from kvxfer.testing.conformance import OutOfPatience, Part, TransferMode, World
from kvxfer.testing.mutant import Mutant
from kvxfer.testing.mutants import (
    AbortsTheOldest,
    DropsTheLastByte,
    FlipsAfterAGigabyte,
    ForgetsTheLastRun,
    ForgetsWhatHasMoved,
    IgnoresAborts,
    IgnoresFences,
    LendsEverything,
    NamesNobody,
    NeverTells,
    RepeatsItsEndpoint,
    ResumesOnTheNextLink,
    SpoilsAfterIdleTime,
    SpoilsEachThousandthBatch,
    SpoilsTheFiftiethLink,
    SwapsEqualRuns,
    TellsOfWhatIsToCome,
    TellsTwice,
)
from kvxfer.transport import Transport
from tests.testing.broken.admitting import ComparesFourBytes, ComparesNothing
from tests.testing.broken.blocking import (
    BlocksNowAndThen,
    BlocksOnLargeBatches,
    BlocksWithStoppedPeers,
    BurnsInSubmit,
    SleepsInConnect,
    SleepsInPoll,
    SleepsInRegister,
)
from tests.testing.broken.ending import (
    AbortsAllOfALink,
    ClosesQuietly,
    LeavesItsWritesBehind,
    NeverGetsQuiet,
    SaysItInWords,
    SaysQuietedTooSoon,
    SaysQuietedTwice,
    SaysQuietTooSoon,
    SwapsResults,
)
from tests.testing.broken.keeping import (
    ClaimsAGpu,
    HasEightLinks,
    KeepsEndpoints,
    KeepsWhatHasEnded,
    KeepsWhatWasAborted,
    KeepsWhatWasNeverMade,
    LeaksDescriptors,
    LeaksMappedMemory,
    LeaksMemory,
    LeaksOnAbort,
    LeaksWithEachBatch,
    LeavesAChild,
    LeavesAFile,
    SealsItsMemory,
    ServesWhatWasGivenBack,
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
    CountsIn31Bits,
    CountsIn32Bits,
    CountsStreams,
    FailsAtRoundSizes,
    ForgetsTheFencesOfOthers,
    ForgetsToAskTheFence,
    LosesAFenceBetweenTwoQuestions,
    MixesUpEqualBatches,
    MovesTooMuch,
    TakesTheFirst65536Runs,
    TellsEarly,
)
from tests.testing.broken.naming import BelievesAnyAddress, OpensAnyFile, SendsToAnyPort
from tests.testing.on_fake import OnFake
from tests.testing.sound import GetsQuietLater, HeldUpOnce, WithdrawsLate

__all__ = ["MUTANTS", "SOUND", "LeaksMemory", "clean_up", "complaint", "complaint_of_sound"]


WAYS = {"way": TransferMode.READ}
PART = {"part": Part(TransferMode.READ, "target")}

MUTANTS: list[tuple[type[Transport], str, dict[str, Any]]] = [
    (TellsEarly, "test_complete_means_visible", WAYS),
    (TellsTwice, "test_every_batch_ends_once", {**WAYS, "layout": "one odd run"}),
    (NeverTells, "test_every_batch_ends_once", {**WAYS, "layout": "one odd run"}),
    (MovesTooMuch, "test_exactly_these_bytes", {**WAYS, "layout": "thousands of short runs"}),
    (ForgetsTheLastRun, "test_exactly_these_bytes", {**WAYS, "layout": "thousands of short runs"}),
    (BelievesAnyOffset, "test_offsets_outside_are_refused", WAYS),
    (IgnoresFences, "test_nothing_is_touched_before_the_fence", WAYS),
    (ForgetsToAskTheFence, "test_nothing_is_touched_before_the_fence", WAYS),
    *((ForgetsTheFencesOfOthers, "test_nothing_is_touched_before_the_fence", {"way": way}) for way in TransferMode),
    (LosesAFenceBetweenTwoQuestions, "test_a_fence_passes_between_two_questions", PART),
    (IgnoresAborts, "test_a_half_without_its_other_half_can_be_aborted", {"part": Part(TransferMode.SEND, "target")}),
    (SaysQuietTooSoon, "test_aborted_batches_end_and_stay_ended", WAYS),
    (NamesNobody, "test_disconnecting_in_flight", {"part": Part(TransferMode.SEND, "source"), "closer": "far"}),
    (Spins, "test_idle_costs_nothing", {}),
    (LeaksMemory, "test_nothing_leaks", {}),
    (LeaksMemory, "test_links_do_not_leak", {}),
    (LeaksDescriptors, "test_nothing_leaks", {}),
    (KeepsWhatHasEnded, "test_links_that_have_ended_do_not_leak", {"end": "peer closed"}),
    (KeepsWhatWasAborted, "test_links_that_have_ended_do_not_leak", {"end": "aborted"}),
    (KeepsWhatWasNeverMade, "test_links_that_have_ended_do_not_leak", {"end": "never made"}),
    (KeepsEndpoints, "test_a_withdrawn_endpoint_is_forgotten", WAYS),
    (RepeatsItsEndpoint, "test_endpoints_are_fresh_and_small", {}),
    (TakesAnyOption, "test_an_unknown_option_is_named", {}),
    (TakesUsedMemoryBack, "test_memory_in_use_cannot_be_deregistered", PART),
    (ClosesQuietly, "test_closing_in_flight", {"part": Part(TransferMode.SEND, "target"), "closer": "far"}),
    (FailsAtRoundSizes, "test_round_sizes", WAYS),
    (TakesTheFirst65536Runs, "test_a_hundred_thousand_runs", WAYS),
    (CountsIn32Bits, "test_offsets_beyond_four_gigabytes", {}),
    (CountsIn32Bits, "test_a_run_longer_than_four_gigabytes", {}),
    (CountsIn31Bits, "test_a_run_longer_than_four_gigabytes", {}),
    (MixesUpEqualBatches, "test_hundreds_of_equal_batches_at_once", {"way": TransferMode.SEND}),
    (HasEightLinks, "test_dozens_of_links_at_once", WAYS),
    (AbortsTheOldest, "test_an_abort_ends_its_batch_and_no_other", PART),
    (AbortsAllOfALink, "test_an_abort_ends_its_batch_and_no_other", PART),
    (SwapsResults, "test_each_result_is_of_its_batch", PART),
    (SaysItInWords, "test_disconnecting_in_flight", {"part": Part(TransferMode.SEND, "source"), "closer": "near"}),
    (TakesAnyMemory, "test_kinds_that_are_not_declared_are_refused", {}),
    (SleepsInPoll, "test_no_call_blocks", {}),
    (SleepsInConnect, "test_no_call_blocks", {}),
    (SleepsInRegister, "test_no_call_blocks", {}),
    (BurnsInSubmit, "test_no_call_blocks", {}),
    (BlocksOnLargeBatches, "test_no_call_blocks", {}),
    (BlocksNowAndThen, "test_no_call_blocks", {}),
    (BlocksWithStoppedPeers, "test_no_call_blocks_when_the_peer_has_stopped", {}),
    (LeaksWithEachBatch, "test_batches_do_not_leak", {}),
    (LeaksMappedMemory, "test_batches_do_not_leak", {}),
    (LeaksOnAbort, "test_batches_do_not_leak", {}),
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
    (BelievesAnyAddress, "test_forged_endpoints_reach_nothing", {"way": TransferMode.READ}),
    (BelievesAnyAddress, "test_forged_endpoints_reach_nothing", {"way": TransferMode.WRITE}),
    (OpensAnyFile, "test_forged_endpoints_reach_nothing", {"way": TransferMode.READ}),
    *((mutant, "test_strangers_move_nothing", WAYS) for mutant in (ComparesFourBytes, ComparesNothing)),
    (SendsToAnyPort, "test_memory_is_sent_to_the_peer_only", {"way": TransferMode.WRITE}),
    (SendsToAnyPort, "test_memory_is_sent_to_the_peer_only", {"way": TransferMode.SEND}),
    *((ResumesOnTheNextLink, "test_any_history", {"way": way, "seed": 0}) for way in TransferMode),
    *((FlipsAfterAGigabyte, "test_gigabytes_over_one_link", {"way": way}) for way in TransferMode),
    (NamesNobody, "test_any_history", {**WAYS, "seed": 0}),
    (SpoilsEachThousandthBatch, "test_batches_do_not_leak", {}),
    (SpoilsTheFiftiethLink, "test_links_do_not_leak", {}),
    (SpoilsAfterIdleTime, "test_idle_costs_nothing", {}),
    (DropsTheLastByte, "test_round_sizes", WAYS),
    (SwapsEqualRuns, "test_exactly_these_bytes", {**WAYS, "layout": "equal runs"}),
    *((mutant, mutant.found_by, WAYS) for mutant in (TellsOfWhatIsToCome, ForgetsWhatHasMoved)),
    (LendsEverything, "test_memory_that_was_not_lent_is_out_of_reach", {"one_sided": TransferMode.READ}),
    (LendsEverything, "test_memory_that_was_not_lent_is_out_of_reach", {"one_sided": TransferMode.WRITE}),
]

SOUND: list[tuple[type[Transport], str, dict[str, Any]]] = [
    (WithdrawsLate, "test_a_withdrawn_endpoint_is_forgotten", WAYS),
    (HeldUpOnce, "test_no_call_blocks", {}),
]
"""Back ends of which a clause might think that they are broken, and must not."""


class Complaint(NamedTuple):
    """What a clause has against a back end: that it breaks the ``rule``, or only that ``patience`` ran out."""

    kind: Literal["rule", "patience"]
    text: str


def complaint(transport: type[Transport], clause: str, arguments: dict[str, Any]) -> Complaint | None:
    """Run a clause of the suite against a back end; returns what it complains of, ``None`` if it passes, or leaves the clause out."""

    here = Network()
    around = {"inner": "kvxfer.testing:FakeTransport", "inner_options": {"network": here}}

    class Suite(OnFake):
        backend = transport
        network = here
        options: ClassVar[dict[str, Any]] = around if issubclass(transport, Mutant) else {"network": here}
        patience_s = 1.5
        notice_s = 1.5
        rounds = 60 if issubclass(transport, Mutant) else 30
        gigabytes = True
        __test__ = False

    suite = Suite()
    world = World(suite)
    try:
        getattr(suite, clause)(**({} if clause == "test_an_unknown_option_is_named" else {"world": world}), **arguments)
    except (AssertionError, pytest.fail.Exception) as e:
        text = textwrap.shorten(str(e).partition("\n")[0], 160, placeholder=" ...") or "an assertion"
        return Complaint("patience" if isinstance(e, OutOfPatience) else "rule", text)
    except pytest.skip.Exception:
        pass
    finally:
        with contextlib.suppress(Exception):  # a defect may show again here
            world.close()
    return None


_of_sound: dict[str, Complaint | None] = {}


def complaint_of_sound(transport: type[Transport], clause: str, arguments: dict[str, Any]) -> Complaint | None:
    """Return what a clause has against the back end that a mutant was made of. Asked once a process."""
    sound = transport.__bases__[0]
    sound = sound if sound in (FakeTransport, GetsQuietLater) else FakeTransport
    key = f"{sound.__name__} {clause} {arguments}"
    if key not in _of_sound:
        _of_sound[key] = complaint(sound, clause, arguments)
    return _of_sound[key]


def main() -> int:
    """Try all mutants; returns how many are not found by their clause as breaking its rule, and it by nothing else."""
    found_by: Counter[str] = Counter()
    results: Counter[str] = Counter()
    for backend, clause, arguments in MUTANTS:
        sound, found = complaint_of_sound(backend, clause, arguments), complaint(backend, clause, arguments)
        clean_up()
        if sound is not None:
            result, text = "BLIND", f"the sound back end is found as well: {sound.text}"
        elif found is None:
            result, text = "SURVIVES", "-"
        elif found.kind == "patience":
            result, text = "PATIENCE", found.text
        else:
            result, text = "found", found.text
            found_by[clause] += 1
        results[result] += 1
        print(f"{result:8} {backend.__name__:24} {clause}: {text}", flush=True)
    for backend, clause, arguments in SOUND:
        wrong = complaint(backend, clause, arguments)
        results["let pass" if wrong is None else "WRONGED"] += 1
        print(
            f"{'let pass' if wrong is None else 'WRONGED':8} {backend.__name__:24} {clause}: {wrong and wrong.text or '-'}"
        )
    print(f"{len(found_by)} clauses have found mutants:")
    for clause, count in sorted(found_by.items()):
        print(f"{count:4} {clause}")
    print(
        f"{len(MUTANTS)} mutants and {len(SOUND)} sound ones:", ", ".join(f"{n} {what}" for what, n in results.items())
    )
    return sum(results.values()) - results["found"] - results["let pass"]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
