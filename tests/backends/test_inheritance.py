"""What a process starts gets none of its back ends' sockets, whoever opened them, and whatever else was left to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvxfer.backend.inheritance import Uninherited
from tests.conftest import require

OVER_TCP = {"listen": "0.0.0.0", "ucx": {"TLS": "tcp"}}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("tcp", {}),
        ("zmq", {}),
        ("cma", {}),
        ("ucx", {}),
        ("ucx", OVER_TCP),
        ("nixl", {}),
        ("nixl", {**OVER_TCP, "verbs": ["write"]}),
    ],
    ids=lambda x: x if isinstance(x, str) else "over tcp" if "ucx" in x else "plain",
)
def test_a_child_gets_no_socket_of_a_back_end(backend: str, options: dict[str, Any]) -> None:
    require(backend)
    asked = [sys.executable, "-m", "tests.backends.inheriting", backend, json.dumps(options)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_what_was_inheritable_before_stays_so() -> None:
    with socket.socket() as before, socket.socket() as after:
        before.set_inheritable(True)
        uninherited = Uninherited()
        after.set_inheritable(True)
        uninherited.look()
        assert before.get_inheritable() and not after.get_inheritable()
        after.set_inheritable(True)
        uninherited.look()
        assert after.get_inheritable(), "it was looked a moment ago"
        uninherited.soon()
        uninherited.look()
        assert not after.get_inheritable()
