"""The transfer that docs/protocol.md follows goes as the page says, message by message."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kvxfer import Agent, BlockTable, Cache, Config, Directory, Ended, Offer, Released, Ticket, TransferId, digest
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.values import Action, Moved

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def said(message: m.Message) -> str:
    """Return what the page says of a message's fields."""
    match message:
        case m.FetchRequest():
            return f"attempt {message.attempt}: tokens {message.start} to {message.tokens}"
        case m.PartReady():
            numbers = f"attempt {message.attempt}, generation {message.generation}"
            return f"{numbers}: tokens {message.lo} to {message.hi}{', final' if message.final else ''}"
        case m.AttemptClosed():
            return f"attempt {message.attempt}: {message.reason}{', may come again' if message.again else ''}"
        case m.CommitRequest():
            return f"attempt {message.attempt}: I have all bytes; did generation {message.generation} hold?"
        case m.CommitAck():
            return f"attempt {message.attempt}: yes"
    return ""


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_transfer_goes_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[m.Message] = []
    moved: list[Moved] = []
    encode, arrive = m.encode, ConsumerMachine.moved

    def record(message: m.Message) -> bytes:
        if not isinstance(message, m.Ping | m.Pong) and message not in sent[-1:]:
            sent.append(message)
        return encode(message)

    def count(kind: type) -> int:
        return sum(isinstance(message, kind) for message in sent)

    def move(self: ConsumerMachine, done: Moved, now: float) -> list[Action]:
        actions = arrive(self, done, now)
        moved.append(done)
        return actions

    monkeypatch.setattr(m, "encode", record)
    monkeypatch.setattr(ConsumerMachine, "moved", move)
    # As between two hosts, where the counter cannot be read.
    monkeypatch.setattr(SharedRevocationCounter, "invite", lambda self: "")
    caches = [Cache.of_tensors(np.zeros((4, 16, 16, 256), np.uint8), "layer block token unit") for _ in range(2)]
    with (
        Agent(caches[0], Config(), "prefill") as prefill,
        Agent(caches[1], Config(), "decode") as decode,
        Directory(Config(), "prefill") as directory,
    ):
        directory.publish((prefill.descriptor,))
        transfer, check = TransferId.mint(directory.epoch, "request-1"), digest(tokens=range(40), model="my-model")
        ticket = Ticket(transfer, check, directory.source)
        decode.fetch(ticket.fetch("request-7", BlockTable.of([[1, 2, 4]]), start=0, tokens=40))
        events: list[object] = []

        def seen(kind: type) -> bool:
            events.extend(decode.events(timeout=0.1))
            return any(isinstance(event, kind) for event in events)

        until(lambda: count(m.FetchRequest) == 1)
        prefill.offer(Offer(transfer, check, 1, 16, BlockTable.of([[7]]), final=False))
        until(lambda: moved)
        prefill.revoke(transfer, 1, "preempted", gone=False)
        until(lambda: count(m.FetchRequest) == 2)
        prefill.offer(Offer(transfer, check, 2, 32, BlockTable.of([[3, 12]]), final=False))
        until(lambda: count(m.PartReady) == 2)
        prefill.offer(Offer(transfer, check, 2, 40, BlockTable.of([[3, 12, 9]]), final=True))
        until(lambda: seen(Released))
    ended = next(event for event in events if isinstance(event, Ended))
    assert ended.outcome.delivered and ended.generation == 2
    assert f"{ended.nbytes:,} bytes" in PAGE

    shown = rows("One transfer, followed to its end")
    # A directory may encode its descriptor before it is asked.
    order = [type(message).__name__ for message in sent if not isinstance(message, m.EngineDescriptor)]
    assert order[: len(shown) - 1] == [row[1].strip("`") for row in shown if "EngineDescriptor" not in row[1]]
    assert [text for text in map(said, sent) if text][:8] == [row[2] for row in shown[4:]]


def test_each_message_has_its_row() -> None:
    assert {kind.__name__ for kind in get_args(m.Message)} == {row[0].strip("`") for row in rows("Messages")}


def test_the_states_of_the_example_are_those_of_the_tables() -> None:
    generated = "".join(re.findall(r"^\| state \| on \| becomes \|$.*?\n\n", PAGE, re.M | re.S))
    states = {word for row in re.findall(r"^\| (\w+) \|.*\| (\w+) \|$", generated, re.M) for word in row}
    cells = [cell for row in rows("One transfer, followed to its end") for cell in row[3:]]
    named = {state.strip() for cell in cells for state in cell.split(", then")}
    assert named - {""} <= states
