"""Where workers' control sockets listen."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from tests.control.conftest import engine as engine
from tests.ports import free_ports


def port_of(agent: Any) -> int:
    return int(agent.descriptor.address.rpartition(":")[2])


def test_each_worker_takes_the_next_port_of_the_range(engine: Any) -> None:
    first = free_ports(3)
    made = engine({}, tp=2, control_ports=f"{first}-{first + 2}")
    assert [port_of(agent) for agent in made.agents] == [first, first + 1]
    with pytest.raises(OSError, match=r"no port of 'control_ports' .* is free; each worker needs one"):
        engine({}, tp=2, control_ports=f"{first}-{first + 2}")


@pytest.mark.parametrize("text", ["", "20000-", "-5", "20001-20000", "0-3", "70000", "a-b"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ConfigError, match="control_ports"):
        Config(control_ports=text)
