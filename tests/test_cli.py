"""The program `kvxfer`: commands by entry point, what `doctor` tells, and how errors reach the user."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvxfer
from kvxfer.cli.main import build
from kvxfer.cli.probing import probe_all

BACKEND = """
import os
import signal
import time

from kvxfer.transport.contract import Probe, Transport

class Good(Transport):
    @classmethod
    def probe(cls):
        return Probe(usable=True, reason="works", memory=frozenset({"cpu"}), facts={"library": "1.2 [x]"})

class Idle(Transport):
    @classmethod
    def probe(cls):
        return Probe(usable=False, reason="no such card")

class Crashes(Transport):
    @classmethod
    def probe(cls):
        os.kill(os.getpid(), signal.SIGSEGV)

class Prints(Transport):
    @classmethod
    def probe(cls):
        os.write(1, b"a library says hello")
        return Probe(usable=True, reason="works, loudly")

class Hangs(Transport):
    @classmethod
    def probe(cls):
        time.sleep(3600)
"""

COMMANDS = """
import typer
from kvxfer.errors import KvxferError

def hello(name: str) -> None:
    "Greets."
    typer.echo(f"hello {name}")

def fails() -> None:
    raise KvxferError("what happened, and what to do")

family = typer.Typer()
family.command("hello")(hello)
family.command("fails")(fails)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution beside kvxfer, with back ends and commands of its own; some of them broken."""
    (tmp_path / "third_party_backend.py").write_text(BACKEND)
    (tmp_path / "third_party_commands.py").write_text(COMMANDS)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvxfer.backends]\n"
        "good = third_party_backend:Good\n"
        "idle = third_party_backend:Idle\n"
        "broken = third_party_backend:Missing\n"
        "crashes = third_party_backend:Crashes\n"
        "prints = third_party_backend:Prints\n"
        "[kvxfer.commands]\n"
        "hello = third_party_commands:hello\n"
        "fails = third_party_commands:fails\n"
        "family = third_party_commands:family\n"
        "lost = third_party_nowhere:command\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(build(), arguments)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, kvxfer.__version__)


@pytest.mark.usefixtures("installed")
def test_another_distribution_brings_commands() -> None:
    assert "Greets." in run("--help").stdout
    result = run("hello", "world")
    assert (result.exit_code, result.stdout) == (0, "hello world\n")
    assert run("family", "hello", "world").stdout == "hello world\n"


def test_a_command_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.cli.main.entry_points", lambda group: ())
    result = run("demo", "--backend", "zmq")
    assert result.exit_code == 1
    assert "pip install 'kvxfer[vllm]'" in result.stderr


@pytest.mark.usefixtures("installed")
def test_a_command_that_cannot_be_imported_harms_no_other() -> None:
    result = run("lost")
    assert result.exit_code == 1
    assert "lost" in result.stderr and "third_party_nowhere" in result.stderr
    assert run("hello", "world").exit_code == 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("command", [["fails"], ["family", "fails"]])
def test_errors_of_kvxfer_are_told_without_a_traceback(command: list[str]) -> None:
    result = run(*command)
    assert (result.exit_code, result.stderr) == (1, "kvxfer: what happened, and what to do\n")


@pytest.mark.usefixtures("installed")
def test_doctor_tells_of_each_back_end_whether_it_works_and_why_not() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    backends = json.loads(result.stdout)["backends"]
    assert backends["good"] == {
        "usable": True,
        "reason": "works",
        "memory": ["cpu"],
        "facts": {"library": "1.2 [x]"},
    }
    assert not backends["idle"]["usable"] and backends["idle"]["reason"] == "no such card"
    assert not backends["broken"]["usable"] and "third_party_backend" in backends["broken"]["reason"]
    assert not backends["crashes"]["usable"] and "SIGSEGV" in backends["crashes"]["reason"]
    assert backends["prints"]["usable"]


@pytest.mark.usefixtures("installed")
def test_a_probe_that_hangs_is_given_up() -> None:
    started = time.monotonic()
    probes = probe_all(["third_party_backend:Hangs"], patience_s=1)
    assert "not come to an end" in probes["third_party_backend:Hangs"].reason
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("installed")
def test_doctor_shows_the_same_to_people() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("good", "works", "1.2 [x]", "idle", "no such card", "broken", kvxfer.__version__, "numpy"):
        assert word in result.stdout


def test_doctor_lists_what_ships_with_kvxfer_and_where_it_runs() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["backends"]["zmq"]["usable"]
    assert report["versions"]["numpy"] and report["host"]["cpus"] > 0
    assert set(report["versions"]) >= {"torch", "vllm", "nixl", "ucxx", "nccl"}
