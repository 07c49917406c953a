"""What one side tells the other arrives as it was, or is refused in words that help."""

import subprocess
import sys
import zlib
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase
from kvxfer.errors import TransportError
from kvxfer.testing.fake import FakeTransport


class Ours(EndpointBase, frozen=True):
    backend = "our_own"
    format = 7

    token: Annotated[bytes, Meta(max_length=1 << 21)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class Short(Ours, frozen=True):
    most_bytes = 100


class Newer(EndpointBase, frozen=True):
    backend = "our_own"
    format = 8

    token: bytes


class Theirs(EndpointBase, frozen=True):
    backend = "another"
    format = 7

    token: bytes
    port: int


OURS = st.builds(Ours, st.text(max_size=20), st.binary(max_size=40), st.integers(1, 65535))


@given(OURS)
def test_what_was_encoded_is_decoded(ours: Ours) -> None:
    assert Ours.decode(ours.encode()) == ours


@given(OURS, st.data())
def test_what_was_altered_is_refused(ours: Ours, data: st.DataObject) -> None:
    raw = bytearray(ours.encode())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportError, match="our_own"):
        Ours.decode(bytes(raw))
    with pytest.raises(TransportError, match="our_own"):
        Ours.decode(ours.encode()[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=64))
def test_noise_is_refused_even_with_a_checksum_that_is_right(noise: bytes) -> None:
    for said in (noise, b"our_own " + noise, b"our_own 7 " + noise):
        with pytest.raises(TransportError, match="our_own"):
            Ours.decode(said + zlib.crc32(said).to_bytes(4))


@pytest.mark.parametrize(
    "other, said",
    [
        (Newer("b", b""), "format 8, this side's 7; install the same release of it on both"),
        (Theirs("b", b"", 1), "an endpoint of back end 'another', not of 'our_own'"),
        (Ours("b", b"", 65536), "65535"),
    ],
)
def test_the_reason_is_named(other: EndpointBase, said: str) -> None:
    with pytest.raises(TransportError, match=said):
        Ours.decode(other.encode())


def test_it_has_a_most() -> None:
    long = Ours("a", bytes(1 << 20), 1)
    with pytest.raises(TransportError, match="register fewer, longer regions"):
        long.encode()
    most = Ours("a", bytes((1 << 20) - 100), 1).encode()
    Ours.decode(most)
    with pytest.raises(TransportError, match="not an endpoint"):
        Short.decode(most)
    with pytest.raises(TransportError, match="more than 100"):
        Short("a", bytes(100), 1).encode()
    Short.decode(Short("a", bytes(50), 1).encode())


FRESH = """
from __future__ import annotations

import sys
import threading

from kvxfer.backend.endpoint import EndpointBase

sys.setswitchinterval(1e-6)
for i in range(300):
    class Part(EndpointBase, frozen=True):
        backend, format = "part", 1
        number: int

    body = "class Fresh(EndpointBase, frozen=True):\\n    backend, format = 'fresh', 1\\n" + "".join(
        f"    f{j}: {'int' if j % 2 else 'tuple[Part, ...]'}\\n" for j in range(20)
    )
    globals()["Part"] = Part
    exec(compile("from __future__ import annotations\\n" + body, "fresh", "exec"), globals())
    data = Fresh("a", *(1 if j % 2 else (Part("b", 2),) for j in range(20))).encode()
    all_here = threading.Barrier(4)

    def decode() -> None:
        all_here.wait()
        Fresh.decode(data)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_decode_a_class_that_none_has_decoded() -> None:
    """The data threads of two agents in one process, at their first links. It must not crash the process."""
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=300)


def test_an_endpoint_that_is_too_long_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []
    monkeypatch.setattr(FakeTransport, "make_endpoint", lambda *_: Ours("a", bytes(1 << 20), 1))
    monkeypatch.setattr(FakeTransport, "drop_endpoint", lambda _, mine: dropped.append(mine))
    transport = FakeTransport("a", {})
    with pytest.raises(TransportError, match="more than 1048576; register fewer, longer regions"):
        transport.endpoint()
    assert len(dropped) == 1
    transport.close()
