"""The two parts of the connector by themselves: what they call in which order, with an agent that is played."""

import ctypes
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer import Ended, Failure, FailureKind, Handle, Outcome, Released, Source, Ticket, TransferId
from kvxfer_sglang.decode import DecodeRank
from kvxfer_sglang.identity import request_digest
from kvxfer_sglang.notes import AttemptFailed, PagesOffered, PagesWanted
from kvxfer_sglang.prefill import MAX_REMEMBERED, PrefillRank
from kvxfer_sglang.states import States

ROOM, PAGE, HERE = 77, 16, Source("10.0.0.1", 4000, 5)
OFFER = Handle(f"room {ROOM}")
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
LOST = Outcome(Failure(FailureKind.PEER_LOST, "it is gone"))


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's numbers of states, which is all that the parts need of it."""
    module: Any = types.ModuleType("sglang.srt.disaggregation.base.conn")
    module.KVPoll = SimpleNamespace(
        Failed=FAILED, Bootstrapping=BOOTSTRAPPING, WaitingForInput=WAITING, Transferring=TRANSFERRING, Success=SUCCESS
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Manager:
    """SGLang's state of one request, and all that is said and called, in order."""

    def __init__(self) -> None:
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, dict[Any, PagesWanted]] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.last_stage = True
        self.states = States((), PAGE)
        self.kv_args = SimpleNamespace(page_size=PAGE, aux_data_ptrs=[], aux_item_lens=[])
        self.done: list[tuple[str, Any]] = []
        self.others: list[AttemptFailed] = []  # what a decode rank tells all prefill ranks
        self.rank: Any = SimpleNamespace(source=HERE, agent=self)
        self.version = "default"

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status
        self.done.append(("state", status))

    def weights(self) -> str:
        return self.version

    def fail(self, room: int, reason: str) -> None:
        self.update_status(room, FAILED)

    def resolve_kv_replica_factor(self, known: Any) -> None:
        pass

    def tell(self, host: str, port: int, note: Any) -> None:
        self.done.append(("tell", note))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.done.append((name, arguments))

    def called(self) -> list[str]:
        return [name for name, _ in self.done]


@pytest.fixture
def manager() -> Iterator[Manager]:
    yield Manager()


def prefilling(manager: Manager, pages: int = 2, stages: int = 1) -> tuple[PrefillRank, TransferId]:
    """A prefill rank that has sent the first page of a request."""
    rank = PrefillRank(manager)
    rank.start(manager.rank)
    rank.wanted(PagesWanted(ROOM, 9, "10.0.0.2", 5000, 32, 1, stages))
    assert manager.request_status[ROOM] == WAITING and manager.req_to_decode_prefix_len[ROOM] == 32
    rank.begin(ROOM, pages)
    assert manager.called()[-1] == "tell"  # before anything is computed
    rank.add(ROOM, [3], False, None, None)
    assert manager.called().count("tell") == 1
    offer = dict(manager.done)["offer"][0]
    assert (offer.tokens, offer.final, offer.digest) == (PAGE, False, request_digest(ROOM, 32, pages, "default"))
    note = dict(manager.done)["tell"]
    assert note.attempt == 9 and Ticket.read(note.ticket) == Ticket(offer.transfer, offer.digest, HERE)
    manager.done.clear()
    return rank, offer.transfer


def test_only_the_last_stage_of_a_pipeline_tells_what_was_sampled(manager: Manager) -> None:
    """Unless decode has stages too, each of which hears from one stage here."""
    memory = ctypes.create_string_buffer(b"token")
    manager.kv_args.aux_data_ptrs, manager.kv_args.aux_item_lens = [ctypes.addressof(memory)], [5]
    for last, stages, payload in ((False, 1, b""), (True, 1, b"token"), (False, 2, b"token")):
        manager.last_stage = last
        rank, _ = prefilling(manager, stages=stages)
        rank.add(ROOM, [8], True, 0, None)
        assert dict(manager.done)["offer"][0].payload == payload
        rank.begin(ROOM, 0)
        manager.done.clear()
        rank.add(ROOM, [], True, 0, None)  # decode has all pages, and needs the metadata
        assert [note.aux for name, note in manager.done if name == "tell"] == ([payload] if payload else [])
        manager.request_status[ROOM] = BOOTSTRAPPING
        manager.transfer_infos.clear(), manager.done.clear()


