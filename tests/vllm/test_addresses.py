"""Where vLLM's processes are found: data-parallel ranks, remote workers, what manifests for NIXL set."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer_vllm.migration import HOST, PORT
from kvxfer_vllm.settings import settings_of
from tests.ports import free_ports
from tests.vllm.cases import check, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import prompt
from tests.vllm.test_settings import config

OURS = "10.1.2.3"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's way for an operator to say a host's address."""
    monkeypatch.setenv("VLLM_HOST_IP", OURS)


def test_every_process_names_its_own_host() -> None:
    for listen, expected in ({}, OURS), ({"listen": "0.0.0.0"}, "0.0.0.0"):
        found = settings_of(config({"advertise": "auto", **listen}))
        assert (found.advertise, found.listen) == (OURS, expected)


def test_a_host_that_vllm_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    with pytest.raises(ConfigError, match="set VLLM_HOST_IP, or 'advertise'"):
        settings_of(config({"advertise": "auto"}))


def test_what_manifests_for_nixl_set(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(HOST, "127.0.0.2")
    monkeypatch.setenv(PORT, "5600")
    with caplog.at_level("INFO", "kvxfer.vllm"):
        found = settings_of(config())
    assert (found.listen, found.advertise, found.port) == ("127.0.0.2", None, 5600)
    assert f"(from {HOST})" in caplog.text and f"(from {PORT})" in caplog.text


def test_settings_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST, "127.0.0.2")
    monkeypatch.setenv(PORT, "5600")
    found = settings_of(config({"listen": "127.0.0.3", "port": 0}))
    assert (found.listen, found.port) == ("127.0.0.3", 0)


def test_all_addresses_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST, "0.0.0.0")
    found = settings_of(config())
    assert (found.listen, found.advertise) == ("0.0.0.0", OURS)


def test_a_remote_worker_with_the_head_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives the driver's variables to workers on other hosts."""
    monkeypatch.setenv(HOST, "203.0.113.77")
    found = settings_of(config())
    assert (found.listen, found.advertise) == (OURS, OURS)


@pytest.mark.parametrize("settings", [{}, {"listen": "127.0.0.3"}, {"advertise": "localhost"}])
def test_an_engine_of_several_hosts_does_not_send_peers_to_their_own(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set 'advertise' to 'auto'"):
        settings_of(config(settings, nnodes=2))
    assert settings_of(config({"advertise": "auto"}, nnodes=2)).advertise == OURS
    settings_of(config(settings, nnodes=1))


def test_ray_may_place_workers_on_other_hosts(caplog: pytest.LogCaptureFixture) -> None:
    for workers, settings in (1, {}), (2, {"advertise": "auto"}):
        settings_of(config(settings, distributed_executor_backend="ray", world_size=workers))
    assert "Ray" not in caplog.text
    settings_of(config({}, distributed_executor_backend="ray", world_size=2))
    assert "Ray may place some on others; set 'advertise' to 'auto'" in caplog.text


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_an_environment_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv(PORT, port)
    with pytest.raises(ConfigError, match=f"{PORT} is '{port}'"):
        settings_of(config())


def test_a_rank_without_a_port() -> None:
    with pytest.raises(ConfigError, match="data-parallel rank 7"):
        settings_of(config({"port": 65530}, data_parallel_index=7))


def test_data_parallel_ranks_on_one_host(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command, one fixed port, two engines, each found by itself: whichever balances, its params name the one that ran."""
    import tests.vllm.engine as made

    port, ranks = free_ports(2), iter((0, 1))
    plain = made.vllm_config

    def numbered(*args: Any, **more: Any) -> Any:
        out = plain(*args, **more)
        out.parallel_config.data_parallel_index = next(ranks, 0)
        return out

    monkeypatch.setattr(made, "vllm_config", numbered)
    extra = {"port": port}
    first, second = make(extra=extra), make(extra=extra)
    assert (first.address.port, second.address.port) == (port, port + 1)
    d = make()
    for p in (second, first):
        text = prompt(60, seed=p.address.port)
        params = prefill(p, text)
        name = d.add(text, params)
        d.run(p, until=name)
        check(d, name, text)
        assert d.computed[name] == 1 + 3
