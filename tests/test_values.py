"""Block tables: what goes in comes out, on every way that they travel, and nothing else gets in."""

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import PeerError
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.values import NULL, BlockTable, Fetch, Offer

ids = st.integers(NULL, 2**31 - 1)
tables = st.lists(st.lists(ids, max_size=5), max_size=4)
T, PEER = TransferId("own/1/x", 0), Source("127.0.0.1", 1, 7)


@given(rows=tables)
def test_ids_come_out_as_they_went_in(rows: list[list[int]]) -> None:
    table = BlockTable.of(rows)
    assert table.tolist() == rows and len(table) == len(rows)
    assert table == BlockTable.of(np.array(row, np.int64) for row in rows)
    assert hash(table) == hash(BlockTable.of(map(tuple, rows)))
    assert table.ids() == tuple(b for row in rows for b in row if b != NULL)
    assert table.empty == (not table.ids())
    for g, row in enumerate(rows):
        assert table[g].dtype == np.int64 and table[g].tolist() == row and table.count(g) == len(row)
    assert pickle.loads(pickle.dumps(table)) == table
    want = m.FetchRequest(T, 1, b"d", 0, 4, table, 1, 1.0)
    assert m.decode(m.encode(want)) == want
    for value in (Offer(T, b"d", 1, 4, table, True), Fetch("r", T, b"d", PEER, table, 0, 4)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@given(row=st.lists(st.integers(0, 9), max_size=6), other=st.lists(st.integers(0, 9), max_size=6))
def test_an_engine_s_null_block_is_ours(row: list[int], other: list[int]) -> None:
    ours = [NULL if b == 0 else b for b in row]
    table = BlockTable.of([row], null=0)
    assert table.tolist() == [ours]
    filled = [o if b == NULL else b for b, o in zip(ours, other, strict=False)]
    assert table.filled(BlockTable.of([other])).tolist() == [filled + ours[len(filled) :]]


@given(row=st.lists(ids, max_size=6), first=st.integers(0, 7), past=st.integers(0, 7))
def test_a_row_is_cut_in_place(row: list[int], first: int, past: int) -> None:
    table = BlockTable.of([row])
    cut = [NULL] * min(first, past) + row[first:past]
    assert table.only([(first, past)]).tolist() == [cut]
    assert table.continues(table.only([(0, past)]))
    assert table.only([(0, past)]).continues(table) == (past >= len(row))


@pytest.mark.parametrize("length", [0, 1, 5, 32, 33, 60])
@given(odd=st.dictionaries(st.integers(0, 59), st.sampled_from([NULL, 7]), max_size=2), data=st.data())
def test_what_is_asked_of_short_and_of_long_rows(length: int, odd: dict[int, int], data: st.DataObject) -> None:
    row = [odd.get(at, 100 - at) for at in range(length)]
    past = data.draw(st.just(length) | st.integers(0, length))
    first = data.draw(st.integers(0, past))
    table, cut = BlockTable.of([[3], row]), row[:past]
    there = [block for block in cut if block != NULL]
    assert table.distinct(1, first, past) == (NULL not in cut[first:] and len(set(there)) == len(there))
    assert table.there(1, first, past) == (NULL not in cut[first:])
    assert table.greatest(1) == max(row, default=NULL)
    assert BlockTable.of([[], row]).empty == (not row or set(row) == {NULL})
    assert table.keeps(BlockTable.of([[4], cut]), 1, first, past)
    changed = BlockTable.of([[3], [*row[:past], 999]])
    assert not table.keeps(changed, 1, first, past + 1)
    sliced = table.cut([(0, 1), (first, past)])
    assert sliced.tolist() == [[3], cut[first:]]
    assert sliced.behind([0, first]) == table.only([(0, 1), (first, past)])


@pytest.mark.parametrize(
    "row",
    [
        [1.0],
        [-2],
        [2**31],
        ["1"],
        [None],
        [[1]],
        "ab",
        bytes(8),
        {2, 1},
        {2: 1},
        np.array([1.5]),
        np.zeros((2, 2), int),
    ],
)
def test_what_is_no_row_of_ids_is_refused_in_words(row: object) -> None:
    with pytest.raises(ValueError, match="block table, group 1"):
        BlockTable.of([[1], row])  # type: ignore[list-item]


@pytest.mark.parametrize("row", [b"abc", b"\xfe\xff\xff\xff"])
def test_a_peer_s_table_is_checked_as_it_is_decoded(row: bytes) -> None:
    with pytest.raises(ValueError, match="block table, group 0"):
        BlockTable((row,))
    good = m.encode(m.FetchRequest(T, 1, b"d", 0, 4, BlockTable.of([[1]]), 1, 1.0))
    packed = msgspec.msgpack.decode(good)
    packed[6] = [[row]]
    with pytest.raises(PeerError, match="block table, group 0"):
        m.decode(msgspec.msgpack.encode(packed))
