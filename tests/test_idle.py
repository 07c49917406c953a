"""What an engine pays for kvxfer while nothing moves."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import kvxfer
from kvxfer.threads import NamedThread
from kvxfer_bench.idle import measure_idle

HEAVY = {"torch", "vllm", "asyncio", "email", "concurrent", "numba", "triton", "zmq", "numpy.typing"}


def test_an_idle_agent_sleeps_and_importing_loads_little() -> None:
    """What time and memory this takes is for `kvxfer bench idle`: here, what they follow from."""
    found = measure_idle("zmq", 2.0)
    assert not HEAVY & set(found["imports"])
    assert {"kvxfer-control", "kvxfer-data", "kvxfer-dir"} <= set(found["wakeups_per_s"])
    assert all(rate <= 3 for rate in found["wakeups_per_s"].values())


def test_importing_the_package_loads_no_part_of_it() -> None:
    program = "import sys, kvxfer; print(*(name for name in sys.modules if name.startswith(('kvxfer.', 'numpy'))))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert not loaded.stdout.split()


def test_each_public_name_is_where_type_checkers_are_told() -> None:
    with open(kvxfer.__file__) as file:
        told = next(node for node in ast.parse(file.read()).body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in told.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(kvxfer.__all__)
    for name, home in homes.items():
        assert home is not None
        assert getattr(kvxfer, name) is getattr(sys.modules[home], name)
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    with pytest.raises(AttributeError, match="no attribute 'Agents'"):
        kvxfer.Agents  # noqa: B018


def test_no_name_of_a_thread_is_longer_than_the_kernel_keeps() -> None:
    NamedThread(print, "kvxfer-renewals")
    with pytest.raises(ValueError, match="15 characters .* 'kvxfer-directory'"):
        NamedThread(print, "kvxfer-directory")