def test_pages_are_given_up_before_anyone_hears_of_it(manager: Manager) -> None:
    rank, transfer = prefilling(manager)
    rank.withdraw(ROOM, "no more")
    assert manager.called() == ["revoke", "tell"]
    assert manager.done[0][1][:2] == (transfer, 1)
    assert manager.done[1][1] == AttemptFailed(ROOM, 9, "no more")
    manager.done.clear()
    rank.add(ROOM, [8], True, 0, None)  # SGLang goes on until it looks
    assert not manager.done


def test_pages_are_given_up_that_decode_asks_for_before_they_are_offered(manager: Manager) -> None:
    rank, _ = prefilling(manager)
    rank.begin(ROOM, 2)
    ticket = Ticket.read(manager.done.pop()[1].ticket)
    rank.withdraw(ROOM, "no more")
    assert manager.called() == ["revoke", "tell"] and manager.done[0][1][0] == ticket.transfer
    rank.heard(Ended("producer", ticket.transfer, OFFER, LOST, 0, 0.0))
    rank.heard(Released("producer", ticket.transfer, OFFER))
    assert manager.called() == ["revoke", "tell"]


def test_an_offer_s_digest_is_that_of_the_weights_that_computed_it(manager: Manager) -> None:
    rank, _ = prefilling(manager)
    for versions in (["default", "2"], ["2", "3"]):  # when it begins, and when the first pages are there
        manager.version = versions[0]
        rank.begin(ROOM, 2)
        manager.version = versions[1]
        rank.add(ROOM, [3], False, None, None)
        assert dict(manager.done)["offer"][0].digest == request_digest(ROOM, 32, 2, versions[1])
        first = dict(manager.done)["offer"][0].digest
        manager.version = "later"
        rank.add(ROOM, [8], True, 0, None)
        assert dict(manager.done)["offer"][0].digest == first


def test_a_bounded_number_of_requests_is_remembered_that_decode_aborted_before_they_came(manager: Manager) -> None:
    rank = PrefillRank(manager)
    for room in range(1, MAX_REMEMBERED + 2):
        rank.aborted(room)
    rank.expect(1)
    assert not manager.done  # forgotten
    rank.expect(2)
    assert manager.done == [("state", FAILED)]
    rank.expect(2)  # another request
    assert manager.done == [("state", FAILED)]


def test_decode_s_next_request_in_a_room_is_not_the_one_it_aborted(manager: Manager) -> None:
    rank = PrefillRank(manager)
    rank.aborted(ROOM)  # which never came
    rank.wanted(PagesWanted(ROOM, 9, "10.0.0.2", 5000, 32, 1))
    rank.expect(ROOM)
    assert manager.done == [("state", WAITING)]


def test_an_abort_of_a_request_that_prefill_has_let_go_of_is_of_no_later_one(manager: Manager) -> None:
    rank = PrefillRank(manager)
    rank.drop(ROOM, "it had failed")
    rank.aborted(ROOM)
    rank.expect(ROOM)
    assert not manager.done


def test_sglang_has_its_pages_back_once_they_are_released(manager: Manager) -> None:
    rank, transfer = prefilling(manager)
    rank.heard(Ended("producer", transfer, OFFER, Outcome(), 0, 0.0))
    assert not manager.done
    rank.heard(Released("producer", transfer, OFFER))
    assert manager.done == [("state", SUCCESS)]


def test_the_end_of_what_was_given_up_is_not_that_of_the_next(manager: Manager) -> None:
    rank, transfer = prefilling(manager)
    rank.withdraw(ROOM, "no more")
    manager.request_status[ROOM] = BOOTSTRAPPING
    rank.wanted(PagesWanted(ROOM, 10, "10.0.0.2", 5000, 0, 1))
    rank.begin(ROOM, 1)
    manager.done.clear()
    rank.heard(Ended("producer", transfer, OFFER, LOST, 0, 0.0))
    rank.heard(Released("producer", transfer, OFFER))
    assert not manager.done


