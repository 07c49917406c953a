"""Hosts on a network of their own, played by this one: network namespaces on one bridge, without privileges.

Each has an address that the others reach, a loopback of its own, and nothing else: what is told `127.0.0.1` finds only itself.
"""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Host", "Program", "hosts", "lack", "on_slow_link", "program"]

PROGRAMS = ("unshare", "nsenter", "ip")
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        address: Where the others reach it.
        into: What to put before a command that is to run on it.
        across: The same, before a command that is given on another host of its network.
    """

    address: str
    into: tuple[str, ...]
    across: tuple[str, ...]


def lack() -> str | None:
    """Why there can be no such hosts, or None if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} (of util-linux and iproute2) is not here"
    try:
        with hosts(1):
            return None
    except OSError as error:
        return f"this host permits no network namespaces to this user: {error}"


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Have so many; they end with the block, or with what runs on them if that is later.

    Raises:
        OSError: This host does not let this user make them.
    """
    with ExitStack() as stack:
        bridge = _namespace(stack, ["unshare", "--map-root-user", "--net"])
        _ip(_into(bridge), "link add bridge type bridge", "link set bridge up")
        made = []
        for n in range(count):
            pid = _namespace(stack, [*_into(bridge), "unshare", "--net"])
            host = Host(f"198.51.100.{n + 1}", _into(pid), ("nsenter", "--target", str(pid), "--net"))
            _ip(
                _into(bridge),
                f"link add port{n} type veth peer name eth0 netns {pid}",
                f"link set port{n} master bridge up",
            )
            # By its default route a host finds its own address, though nothing is there beyond the bridge.
            _ip(
                host.into,
                "link set lo up",
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
                "route add default dev eth0",
            )
            made.append(host)
        yield made


def _namespace(stack: ExitStack, command: Sequence[str]) -> int:
    """Return a process that holds a namespace made by this command until the stack or this process ends."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo made; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(holder)  # which closes its pipes and waits
    stack.callback(holder.kill)
    assert holder.stdout is not None and holder.stderr is not None
    if not select.select([holder.stdout], [], [], PATIENCE_S)[0]:
        raise OSError(f"{' '.join(command)} is not done after {PATIENCE_S:g} s")
    if holder.stdout.readline() != "made\n":
        raise OSError(holder.stderr.read().strip())
    return holder.pid


def _into(pid: int) -> tuple[str, ...]:
    return ("nsenter", "--target", str(pid), "--user", "--net", "--preserve-credentials")


def _ip(into: Sequence[str], *commands: str) -> None:
    for command in commands:
        try:
            ran = subprocess.run([*into, "ip", *command.split()], capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"ip {command} is not done after {PATIENCE_S:g} s") from error
        if ran.returncode:
            raise OSError(f"ip {command}: {ran.stderr.strip()}")


def on_slow_link(program: str, mbit: int, folder: Path, mtu: int = 1500) -> str:
    """Run a program of Python whose loopback device carries ``mbit`` Mbit/s in packets of ``mtu`` bytes, and return what it prints."""
    (folder / "slow.py").write_text(program)
    link = f"ip link set lo mtu {mtu} up && tc qdisc add dev lo root tbf rate {mbit}mbit burst 16kb latency 400ms"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", f"{link} && exec {sys.executable} slow.py"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]),  # where tc may be
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path[1:]]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Program:
    """A module of these tests that runs on a host, and is told lines of JSON, and tells objects."""

    def __init__(self, module: str, host: Host, *arguments: str, within: Sequence[str] = ()) -> None:
        command = [*host.into, *within, sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: Any, **named: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(named or words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The object that it tells next; what libraries print is none."""
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "it has ended"
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def program(module: str, host: Host, *arguments: str, within: Sequence[str] = ()) -> Iterator[Program]:
    one = Program(module, host, *arguments, within=within)
    try:
        yield one
    finally:
        one.end()
