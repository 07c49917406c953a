"""What the NIXL back end offers where, its options, and the process around it."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.transport import Verb
from tests.backends.nixl_worlds import altered
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


def test_ucx_settings_with_a_list_reach_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL cuts its parameter at commas, so these go another way; the environment is as before."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    NixlTransport("agent", {"ucx": {"TLS": "cma,tcp"}}).close()
    with pytest.raises(TransportError, match="plugin UCX cannot start.*'TLS': 'cma'"):  # nothing here carries messages
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


def test_an_environment_that_contradicts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(ConfigError, match="UCX_TLS"):
        NixlTransport("agent", {"ucx": {"TLS": "all"}})
    NixlTransport("agent", {"ucx": {"TLS": "tcp"}}).close()


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


def test_probe_tells_versions_and_plugins() -> None:
    probe = NixlTransport.probe()
    assert probe.usable and "UCX" in probe.facts["plugins"] and probe.facts["nixl"].startswith("1.")
    assert probe.facts["ucx"][0].isdigit()
