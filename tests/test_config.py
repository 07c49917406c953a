"""Reading the configuration: what is accepted, and what a mistake is told."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer_tcp.options import Options as TcpOptions
from kvxfer_zmq.options import Options as ZmqOptions


def test_empty_mapping_gives_the_defaults() -> None:
    config = Config.from_mapping({})
    assert config == Config()
    assert (config.backend, config.listen, config.port, config.advertise) == ("tcp", "127.0.0.1", 0, None)
    assert config.integrity == "off"
    assert config.layout_check


def test_all_keys_are_read() -> None:
    settings = {
        "backend": "nixl",
        "backend_options": {"num_threads": 2},
        "listen": "0.0.0.0",
        "port": 5600,
        "advertise": "prefill-0.example",
        "transfer_timeout": 10,
        "start_timeout": 40.5,
        "step_budget": 0.002,
        "lease": 20.5,
        "control_ports": "20000-20003",
        "peer_timeout": 1,
        "abort_timeout": 3.5,
        "staging_bytes": 1 << 20,
        "key_file": "/run/secrets/kvxfer",
        "peers": ["10.0.0.0/8"],
        "integrity": "full",
        "layout_check": False,
        "model": "policy-v3",
        "trace": "/var/log/kvxfer.jsonl",
        "elastic": True,
        "ask": "always",
        "ask_timeout": 0.1,
        "ask_tokens": 256,
        "trust_network": True,
    }
    read = msgspec.structs.asdict(Config.from_mapping(settings))
    assert read | {"peers": list(read["peers"])} == settings
    assert set(settings) == {field.name for field in msgspec.structs.fields(Config)}


def test_config_cannot_be_changed_nor_shared_by_accident() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.port = 1  # type: ignore[misc]
    config.backend_options["left"] = "over"
    assert Config().backend_options == {}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("port", "5600", "a whole number"),
        ("port", 65536, "65535"),
        ("port", True, "a whole number"),
        ("transfer_timeout", "30s", "a number of seconds"),
        ("transfer_timeout", 0, "above 0"),
        ("lease", None, "a number of seconds"),
        ("lease", float("inf"), "at most 86400"),
        ("backend", "", "not empty"),
        ("backend_options", ["a"], "object"),
        ("advertise", 1, "null, or a string"),
        ("staging_bytes", 1.5, "null, or a whole number of bytes"),
        ("staging_bytes", 16383, "at least 16384"),
        ("integrity", "some", "'off', 'sample', 'full'"),
        ("key_file", "a\0b", "without a NUL byte"),
        ("trace", "a\0b", "without a NUL byte"),
    ],
)
def test_wrong_value_names_key_value_and_expectation(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({key: value})
    message = str(caught.value)
    assert repr(key) in message and repr(value) in message and expected in message


@pytest.mark.parametrize("nowhere", [":::", "a b", "127.1", "node-7:7000", "[10.0.0.1]"])
def test_what_no_peer_could_dial_is_not_advertised(nowhere):
    with pytest.raises(ConfigError, match="'advertise'.*neither an IP address nor a host name"):
        Config(advertise=nowhere)


def test_listening_everywhere_needs_a_name_for_peers():
    with pytest.raises(ConfigError, match=r"'listen'.*'advertise'"):
        Config.from_mapping({"listen": "0.0.0.0"})
    assert Config.from_mapping({"listen": "0.0.0.0", "advertise": "node-7"}).advertise == "node-7"


@pytest.mark.parametrize("listen", ["0", "0.0", "0x0", "127.1", "fe80::1%eth0", "a b", "a" * 300, "\ud800", "a..b"])
@pytest.mark.parametrize("read", [Config.from_mapping, TcpOptions.parse, ZmqOptions.parse])
def test_an_address_that_no_peer_could_dial_is_not_told_to_peers(read: Any, listen: str) -> None:
    """Sockets take many ways to write an address, and peers one."""
    with pytest.raises(ConfigError, match=r"'listen'.*neither an IP address nor a host name; .*set 'advertise'"):
        read({"listen": listen})


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]", "::ffff:0.0.0.0", "::%1"])
@pytest.mark.parametrize("read", [Config.from_mapping, TcpOptions.parse, ZmqOptions.parse])
def test_a_wildcard_is_not_told_to_peers(read: Any, wildcard: str) -> None:
    with pytest.raises(ConfigError, match=r"'listen'.*peers cannot dial.*'advertise'"):
        read({"listen": wildcard})
    with pytest.raises(ConfigError, match=r"'advertise'.*peers cannot dial"):
        read({"listen": "127.0.0.1", "advertise": wildcard})


@pytest.mark.parametrize("listen", ["a" * 300, "a..b", "a\0b", "nowhere.invalid"])
def test_what_cannot_be_listened_on_is_named(listen: str) -> None:
    with pytest.raises(OSError, match="cannot listen on"):
        Directory(Config(listen=listen, advertise="localhost"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lease": 1, "backend": {"port": 1, "port": 2}}', "'port' is there twice"),
        ("[" * 100_000, "nested"),
        ('{"lease": ' + "1" * 5000 + "}", "is not JSON"),
        ('"' + "x" * 5000 + '"', "must be a JSON object, not a str"),
        ("\0", "is not JSON"),
        ("x" * 5000, "is not JSON"),
    ],
)
def test_text_that_is_no_json_object_is_named_in_a_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        json_object(text, "it")
    assert len(str(error.value)) < 300


def test_settings_are_read_from_a_file_as_well(tmp_path: Path) -> None:
    """An editor may begin it with a byte order mark."""
    file = tmp_path / "settings.json"
    file.write_bytes(b'\xef\xbb\xbf{"lease": 5}')
    assert json_object(str(file), "it", or_file=True) == {"lease": 5}
    pipe, long = tmp_path / "pipe", tmp_path / "long"
    os.mkfifo(pipe)  # opening it would take until somebody writes
    long.touch()
    os.truncate(long, 10 << 30)
    for nothing in (str(tmp_path / "none"), str(tmp_path), "\0", "x" * 5000, str(pipe), str(long), "/dev/zero"):
        with pytest.raises(ConfigError, match="neither a JSON object nor the path of a file with one") as error:
            json_object(nothing, "it", or_file=True)
        assert len(str(error.value)) < 500
