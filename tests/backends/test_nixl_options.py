"""What the NIXL back end offers where, its options, and the process around it."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport import Batch, Verb
from tests.backends.nixl_worlds import MIB, TCP, altered
from tests.conftest import require

require("nixl")

from kvxfer_nixl import NixlTransport, carriers, reach  # noqa: E402  (only where it can be used)
from kvxfer_nixl.options import Options  # noqa: E402

# --- where reads are offered ------------------------------------------------------------------------------------------


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the host's RDMA cards are looked for."""
    monkeypatch.setattr(reach, "_CARDS", tmp_path / "infiniband")
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "infiniband"


@pytest.mark.parametrize(
    "settings, card, here, elsewhere",
    [
        ({}, None, True, False),
        ({}, "mlx5_0", True, True),
        ({"TLS": "tcp"}, "mlx5_0", False, False),
        ({"TLS": "posix,tcp"}, None, False, False),
        ({"TLS": "cma,tcp"}, "mlx5_0", True, False),
        ({"TLS": "^rc,dc"}, "mlx5_0", True, False),
        ({"TLS": "^cuda_ipc"}, None, True, False),
        ({"TLS": "^sm"}, None, False, False),
        ({"TLS": "^sm"}, "mlx5_0", True, True),
        ({"TLS": "cuda,tcp"}, None, False, False),
        ({"NET_DEVICES": "lo"}, "mlx5_0", True, False),
        ({"NET_DEVICES": "lo,mlx5_0:1"}, "mlx5_0", True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["option", "environment"])
def test_reads_are_offered_where_no_peer_has_to_help(
    settings: dict[str, str],
    card: str | None,
    here: bool,
    elsewhere: bool,
    given: str,
    cards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if card is not None:
        (cards / card).mkdir(parents=True)
    if given == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(f"UCX_{name}", value)
    options = {"listen": "0.0.0.0", **({"ucx": settings} if given == "option" else {})}
    if given == "environment":
        said = NixlTransport.probe().facts["reads"]
        assert said.startswith("none" if not here else "from any" if elsewhere else "from peers on this host")
    with closing(NixlTransport("a", options)) as a, closing(NixlTransport("b", options)) as b:
        verbs = a.capabilities.verbs
        assert verbs == ({Verb.READ, Verb.WRITE} if here else {Verb.WRITE})
        a.connect(a.endpoint(), b.endpoint())
        mine, far = a.endpoint(), altered(b.endpoint(), line=f"kvxfer-nixl-{'0' * 32}")
        if elsewhere or Verb.READ not in verbs:
            a.connect(mine, far)
        else:
            with pytest.raises(TransportError, match=r"TCP.*peer 'b'.*\"verbs\": \[\"write\"\]"):
                a.connect(mine, far)


def test_whoever_names_the_verbs_has_decided(cards: Path) -> None:
    options = {**TCP, "verbs": ["read"]}
    with closing(NixlTransport("a", options)) as a, closing(NixlTransport("b", options)) as b:
        assert a.capabilities.verbs == {Verb.READ}
        a.connect(a.endpoint(), altered(b.endpoint(), line=f"kvxfer-nixl-{'0' * 32}"))


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        ({"plugn": "UCX"}, "did you mean 'plugin'"),
        ({"num_threads": -1}, "num_threads"),
        ({"sync_mode": "loose"}, "sync_mode"),
        ({"threads": 2, "sync_mode": "none"}, "'threads' is 1"),
        ({"plugin": "LIBFABRIC", "threads": 2}, "plugin 'LIBFABRIC'"),
        ({"threads": 5}, "threads"),
        ({"verbs": ["send"]}, "verbs"),
        ({"verbs": []}, "verbs"),
        ({"plugin": "MOONCAKE"}, "no plugin 'MOONCAKE'.*POSIX.*source"),
        ({"plugin": "UCXX"}, "did you mean 'UCX'"),
        ({"plugin": "posix"}, "storage"),
        ({"plugin_params": {"num_worker": 2}}, "did you mean 'num_workers'"),
        ({"plugin_params": {"ucx_devices": "lo"}}, "device_list"),
        ({"plugin_params": {"engine_config": "TLS=tcp"}}, "option 'ucx'"),
        ({"plugin_params": {"ucx_error_handling_mode": "none"}}, "died"),
        ({"ucx": {"TSL": "tcp"}}, "TSL"),
        ({"ucx": {"MAX_RMA_RAILS": "many"}}, "many"),
        ({"plugin": "LIBFABRIC", "ucx": {"TLS": "tcp"}}, "for plugin 'UCX'"),
        ({"plugin": "POSIX", "num_threads": 2}, "num_threads"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NixlTransport("agent", options)


def test_a_plugin_that_cannot_be_loaded_says_why() -> None:
    """Of those in the wheel, GDS needs libcufile, LIBFABRIC libfabric; no machine of ours has both."""
    messages = []
    for plugin in ("GDS", "LIBFABRIC", "INFINIA"):
        try:
            NixlTransport("agent", {"plugin": plugin}).close()
        except (ConfigError, TransportError) as e:
            messages.append(str(e))
    assert any("cannot be loaded here: lib" in m for m in messages), messages


def test_a_plugin_that_cannot_start_is_an_error_of_the_transport() -> None:
    with pytest.raises(TransportError, match="no_such_transport"):
        NixlTransport("agent", {"ucx": {"TLS": "no_such_transport"}})


def test_ucx_settings_with_a_list_reach_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL cuts its parameter at commas, so these go another way; the environment is as before."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    NixlTransport("agent", {"ucx": {"TLS": "cma,tcp"}}).close()
    with pytest.raises(TransportError):  # UCX: nothing here carries messages
        NixlTransport("agent", {"ucx": {"TLS": "cma"}})
    with pytest.raises(TransportError):
        NixlTransport("agent", {"ucx": {"TLS": "cma,posix", "MM_ERROR_HANDLING": False}})
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("options", "kernel", "interval"),
    [
        ({}, True, "inf"),
        ({"listen": "0.0.0.0"}, True, "inf"),
        ({"ucx": {"TLS": "^tcp"}}, True, "inf"),
        ({}, False, "1s"),
        ({"ucx": {"TLS": "self,posix,sysv"}}, True, "1s"),
        ({"ucx": {"TLS": "^sm"}}, True, "1s"),
        ({"ucx": {"KEEPALIVE_INTERVAL": "5s"}}, True, "5s"),
    ],
)
def test_a_keepalive_is_there_only_where_peers_copy_for_us(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kernel: bool, interval: str
) -> None:
    """Its first round may end the process; without one a dead peer would owe its part for ever."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(carriers, "_kernel_copies", lambda: kernel)
    assert Options.parse(options).ucx_settings["KEEPALIVE_INTERVAL"] == interval


def test_this_kernel_copies() -> None:
    assert carriers.copies_directly("sm"), "or UCX would have nothing to read with in these tests"


def test_an_environment_that_contradicts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(ConfigError, match="UCX_TLS"):
        NixlTransport("agent", {"ucx": {"TLS": "all"}})
    NixlTransport("agent", {"ucx": {"TLS": "tcp"}}).close()


def test_peers_with_different_settings_understand_each_other() -> None:
    """One side with its own number of workers."""
    ends = [
        LocalParticipant(NixlTransport, o, n, "cpu")
        for n, o in (("a", {}), ("b", {"plugin_params": {"num_workers": 3}}))
    ]
    a, b = ends
    try:
        for end in ends:
            end.allocate([MIB], 1)
        mine, theirs = a.endpoint(), b.endpoint()
        peer, _ = a.connect(mine, theirs), b.connect(theirs, mine)
        number = a.submit(Batch(Verb.READ, peer, 0, np.array([MIB]), np.array([0]), 0, np.array([0])))
        until = time.monotonic() + 30
        while a.result(number) is None:
            assert time.monotonic() < until
            for end in ends:
                end.turn(True)
        result = a.result(number)
        assert result is not None and result.error is None
    finally:
        for end in ends:
            end.close()
            end.free()


# --- the process around it --------------------------------------------------------------------------------------------


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process."""
    env = {k: v for k, v in os.environ.items() if k not in ("NIXL_LOG_LEVEL", "UCX_TLS")} | environment
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)


LOADING = """
import ctypes, logging, os, sys
import kvxfer_nixl
assert not [m for m in sys.modules if m.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13", "torch")]

def environment():
    table, found = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while table[len(found)]:
        found.append(table[len(found)])
    return sorted(found)

handler = logging.FileHandler(sys.argv[-1] if len(sys.argv) > 1 else os.environ["LOG_FILE"], mode="w")
logging.getLogger("host").addHandler(handler)
before = environment(), dict(os.environ), logging.raiseExceptions, list(logging.getLogger("nixl").handlers)
transport = kvxfer_nixl.NixlTransport("agent", {"ucx": {"TLS": "cma,tcp", "NET_DEVICES": "lo"}, "log_level": "ERROR"})
transport.endpoint()
transport.close()
assert "torch" not in sys.modules, "one without CUDA has nothing to tell NIXL, and one with CUDA has it in a file"
assert (environment(), dict(os.environ), logging.raiseExceptions, list(logging.getLogger("nixl").handlers)) == before
logging.getLogger("host").warning("still here")
"""


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_is_read_without_its_peer_unless_the_operator_says_otherwise(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that the peer has to serve never ends if it dies. UCX knows the setting only where there is CUDA; it starts all the same."""
    monkeypatch.setattr("kvxfer_nixl.options.has_gpu", lambda: gpu)
    name = "CUDA_IPC_ENABLE_GET_ZCOPY"
    for listen in ("127.0.0.1", "0.0.0.0"):
        host = Options(listen=listen).contexts.host
        assert host is not None and host.get(name) == ("y" if gpu else None)
        NixlTransport("agent", {"listen": listen}).close()
    assert Options(ucx={name: "n"}).ucx_settings[name] == "n"
    monkeypatch.setenv(f"UCX_{name}", "n")
    assert name not in Options().ucx_settings


def test_loading_leaves_no_trace(tmp_path: Any) -> None:
    """NIXL is loaded when a transport is made. Neither that nor the options change the environment, as Python or as C
    sees it; and the host's log files stay open (a plain ``import nixl`` closes them)."""
    log = tmp_path / "host.log"
    done = run(LOADING, LOG_FILE=str(log))
    assert done.returncode == 0, done.stderr
    assert "still here" in log.read_text()


def test_the_log_level_is_an_option() -> None:
    program = """
from kvxfer_nixl import NixlTransport
NixlTransport("agent", {"log_level": LEVEL}).close()
"""
    loud, still = (run(program.replace("LEVEL", repr(level))) for level in ("DEBUG", "ERROR"))
    assert loud.returncode == still.returncode == 0, loud.stderr + still.stderr
    assert "Created backend" in loud.stderr and "Created backend" not in still.stderr


def test_a_missing_nixl_names_the_pip_line() -> None:
    program = """
import sys
sys.modules["nixl"] = None
from kvxfer.errors import TransportError
from kvxfer_nixl import NixlTransport
probe = NixlTransport.probe()
assert not probe.usable and "pip install" in probe.reason, probe
try:
    NixlTransport("agent", {})
except TransportError as e:
    assert "pip install ./backends/nixl" in str(e)
else:
    raise AssertionError
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_probe_tells_versions_and_plugins() -> None:
    probe = NixlTransport.probe()
    assert probe.usable and "UCX" in probe.facts["plugins"] and probe.facts["nixl"].startswith("1.")
    assert probe.facts["ucx"][0].isdigit()


def test_every_error_of_nixl_has_words() -> None:
    """Its classes have no common base, and say no more than their name."""
    from kvxfer_nixl.library import load

    library = load()
    names = [n for n in vars(library.bindings) if n.startswith("nixl") and n.endswith("Error")]
    assert len(names) >= 12
    for name in names:
        kind = getattr(library.bindings, name)
        assert issubclass(kind, library.errors)
        assert len(library.explain(kind("NIXL_ERR")).split()) > 3
