"""Commands cross processes, by pickle (vLLM's executor) or msgpack (others)."""

import pickle
from collections.abc import Sequence

import msgspec

from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Cancel, DeclinedTransfer, Revoke, Schedule, StepCommands
from kvxfer.values import BlockTable, Fetch, Group, Offer
from tests.schedule.ends import Loading, Offers, loaded, preempt


def table(*rows: Sequence[int]) -> BlockTable:
    return BlockTable.of(rows)


T = TransferId.derived("a/#\0é", 3)
PEER = Source("::1", 1, 2**63 - 1)
ALL = StepCommands(
    offers=(Offer(T, bytes(range(16)), 2**40, 20, table((1, -1), ()), True),),
    revokes=(Revoke(T, 1, "why", False),),
    fetches=(
        Fetch("r", T, b"d", PEER, table((-1, 2)), 16, 20, None),
        Fetch("r", T, b"d", PEER, table(()), 0, 20, PEER),
    ),
    cancels=(Cancel(0, "why"),),
)


def test_commands_survive_pickle_and_msgpack() -> None:
    assert pickle.loads(pickle.dumps(ALL)) == ALL
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ALL), type=StepCommands) == ALL
    decline = DeclinedTransfer(T, b"d", PEER, "why")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(decline), type=DeclinedTransfer) == decline


def test_a_step_without_news_is_false() -> None:
    assert not StepCommands()
    for field in ("offers", "revokes", "fetches", "cancels"):
        assert StepCommands(**{field: getattr(ALL, field)})


def test_both_halves_speak_with_one_voice() -> None:
    """One request loads its past and offers it on; another is aborted on both sides."""
    schedule = Schedule([Group(16)], PEER)
    consumer, producer = Loading(schedule.consumer), Offers(schedule.producer)
    other = TransferId.derived("b")
    for request, taken, given, blocks in (("r", T, other, [1, 2]), ("s", other, T, [3, 4])):
        assert consumer.arrive(request, taken, b"d", PEER, 32)
        assert producer.arrive(request, given, b"d", 32)
        consumer.allocated(request, table(blocks), 0, 32)
    assert len(schedule) == 4
    loaded(consumer, "r")
    producer.step("r", 31, 1, table([1, 2]))
    consumer.finish("s")
    assert not producer.finish("s", table([]), False)
    commands = schedule.commands()
    assert [want.transfer for want in commands.fetches] == [T, other]
    assert [offer.transfer for offer in commands.offers] == [other]
    assert [cancel.number for cancel in commands.cancels] == [1]
    assert [revoke.transfer for revoke in commands.revokes] == [T]
    producer.preempt("r")
    preempt(consumer, "r")
    assert [revoke.transfer for revoke in schedule.commands().revokes] == [other]
    consumer.finish("r")
    assert not producer.finish("r", table([]), True)
    loaded(consumer, "s")
    assert len(schedule) == 0
