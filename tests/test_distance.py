"""`kvxfer bench distance`: a link that is long and loses packets, made on one host."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvxfer_bench.slow_link import THERE

APART = ("unshare", "--map-root-user", "--net", sys.executable)
PROBE = """
import socket, sys, time
from kvxfer_bench.slow_link import HERE, THERE, SlowLink
round_trip, loss = map(float, sys.argv[1:])
with SlowLink(round_trip, loss, 1e9, None).up(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there, \\
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    there.bind((HERE, 0))
    here.bind((HERE, 0))
    here.settimeout(0.5 if loss else 30.0)
    came = []
    begun = time.monotonic()
    for i in range(500):
        here.sendto(bytes([i % 256]) * 1000, (THERE, there.getsockname()[1]))
        there.settimeout(30.0 if loss == 0 else 0.002 + round_trip)
        try:
            data, sender = there.recvfrom(2000)
            came.append(time.monotonic() - begun)
            there.sendto(data, sender)
            while here.recv(2000) != data:
                assert loss, "it was changed on its way"  # or one that had been given up has come after all
        except TimeoutError:
            pass
        if len(came) == 20:
            break
print(len(came), i + 1, time.monotonic() - begun, sender[0] if came else "")
"""


def apart(*command: str) -> Sequence[str]:
    """What a program says that runs in a network namespace of its own; the test is skipped where the host permits none."""
    ran = subprocess.run([*APART, *command], capture_output=True, text=True, timeout=300)
    if "permits no network device" in ran.stderr or "unshare failed" in ran.stderr:
        pytest.skip(f"the host does not let us: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_what_is_sent_arrives_late_and_from_afar() -> None:
    came, sent, seconds, sender = apart("-c", PROBE, "0.02", "0")[0].split()
    assert (int(came), int(sent), sender) == (20, 20, THERE)
    assert float(seconds) >= 20 * 0.02, "it was there sooner than the link is long"


@pytest.mark.slow
def test_some_of_it_is_lost() -> None:
    came, sent, *_ = apart("-c", PROBE, "0.001", "0.5")[0].split()
    assert int(came) < int(sent)
    assert apart("-c", PROBE, "0.001", "1")[0].split()[:2] == ["0", "500"]


@pytest.mark.slow
def test_the_benchmark_moves_a_request_over_it() -> None:
    link = (0.002, 0.0, 1e9, None)
    told = json.dumps(("tcp", [{"connections": 2}], link, "llama-3-8b", 1, 1))
    *libraries, own = map(json.loads, apart("-m", "kvxfer_bench.distance", told))
    assert [each["what"] for each in libraries] == ["library", "library in one message"]
    assert own["what"] == "transport" and own["options"]["connections"] == 2
    assert own["ms"] >= 2 and own["to_library"] > 0 and own["to_one_message"] > 0
