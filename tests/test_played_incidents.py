"""Incidents of docs/runbook.md between processes: what the log says, whom the failure names, and what `why` and `doctor` find."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.security import make_key
from tests.conftest import require
from tests.networks import Host, hosts
from tests.playing import Played, playing
from tests.test_incidents import ROWS

BASE = {"backend": "tcp", "peer_timeout": 3.0, "transfer_timeout": 20.0, "start_timeout": 6.0, "lease": 60}


class Scene:
    """Engines, and an operator who runs commands on the decode engine's host."""

    def __init__(self, stack: ExitStack, folder: Path, into: Sequence[str] = ()) -> None:
        self._stack, self._folder, self._into = stack, folder, into

    def engine(self, name: str, before: Sequence[str] = (), **config: Any) -> Played:
        (self._folder / f"{name}.json").write_text(json.dumps({**BASE, **config}))
        return self._stack.enter_context(playing(name, self._folder, {**BASE, **config}, before=before))

    def run(self, *words: str) -> tuple[int, str]:
        command = [*self._into, sys.executable, "-m", "kvxfer", *words, "--config", str(self._folder / "decode.json")]
        unwrapped = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=unwrapped)
        return ran.returncode, ran.stdout + ran.stderr

    def why(self, decode: Played) -> tuple[int, str]:
        return self.run("why", "cmpl-7", "--decode", decode.at)

    def doctor(self, at: str) -> tuple[int, str]:
        return self.run("doctor", "--peer", at)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, tmp_path)


def said(decode: Played, incident: str, failure: str, host: str = "127.0.0.1") -> None:
    """The words of the row are those of the one line about the request, and the failure names the peer."""
    words = ROWS[incident][0]
    (line,) = [line for line in decode.log.splitlines() if "request cmpl-7 has not loaded its KV: " in line]
    assert words in failure and words in line
    assert [host in peer for _, peer in decode.failures] == [True]


def test_a_key_on_one_side_only(scene: Scene, tmp_path: Path) -> None:
    make_key(tmp_path / "key.pem")
    p, d = scene.engine("prefill", key_file=str(tmp_path / "key.pem")), scene.engine("decode")
    said(d, "key on one side only", d.load("cmpl-7", p.offer("q")))
    assert "turned away a connection from 127.0.0.1: the peer speaks without a key" in p.log
    code, text = scene.doctor(p.at)
    assert code == 1 and "the peer has a key, and this engine has none" in text


@pytest.mark.keep(1)
@pytest.mark.parametrize("keys", [False, True])
def test_a_prefill_engine_whose_peers_lack_this_host(scene: Scene, tmp_path: Path, keys: bool) -> None:
    make_key(tmp_path / "key.pem")
    key = {"key_file": str(tmp_path / "key.pem")} if keys else {}
    p, d = scene.engine("prefill", peers=["192.0.2.0/24"], **key), scene.engine("decode", **key)
    said(d, "`peers` of the prefill engine lacks this host", d.load("cmpl-7", p.offer("q")))
    assert "it is not in the list of allowed peers" in p.log
    code, text = scene.doctor(p.at)
    assert code == 1 and "do its 'peers' list this host" in text


