"""Commands cross processes, by pickle (vLLM's executor) or msgpack (others)."""

import pickle
from collections.abc import Sequence

import msgspec

from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Cancel, DeclinedTransfer, Revoke, StepCommands
from kvxfer.values import BlockTable, Fetch, Offer


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
