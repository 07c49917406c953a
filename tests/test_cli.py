"""The program `kvxfer`: commands by entry point, what `doctor` tells, and how errors reach the user."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.addresses import settings_problems, told_address
from kvxfer.cli.main import build
from kvxfer.cli.probing import probe_all
from kvxfer.config import Config
from kvxfer.security import make_key
from kvxfer.testing.engine import until
from kvxfer.transport import registry
from tests.stand_in import asked_by_forks  # noqa: F401  a fixture

BACKEND = """
import os
import signal
import time

from kvxfer.transport.contract import Probe, Transport

class Good(Transport):
    name = "good"
    contract = 1
    @classmethod
    def probe(cls):
        return Probe(usable=True, reason="works", memory=frozenset({"cpu"}), facts={"library": "1.2 [x]"})

class Idle(Transport):
    name = "idle"
    contract = 1
    @classmethod
    def probe(cls):
        return Probe(usable=False, reason="no such card")

class Unlisted(Transport):
    name = "unlisted"
    contract = 1
    @classmethod
    def probe(cls):
        return Probe(usable=False, reason="no such driver")

class Crashes(Transport):
    name = "crashes"
    contract = 1
    @classmethod
    def probe(cls):
        os.kill(os.getpid(), signal.SIGSEGV)

class Prints(Transport):
    name = "prints"
    contract = 1
    @classmethod
    def probe(cls):
        os.write(1, b"a library says hello")
        return Probe(usable=True, reason="works, loudly")

class Hangs(Transport):
    name = "hangs"
    contract = 1
    @classmethod
    def probe(cls):
        with open(__file__ + ".pid", "w") as file:
            file.write(str(os.getpid()))
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

ENOUGH = re.compile(r"\d$|moving")
"""What a command writes once its processes run: the number of one, or a benchmark's progress."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kvxfer's own back ends tcp and zmq alone: `doctor` makes each that is installed, and the others cost time."""
    ours, found = {*registry.available()} - {"tcp", "zmq"}, registry.available
    monkeypatch.setattr(
        registry, "available", lambda: {name: target for name, target in found().items() if name not in ours}
    )


