"""Configuration and request ids of the predecessor, as its own documentation wrote them."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.identity import Address, IdentityError
from kvxfer_vllm.migration import OLD_KEYS, check_hosts, params_of, translate
from kvxfer_vllm.said import external_id

P, D = Address("10.0.1.2", 21001), Address("10.0.1.3", 22001)
ID = f"___prefill_addr_{P}___decode_addr_{D}_0f1e2d3c4b5a69788796a5b4c3d2e1f0"
TRANSFER = SimpleNamespace(kv_port="21001")


def old(**more: Any) -> dict[str, Any]:
    """The launch script of its documentation."""
    return {"proxy_ip": "0.0.0.0", "proxy_port": "30001", "http_port": "20001", **more}


def test_its_documented_configuration_becomes_one_of_ours() -> None:
    extra = old(send_type="PUT_ASYNC", nccl_num_channels="16", mem_pool_size_gb="32", kv_buffer_size="1e1")
    settings, notes = translate(extra, TRANSFER)
    config = Config.from_mapping(settings)
    assert config.backend == "nccl" and config.port == 21001 and config.backend_options == {"channels": 16}
    for key in (*extra, "kv_port"):
        assert any(key in note for note in notes), f"nothing is said about {key}"


def test_a_configuration_of_ours_stays_as_it_is() -> None:
    extra = {"backend": "zmq", "port": 5000, "staging_bytes": 1 << 24}
    assert translate(extra, TRANSFER) == (extra, ())


def test_our_keys_win() -> None:
    settings, _ = translate(
        old(nccl_num_channels=8, port=7000, backend_options={"channels": 4, "priority": "high"}), TRANSFER
    )
    assert settings["port"] == 7000 and settings["backend_options"] == {"channels": 4, "priority": "high"}


def test_another_back_end_gets_no_nccl_options() -> None:
    settings, notes = translate(old(backend="ucx", nccl_num_channels=8), TRANSFER)
    assert settings["backend"] == "ucx" and "backend_options" not in settings
    assert any("nccl_num_channels no longer matters" in note for note in notes)


@pytest.mark.parametrize("key", OLD_KEYS)
def test_every_old_key_is_enough_and_explained(key: str) -> None:
    value = {"send_type": "GET", "proxy_ip": "10.0.0.1", "http_ip": "10.0.0.1"}.get(key, "8")
    settings, notes = translate({key: value}, TRANSFER)
    assert key not in settings and settings["backend"] == "nccl"
    assert any(note.startswith(key) for note in notes)


def test_an_unknown_key_is_still_an_error() -> None:
    settings, _ = translate(old(proxy_prt="30001"), TRANSFER)
    with pytest.raises(ConfigError, match="proxy_prt"):
        Config.from_mapping(settings)


@pytest.mark.parametrize(
    "extra, port, named",
    [
        (old(nccl_num_channels="many"), 1, "nccl_num_channels"),
        (old(nccl_num_channels=0), 1, "nccl_num_channels"),
        (old(nccl_num_channels=64), 1, "32"),
        (old(send_type="PUSH"), 1, "PUT_ASYNC"),
        (old(), 70_000, "kv_port"),
        (old(), None, "kv_port"),
    ],
)
def test_values_that_cannot_be_are_named(extra: dict[str, Any], port: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        translate(extra, SimpleNamespace(kv_port=port))


def params(request: str, *, role: str = "consumer", own: Address = D, hosts: tuple[str, ...] = ("10.0.0.0/8",)) -> Any:
    return params_of(
        external_id(request), produces=role != "consumer", consumes=role != "producer", own=own, hosts=hosts
    )


def test_both_sides_derive_one_transfer_whatever_the_engine_added() -> None:
    producer = params(f"cmpl-{ID}-0-0123abcd", role="producer", own=P)
    consumer = params(f"cmpl-{ID}-0-89abcdef")
    assert producer["do_remote_decode"] and not producer["do_remote_prefill"]
    assert consumer["do_remote_prefill"] and not consumer["do_remote_decode"]
    assert producer["transfer_id"] == consumer["transfer_id"] == ID
    assert (consumer["remote_host"], consumer["remote_port"]) == (P.host, P.port)


@pytest.mark.parametrize("own, key", [(P, "do_remote_decode"), (D, "do_remote_prefill")])
def test_an_engine_of_both_roles_goes_by_its_address(own: Address, key: str) -> None:
    assert params(f"chatcmpl-{ID}-0123abcd", role="both", own=own)[key]


def test_an_engine_of_both_roles_that_is_not_named_refuses() -> None:
    with pytest.raises(IdentityError, match=r"10\.9\.9\.9"):
        params(f"chatcmpl-{ID}-0123abcd", role="both", own=Address("10.9.9.9", 1))


def test_an_address_that_is_not_allowed_is_never_dialled() -> None:
    with pytest.raises(IdentityError, match="legacy_hosts"):
        params(f"cmpl-{ID}-0-89abcdef", hosts=("192.168.0.0/16",))


def test_an_evil_id_is_refused() -> None:
    """The old pattern took the last match: here, the attacker's."""
    with pytest.raises(IdentityError):
        params("cmpl-___prefill_addr_evil:22___prefill_addr_10.0.1.2:5___decode_addr_h2:5_u-0-89abcdef")


def test_without_an_allow_list_the_scheme_is_off() -> None:
    assert params(f"cmpl-{ID}-0-89abcdef", hosts=()) is None


def test_an_id_without_addresses_says_nothing() -> None:
    assert params("cmpl-plain-0-89abcdef") is None


def test_a_bad_allow_list_is_found_at_start() -> None:
    good = "10.0.0.0/8", "10.1.0.7:21001", "[fd00::7]:1", "fd00::8", "localhost"
    assert check_hosts(good) == good
    for bad, why in (("not a host", "neither"), ("prefill-1:21001", "'prefill-1' is a name")):
        with pytest.raises(ConfigError, match=f"legacy_hosts.*{why}"):
            check_hosts(["10.0.0.0/8", bad])
