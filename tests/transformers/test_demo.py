"""`kvxfer demo --engine transformers` as a user runs it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import typer
from kvxfer.cli.main import _Program
from kvxfer_transformers.demo.command import DEMO
app = typer.Typer(cls=_Program)
app.callback()(lambda: None)
app.command("demo")(DEMO.command)
app()
"""


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, "demo", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_two_processes_make_the_tokens_of_a_plain_run() -> None:
    result = demo("--backend", "tcp")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["engine"], report["backend"], report["objections"]) == ("transformers", "tcp", [])
    assert report["tokens_identical"] and all(request["tokens_identical"] for request in report["requests"])
    assert all(request["kv_bytes"] > 0 and request["external_kv_tokens"] > 0 for request in report["requests"])


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ('{"listen": "192.0.2.1"}', "set 'listen' to an address of this host"),
        ("{", "--config"),
        ("[1]", "--config"),
        ('{"leese": 3}', "did you mean 'lease'"),
        ('{"backend": "x"}', "'x'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(config: str, word: str) -> None:
    result = demo("--config", config)
    assert result.returncode == 1 and result.stdout == ""
    assert word in result.stderr and "Starting" not in result.stderr
