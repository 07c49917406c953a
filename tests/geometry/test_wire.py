"""The wire form of plans."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.geometry.wire import decode, encode
from tests.geometry.engines import Case, cases
from tests.geometry.test_law import links, plan, rows


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_plan_round_trips(case: Case) -> None:
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        again = decode(encode(made))
        assert rows(again) == rows(made)
        assert again.nbytes == made.nbytes
        one, other = made.runs(), again.runs()
        assert all(np.array_equal(getattr(one, f), getattr(other, f)) for f in ("src", "dst", "length"))
        assert encode(again) == encode(made)


def words(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


GOOD = [words(0), words(0), [(2, 8, 16)], 8, words(0, 64), words(64, 0), words(1, 1)]


def test_a_plan_is_a_list_of_sheets() -> None:
    made = decode(msgspec.msgpack.encode([GOOD]))
    assert (made.rows, made.nbytes) == (4, 32)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, words()),
        (0, words(0, 1)),
        (0, b"1234567"),
        (1, words(0, 1)),
        (2, [(1, 8, 16)]),
        (2, [(2, 8)]),
        (2, [(1 << 30, 8, 16)]),
        (2, [(1 << 62, 8, 16)] * 2),
        (2, [(2, 8, 16)] * 3),
        (3, 0),
        (3, -8),
        (4, words(0)),
        (5, words(0, 1, 2)),
        (6, words(1)),
        (6, words(1, 0)),
        (6, words(-1, 1)),
        (6, None),
    ],
)
def test_what_no_plan_encodes_to_is_refused(at: int, value: object) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        decode(msgspec.msgpack.encode([[*GOOD[:at], value, *GOOD[at + 1 :]]]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
@example(b"")
def test_noise_is_refused(noise: bytes) -> None:
    try:
        decode(noise)
    except ValueError as e:
        assert "not a plan" in str(e)
