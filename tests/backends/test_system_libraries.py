"""Back ends work, and their processes end, on a host that has the RDMA, UCX and ZeroMQ packages of its distribution."""

import subprocess
import sys

import pytest

from tests import system_libraries
from tests.conftest import require

require("system_libraries")

ENDS = """
import sys
from kvxfer.transport import registry

made = [registry.load(sys.argv[1])(agent, {}) for agent in ("a", "b")]
if sys.argv[2] == "closed":
    for transport in made:
        transport.close()
print(open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("how", ["closed", "left"])
@pytest.mark.parametrize("name", ["cma", "nixl", "tcp", "ucx", "zmq"])
def test_a_process_ends_as_usual(name: str, how: str) -> None:
    """With NIXL's copy of libnl and the system's in one process, it ended with SIGSEGV."""
    require(name)
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, name, how],
        env=system_libraries.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
    if name == "nixl":
        assert "/libefa.so.1" in ended.stdout, "UCX has not loaded what brings the second libnl, so this shows nothing"
