"""Tickets: what goes in comes out, over whatever carries texts; anything else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import ArgumentError, Source, Ticket, TransferId

ids = st.builds(TransferId, st.text(st.characters(exclude_categories=["Cs"]), max_size=200), st.integers(0, 1 << 40))
sources = st.builds(
    Source,
    st.ip_addresses().map(str) | st.from_regex(r"[a-c1]{1,9}\.[a-c]{2}", fullmatch=True),
    st.integers(1, 65535),
    st.integers(0, 2**63 - 1),
)
tickets = st.builds(Ticket, ids, st.binary(min_size=1, max_size=64), sources)


@given(tickets)
def test_a_ticket_is_read_as_it_was_made(ticket: Ticket) -> None:
    text = json.loads(json.dumps({"ticket": ticket.text}))["ticket"]
    assert text.isascii() and not set(text) & set("\"'\\&?/+ <>")
    assert Ticket.read(text) == ticket


@given(tickets, st.data())
def test_one_that_was_cut_or_altered_is_refused(ticket: Ticket, data: st.DataObject) -> None:
    text = ticket.text
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        wrong = text[:at]
    else:
        wrong = text[:at] + data.draw(st.sampled_from(sorted(set("aQ9-_.~") - {text[at]}))) + text[at + 1 :]
    try:
        assert Ticket.read(wrong) == ticket  # base64 has bits that say nothing
    except ArgumentError as error:
        assert "ticket" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "kvxfer1.",
        "kvxfer2.AAAA",
        "kvxfer1.AAAAAA==",
        "kvxfer1.\u00e9",
        "x" * 100_000,
        None,
        7,
        b"kvxfer1.",
        {"host": "h"},
    ],
    ids=lambda wrong: f"{wrong!r:.20}",
)
def test_what_is_no_ticket_is_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="ticket"):
        Ticket.read(wrong)  # type: ignore[arg-type]
