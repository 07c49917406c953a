"""What is no memory is refused before anything touches it."""

from __future__ import annotations

import pytest

from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, Region, View
from kvxfer.memory import space
from kvxfer.values import Group


@pytest.mark.parametrize(("address", "nbytes"), [(0, 64), (-4096, 64), (4096, 0), (4096, -5)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_regions_that_are_no_memory_have_no_space(address: int, nbytes: int, device: str) -> None:
    with pytest.raises(ArgumentError, match=f"regions must be pieces of memory: {nbytes} bytes at {address} are none"):
        space([Region(4096, 64, device), Region(address, nbytes, device)])


@pytest.mark.parametrize("device", ["cpu:0", "cpu:x", "cuda", "cuda:", "cuda:x", "cuda:-1", ":0x", "cuda:0:1"])
def test_a_device_is_a_kind_and_a_number(device: str) -> None:
    """Some back ends took ``cpu:0`` for the host and others for a GPU, and errors for ``cuda`` blamed its space."""
    view = View("kv", 0, ("0",), (0,), 1, 64, 64, "x")
    for right in ("cpu", "cuda:0", "vault:12"):
        Cache((Region(4096, 64, right),), (Group(16),), (view,)).check()
    with pytest.raises(ArgumentError, match="region 0: device must be 'cpu', or a kind of device and a number, not "):
        Cache((Region(4096, 64, device),), (Group(16),), (view,)).check()
