"""Where a process listens, and the settings that keep UCX to it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvxfer.backend import ucx
from kvxfer.backend.ports import Port, device_of, listening
from kvxfer.backend.ucx import confined, split
from kvxfer.errors import ConfigError
from kvxfer.settings import everywhere, loopback


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings in the environment, no cards."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ucx, "_CARDS", tmp_path)
    return tmp_path


def test_listening_sees_tcp_in_both_families_and_unix() -> None:
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unix,
        socket.socket() as deaf,
    ):
        unix.bind("\0kvxfer-test-of-ports")
        unix.listen()
        deaf.bind(("127.0.0.1", 0))
        found = {str(port) for port in listening() - before}
        expected = {f"127.0.0.1:{four.getsockname()[1]}", f"[::1]:{six.getsockname()[1]}", "unix:@kvxfer-test-of-ports"}
        assert found == expected
    assert listening() == before
    assert Port("0.0.0.0", 1) != Port("127.0.0.1", 1)


def test_which_addresses_are_whose() -> None:
    assert device_of("127.0.0.1") == device_of("::1") == device_of("localhost") == "lo"
    assert [loopback(a) for a in ("127.0.0.9", "[::1]", "LocalHost", "10.0.0.7", "0.0.0.0", "node-7")] == [True] * 3 + [
        False
    ] * 3
    assert everywhere("0.0.0.0") and everywhere("[::]") and not everywhere("127.0.0.1")
    for wrong in ("198.51.100.7", "no.such.name.invalid"):  # of nobody: RFC 5737, RFC 2606
        with pytest.raises(ConfigError, match="listen"):
            device_of(wrong)


def test_ucx_is_kept_to_where_an_engine_listens(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "device_of", lambda _: "eth5")
    assert confined("127.0.0.1", (), gpus=False) == {"TLS": "self,sm"}
    assert confined("::1", (), gpus=True) == {"TLS": "self,sm,cuda"}
    assert confined("10.0.0.7", (), gpus=True) == {"NET_DEVICES": "eth5"}
    assert confined("0.0.0.0", (), gpus=True) == {}
    assert confined("127.0.0.1", ["TLS"], gpus=False) == {"NET_DEVICES": "eth5"}, "carriers are chosen, devices not"
    assert (
        confined("127.0.0.1", ["NET_DEVICES"], gpus=False)
        == confined("10.0.0.7", ["TLS", "NET_DEVICES"], gpus=False)
        == {}
    )
    for card, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = alone / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert confined("10.0.0.7", (), gpus=True) == {"NET_DEVICES": "eth5,mlx5_0:1"}
    assert confined("127.0.0.1", (), gpus=True) == {"TLS": "self,sm,cuda"}, "a card reaches other hosts"


def test_the_environment_is_respected_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth9")
    ucx._warn.cache_clear()
    assert confined("127.0.0.1", (), gpus=False) == {}
    assert "UCX_NET_DEVICES=eth9" in caplog.text and "127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    ("allowed", "gpus", "host", "network"),
    [
        ("all", False, "self,sm", "^sm,cuda_ipc,rocm_ipc,self,ze_ipc"),
        ("all", True, "self,sm,cuda", "^sm,cuda_ipc,rocm_ipc,self,ze_ipc"),
        ("self,sm,cuda", True, "self,sm,cuda", None),
        ("tcp", True, None, "tcp"),
        ("tcp,self", True, None, "tcp"),
        ("tcp,cma", False, "cma,posix,sysv", "tcp"),
        ("posix,tcp", False, "posix", "tcp"),
        ("cma", False, "cma", None),
        ("rc,cuda_ipc", True, "cuda_ipc,posix,sysv", "rc"),
        ("rc:aux,tcp,\\cuda", True, "\\cuda,posix,sysv", "rc:aux,tcp,cuda_copy,gdr_copy"),
        ("tcp,cuda", False, None, "tcp,cuda_copy,gdr_copy"),
        ("^tcp", False, "self,sm", "^sm,cuda_ipc,rocm_ipc,self,ze_ipc,tcp"),
        ("^cma", True, "self,posix,sysv,cuda", "^sm,cuda_ipc,rocm_ipc,self,ze_ipc,cma"),
        ("^shm,cuda_ipc", True, None, "^sm,cuda_ipc,rocm_ipc,self,ze_ipc,shm,cuda_ipc"),
        ("no_such", False, None, "no_such"),
        ("self", False, None, "self"),
        ("^posix,sysv", False, None, "^sm,cuda_ipc,rocm_ipc,self,ze_ipc,posix,sysv"),
    ],
)
@pytest.mark.parametrize("given", ["as a setting", "in the environment"])
def test_no_context_of_ucx_has_both_shared_memory_and_a_network(
    alone: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
    gpus: bool,
    host: str | None,
    network: str | None,
    given: str,
) -> None:
    """What the operator allows is divided; a peer of the network could otherwise name processes and memory of this host."""
    monkeypatch.setattr(ucx, "_cards", lambda: ["mlx5_0:1"])
    if given == "in the environment":
        monkeypatch.setenv("UCX_TLS", allowed)
    both = split({"RNDV_THRESH": "8192", **({"TLS": allowed} if given == "as a setting" else {})}, gpus)
    for settings, expected in ((both.host, host), (both.network, network)):
        assert (settings and settings["TLS"]) == expected
        assert settings is None or settings["RNDV_THRESH"] == "8192"


@pytest.mark.parametrize("allowed", ["^tcp", "rc,sm", "ib,shm"])
def test_without_a_card_there_is_no_network_but_tcp(alone: Path, allowed: str) -> None:
    both = split({"TLS": allowed}, gpus=False)
    assert both.host is not None and both.network is None
