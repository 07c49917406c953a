"""The producer's half, case by case: when blocks are offered, when they are taken back, who frees them."""

from collections.abc import Sequence

import pytest

from kvxfer.identity import TransferId
from kvxfer.schedule import OfferSchedule, Revoke, ScheduleError, StepCommands
from kvxfer.values import BlockTable, Group, Offer
from tests.schedule.ends import Offers, held, released


def table(*rows: Sequence[int]) -> BlockTable:
    return BlockTable.of(rows)


FULL = [Group(16)]
MIXED = [Group(16), Group(16, "window", 16)]
STATE = [Group(16), Group(1024, "state")]
DIGEST = b"d" * 16
T = TransferId.derived("t")
U = TransferId.derived("u")


def tracking(groups: list[Group], tokens: int) -> Offers:
    tracker = Offers(OfferSchedule(groups))
    assert tracker.arrive("r", T, DIGEST, tokens)
    return tracker


def only_offer(tracker: Offers) -> Offer:
    commands = tracker.commands()
    assert not commands.revokes
    (offer,) = commands.offers
    return offer


def only_revoke(tracker: Offers) -> Revoke:
    commands = tracker.commands()
    assert not commands.offers
    (revoke,) = commands.revokes
    return revoke


class TestChunks:
    def test_chunk_that_completes_no_block_offers_a_part_of_one(self) -> None:
        tracker = tracking(FULL, 40)
        tracker.step("r", 0, 15, table([5]))
        assert (only_offer(tracker)).tokens == 15
        tracker.step("r", 15, 1, table([5]))
        assert only_offer(tracker).tokens == 16
        tracker.step("r", 16, 17, table([5, 6, 7]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.blocks) == (32, table((5, 6))), "whole blocks where there are any"
        tracker.step("r", 33, 0, table([5, 6, 7]))
        assert (offer := only_offer(tracker)).tokens == 33 and offer.blocks == table((5, 6, 7)) and not offer.final
        tracker.step("r", 33, 0, table([5, 6, 7]))
        assert tracker.commands() == StepCommands()

    def test_a_block_that_is_not_there_is_not_offered(self) -> None:
        tracker = tracking(FULL, 40)
        tracker.step("r", 0, 40, table([5, 6]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.final) == (32, False)
        assert not tracker.finish("r", table([5, 6]), True)
        assert "too few blocks" in only_revoke(tracker).reason

    def test_later_groups_wait_for_the_final_table(self) -> None:
        tracker = tracking(MIXED, 40)
        tracker.step("r", 0, 40, table([1, 2, 3], [4, 5, 6]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.blocks, offer.final) == (40, table((1, 2, 3), ()), False)
        assert tracker.finish("r", table([1, 2, 3], [-1, 5, 6]), True)
        assert only_offer(tracker) == Offer(
            T, DIGEST, offer.generation, 40, table((1, 2, 3), (-1, 5, 6)), True, handle="r"
        )

    def test_windows_whose_end_stays_are_offered_with_the_step(self) -> None:
        """And what the request gives up, or takes, behind that changes nothing."""
        tracker = tracking(MIXED, 40)
        tracker.step("r", 0, 40, table([1, 2, 3], [4, 5, 6]), table([], [-1, 5, 6]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.blocks, offer.final) == (40, table((1, 2, 3), (-1, 5, 6)), True)
        tracker.step("r", 40, 10, table([1, 2, 3, 7], [-1, -1, 6, 8]), table([], [-1, 5, 6]))
        assert tracker.finish("r", table([1, 2, 3, 7], [-1, 5, 6, 8]), True)
        assert not tracker.commands()

    def test_windows_alone_whose_end_stays_are_offered_once(self) -> None:
        tracker = tracking([Group(16, "window", 16)], 40)
        tracker.step("r", 0, 20, table([4, 5]))
        assert not tracker.commands()
        tracker.step("r", 20, 20, table([-1, 5, 6]), table([-1, 5, 6]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.blocks, offer.final) == (40, table((-1, 5, 6)), True)
        assert tracker.finish("r", table([-1, 5, 6]), True)
        assert not tracker.commands()

    def test_table_of_another_engine_is_refused(self) -> None:
        with pytest.raises(ScheduleError, match="1 groups in an engine that has 2"):
            tracking(MIXED, 40).step("r", 0, 16, table([1]))


class TestFinish:
    def test_state_that_moved_on_is_not_offered(self) -> None:
        tracker = tracking(STATE, 20)
        tracker.step("r", 0, 20, table([1, 2], [3]))
        generation = only_offer(tracker).generation
        tracker.step("r", 20, 1, table([1, 2], [3]))
        assert not tracker.finish("r", table([1, 2], [3]), True)
        revoke = only_revoke(tracker)
        assert (revoke.generation, revoke.gone) == (generation, True)
        assert "holds 21 tokens instead of 20" in revoke.reason
        assert len(tracker) == 0

    def test_state_of_a_request_that_stops_is_offered_with_the_step(self) -> None:
        tracker = Offers(OfferSchedule(STATE))
        assert tracker.arrive("r", T, DIGEST, 20, stops=True)
        tracker.step("r", 0, 16, table([1], [3]))
        assert not only_offer(tracker).final
        tracker.step("r", 16, 4, table([1, 2], [3]))
        offer = only_offer(tracker)
        assert (offer.tokens, offer.blocks, offer.final) == (20, table((1, 2), (3,)), True)
        assert tracker.finish("r", table([1, 2], [3]), True)
        assert not tracker.commands()

    def test_state_of_a_request_that_did_not_stop_after_all_is_taken_back(self) -> None:
        tracker = Offers(OfferSchedule(STATE))
        assert tracker.arrive("r", T, DIGEST, 20, stops=True)
        tracker.step("r", 0, 20, table([1, 2], [3]))
        assert only_offer(tracker).final
        tracker.step("r", 20, 1, table([1, 2], [3]))
        commands = tracker.commands()
        assert [r.reason for r in commands.revokes] == ["the producer went on, and its recurrent state with it"]
        assert not any(offer.final for offer in commands.offers)
        assert not tracker.finish("r", table([1, 2], [3]), True)

    def test_state_without_a_block_waits(self) -> None:
        tracker = Offers(OfferSchedule(STATE))
        assert tracker.arrive("r", T, DIGEST, 20, stops=True)
        tracker.step("r", 0, 20, table([1, 2], [-1]))
        assert not only_offer(tracker).final

    def test_read_before_it_finished_holds_nothing(self) -> None:
        tracker = tracking(FULL, 20)
        tracker.step("r", 0, 20, table([5, 6]))
        assert released(tracker, T, only_offer(tracker).generation) is None
        assert only_revoke(tracker).gone
        assert "r" not in tracker and len(tracker) == 0
        tracker.step("r", 20, 1, table([5, 6]))
        assert not tracker.finish("r", table([5, 6]), True)
        assert not tracker.commands()


class TestPreemption:
    @pytest.mark.parametrize("blocks", [table([7, 6]), table([5])])
    def test_that_went_unseen_is_noticed_by_the_table(self, blocks: BlockTable) -> None:
        tracker = tracking(FULL, 48)
        tracker.step("r", 0, 32, table([5, 6]))
        before = only_offer(tracker)
        tracker.step("r", 0, 16, blocks)
        commands = tracker.commands()
        assert [(revoke.generation, revoke.gone) for revoke in commands.revokes] == [(before.generation, False)]
        (offer,) = commands.offers
        assert offer.generation > before.generation and offer.blocks == table(blocks[0][:1])

    @pytest.mark.parametrize("blocks", [table([]), table([5, 6])])
    def test_and_never_resumed(self, blocks: BlockTable) -> None:
        """vLLM may end a preempted request normally, by a result that was in flight; its KV is gone."""
        tracker = tracking(FULL, 20)
        tracker.step("r", 0, 20, table([5, 6]))
        tracker.commands()
        tracker.preempt("r")
        assert not tracker.finish("r", blocks, True)
        assert [revoke.gone for revoke in tracker.commands().revokes] == [False, True]


class TestNames:
    def test_siblings_share_one_offer(self) -> None:
        tracker = tracking(FULL, 20)
        assert tracker.arrive("s", T, DIGEST, 20, answer="r")
        assert tracker.arrive("r", T, DIGEST, 20), "asked again"
        tracker.step("r", 0, 20, table([5, 6]))
        tracker.step("s", 0, 20, table([5, 7]))
        assert only_offer(tracker).blocks == table((5, 6))
        assert tracker.finish("r", table([5, 6]), True) and not tracker.finish("s", table([5, 7]), True)
        assert tracker.offers(T, DIGEST) and released(tracker, T, 9) == "r" and len(tracker) == 0

    def test_other_content_or_another_length_is_not_shared(self) -> None:
        tracker = tracking(FULL, 20)
        assert not tracker.arrive("s", T, b"other", 20) and not tracker.arrive("s", T, DIGEST, 19)
        assert "s" not in tracker
        for digest, tokens in ((DIGEST, 19), (b"other", 20)):
            with pytest.raises(ScheduleError, match="request r offers 20 tokens of ext/t#0"):
                tracker.arrive("r", T, digest, tokens)

    def test_each_further_answer_adds_a_consumer(self) -> None:
        tracker = tracking(FULL, 20)
        assert tracker.arrive("s", T, DIGEST, 20) and tracker.arrive("a", T, DIGEST, 20)
        tracker.step("r", 0, 20, table([5, 6]))
        first = only_offer(tracker)
        assert first.consumers == 3
        assert tracker.arrive("b", T, DIGEST, 20)
        assert [revoke.gone for revoke in tracker.commands().revokes] == [False], (
            "an agent takes no more within a generation"
        )
        tracker.step("r", 20, 1, table([5, 6]))
        again = only_offer(tracker)
        assert (again.consumers, again.blocks) == (4, first.blocks) and again.generation > first.generation
        tracker.finish("b", table([]), False)
        assert only_offer(tracker).consumers == 3
        tracker.finish("a", table([]), False)
        assert only_offer(tracker).consumers == 2, "its client is gone"
        tracker.finish("r", table([5, 6]), True), tracker.finish("s", table([7, 8]), True)
        assert not tracker.commands().offers

    def test_a_retry_shares_what_is_held(self) -> None:
        tracker = tracking(FULL, 20)
        tracker.step("r", 0, 20, table([5, 6]))
        tracker.finish("r", table([5, 6]), True)
        assert only_offer(tracker).consumers == 1
        assert tracker.arrive("s", T, DIGEST, 20)
        assert not tracker.commands(), "its answer replaces the first"
        tracker.finish("s", table([]), False)
        assert not tracker.commands(), "nor does it count if it is aborted"
        assert tracker.arrive("s", T, DIGEST, 20)
        assert not tracker.finish("s", table([7, 8]), True) and held(tracker) == {T}
        tracker.withdraw(T, "its lease ran out")
        assert not tracker.arrive("u", T, DIGEST, 20), "it is about to end"

    def test_a_rejected_answer_takes_only_what_it_has_told_of(self) -> None:
        tracker = Offers(OfferSchedule(FULL))
        for request, transfer, answer in (("a0", T, "a"), ("a1", U, "a"), ("b0", T, "b")):
            assert tracker.arrive(request, transfer, DIGEST, 20, answer=answer)
        tracker.step("a0", 0, 20, table([5, 6])), tracker.step("a1", 0, 20, table([7, 8]))
        tracker.commands()
        for _ in range(2):
            tracker.decline_answer(T, "b", "rejected")
            assert set(tracker.transfers) == {T, U}, "the other answer still tells of both"
        tracker.decline_answer(U, "unheard of", "rejected")
        tracker.decline_answer(T, "a", "rejected")
        assert not tracker.transfers

    def test_who_shares_offers_its_own_blocks_if_the_first_fails(self) -> None:
        tracker = tracking(FULL, 20)
        assert tracker.arrive("s", T, DIGEST, 20, answer="r")
        tracker.step("r", 0, 20, table([5, 6]))
        first = only_offer(tracker)
        tracker.finish("r", table([5, 6]), False)
        tracker.step("s", 16, 4, table([5, 7]))
        commands = tracker.commands()
        assert [revoke.generation for revoke in commands.revokes] == [first.generation]
        (second,) = commands.offers
        assert (second.blocks, second.consumers, second.handle) == (table((5, 7)), 1, "s")
        assert second.generation > first.generation
        assert tracker.finish("s", table([5, 7]), True) and released(tracker, T, second.generation) == "s"

    def test_read_in_a_generation_that_was_revoked_since(self) -> None:
        """All ranks were done before the preemption: the transfer is over, though offered again, which others may be reading."""
        tracker = tracking(FULL, 20)
        tracker.step("r", 0, 20, table([5, 6]))
        first = only_offer(tracker)
        tracker.preempt("r")
        tracker.step("r", 0, 20, table([7, 8]))
        tracker.commands()
        tracker.finish("r", table([7, 8]), True)
        assert released(tracker, T, first.generation) is None
        last = only_revoke(tracker)
        assert last.gone and last.generation > first.generation
        assert released(tracker, T, last.generation) == "r"

    def test_two_transfers_of_one_request_are_a_bug(self) -> None:
        with pytest.raises(ScheduleError, match="ext/t#0, not ext/u#0"):
            tracking(FULL, 20).arrive("r", U, DIGEST, 20)


class TestConsumers:
    def test_each_decline_is_one_fewer_and_the_last_withdraws(self) -> None:
        tracker = Offers(OfferSchedule(FULL))
        for request in "rst":
            assert tracker.arrive(request, T, DIGEST, 40)
        tracker.decline(T, "not needed")
        assert tracker.commands() == StepCommands(), "nothing is offered yet that could be said again"
        tracker.step("r", 0, 20, table([5, 6]))
        first = only_offer(tracker)
        assert first.consumers == 2
        tracker.decline(T, "not needed")
        assert only_offer(tracker) == Offer(T, DIGEST, first.generation, 16, table((5,)), False, 1, handle="r")
        tracker.finish("s", table([]), False)
        assert tracker.commands() == StepCommands(), "the answer to the first may still be read"
        tracker.decline(T, "not needed")
        assert only_revoke(tracker).gone and T not in tracker.transfers
