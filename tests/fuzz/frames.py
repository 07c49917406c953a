"""Valid control frames of every kind, to mutate, and a mutator for where no coverage guides it."""

from __future__ import annotations

import random

from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, Group, Heads, Rank, Region, ShardAssignment, View
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.values import BlockTable

T = TransferId("own/1/fuzz", 0)
ROW = [3, 1, -1, 7]
CACHE = Cache(
    (Region(4096, 1 << 16),),
    (Group(4), Group(4, "window", 8), Group(4, "state")),
    (
        View("kv", 0, ("layer.0", "layer.1"), (0, 8192), 16, 256, 16, "test", Heads(0, 4, 4, 64), 16),
        View("kv", 1, ("layer.2",), (16384,), 16, 64, 16, "test", None, 16),
        View("state", 2, ("layer.3",), (32768,), 16, 64, 64, "test"),
    ),
    Rank(0, 0),
)
CLAIMS = (ShardAssignment(0, 0, ("layer.0", "layer.1"), 0, 4), ShardAssignment(1, 1, ("layer.2",), 0, 1))

MESSAGES: list[m.Message] = [
    m.Hello(
        m.PROTOCOL, "zmq", 7, 8, "engine", b"endpoint", CACHE, CLAIMS, "read", 4096, "off", {"weights": "a3f1"}, 2048
    ),
    m.Welcome(7, b"endpoint", 4096),
    m.Refused(FailureKind.INCOMPATIBLE, "no", True, True),
    m.FetchRequest(T, 1, b"digest", 0, 12, BlockTable.of([ROW] * 3), 1, 30.0, 0, 20.0),
    m.PartReady(T, 1, 1, 0, 0, 12, True, BlockTable.of([ROW] * 3), 0, 0),
    m.PartReady(T, 1, 1, 1, 4, 8, False, BlockTable.of([ROW]), 3, 4096),
    m.PartReady(T, 1, 1, 2, 8, 12, False, BlockTable.of([ROW]), 4, 0, bands=(1, 2)),
    m.SlotReady(T, 1, 0, 0, 4096, 512),
    m.SlotFree(T, 1, 0, 0),
    m.Checksums(T, 1, b"checksum"),
    m.Underway(T, 1, 512, 4096),
    m.CommitRequest(T, 1, 1),
    m.CommitAck(T, 1),
    m.CloseAttempt(T, 1, b"digest", FailureKind.CANCELLED, "client left"),
    m.AttemptClosed(T, 1, FailureKind.REVOKED, "preempted", True),
    m.Ping(1),
    m.Pong(1),
    m.Lookup(m.PROTOCOL),
    m.EngineDescriptor(
        m.PROTOCOL, "engine", 7, (m.RankDescriptor("tcp://127.0.0.1:5555", 9, CACHE, ("zmq",)),), {"weights": "a3f1"}
    ),
    m.Renew(7, (m.Named(T, b"digest"),)),
    m.Decline(7, (m.Named(T, b"digest"),), "rejected"),
    m.Committed(T, 3, b"digest"),
    m.Await(7, (m.Named(T, b"digest"),)),
    m.Begun((m.Named(T, b"digest"),)),
    m.OtherContent((m.Named(T, b"digest"),)),
    m.Inquire(7, T, 16, b"0123456789abcdef" * 3),
    m.InquiryAnswer(T, 7, 48, b"0123456789abcdef", "held"),
    m.Explain("chatcmpl-1", (b"12345678",), 5),
    m.Explained(
        "engine",
        1e9,
        1000,
        (m.Story("consumer", "chatcmpl-1", "own/1/fuzz", b"12345678", "10.0.0.1:5555", stages={"asked": 0.1}),),
    ),
]
FRAMES = [m.encode(x) for x in MESSAGES]
_SPICE = [
    b"\xff",
    b"\x00",
    b"\xc0",
    b"\xcf" + b"\xff" * 8,
    b"\xd3" + b"\x80" + b"\0" * 7,
    b"\xdd\x7f\xff\xff\xff",
    b"\x90",
]


def mutate(frame: bytes, rng: random.Random) -> bytes:
    """The frame with a few bytes changed, put in, taken out, or taken from another frame."""
    out = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if out:
                out[at % len(out)] = rng.randrange(256)
            case 1 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 2:
                out[at:at] = rng.choice(_SPICE)
            case 3:
                del out[at : at + rng.randint(1, 8)]
            case 4:
                other = rng.choice(FRAMES)
                cut = rng.randrange(len(other))
                out[at:at] = other[cut : cut + rng.randint(1, 64)]
            case _:
                del out[at:]
    return bytes(out)
