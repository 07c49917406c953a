"""The example of a back end is small, keeps the contract, and works from its wheel in an environment where nothing else is."""

import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer.backend.endpoint import new_token
from kvxfer.geometry import Region
from kvxfer.transport import Batch, Verb
from kvxfer_bench.soak import measure

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kvxfer-shm"
SOURCE = EXAMPLE / "kvxfer_shm" / "__init__.py"
PAGE = ROOT / "docs" / "writing-a-backend.md"

sys.path.append(str(EXAMPLE))  # its own test file is the one on the page
import test_kvxfer_shm  # noqa: E402
from kvxfer_shm import Endpoint  # noqa: E402


class TestShm(test_kvxfer_shm.TestShm):
    gigabytes = False
    rounds = 50


def test_nothing_is_handed_over_before_the_peer_has_shown_that_the_link_is_its_own() -> None:
    """It could be anybody who has carried the endpoint of another process here."""
    memory = np.ones(1 << 16, np.uint8)
    sender = test_kvxfer_shm.ShmTransport("p", {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind("\0" + (name := f"kvxfer-shm-{os.urandom(16).hex()}"))
        door.listen()
        sender.register([Region(memory.ctypes.data, memory.nbytes)])
        peer = sender.connect(sender.endpoint(), Endpoint("d", name, new_token()).encode())
        sender.submit(Batch(Verb.SEND, peer, 0, np.array([memory.nbytes]), np.array([0])))
        for _ in range(3):
            sender.poll()
        with door.accept()[0] as heard:
            heard.setblocking(False)
            assert heard.recv(1000), "its greeting"
            with pytest.raises(BlockingIOError):
                heard.recv(1000)
    sender.close()


@pytest.mark.slow
def test_nothing_is_wrong_or_left_after_a_short_soak() -> None:
    """Named by its class, as one that is not installed. Too short a run to say whether anything grows."""
    found = measure(6.0, 3.0, backend="kvxfer_shm:ShmTransport")
    assert [c for c in found["complaints"] if "grew" not in c] == []
    assert found["restarts"] >= 1 and found["outcomes"]["delivered"] > 0
