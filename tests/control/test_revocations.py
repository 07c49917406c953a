"""The revocation counter: read by others, and changed by whatever makes announced bytes doubtful before anybody can act on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.control.revocations import RevocationView, SharedRevocationCounter
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner, ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import Action, Emit, Ended, LinkInfo, Moved, PartRef, Released, Send
from kvxfer.testing.engine import PagedMemory
from kvxfer.testing.fake import Network
from kvxfer.values import BlockTable, Offer
from tests.control.conftest import SeededEngine, fetch, meet, offered, until

SILENT = Failure(FailureKind.PEER_LOST, "cut")
PREEMPTED = Failure(FailureKind.REVOKED, "preempted")
T = TransferId("router/1/x", 0)
LEASE = 10.0


@pytest.fixture
def revocations() -> Any:
    made = SharedRevocationCounter()
    yield made
    made.close()


def test_it_is_seen_from_another_process(revocations: SharedRevocationCounter) -> None:
    for _ in range(3):
        revocations.count()
    code = "import sys; from kvxfer.control.revocations import RevocationView; print(RevocationView(sys.argv[1])())"
    assert subprocess.check_output([sys.executable, "-c", code, revocations.invite()], text=True).split() == ["3"]


def test_what_is_declared_is_seen_at_once_and_the_last_count_stays(revocations: SharedRevocationCounter) -> None:
    sight = RevocationView(revocations.invite())
    assert sight() == revocations.declared == revocations.taken_in == 0
    revocations.offered(T, 1)
    assert revocations.declare(T)
    assert (sight(), revocations.taken_in) == (1, 0)
    revocations.count()
    assert (sight(), revocations.taken_in) == (2, 1)
    revocations.close()
    revocations.close()
    revocations.declare(T)
    assert sight() == 3, "who closes it gives all up"


def test_what_is_over_or_was_never_offered_disturbs_nobody(revocations: SharedRevocationCounter) -> None:
    assert not revocations.declare(T)
    revocations.offered(T, 1)
    revocations.offered(T, 2)
    revocations.over(T, 1)
    assert revocations.vouch(T) == 0 and revocations.declare(T), "the next generation may have been announced"
    revocations.over(T, 2)
    assert revocations.vouch(T) is None and not revocations.declare(T), (
        "nothing is vouched for whose end would not be counted"
    )
    assert revocations.declared == 1


def test_only_a_revocation_counter_is_taken_for_one(revocations: SharedRevocationCounter, tmp_path: Any) -> None:
    name, fd, token = revocations.invite().split("/")
    path = tmp_path / "kvxfer-revocations"
    path.write_bytes(bytes(4096))
    reading, writing = os.pipe()
    with path.open() as file:
        places = [
            "",
            "x",
            f"{name}/{fd}",
            f"{name}/{fd}/{token}0",
            f"{name}/{fd}/{'0' * 32}",
            f"{name}/99999/{token}",
            f"{name[:-1]}g/{fd}/{token}",
            f"kvxfer-revocations-{'0' * 32}/{fd}/{token}",
            f"{os.getpid()}/{fd}/{token}",
            f"{name}/{file.fileno()}/{token}",
            f"{name}/{reading}/{token}",
            f"{name}/0/{token}",
        ]
        for place in places:
            assert RevocationView.of(place) is None, place
    os.close(reading)
    os.close(writing)
    place = revocations.invite()
    revocations.close()
    assert RevocationView.of(place) is None


CUT = """
import mmap, os, secrets, sys
from kvxfer.control.revocations import RevocationView, SharedRevocationCounter
counter = SharedRevocationCounter()
fd, place = counter._fd, counter.invite()
if sys.argv[1] != "ours":
    fd = os.memfd_create("kvxfer-revocations", os.MFD_ALLOW_SEALING if sys.argv[1] == "unsealed" else 0)
    os.ftruncate(fd, 4096)
    token = secrets.token_bytes(16)
    mmap.mmap(fd, 4096)[8:24] = token
    place = f"{place.partition('/')[0]}/{fd}/{token.hex()}"
sight = RevocationView.of(place)
for size in (4095, 0):
    try:
        os.ftruncate(fd, size)
    except PermissionError:
        pass
