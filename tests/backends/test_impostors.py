"""A peer on another host whose UCX address names a process of this host: `ucx` and `nixl`, by real processes in networks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.conftest import require
from tests.networks import Host, hosts, program

impostor = partial(program, "tests.backends.impostor")


@pytest.fixture(scope="module")
def apart() -> Iterator[list[Host]]:
    require("networks")
    with hosts(2) as two:
        yield two


@pytest.mark.timeout(120)
@pytest.mark.parametrize("whom", ["a neighbour", "the reader itself"])
@pytest.mark.parametrize("allowed", ["tcp,cma", "tcp,sysv", "tcp,posix", "all"])
@pytest.mark.parametrize("backend", ["ucx", "nixl"])
def test_a_peer_passes_for_no_process_that_it_is_not(apart: list[Host], backend: str, allowed: str, whom: str) -> None:
    """What comes is what the peer itself has, over the network, if anything does; no memory of others is attached for it."""
    require(backend)
    here, there = apart
    with impostor(here, "holder") as holder, impostor(here, "victim", backend, here.address) as victim:
        mine, other = victim.hear(), holder.hear()
        named = other if whom == "a neighbour" else mine
        claims = str(named["pid"]), str(other["segment"])
        with impostor(there, "peer", backend, there.address, allowed, *claims) as peer:
            victim.tell(endpoint=peer.hear()["endpoint"])
            peer.tell(endpoint=mine["endpoint"])
            got = victim.hear()
            holder.tell()
            assert not got["secret"], got
            assert other["segment"] not in got["segments"], "it has attached what the peer named"
            assert holder.hear()["whole"], "it has written to what the peer named"
            assert got["own"], got


@pytest.mark.timeout(120)
def test_the_claim_is_believed_by_ucx_itself(apart: list[Host]) -> None:
    """Or the test above would find nothing."""
    require("nixl")
    here, there = apart
    with impostor(here, "holder") as holder, impostor(here, "victim", "nixl", here.address, "undivided") as victim:
        mine, other = victim.hear(), holder.hear()
        with impostor(
            there, "peer", "nixl", there.address, "tcp,cma", str(other["pid"]), str(other["segment"])
        ) as peer:
            victim.tell(endpoint=peer.hear()["endpoint"])
            peer.tell(endpoint=mine["endpoint"])
            assert victim.hear()["secret"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["here", "in another pid namespace", "at another control connection"])
@pytest.mark.parametrize("listen", ["an address", "loopback"])
@pytest.mark.parametrize("backend", ["ucx", "nixl"])
def test_an_honest_peer_of_this_host(apart: list[Host], backend: str, listen: str, where: str) -> None:
    """One in a container of its own, as of a pod, is reached by the network only, and on loopback by nothing, which is said.

    One whose endpoint another has passed on is reached by nothing at all.
    """
    require(backend)
    host = apart[0]
    address = host.address if listen == "an address" else "127.0.0.1"
    within = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if "namespace" in where else []
    control = ["", "another"] if "control" in where else []
    with (
        impostor(host, "victim", backend, address, *control) as reader,
        impostor(host, "honest", backend, address, within=within) as peer,
    ):
        mine = reader.hear()
        reader.tell(endpoint=peer.hear()["endpoint"])
        peer.tell(endpoint=mine["endpoint"])
        got = reader.hear()
        if control:
            assert not got["own"] and ("control connection" in got["error"] or "is gone" in got["error"]), got
        elif listen == "loopback" and where != "here":
            assert (
                not got["own"] and "namespace" in got["error"] and "'listen' is a loopback address" in got["error"]
            ), got
        else:
            assert got["own"] and got["error"] is None, got