def decoding(manager: Manager) -> tuple[DecodeRank, int, str]:
    """A decode rank that fetches two pages."""
    manager.request_status[ROOM] = WAITING
    rank = DecodeRank(manager)
    rank.start(manager.rank)
    attempt = rank.expect(ROOM, [[4, 5]], 0, 32, manager.others.append)
    rank.offered(offered(attempt))
    fetch = dict(manager.done)["fetch"][0]
    assert (fetch.tokens, fetch.digest, fetch.own) == (2 * PAGE, request_digest(ROOM, 32, 2, "default"), HERE)
    manager.done.clear()
    return rank, attempt, fetch.handle


def offered(attempt: int) -> PagesOffered:
    source = Source("10.0.0.3", 4000, 6)
    return PagesOffered(ROOM, attempt, Ticket(TransferId.mint(6, "x"), b"digest", source).text)


def ended(handle: str, outcome: Outcome) -> Ended:
    return Ended("consumer", TransferId.mint(6, "x"), handle, outcome, 0, 0.0)


def released(handle: str) -> Released:
    return Released("consumer", TransferId.mint(6, "x"), handle)


def test_pages_are_there_once_they_are_released(manager: Manager) -> None:
    rank, _, handle = decoding(manager)
    rank.heard(ended(handle, Outcome()))
    assert not manager.done and not rank.quiet(ROOM)
    rank.heard(released(handle))
    assert manager.done == [("state", SUCCESS)] and rank.quiet(ROOM)


def test_a_failure_is_told_at_once_and_pages_are_free_once_they_are_released(manager: Manager) -> None:
    rank, attempt, handle = decoding(manager)
    rank.heard(ended(handle, LOST))
    assert manager.done == [("state", FAILED)] and not rank.quiet(ROOM)
    rank.drop(ROOM, attempt, "failed")
    assert not rank.quiet(ROOM)
    rank.heard(released(handle))
    assert rank.quiet(ROOM)


def test_a_request_that_is_dropped_is_cancelled_and_free_once_it_is_released(manager: Manager) -> None:
    rank, attempt, handle = decoding(manager)
    rank.drop(ROOM, attempt, "aborted")
    assert manager.done == [("cancel", (handle, "aborted"))] and not rank.quiet(ROOM)
    rank.heard(ended(handle, LOST))
    assert not rank.quiet(ROOM)
    rank.heard(released(handle))
    assert rank.quiet(ROOM) and len(manager.done) == 1


DIFFERS = Outcome(Failure(FailureKind.DIGEST_DIFFERS, "the digests differ"))


def test_what_came_for_weights_that_are_no_longer_here_is_not_taken(manager: Manager) -> None:
    rank, _, handle = decoding(manager)
    manager.version = "2"
    rank.heard(ended(handle, Outcome())), rank.heard(released(handle))
    assert manager.done == [("state", FAILED)] and rank.quiet(ROOM)


def test_prefill_is_asked_again_if_the_weights_here_have_become_others(manager: Manager) -> None:
    """Both servers were updated while the request waited for its turn at prefill."""
    rank, attempt, handle = decoding(manager)
    for version in ("2", "3"):
        manager.version = version
        rank.heard(ended(handle, DIFFERS))
        assert not manager.done and not rank.quiet(ROOM)
        rank.heard(released(handle))
        (fetch,) = dict(manager.done)["fetch"]
        assert (fetch.handle, fetch.digest) == (handle, request_digest(ROOM, 32, 2, version))
        manager.done.clear()
    rank.heard(ended(handle, DIFFERS)), rank.heard(released(handle))  # prefill has others still
    assert manager.done == [("state", FAILED)] and rank.quiet(ROOM)


def test_nothing_is_asked_again_for_a_request_that_is_dropped(manager: Manager) -> None:
    rank, attempt, handle = decoding(manager)
    rank.drop(ROOM, attempt, "aborted")
    manager.done.clear()
    manager.version = "2"
    rank.heard(ended(handle, DIFFERS)), rank.heard(released(handle))
    assert not manager.done and rank.quiet(ROOM)


