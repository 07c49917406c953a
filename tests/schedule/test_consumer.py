"""The consumer's half, case by case: what is asked for, into which blocks, and that it is asked for once."""

from collections.abc import Sequence

import pytest

from kvxfer.identity import Source, TransferId
from kvxfer.schedule import DeclinedTransfer, FetchSchedule, ScheduleError
from kvxfer.values import BlockTable, Fetch, Group
from tests.schedule.ends import Loading, loaded, waiting


def table(*rows: Sequence[int]) -> BlockTable:
    return BlockTable.of(rows)


FULL = [Group(16)]
DIGEST = b"d" * 16
PEER = Source("p", 1, 7)
T = TransferId.derived("t")
U = TransferId.derived("u")


def expecting(groups: list[Group], tokens: int, *requests: str, own: Source | None = None) -> Loading:
    intake = Loading(FetchSchedule(groups, own))
    for request in requests or ("r",):
        assert intake.arrive(request, T, DIGEST, PEER, tokens)
    return intake


def only_want(intake: Loading) -> Fetch:
    commands = intake.commands()
    assert not commands.cancels and not commands.offers and not commands.revokes
    (want,) = commands.fetches
    return want


class TestWant:
    def test_whole_prompt(self) -> None:
        own = Source("d", 2, 9)
        intake = expecting(FULL, 40, own=own)
        assert intake.matched("r", 0) == 40
        intake.allocated("r", table([5, 6, 7, 8]), 0, 40)
        assert only_want(intake) == Fetch("r", T, DIGEST, PEER, table((5, 6, 7)), 0, 40, own, tail=True, number=0)
        assert not intake.commands()

    def test_fewer_tokens_than_promised(self) -> None:
        intake = expecting(FULL, 40)
        intake.allocated("r", table([5, 6, 7]), 16, 16)
        want = only_want(intake)
        assert (want.blocks, want.start, want.tokens) == (table((-1, 6)), 16, 32)

    def test_null_blocks_are_not_wanted(self) -> None:
        """vLLM, 200 tokens, window 64, block 32: the head of the window group is null."""
        intake = expecting([Group(32), Group(32, "window", 64), Group(1024, "state")], 200)
        blocks = table(range(8, 15), (-1, -1, -1, -1, 5, 6, 7), (3,))
        intake.allocated("r", blocks, 0, 200)
        assert only_want(intake).blocks == blocks

    @pytest.mark.parametrize("blocks", [table([5, 6]), table([5, -1, 7]), table([]), table([5, 6, 7], [8])])
    def test_tokens_without_a_block_are_refused(self, blocks: BlockTable) -> None:
        intake = expecting(FULL, 40)
        with pytest.raises(ScheduleError):
            intake.allocated("r", blocks, 0, 40)
        assert not intake.commands()
        assert intake.matched("r", 0) == 40

    def test_part_of_a_state_is_refused(self) -> None:
        intake = expecting([Group(1024, "state")], 40)
        with pytest.raises(ScheduleError, match="expects 16 tokens where 40"):
            intake.allocated("r", table([5]), 0, 16)

    def test_more_than_promised_is_refused(self) -> None:
        intake = expecting(FULL, 40)
        with pytest.raises(ScheduleError, match="expects 41 tokens"):
            intake.allocated("r", table([5, 6, 7]), 0, 41)


class TestSiblings:
    def test_loading_twice_is_refused(self) -> None:
        intake = expecting(FULL, 40, "r", "s")
        intake.allocated("r", table([5, 6, 7]), 0, 40)
        with pytest.raises(ScheduleError, match="expects 40 tokens where None"):
            intake.allocated("s", table([8, 9, 10]), 0, 40)

    def test_the_first_is_aborted_before_it_asked(self) -> None:
        intake = expecting(FULL, 40, "r", "s")
        intake.finish("r")
        assert not intake.declines()
        assert intake.matched("s", 0) == 40


class TestDecline:
    def test_rejected_request(self) -> None:
        intake = expecting(FULL, 40)
        assert waiting(intake) == {T: (DIGEST, PEER)}
        intake.finish("r", "the consumer rejected the request")
        assert intake.declines() == (DeclinedTransfer(T, DIGEST, PEER, "the consumer rejected the request"),)
        assert not intake.declines() and not waiting(intake) and len(intake) == 0

    def test_all_is_in_the_local_cache(self) -> None:
        intake = expecting(FULL, 32)
        assert intake.matched("r", 32) == 0
        intake.allocated("r", table([5, 6, 7]), 32, 0)
        (release,) = intake.declines()
        assert release.transfer == T
        intake.finish("r")
        assert not intake.declines(), "given up once"

    @pytest.mark.parametrize("offered", [True, False])
    def test_nothing_of_it_is_wanted(self, offered: bool) -> None:
        """Its producer is told before there are blocks for the request; or then, where it may not know its own request yet."""
        intake = Loading(FetchSchedule(FULL))
        assert intake.arrive("r", T, DIGEST, PEER, 0, offered=offered) and intake.arrive("s", T, DIGEST, PEER, 0)
        told = [intake.declines()]
        assert intake.matched("r", 0) == 0 and not intake.arrive("t", T, DIGEST, PEER, 40)
        intake.allocated("r", table([5]), 0, 0)
        intake.finish("r")
        intake.finish("s")
        told.append(intake.declines())
        assert [len(declines) for declines in told] == [offered, not offered] and len(intake) == 0


class TestNames:
    @pytest.mark.parametrize("other", [(b"e" * 16, PEER, 40), (DIGEST, Source("p", 1, 8), 40), (DIGEST, PEER, 41)])
    def test_one_id_for_two_contents_is_refused(self, other: tuple[bytes, Source, int]) -> None:
        intake = expecting(FULL, 40)
        assert not intake.arrive("s", T, *other)
        assert intake.matched("s", 0) == 0
        intake.finish("s")
        assert intake.matched("r", 0) == 40

    def test_arriving_again_changes_nothing(self) -> None:
        intake = expecting(FULL, 40)
        assert intake.arrive("r", T, DIGEST, PEER, 40)
        with pytest.raises(ScheduleError, match="ext/t#0, not ext/u#0"):
            intake.arrive("r", U, DIGEST, PEER, 40)

    def test_a_load_that_nobody_could_ask_for_is_declined_for_its_producer(self) -> None:
        intake = expecting(FULL, 40)
        intake.allocated("r", table([5, 6, 7]), 0, 40)
        intake.commands()
        intake.unasked("r")
        assert intake.declines() == (DeclinedTransfer(T, DIGEST, PEER, "the consumer gave up before it could ask"),)
        loaded(intake, "r")
        intake.finish("r")
        assert not intake.declines() and not intake.commands() and len(intake) == 0
        intake.unasked("r")
        assert not intake.declines(), "nothing is known of it"