@contextmanager
def web_server() -> Iterator[int]:
    """A server that answers anything as HTTP servers do."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    there = server.accept()[0]
                except OSError:
                    return
                with there:
                    there.recv(1 << 10)
                    there.sendall(
                        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received."
                    )

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_the_port_of_an_engine_s_api(scene: Scene) -> None:
    p, d = scene.engine("prefill"), scene.engine("decode")
    with web_server() as port:
        said(d, "an engine's HTTP port for its directory", d.load("cmpl-7", p.offer("q"), port=port))
        for code, text in (scene.why(d), scene.doctor(f"127.0.0.1:{port}")):
            assert code == 1 and "it answers in HTTP" in text


def test_the_port_of_a_worker(scene: Scene) -> None:
    p, d = scene.engine("prefill"), scene.engine("decode")
    port = int(p.rank.rpartition(":")[2])
    said(d, "a worker's port for its directory", d.load("cmpl-7", p.offer("q"), port=port))
    for code, text in (scene.why(d), scene.doctor(f"127.0.0.1:{port}")):
        assert code == 1 and "not of its engine's directory" in text


def test_different_back_ends(scene: Scene) -> None:
    p, d = scene.engine("prefill"), scene.engine("decode", backend="zmq")
    said(d, "different back ends", d.load("cmpl-7", p.offer("q")))
    code, text = scene.why(d)
    assert code == 1 and "configure the same on both" in text and "lease" not in text
    code, text = scene.doctor(p.at)
    assert code == 1 and "configure the same on both" in text


def test_a_prefill_engine_that_has_restarted_on_its_port(scene: Scene) -> None:
    p, d = scene.engine("prefill"), scene.engine("decode")
    ticket = p.offer("q")
    p.process.kill()
    p.process.wait()
    again = scene.engine("again", port=p.port)
    said(d, "prefill engine restarted on its port", d.load("cmpl-7", ticket))
    code, text = scene.why(d)
    assert code == 1 and "has restarted since it was named" in text
    assert d.load("next", again.offer("r")) == "", "and the next one is served"


def test_the_address_of_another_engine(scene: Scene) -> None:
    """As by a name that resolves to the wrong host, or by the decode engine's own address."""
    p, other, d = scene.engine("prefill"), scene.engine("other"), scene.engine("decode")
    said(d, "a name or an address of another engine", d.load("cmpl-7", p.offer("q"), port=other.port))
    code, text = scene.why(d)
    assert (
        code == 1 and f"the engine at {other.at} knows nothing of it" in text and "this address, and the name" in text
    )


def test_a_full_disk_where_the_trace_is_written(scene: Scene) -> None:
    require("networks")  # which says whether this user may have namespaces
    full = 'mount -t tmpfs -o size=4k none /mnt && : > /mnt/trace && cat /dev/zero > /mnt/fill; exec "$@"'
    p = scene.engine("prefill")
    d = scene.engine("decode", ("unshare", "--map-root-user", "--mount", "sh", "-c", full, "sh"), trace="/mnt/trace")
    assert d.load("cmpl-7", p.offer("q")) == "", "no request fails for it"
    assert ROWS["disk full where `trace` writes"][0] + "/mnt/trace: " in d.log
    assert d.load("cmpl-8", p.offer("r")) == ""
    assert d.log.count("no more lines are written") == 1


def test_few_descriptors_at_the_directory(scene: Scene) -> None:
    p, d = scene.engine("prefill", ("prlimit", "--nofile=200:200")), scene.engine("decode")
    with ExitStack() as stack:
        for _ in range(300):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((p.host, p.port))
        assert d.load("cmpl-7", p.offer("q")) == "", "strangers give way"
        assert "this process has few descriptors left (ulimit -n)" in p.log


@pytest.mark.keep(1)
@pytest.mark.parametrize("where", ["directory", "worker", "midway"])
def test_a_firewall_that_drops_what_the_prefill_host_answers(where: str, tmp_path: Path) -> None:
    require("networks")
    make_key(tmp_path / "key.pem")

    def drop(host: Host, *rule: str) -> None:
        subprocess.run([*host.into, "ip", *rule], check=True, timeout=300)

    with hosts(2) as (prefill, decode), ExitStack() as stack:
        scene = Scene(stack, tmp_path, decode.into)
        key = str(tmp_path / "key.pem")
        p = scene.engine("prefill", prefill.into, listen=prefill.address, port=5000, key_file=key)
        d = scene.engine("decode", decode.into, listen=decode.address, port=5000, key_file=key)
        if where == "midway":
            assert d.load("before", p.offer("first")) == ""
            drop(prefill, "route", "add", "blackhole", f"{decode.address}/32")
        else:
            port = "5000" if where == "directory" else p.rank.rpartition(":")[2]
            drop(prefill, "rule", "add", "ipproto", "tcp", "sport", port, "blackhole")
        failure = d.load("cmpl-7", p.offer("q"))
        if where == "midway":
            said(d, "a peer that hangs", failure, prefill.address)
        else:
            said(d, "a firewall that lets one direction through", failure, prefill.address)
            assert "no connection was made: its host is down, or a firewall or route drops packets" in failure
        code, text = scene.why(d)
        assert code == 1 and "router" not in text and "lease" not in text
        code, text = scene.doctor(p.at)
        assert code == 1 and "a firewall or route drops packets" in text
