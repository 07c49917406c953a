"""What is no memory is refused before anything touches it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, Region, View
from kvxfer.memory import allocate, space
from kvxfer.values import Group


@pytest.mark.parametrize(("address", "nbytes"), [(0, 64), (-4096, 64), (4096, 0), (4096, -5)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_regions_that_are_no_memory_have_no_space(address: int, nbytes: int, device: str) -> None:
    with pytest.raises(ArgumentError, match=f"regions must be pieces of memory: {nbytes} bytes at {address} are none"):
        space([Region(4096, 64, device), Region(address, nbytes, device)])


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "8", True, None])
def test_a_size_is_a_positive_integer(nbytes: Any) -> None:
    with pytest.raises(ArgumentError, match="^nbytes must be "):
        allocate(nbytes)


def test_the_error_for_a_region_of_numbers_names_what_is_there() -> None:
    pytest.importorskip("torch")
    made = import_module("kvxfer.memory.torch_space").TorchSpace
    with pytest.raises(ArgumentError, match="was made of none") as caught:
        made((Region(4096, 64, "fpga:0"),), "fpga:0")
    names = re.findall(r"kvxfer[.\w]*\.(?:Region|Cache)\.\w+", str(caught.value))
    assert len(names) == 2
    for name in names:
        module, cls, method = name.rsplit(".", 2)
        assert callable(getattr(getattr(import_module(module), cls), method))


@pytest.mark.parametrize("device", ["cpu:0", "cpu:x", "cuda", "cuda:", "cuda:x", "cuda:-1", ":0x", "cuda:0:1"])
def test_a_device_is_a_kind_and_a_number(device: str) -> None:
    """Some back ends took ``cpu:0`` for the host and others for a GPU, and errors for ``cuda`` blamed its space."""
    view = View("kv", 0, ("0",), (0,), 1, 64, 64, "x")
    for right in ("cpu", "cuda:0", "vault:12"):
        Cache((Region(4096, 64, right),), (Group(16),), (view,)).check()
    with pytest.raises(ArgumentError, match="region 0: device must be 'cpu', or a kind of device and a number, not "):
        Cache((Region(4096, 64, device),), (Group(16),), (view,)).check()