@pytest.fixture
def installed(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution beside kvxfer, with back ends and commands of its own; some of them broken."""
    (tmp_path / "third_party_backend.py").write_text(BACKEND)
    (tmp_path / "third_party_commands.py").write_text(COMMANDS)
    (tmp_path / "third_party_mistake.py").write_text("raise RuntimeError('built for another driver')")
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
        "mistaken = third_party_mistake:Backend\n"
        "[kvxfer.commands]\n"
        "hello = third_party_commands:hello\n"
        "fails = third_party_commands:fails\n"
        "family = third_party_commands:family\n"
        "lost = third_party_nowhere:command\n"
        "mistaken = third_party_mistake:command\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(build(), arguments)


@pytest.mark.usefixtures("installed")
def test_another_distribution_brings_commands() -> None:
    assert "Greets." in run("--help").stdout
    result = run("hello", "world")
    assert (result.exit_code, result.stdout) == (0, "hello world\n")
    assert run("family", "hello", "world").stdout == "hello world\n"


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


def test_a_benchmark_for_which_there_is_no_memory_does_not_begin() -> None:
    result = run("bench", "transfer", "--tokens", "99999999999")
    assert result.exit_code == 1 and not result.stdout
    assert "--tokens 99999999999 is too great" in result.stderr and "are available" in result.stderr


@pytest.mark.parametrize(
    "words", ["transfer --backend", "chaos --backend", "load", "engines", "sglang", "conversation --backend"]
)
def test_a_benchmark_of_a_back_end_that_is_not_installed_starts_nothing(words: str) -> None:
    result = run("bench", *words.split(), "nonesuch")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("kvxfer: unknown back end 'nonesuch'; installed are ")


@pytest.mark.parametrize("words", ["transfer --backend auto", 'load tcp:{"leese":3}', "load NixlConnector"])
def test_a_benchmark_of_what_it_cannot_measure_starts_nothing(words: str) -> None:
    result = run("bench", *words.split())
    assert (result.exit_code, result.stdout) == (1, "") and "unknown" in result.stderr


@pytest.mark.parametrize("words", ["--version", "--help", "doctor --json", "bench transfer --help"])
def test_a_full_disk_behind_standard_output_is_told(words: str, few: None) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvxfer", *words.split()], stdout=full, stderr=-1, text=True, timeout=300
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "cannot be written: No space left on device" in done.stderr


@pytest.mark.usefixtures("installed")
def test_doctor_tells_of_each_back_end_whether_it_works_and_why_not() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    backends = json.loads(result.stdout)["backends"]
    good = {"usable": True, "reason": "works", "memory": ["cpu"], "facts": {"library": "1.2 [x]"}, "elastic": ""}
    assert backends["good"] == good  # it cannot be made, so nobody knows how it moves elastic memory
    assert not backends["idle"]["usable"] and backends["idle"]["reason"] == "no such card"
    assert not backends["broken"]["usable"] and "third_party_backend" in backends["broken"]["reason"]
    assert not backends["crashes"]["usable"] and "SIGSEGV" in backends["crashes"]["reason"]
    assert backends["prints"]["usable"]


@pytest.mark.usefixtures("installed")
def test_a_probe_that_hangs_is_given_up(tmp_path: Path) -> None:
    probes = probe_all(["third_party_backend:Hangs"], patience_s=2)
    assert "did not finish in time" in probes["third_party_backend:Hangs"].probe.reason
    assert not Path("/proc", (tmp_path / "third_party_backend.py.pid").read_text()).exists(), "its process is left"


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (["doctor", "--config", '{"backend": "third_party_backend:Hangs"}'], "third_party_backend.py.pid"),
        (["bench", "transfer"], "said"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_interrupt_ends_a_command_and_all_its_processes_without_a_word(
    words: list[str], begun: str, tmp_path: Path
) -> None:
    """Ctrl-C in a terminal, which all processes of a command are told of."""
    (tmp_path / "third_party_backend.py").write_text(BACKEND)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with (tmp_path / "said").open("w+b") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvxfer", *words],
            stdout=said,
            stderr=said,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
        )
        try:
            there = tmp_path / begun
            until(lambda: (there.exists() and ENOUGH.search(there.read_text())) or child.poll() is not None, 300.0)
            os.killpg(child.pid, signal.SIGINT)
            assert child.wait(120) == 130, (tmp_path / "said").read_text()
        finally:
            child.kill()
    text = (tmp_path / "said").read_text()
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    assert begun == "said" or not Path("/proc", (tmp_path / begun).read_text()).exists(), "a process is left"


def test_doctor_lists_every_port_with_who_opens_it_and_who_may_speak_to_it(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    settings = {
        "listen": "0.0.0.0",
        "advertise": "localhost",
        "port": 7001,
        "key_file": str(tmp_path / "key"),
        "backend": "auto",
    }
    (tmp_path / "engine.json").write_text(json.dumps(settings))
    report = json.loads(run("doctor", "--json", "--config", str(tmp_path / "engine.json")).stdout)
    rows = {row["opened_by"]: row for row in report["ports"]}
    assert rows["directory, in the scheduler"] == {
        "port": "0.0.0.0:7001",
        "opened_by": "directory, in the scheduler",
        "who": "anybody who has the key",
    }
    assert rows["back end zmq"]["port"].startswith("0.0.0.0:") and "secret" in rows["back end zmq"]["who"]
    for open_one in {"back end nixl", "back end ucx"} & set(rows):
        assert "firewall" in rows[open_one]["who"]
    assert "nixl" not in report["auto"]["cpu"], "with a key it has to be named"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"key_file": "/nonexistent"}, "'/nonexistent'"),
        ({"peers": ["not a network"]}, "'peers'"),
        (
            {"trace": "/nonexistent/trace"},
            "'trace': /nonexistent/trace cannot be written: No such file or directory; name",
        ),
        (
            {"staging_bytes": 10**21},
            "'staging_bytes': each worker takes 1000000000000000000000 bytes, and this host has",
        ),
        ({"listen": "203.0.113.7"}, "cannot listen on 203.0.113.7 port any"),
        (
            {"advertise": "no-such-host.invalid"},
            "'advertise' is 'no-such-host.invalid', which this host cannot resolve",
        ),
    ],
)
def test_where_an_engine_would_not_be_found(settings: dict[str, Any], words: str) -> None:
    [problem] = settings_problems(Config.from_mapping(settings))
    assert words in problem


def test_a_port_that_is_taken_and_free_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(port=taken.getsockname()[1])
        [problem] = settings_problems(config)
        [control] = settings_problems(Config(control_ports=str(config.port)))
    assert f"cannot listen on 127.0.0.1 port {config.port}: Address already in use" in problem
    assert f"no port of 'control_ports' ({config.port}) is free" in control
    assert not settings_problems(config) and not settings_problems(config), "nothing is left open"


def test_a_trace_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("{}\n")
    assert not any(settings_problems(Config(trace=str(path))) for path in (kept, new))
    assert kept.read_text() == "{}\n" and not new.exists()


@pytest.mark.usefixtures("installed")
def test_doctor_fails_where_an_engine_would_not_be_found() -> None:
    result = run("doctor", "--json", "--config", '{"backend": "prints", "advertise": "no-such-host.invalid"}')
    assert result.exit_code == 1 and "no-such-host.invalid" in json.loads(result.stdout)["problems"][0]


def test_settings_that_are_none_are_told() -> None:
    for config, words, status in [
        ("{", "neither a JSON object", 2),
        ("no-such-file", "neither a JSON object", 2),
        ("[1]", "neither a JSON object", 2),
        ('{"lissten": 1}', "did you mean 'listen'", 1),
        ('{"staging_bytes": 1}', "16384", 1),
    ]:
        result = run("doctor", "--config", config)
        assert result.exit_code == status and words in result.stderr


def test_a_request_whose_name_is_no_text_is_asked_for() -> None:
    result = run("why", "--decode", "127.0.0.1:1", os.fsdecode(b"\xff"))
    assert result.exit_code == 3 and "cannot be reached" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "words", ["doctor --config FILE", "why --decode 127.0.0.1:1 --config FILE", "keys FILE show", "bench table FILE"]
)
def test_a_file_without_an_end_is_refused(words: str) -> None:
    result = run(*words.replace("FILE", "/dev/zero").split())
    assert result.exit_code and "it is not a regular file" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("installed")
def test_doctor_fails_where_what_is_configured_will_not_work() -> None:
    result = run("doctor", "--json", "--config", '{"backend": "idle"}')
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == ["back end idle does not work here: no such card"]
    bad = run("doctor", "--json", "--config", '{"backend": "zmq", "backend_options": {"no_such": 1}}')
    assert bad.exit_code == 1 and "no_such" in json.loads(bad.stdout)["problems"][0]
    assert run("doctor", "--json", "--config", '{"backend": "auto"}').exit_code == 0


def test_a_command_that_is_not_installed_says_what_to_install() -> None:
    """The program of an environment without the distributions that bring more."""
    bare = """
import importlib.metadata as metadata

distributions = metadata.Distribution.discover
gone = "kvxfer-bench", "kvxfer-testing", "kvxfer-vllm"
metadata.Distribution.discover = lambda **k: (d for d in distributions(**k) if d.metadata["Name"] not in gone)
from kvxfer.cli.main import app
app(prog_name="kvxfer")
"""

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", bare, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
        )

    for name in ("chaos", "transfer", "no-such-benchmark"):
        lacking = program("bench", name, "--any", "option")
        assert lacking.returncode == 2
        assert (
            f"benchmark '{name}' is not installed; in a checkout, pip install ./benchmarks brings the benchmarks"
            in lacking.stderr
        )
    assert "pip install ./benchmarks brings the benchmarks" in program("bench", "--help").stdout
    for command, brings in (("conformance", "./testing"), ("demo", "'./connectors/vllm[demo]'")):
        lacking = program(command, "tcp")
        assert lacking.returncode == 2 and f"pip install {brings}" in lacking.stderr
    with_them = run("bench", "no-such-benchmark")
    assert with_them.exit_code == 2 and "pip install" not in with_them.stderr


@pytest.mark.usefixtures("few")
def test_doctor_tells_where_auto_leads_and_which_other_addresses_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"10.0.0.7": "eth0", "192.0.2.7": "ib0"}
    monkeypatch.setattr("kvxfer.cli.addresses.own_addresses", lambda: found)
    said = told_address(Config(listen="10.0.0.7", advertise="10.0.0.7"), automatic=True)
    assert "10.0.0.7" in said and "(eth0)" in said and "192.0.2.7 (ib0)" in said and "set 'advertise'" in said
    assert told_address(Config(advertise="10.0.0.7"), automatic=False) == "10.0.0.7"
    report = json.loads(run("doctor", "--json", "--config", '{"listen": "127.0.0.5"}').stdout)
    assert report["address"] == "127.0.0.5"
