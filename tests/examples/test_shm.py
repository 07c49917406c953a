"""The example of a back end is small, keeps the contract, and works from its wheel in an environment where nothing else is."""

import ast
import io
import json
import os
import re
import socket
import subprocess
import sys
import tokenize
import venv
from pathlib import Path

import numpy as np
import pytest

from kvxfer.backend.endpoint import new_token
from kvxfer.geometry import Region
from kvxfer.transport import Batch, Verb
from kvxfer_bench.soak import measure

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kvxfer-shm"
SOURCE = EXAMPLE / "kvxfer_shm" / "__init__.py"
PAGE = ROOT / "docs" / "writing-a-backend.md"

sys.path.append(str(EXAMPLE))  # its own test file is the one on the page
import test_kvxfer_shm  # noqa: E402
from kvxfer_shm import Endpoint  # noqa: E402


class TestShm(test_kvxfer_shm.TestShm):
    gigabytes = False
    rounds = 50


def test_nothing_is_handed_over_before_the_peer_has_shown_that_the_link_is_its_own() -> None:
    """It could be anybody who has carried the endpoint of another process here."""
    memory = np.ones(1 << 16, np.uint8)
    sender = test_kvxfer_shm.ShmTransport("p", {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind("\0" + (name := f"kvxfer-shm-{os.urandom(16).hex()}"))
        door.listen()
        sender.register([Region(memory.ctypes.data, memory.nbytes)])
        peer = sender.connect(sender.endpoint(), Endpoint("d", name, new_token()).encode())
        sender.submit(Batch(Verb.SEND, peer, 0, np.array([memory.nbytes]), np.array([0])))
        for _ in range(3):
            sender.poll()
        with door.accept()[0] as heard:
            heard.setblocking(False)
            assert heard.recv(1000), "its greeting"
            with pytest.raises(BlockingIOError):
                heard.recv(1000)
    sender.close()


def test_the_page_shows_all_of_it_in_order() -> None:
    shown = re.findall(rf"^<!-- snippet: {SOURCE.relative_to(ROOT)}:(.*) -->$", PAGE.read_text(), re.M)
    [module] = ast.parse(source := SOURCE.read_text()).body[:1]
    marked: list[str] = []
    inside = False
    for line in source.splitlines()[module.end_lineno :]:
        if mark := re.match(r" *# --8<-- \[(start|end):(\w+)\]$", line):
            inside = mark[1] == "start"
            marked += [mark[2]] * inside
        else:
            assert inside or not line.strip(), f"{line!r} is not on the page"
    assert shown == marked
    assert "<!-- snippet: examples/kvxfer-shm/test_kvxfer_shm.py -->" in PAGE.read_text()


def test_it_stays_small() -> None:
    """Lines with code on them: neither blank, nor comments, nor docstrings."""
    source = SOURCE.read_text()
    text: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            text |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    assert len({t.start[0] for t in tokens if t.type not in blank} - text) <= 120


@pytest.mark.slow
def test_nothing_is_wrong_or_left_after_a_short_soak() -> None:
    """Named by its class, as one that is not installed. Too short a run to say whether anything grows."""
    found = measure(6.0, 3.0, backend="kvxfer_shm:ShmTransport")
    assert [c for c in found["complaints"] if "grew" not in c] == []
    assert found["restarts"] >= 1 and found["outcomes"]["delivered"] > 0


@pytest.mark.slow
def test_from_its_wheel_it_conforms_and_is_what_auto_takes(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    with_commands = (ROOT / "testing", ROOT / "benchmarks", ROOT / "backends/tcp")
    for folder in (ROOT, *with_commands, EXAMPLE):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=folder, check=True, timeout=300, capture_output=True)
    core, *others = sorted(map(str, wheels.glob("*.whl")))
    home = tmp_path / "environment"
    venv.create(home)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [*pip, "install", "-q", "--no-compile", f"{core}[cli]", *others, "pytest"], check=True, timeout=240, env=alone
    )

    def kvxfer(*arguments: str) -> str:
        command = [str(home / "bin" / "kvxfer"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=alone)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    suite = json.dumps({"gigabytes": False, "rounds": 50})
    kvxfer("conformance", "shm", "--suite", suite, "--report", "report.json", "--report", "report.md")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["conforms"] and report["release"] == "kvxfer-shm 0.1.0" and report["counts"]["kept"] > 80
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"backend": "shm"}))
    doctor = json.loads(kvxfer("doctor", "--json", "--config", str(settings)))
    assert doctor["backends"]["shm"]["usable"]
    assert doctor["auto"]["cpu"] == "shm, else tcp"
    measured = kvxfer("bench", "transfer", "--backend", "shm", "--device", "cpu", "--tokens", "256", "--json")
    assert json.loads(measured)
