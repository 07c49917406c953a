"""What operators and peers meet with several back ends alike, and the conformance suite does not ask."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.conformance import ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.transport import registry
from kvxfer_nccl.endpoint import Endpoint as NcclEndpoint
from tests.backends.conftest import way_of, world_of
from tests.conftest import require

NCCL, ON_HOST = "tests.backends.fake_nccl:FakeNcclTransport", "tests.backends.cuda_on_host:OnHost"
ANYWHERE = "0.0.0.0"


@pytest.mark.parametrize("backend", ["tcp", "zmq", "nixl", NCCL, ON_HOST])
def test_a_link_that_the_peer_has_given_up_before_we_connect_fails_at_once(backend: str) -> None:
    """Its answer, not a deadline, ends our batches."""
    if backend == "nixl":
        require(backend)
    with closing(world_of(backend)) as world:
        a, b = world.local(), world.local()
        world.allocate(a, b)
        mine, theirs = a.endpoint(), b.endpoint()
        while backend == NCCL and NcclEndpoint.decode(mine).token > NcclEndpoint.decode(theirs).token:
            mine = a.endpoint()  # until it is a that dials
        b.disconnect(b.connect(theirs, mine))
        world.run(0.05)
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: -1})
        halves = link.halves(way_of(world), b, a, Runs.of([0], [0], [1000]))
        (half,) = [half for half in halves if half[0] is a]
        [result] = world.finish(Started([(a, a.submit(half[1]))]), seconds=8)
        assert result.error is not None and b.name in result.error


READ, WRITE = TransferMode.READ, TransferMode.WRITE


@pytest.mark.parametrize(
    "backend, options, ways",
    [
        ("cma", {"mode": "vm"}, [READ]),
        ("cma", {"mode": "shm"}, [READ, WRITE]),
        ("nixl", {}, [READ]),
        (ON_HOST, {}, [READ]),
    ],
)
def test_memory_that_was_not_lent_is_out_of_reach(
    backend: str, options: dict[str, Any], ways: list[TransferMode]
) -> None:
    """Who may read may write as well, where the kernel or a library moves the bytes; not where the owner does."""
    if backend != ON_HOST:
        require(backend)
    runs = Runs.of([5], [7], [1000])
    with closing(world_of(backend, **options)) as world:
        owner, peer = world.local(), world.local()
        for participant in (owner, peer):
            for seed in (1, 2):
                participant.allocate([1 << 16], seed)
        for lent, writable in (([1], False), ([1], True), ([], True)):
            mine, theirs = owner.endpoint_lending(lent, writable), peer.endpoint()
            link = ParticipantLink({owner.name: owner.connect(mine, theirs), peer.name: peer.connect(theirs, mine)})
            for way, memory in ((way, memory) for way in ways for memory in (0, 1)):
                ends = (owner, peer) if way is READ else (peer, owner)
                named = {"memory" if way is READ else "target_memory": memory}
                if memory in lent and (writable or way is READ):
                    world.move(link, way, *ends, runs, **named)
                    continue
                before = owner.content(memory), peer.content(0)
                [(participant, batch)] = link.halves(way, *ends, runs, **named)
                ended = world.finish(world.submit(participant, batch))
                assert all(r.error is not None for r in ended), f"{way} of memory {memory}, of which {lent} was lent"
                assert_equal(owner.content(memory), before[0], "memory that was not lent")
                assert_equal(peer.content(0), before[1], "the memory of the peer that was refused")


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("tcp", {"port": 70_000}, "port"),
    ("tcp", {"connections": "many"}, "connections"),
    ("tcp", {"conections": 2}, "did you mean 'connections'"),
    ("tcp", {"heartbeat_s": 0}, "heartbeat_s"),
    ("tcp", {"listen": ANYWHERE}, "advertise"),
    ("tcp", {"listen": ANYWHERE, "advertise": "no-such-host.invalid"}, "cannot resolve"),
    ("zmq", {"protocol": "carrier pigeon"}, "protocol"),
    ("zmq", {"io_threads": "many"}, "io_threads"),
    ("zmq", {"listen": ANYWHERE}, "advertise"),
    ("cma", {"mode": "fast"}, "mode"),
    ("cma", {"allow_ptrace": "yes"}, "allow_ptrace"),
    (NCCL, {"channels": 0}, "channels"),
    (NCCL, {"priority": "low"}, "priority"),
    (NCCL, {"nccl_num_channels": 8}, "channels"),
    (NCCL, {"listen": ANYWHERE}, "advertise"),
    ("ucx", {"lissten": "10.0.0.1"}, "did you mean 'listen'"),
    ("ucx", {"listen": "198.51.100.7"}, "no network device of this host"),  # of nobody: RFC 5737
    ("ucx", {"ports": "20000"}, "ports"),
    ("ucx", {"ucx": {"RNDV_TRESH": "1k"}}, "did you mean 'RNDV_THRESH'"),
    ("ucx", {"ucx": {"RNDV_THRESH": "many"}}, "'many'"),
    (ON_HOST, {"engine": "steam"}, "engine"),
    (ON_HOST, {"ctas": 0}, "ctas"),
]


@pytest.mark.keep(len(OPTIONS))
@pytest.mark.parametrize("backend, options, named", OPTIONS)
def test_options_that_cannot_be_are_named(backend: str, options: dict[str, Any], named: str) -> None:
    if backend == "ucx":
        require(backend)
    with pytest.raises(ConfigError, match=named):
        registry.load(backend)("agent", options)


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
def test_a_port_in_use_is_named(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=str(port)):
            registry.load(backend)("agent", {"port": port})


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
def test_a_name_that_is_advertised_is_looked_up_where_it_is_said(backend: str) -> None:
    with closing(world_of(backend, listen=ANYWHERE, advertise="localhost")) as world:
        a, b, link = world.pair()
        assert b"127.0.0.1" in a.endpoint() and b"localhost" not in a.endpoint()
        world.move(link, way_of(world), a, b, Runs.of([0], [0], [1000]))
