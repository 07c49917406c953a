"""Frames made of noise and of other frames, at the decoder and at a live agent. Longer runs: ``make fuzz``."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import PeerError
from kvxfer.failures import FailureKind
from kvxfer.protocol import messages as m
from kvxfer.values import BlockTable
from tests.conftest import require
from tests.fuzz import agent, decoder
from tests.fuzz.frames import FRAMES, MESSAGES, mutate

ROOT = Path(__file__).parents[2]
SEEDS = st.integers(0, 1 << 32)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([type(x).__struct_config__.tag for x in MESSAGES]),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


@pytest.mark.parametrize("frame", FRAMES, ids=[type(x).__name__ for x in MESSAGES])
def test_every_message_comes_back_as_it_went(frame: bytes) -> None:
    assert decoder.one(frame)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise(frame: bytes) -> None:
    decoder.one(frame)


@given(VALUES)
@settings(deadline=None)
def test_well_formed_values_that_are_no_messages(value: Any) -> None:
    decoder.one(msgspec.msgpack.encode(value))


@given(st.sampled_from(FRAMES), SEEDS)
@settings(max_examples=2000, deadline=None)
def test_mutated_messages(frame: bytes, seed: int) -> None:
    decoder.one(mutate(frame, random.Random(seed)))


@pytest.mark.parametrize(
    "message",
    [
        m.FetchRequest(MESSAGES[3].transfer, 1 << 62, b"", 1 << 47, 1 << 48, BlockTable(), 1, 1e6),  # type: ignore[union-attr]
        m.Refused(FailureKind.REFUSED, "x" * 10_000_000, True),
    ],
)
def test_what_is_large_but_allowed_stays_within_bounds(message: m.Message) -> None:
    again = m.decode(m.encode(message))
    assert len(getattr(again, "reason", "")) <= m.MAX_WORDS + 10


@pytest.mark.parametrize(
    "frame",
    [
        b"\x98\xa4want\x82\xa4base\xa1x\xa6prompt\x00\xff\xc4\x00\x00\x00\x90\x01\xcb" + b"\x7f\xf0" + b"\0" * 6,
        b"\0" * (m.MAX_BYTES + 1),
        b"\xdd\xff\xff\xff\xff" * 1000,
        b"\x91" * 100_000,
    ],
    ids=["infinite patience", "too long", "endless lists", "deep"],
)
def test_what_is_out_of_bounds_is_refused(frame: bytes) -> None:
    with pytest.raises(PeerError):
        m.decode(frame)


@pytest.fixture
def rig() -> Iterator[agent.Rig]:
    rig = agent.Rig()
    yield rig
    rig.close()


@pytest.mark.keep(1)
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_under_fire_lives_and_works(rig: agent.Rig, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(6000):
        frame = rng.choice(FRAMES)
        rig.throw(bytes([rng.randrange(4)]) + (frame if rng.random() < 0.2 else mutate(frame, rng)))
        if i % 32 == 0:
            rig.drain()
        if i % 1000 == 999:
            rig.check()


@pytest.mark.slow
@pytest.mark.parametrize(("harness", "runs"), [("decoder", 200_000), ("agent", 100_000), ("machines", 100)])
def test_guided_by_coverage(harness: str, runs: int, tmp_path: Path) -> None:
    """So many runs that three times as many reach hardly any code that these do not, however busy this machine is."""
    require("atheris")
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        harness,
        f"-runs={runs}",
        "-max_total_time=60",
        f"-artifact_prefix={tmp_path}/",
    ]
    # The fuzzer has a limit of memory, and takes what our own peak was for its own if we did not fork.
    fork: Callable[[], None] = lambda: None  # noqa: E731
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, preexec_fn=fork)
    assert done.returncode == 0, done.stderr[-4000:]