def test_tickets_that_come_too_late_or_twice_fetch_nothing(manager: Manager) -> None:
    rank, attempt, _ = decoding(manager)
    rank.offered(offered(attempt))  # by the next prefill rank
    rank.offered(offered(attempt + 1))  # of another attempt
    rank.failed(AttemptFailed(ROOM, attempt + 1, "other"))
    rank.drop(ROOM, attempt, "aborted")
    manager.done.clear()
    rank.offered(offered(attempt))
    assert not manager.done


def test_what_prefill_has_given_up_is_not_fetched(manager: Manager) -> None:
    manager.request_status[ROOM] = WAITING
    rank = DecodeRank(manager)
    rank.start(manager.rank)
    attempt = rank.expect(ROOM, [[4, 5]], 0, 32, manager.others.append)
    rank.failed(AttemptFailed(ROOM, attempt, "no more"))
    rank.offered(offered(attempt))
    assert manager.done == [("state", FAILED)] and rank.quiet(ROOM)


def test_what_one_prefill_rank_gives_up_the_others_hear_once(manager: Manager) -> None:
    rank, attempt, _ = decoding(manager)
    note = AttemptFailed(ROOM, attempt, "no more")
    rank.failed(AttemptFailed(ROOM, attempt + 1, "of another attempt"))
    assert not manager.others
    rank.failed(note), rank.failed(AttemptFailed(ROOM, attempt, "nor here"))
    assert manager.others == [note]


def test_a_prefill_rank_gives_up_what_another_one_has_given_up(manager: Manager) -> None:
    rank, transfer = prefilling(manager)
    rank.given_up(AttemptFailed(ROOM, 8, "of another attempt"))
    assert not manager.done
    rank.given_up(AttemptFailed(ROOM, 9, "no more"))
    assert manager.called() == ["state", "revoke", "tell"] and manager.request_status[ROOM] == FAILED
    assert manager.done[1][1][:3] == (transfer, 1, "no more")


def test_a_recurrent_state_goes_without_a_page_of_the_request(manager: Manager) -> None:
    manager.states = States(("mamba",), PAGE)
    rank, _ = prefilling(manager)
    rank.begin(ROOM, 0)
    manager.done.clear()
    rank.add(ROOM, [], True, 0, None, [[3]])
    (offer,) = [done[1][0] for done in manager.done if done[0] == "offer"]
    assert manager.request_status[ROOM] == TRANSFERRING and offer.blocks.tolist() == [[0], [3]] and offer.final
    manager.done.clear()
    decode = DecodeRank(manager)
    decode.start(manager.rank)
    decode.offered(offered(decode.expect(ROOM, [[], [4]], 0, 32, manager.others.append)))
    fetch = dict(manager.done)["fetch"][0]
    assert fetch.blocks.tolist() == [[], [4]] and fetch.tokens == offer.tokens == 1  # on both sides as many


def test_dropping_an_attempt_leaves_the_next_alone(manager: Manager) -> None:
    rank, attempt, _ = decoding(manager)
    again = rank.expect(ROOM, [[6, 7]], 0, 32, manager.others.append)
    rank.drop(ROOM, attempt, "late")
    rank.failed(AttemptFailed(ROOM, attempt, "no more"))
    assert manager.request_status[ROOM] != FAILED and not manager.others
    manager.request_status[ROOM] = WAITING
    rank.offered(offered(again))
    assert "fetch" in manager.called()


def test_a_cut_ticket_fails_the_request(manager: Manager) -> None:
    manager.request_status[ROOM] = WAITING
    rank = DecodeRank(manager)
    rank.start(manager.rank)
    attempt = rank.expect(ROOM, [[4, 5]], 0, 32, manager.others.append)
    rank.offered(PagesOffered(ROOM, attempt, offered(attempt).ticket[:-4]))
    assert manager.request_status[ROOM] == FAILED and rank.quiet(ROOM)
