"""Our own spaces keep the contract of spaces, the suite finds what breaks it, and a space is found as installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kvxfer import memory
from kvxfer.cli.main import app
from kvxfer.errors import ArgumentError, ConfigError
from kvxfer.geometry import Region
from kvxfer.memory import registry
from kvxfer.memory.cpu import CpuSpace
from kvxfer.memory.space import Space
from kvxfer.testing.spaces.mutants import SPACE_MUTANTS
from kvxfer.testing.spaces.suite import SpaceSuite
from tests.conftest import require
from tests.memory.island import DEVICE, install

torch = pytest.importorskip("torch")
ISLAND = "tests.memory.island:IslandSpace"


class ByRows(CpuSpace):
    """Host memory with nothing but what a space must have: all else is the defaults."""

    pack, unpack, prepare_checksum = Space.pack, Space.unpack, Space.prepare_checksum


class TestCpu(SpaceSuite):
    space = CpuSpace
    device = "cpu"


class TestDefaults(SpaceSuite):
    space = ByRows
    device = "cpu"


class TestTorch(SpaceSuite):
    """On a device whose memory nobody else can address: whoever tries dies."""

    space: ClassVar[Any] = registry.load(ISLAND, "for tests")
    device = DEVICE


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def put(kind: str, target: str, name: str = "site") -> None:
        monkeypatch.syspath_prepend(str(install(tmp_path / name, kind, target)))
        registry.space_for.cache_clear()

    yield put
    monkeypatch.undo()
    registry.space_for.cache_clear()


def test_an_installed_space_is_found_by_its_kind(installed) -> None:  # type: ignore[no-untyped-def]
    installed("island", ISLAND)
    made = memory.allocate(100, DEVICE)
    assert type(made).__name__ == "IslandSpace" and memory.devices_of("island") == [DEVICE]
    assert type(memory.space(made.regions)).__name__ == "IslandSpace"
    assert memory.fence(DEVICE).passed()


def test_an_installed_space_comes_before_ours_but_never_for_the_host(installed) -> None:  # type: ignore[no-untyped-def]
    installed("cuda", "kvxfer.memory.torch_space:TorchSpace")
    installed("cpu", ISLAND, "other")
    assert registry.space_for("cuda").__name__ == "TorchSpace"
    assert registry.space_for("cpu") is CpuSpace


def test_two_spaces_for_one_kind_are_refused(installed) -> None:  # type: ignore[no-untyped-def]
    installed("island", ISLAND)
    installed("island", "somebody.elses:Space", "other")
    with pytest.raises(ConfigError, match="two spaces are installed for devices of kind 'island'"):
        memory.allocate(9, DEVICE)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no.such.module:Space", "cannot be loaded"),
        ("tests.memory.test_space_suite:require", "is not a kvxfer.memory.Space class"),
        ("tests.memory.test_space_suite:HalfWritten", "lacks allocate, devices, gather, scatter"),
        ("tests.memory.test_space_suite:OfTomorrow", "contract = 99"),
    ],
)
def test_a_space_that_cannot_be_used_says_why(installed, target: str, words: str) -> None:  # type: ignore[no-untyped-def]
    installed("island", target)
    with pytest.raises(ConfigError, match=words):
        memory.space((Region(1, 1, DEVICE),))


class HalfWritten(Space):
    contract = 1


class OfTomorrow(CpuSpace):
    contract = 99


class Shy(CpuSpace):
    @classmethod
    def devices(cls, kind: str) -> list[str]:
        raise OSError("no driver")


def test_a_device_that_nobody_knows_is_told_with_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"'abacus' is not known: .*'cpu'.*'cuda'.*Install the distribution"):
        memory.space((Region(1, 1, "abacus:0"),))
    assert memory.devices_of("abacus") == ()


def test_reading_the_island_directly_kills() -> None:
    """So that the tests above prove what they say."""
    code = (
        "import ctypes, tests.memory.island as i; s = i.IslandSpace.allocate(4096, 'island:0');"
        "ctypes.c_uint8.from_address(s.region.address).value"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == -11


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SPACE_MUTANTS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", ["cpu", ISLAND])
def test_the_suite_finds_each_mutant(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    monkeypatch.setattr("kvxfer.testing.spaces.report.SPACE_MUTANTS", (mutant,))
    monkeypatch.setattr("kvxfer.testing.spaces.suite.SpaceSuite.patience_s", 3.0)
    ran = CliRunner().invoke(
        app, ["conformance", "--space", name, "--memory", DEVICE if ":" in name else "cpu", "--mutants"]
    )
    assert ran.exit_code == 0 and "1 found" in ran.output, ran.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["tcp", "--space", "cpu"], 2),
        (["--space", "abacus"], 2),
        (["--space", ISLAND], 2),
        (["--space", "cpu", "--options", '{"a": 1}'], 2),
        (["--space", "cuda"], 3),
        (["--space", ISLAND, "--memory", "island:9"], 3),
        (["--space", ISLAND, "--memory", "island:x"], 3),
        (["--space", "tests.memory.test_space_suite:Shy", "--memory", "shy:0"], 3),
    ],
)
def test_what_cannot_be_tried(arguments: list[str], code: int) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert CliRunner().invoke(app, ["conformance", *arguments]).exit_code == code