print("not seen" if sight is None else f"seen {sight()}")
"""


@pytest.mark.parametrize(
    ("whose", "said"), [("ours", "seen 0"), ("unsealed", "not seen"), ("never to be sealed", "not seen")]
)
def test_a_counter_that_is_cut_short_ends_no_consumer(whose: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", CUT, whose], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_any_number_of_consumers_may_look(revocations: SharedRevocationCounter) -> None:
    """Each has been invited, and leaves nothing of itself in the producer's queue for good."""
    for _ in range(400):
        assert RevocationView.of(revocations.invite()) is not None


# --- what changes it ---------------------------------------------------------------------------------------------------


class Party:
    """A producer's machine with one link, over which a transfer is wanted and offered."""

    def __init__(self, mode: str = "read") -> None:
        self.revocations = RevocationCounter()
        self.revocations.offered(T, 2)
        self.machine = ProducerMachine(LEASE, LEASE, self.revocations)
        ours, theirs = (PagedMemory().caches[0] for _ in range(2))
        planner = Planner(ours, theirs, (ShardAssignment(0, 0, ours.views[0].layers, 0, 4),))
        self.machine.link_up(b"link", LinkInfo(mode, planner, peer=7), 0.0)  # type: ignore[arg-type]

    def want(self, attempt: int = 1, seconds: float = 5.0) -> list[Action]:
        blocks = BlockTable.of([[1]])
        return self.machine.message(b"link", m.FetchRequest(T, attempt, b"d", 0, 4, blocks, 1, seconds), 0.0)

    def offer(self, generation: int = 1) -> list[Action]:
        offer = Offer(T, b"d", generation, 4, BlockTable.of([[2]]), True)
        return self.machine.offer(offer, 0.0)

    def announced(self) -> m.PartReady:
        actions = [*self.want(), *self.offer()]
        (have,) = (a.message for a in actions if isinstance(a, Send) and isinstance(a.message, m.PartReady))
        return have


def test_what_is_announced_carries_a_count_that_holds() -> None:
    party = Party()
    party.revocations.count()
    assert party.announced().revocations == party.revocations.declared == 1


def test_nothing_announced_between_a_declaration_and_its_taking_in_is_believed() -> None:
    """The engine has taken its blocks; the machine still believes that it holds them."""
    party = Party()
    party.revocations.declare(T)
    assert party.announced().revocations != party.revocations.declared
    party.machine.revoke(T, 1, PREEMPTED, False, 0.0)
    party.revocations.take_in()
    again = Party()
    assert again.announced().revocations == again.revocations.declared


