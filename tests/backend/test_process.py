"""Who is at the other end of a Unix socket, by the kernel's word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvxfer.backend.process import PeerProcess
from tests.conftest import require

SAYS_HELLO = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.send(b'x'); time.sleep(60)"


@pytest.fixture(params=["as the kernel is", "before 6.5", "before 5.3"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What it can tell; older ones know neither option 77 nor call 434."""
    if request.param != "as the kernel is":
        monkeypatch.setattr("kvxfer.backend.process._SO_PEERPIDFD", 9999)
    if request.param == "before 5.3":
        monkeypatch.setattr("kvxfer.backend.process._PIDFD_OPEN", 9999)
    return str(request.param)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    name = f"kvxfer-test-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen([sys.executable, "-c", SAYS_HELLO, name])
        accepted = listener.accept()[0]
        assert accepted.recv(1) == b"x"
        yield process, accepted
        accepted.close()
        process.kill()
        process.wait()


def test_it_is_who_has_connected_and_lives_until_its_end(
    child: tuple[subprocess.Popen[bytes], socket.socket], kernel: str
) -> None:
    process, accepted = child
    peer = PeerProcess(accepted)
    assert peer.pid == process.pid and peer.held == peer.lives() == (kernel != "before 5.3")
    process.kill()
    process.wait()
    assert not peer.lives()
    gone = PeerProcess(accepted)
    assert not gone.lives()
    for one in (peer, gone):
        one.close()
        one.close()


def test_two_processes_are_told_apart(child: tuple[subprocess.Popen[bytes], socket.socket], kernel: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        peer, again, me = PeerProcess(child[1]), PeerProcess(child[1]), PeerProcess(here)
        assert me.pid == os.getpid()
        assert peer.is_also(again) and not peer.is_also(me)
        for one in (peer, again, me):
            one.close()


def test_a_closed_one_is_believed_no_more() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        me = PeerProcess(here)
        assert me.lives()
        me.close()
        assert not me.lives()


def test_a_process_of_this_user_and_these_namespaces_equals_us(
    child: tuple[subprocess.Popen[bytes], socket.socket], kernel: str
) -> None:
    process, accepted = child
    peer = PeerProcess(accepted)
    assert peer.equals_us()
    process.kill()
    process.wait()
    assert not peer.equals_us()
    peer.close()


@pytest.mark.parametrize(
    "how", [["--user", "--map-root-user"], ["--user", "--map-root-user", "--pid", "--fork"], ["--setuid"]]
)
def test_a_process_with_other_rights_does_not(how: list[str]) -> None:
    """It could not open by itself all that this one may."""
    name = f"kvxfer-test-{os.urandom(16).hex()}"
    if how == ["--setuid"]:
        if os.geteuid():
            pytest.skip("only root may become somebody else")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    else:
        require("networks")  # which takes the same rights
        command = ["unshare", *how, "--kill-child"] if "--fork" in how else ["unshare", *how]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(20)
        with subprocess.Popen([*command, sys.executable, "-c", SAYS_HELLO, name]) as process:
            accepted = listener.accept()[0]
            with accepted:
                peer = PeerProcess(accepted)
                assert peer.pid > 0 and not peer.equals_us()
                peer.close()
            process.kill()