ENDS: dict[str, Callable[[Party], Any]] = {
    "preempted": lambda p: p.machine.revoke(T, 1, PREEMPTED, False, 0.0),
    "aborted": lambda p: p.machine.revoke(T, 1, PREEMPTED, True, 0.0),
    "computed anew": lambda p: p.offer(2),
    "link lost": lambda p: p.machine.link_down(b"link", SILENT, 0.0),
    "dropped": lambda p: p.machine.message(
        b"link", m.CloseAttempt(T, 1, b"d", FailureKind.CANCELLED, "changed its mind"), 0.0
    ),
    "wanted anew": lambda p: p.want(2),
    "out of time": lambda p: p.machine.tick(6.0),
    "other bytes": lambda p: p.machine.message(b"link", m.CommitRequest(T, 1, 1, b"12345678"), 0.0),
    "another generation": lambda p: p.machine.message(b"link", m.CommitRequest(T, 1, 3), 0.0),
    "a part that cannot be sent": lambda p: p.machine.moved(
        Moved(PartRef("producer", b"link", T, 1, 0), Failure(FailureKind.BACKEND_FAILED, "it broke"), True, 0), 0.0
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_whatever_ends_a_serve_changes_it(how: str) -> None:
    party = Party("sendrecv" if "sent" in how else "read")
    have = party.announced()
    assert have.revocations == party.revocations.declared
    ENDS[how](party)
    assert have.revocations != party.revocations.declared


def test_what_goes_well_or_was_never_announced_does_not() -> None:
    party = Party()
    have = party.announced()
    said = party.machine.message(b"link", m.CommitRequest(T, 1, 1), 0.0)
    assert any(isinstance(a, Emit) for a in said)
    assert have.revocations == party.revocations.declared
    waiting = Party()
    waiting.want()
    waiting.machine.link_down(b"link", SILENT, 0.0)
    assert waiting.revocations.declared == 0


# --- agents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbs", [["read"], ["send", "recv"]])
def test_a_producer_that_can_be_seen_need_not_answer(engine, monkeypatch: pytest.MonkeyPatch, verbs: list[str]) -> None:
    """Nor be running by then. One that cannot be seen is asked."""
    p, d = pair(engine, {"verbs": verbs})
    monkeypatch.setattr(ProducerMachine, "_commit_request", lambda *_: [])
    assert deliver(p, d, T).outcome.delivered
    assert (d.block(5) == p.block(3)).all()
    monkeypatch.setattr(RevocationView, "of", lambda place: None)
    other = engine({"verbs": verbs, "network": p.net}, transfer_timeout=2.5)
    meet(other, p)
    assert deliver(p, other, TransferId("router/1/y", 0)).outcome.kind is FailureKind.TIMED_OUT


def test_a_producer_that_writes_is_asked(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its word ends what it may do in our memory."""
    p, d = pair(engine, {"verbs": ["write"]}, transfer_timeout=2.5)
    meet(d, p)
    monkeypatch.setattr(ProducerMachine, "_commit_request", lambda *_: [])
    assert deliver(p, d, T).outcome.kind is FailureKind.TIMED_OUT


def test_nothing_that_a_closing_agent_announces_is_believed(engine) -> None:
    p, _ = pair(engine, {"verbs": ["read"]})
    agent = p.agents[0]
    sight = RevocationView(agent._revocations.invite())
    agent._revocations.offered(T, 1)
    agent.close()
    assert agent._revocations.vouch(T) != sight()


@pytest.mark.parametrize("corrupt", [0.0, 1.0])
def test_a_checked_transfer_needs_no_answer_if_the_sums_agree(
    engine, monkeypatch: pytest.MonkeyPatch, corrupt: float
) -> None:
    p, d = pair(
        engine, {"verbs": ["read"], "corrupt": corrupt}, integrity="full", transfer_timeout=1.0 if corrupt else 10.0
    )
    monkeypatch.setattr(ProducerMachine, "_commit_request", lambda *_: [])
    monkeypatch.setattr(p.net, "delay_s", 0.2 if corrupt else 1.5)  # so that the producer's sum is there first
    assert deliver(p, d, T).outcome.delivered is not bool(corrupt)


def test_transfers_that_end_well_disturb_no_others(engine) -> None:
    """Engines revoke what has been read, too, to be sure."""
    p, d = pair(engine, {"verbs": ["read"]})
    agent = p.agents[0]
    for i in range(3):
        t = TransferId("router/1/z", i)
        assert deliver(p, d, t, f"{i}").outcome.delivered
        p.wait(Released, count=i + 1)
        agent.revoke(t, 1, "all is read", True)
        agent.offer(offered([3], 4, transfer=t))  # too late, and ignored
        agent.revoke(t, 1, "all is read", True)
    until(lambda: not agent._revocations._offered)


def test_a_revocation_is_seen_before_the_control_thread_comes_to_it(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses the blocks at once, and the consumer is not told Delivered."""
    p, d = pair(engine, {"verbs": ["read"]}, transfer_timeout=2.5)
    meet(d, p)
    p.net.delay_s = 1.5
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    until(lambda: p.agents[0]._runtime.producer._serves)  # announced, and being read
    monkeypatch.setattr(ProducerMachine, "revoke", lambda *_: [])  # as if it had not come to it
    monkeypatch.setattr(ProducerMachine, "_commit_request", lambda *_: [])
    p.agents[0].revoke(T, 1, "preempted", False)
    p.memory.arrays[0][:] = 0
    (ended,) = d.wait(Ended)
    assert ended.outcome.kind is FailureKind.TIMED_OUT, ended


def pair(
    engine: Callable[..., SeededEngine], options: dict[str, Any], **config: Any
) -> tuple[SeededEngine, SeededEngine]:
    """Two engines on a network of their own."""
    net = Network()
    p = engine({**options, "network": net}, seed=1)
    d = engine({**options, "network": net}, **config)
    p.net = net  # type: ignore[attr-defined]
    return p, d


def deliver(p: SeededEngine, d: SeededEngine, transfer: TransferId, handle: str = "req") -> Ended:
    p.agents[0].offer(offered([3], 4, transfer=transfer))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=transfer, handle=handle))
    return d.over(handle)
