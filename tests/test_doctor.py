"""`kvxfer doctor` looks at this host, and visits engines that run."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvxfer.backend import ucx
from kvxfer.backend.ports import listening
from kvxfer.cli import stand_in
from kvxfer.cli.encryption import encryption
from kvxfer.cli.host import host_facts
from kvxfer.cli.main import build
from kvxfer.cli.stand_in import StandIn
from kvxfer.cli.visit import show_visit, visit
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.engine import WorkerChannel
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Await, Named
from kvxfer.security import make_key
from kvxfer.testing.engine import AgentEngine, ConversationEngine, PagedMemory, until
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import registry
from tests.conftest import require
from tests.control.node import nodes
from tests.control.test_processes import deliver
from tests.stand_in import asked_by_forks, standing_in  # noqa: F401  a fixture


@pytest.fixture
def node() -> Iterator[Any]:
    with nodes() as make:
        yield make


def call(source: Source, **config: Any) -> dict[str, Any]:
    """What a visit has found."""
    return visit(f"{source.host}:{source.port}", Config.from_mapping(config))


def only(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have doctor make no others here, which cost time."""
    left = {backend: registry.available()[backend]}
    monkeypatch.setattr(registry, "available", lambda: left)


@pytest.mark.parametrize("backend", ["zmq", "tcp", "nixl", "ucx"])
def test_a_visit_tells_which_back_end_and_which_transport(node: Any, backend: str) -> None:
    if backend in ("nixl", "ucx"):
        require(backend)
    p, d = node(backend, seed=1), node(backend)
    found = call(p.source, backend=backend)
    assert "failure" not in found
    (link,) = found["links"]
    assert (link["backend"], link["up"], link["role"]) == (backend, True, "consumer")
    assert 0 < link["round_trip"] < 1 and 0 < found["round_trip_ms"] < 1000
    if backend in ("nixl", "ucx"):
        assert "intra-node: " in link["transport"] and "memory" in link["transport"]
    assert {row["backend"]: row["against"] for row in found["candidates"]}[backend] == ""
    assert p.holds() == (0, 0), "the visitor has taken its want back"
    deliver(p, d, "after")


def test_a_key(node: Any, tmp_path: Path) -> None:
    for file in ("key", "other"):
        make_key(tmp_path / file)
    p = node("zmq", seed=1, key_file=str(tmp_path / "key"))
    assert "failure" not in call(p.source, backend="zmq", key_file=str(tmp_path / "key"))
    for settings in ({"key_file": str(tmp_path / "other")}, {}):
        assert call(p.source, backend="zmq", peer_timeout=10.0, **settings)["failure"]["kind"] == "refused"


@pytest.mark.parametrize("way, code", [("from_peer", 1), ("to_peer", 0)])
def test_a_link_over_which_nothing_can_be_loaded_is_a_problem(
    way: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way need not go: a prefill engine dials no decode engine."""
    only("tcp", monkeypatch)
    measured: dict[str, Any] = {"from_peer": {}, "to_peer": {}, way: {"failure": "it went away"}}
    monkeypatch.setattr("kvxfer.cli.doctor.visit", lambda peer, settings: {"peer": peer, "measured": measured})
    result = CliRunner().invoke(build(), ["doctor", "--json", "--peer", "127.0.0.1:9"])
    assert result.exit_code == code
    assert (
        json.loads(result.stdout)["problems"] == ["127.0.0.1:9: nothing could be loaded from it: it went away"] * code
    )


@pytest.mark.parametrize("backend", ["tcp", "zmq", "cma"])
def test_a_stand_in_is_measured_in_both_directions(backend: str, tmp_path: Path) -> None:
    require(backend)
    make_key(tmp_path / "key")
    settings = {"backend": backend, "key_file": str(tmp_path / "key")}
    with standing_in(**settings) as there:
        found = visit(there, Config.from_mapping(settings))
        assert "failure" not in found
        for way in ("from_peer", "to_peer"):
            assert found["measured"][way]["bytes"] == [64 << 20, 64 << 10]
            assert 0.001 < found["measured"][way]["GB_per_s"] < 1000, found
            assert 0.001 < found["measured"][way]["ms"] < 1000, found


@pytest.mark.parametrize(
    ("bytes_per_s", "held_up", "long"),
    [(1e9, 0.0, 64 << 20), (1e9, 2.0, 64 << 20), (250e3, 0.0, 512 << 10), (10e3, 0.0, 64 << 10)],
)
def test_the_link_s_pace_decides_how_much_is_moved(bytes_per_s: float, held_up: float, long: int) -> None:
    """And not the first transfer of a size, which touches new memory and may be held up."""
    seen: set[int] = set()

    def move(blocks: int) -> float:
        first = blocks not in seen
        seen.add(blocks)
        return (held_up if first else 0.0) + blocks * stand_in.BLOCK / bytes_per_s

    assert stand_in._figures(move)["bytes"] == [long, stand_in.BLOCK]


def test_each_rank_of_an_engine_is_visited() -> None:
    """And what `auto` would rather use is told with what it lacks there."""
    require("cma")
    with AgentEngine(Config(backend="zmq"), PagedMemory(ranks=2)) as engine:
        found = call(engine.source, backend="auto")
    against = {row["backend"]: row["against"] for row in found["candidates"]}
    assert "failure" not in found and found["ranks"] == len({link["peer"] for link in found["links"]}) == 2
    assert against["zmq"] == "" and "pip install ./backends/cma" in against["cma"]


def test_a_stand_in_survives_nonsense_and_tells_what_it_cannot_reach() -> None:
    settings = {"backend": "tcp", "peer_timeout": 1.0}
    with standing_in(**settings) as there:
        host, port = there.split(":")
        with Directory(Config.from_mapping(settings), "stranger") as directory:
            for base in ("router/x", "own/x/give 1", "own/1/give x", "own/1/burn 1 127.0.0.1 9", "own/1/take 1 a/b 9"):
                named = (Named(TransferId(base, 0), b""),)
                directory.tell(Source(host, int(port), 1), Await(0, named))
            found = visit(there, Config.from_mapping({**settings, "advertise": "127.0.0.2"}))
        assert found["measured"]["from_peer"]["GB_per_s"] > 0
        assert "could not fetch from here" in found["measured"]["to_peer"]["failure"]
    with StringIO() as shown:
        show_visit(Console(file=shown, width=500), found)
        told = shown.getvalue()
    assert (
        "from the peer: " in told and "Mbit/s) for 64 MiB" in told and "to the peer: the peer could not fetch" in told
    )


def test_a_stand_in_is_begun_by_the_command_and_ended_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: StandIn, seconds: float) -> None:
        assert listening() - before, "it is there before it is told of"
        raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "serve", interrupted)
    before = listening()
    result = CliRunner().invoke(build(), ["doctor", "--stand-in", "cpu", "--config", '{"backend": "tcp"}'])
    assert result.exit_code == 0 and "--peer 127.0.0.1:" in result.stdout
    assert not listening() - before


BOTH = '{"tests.test_doctor:First": {}, "tests.test_doctor:Later": {"sed": 1}}'
"""What `auto` starts with, which is sound, and another one."""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--peer", "nowhere"], 2, "nowhere"),
        (["--peer", "host:99999"], 2, "does not end in a port"),
        (["--config", "["], 2, "neither a JSON object"),
        (["--stand-in", "cpu", "--json"], 2, "leave out --peer and --json"),
        (["--stand-in", "cpu", "--peer", "127.0.0.1:1"], 2, "leave out --peer and --json"),
        # It would dial whatever a stranger names.
        (["--stand-in", "cpu", "--config", '{"listen": "0.0.0.0", "advertise": "127.0.0.1"}'], 1, "key_file"),
        (["--config", '{"backend": "kvxfer.testing.fake:FakeTransport", "port": TAKEN}'], 1, "no other process uses"),
        (["--config", f'{{"backend": "auto", "backend_options": {BOTH}}}'], 1, "unknown option 'sed' of back end"),
    ],
)
def test_what_cannot_be_done_is_told(words: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "available", dict)
    monkeypatch.setattr(StandIn, "serve", lambda engine, seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        result = CliRunner().invoke(build(), ["doctor", *words], env={"COLUMNS": "400"})
    assert result.exit_code == code and said in " ".join(result.output.split())


class Later(FakeTransport):
    """Opens ports once its links are used."""

    name = "later"
    guarded = "never"
    tells_hosts = False
    opens_later = "any free ones, by its library"
    costs = {"cpu": 2}


class First(Later):
    name = "first"
    costs = {"cpu": 1}


def test_what_a_back_end_leaves_open_is_told_in_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe's lines are not wrapped: what `grep` finds has its end."""
    monkeypatch.setattr(registry, "available", dict)
    monkeypatch.delenv("COLUMNS", raising=False)
    settings = {"backend": "tests.test_doctor:Later", "advertise": "no-such-host.invalid"}
    for peers in ({}, {"peers": ["10.0.0.0/8"]}):
        told = CliRunner().invoke(build(), ["doctor", "--config", json.dumps(settings | peers)]).stdout
        assert ("back end later may dial hosts that are not in 'peers'" in told) is bool(peers)
    [problem] = [line for line in told.splitlines() if "problem:" in line]
    assert "no-such-host.invalid" in problem and problem.endswith("or to 'auto'")
    [row] = [line for line in told.splitlines() if "Later, later" in line]
    assert Later.opens_later in row and "firewall" in row
    assert "KV that later moves is not encrypted" in told


def _kind(port: str) -> str:
    """A port without its number or its secret name."""
    return port.rpartition("@")[0] if port.startswith("unix:") else port.rpartition(":")[0]


@pytest.mark.parametrize("backend", ["tcp", "cma"])
def test_every_port_that_an_engine_opens_is_listed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(backend)
    only(backend, monkeypatch)
    config = Config(backend=backend)
    shown = CliRunner().invoke(build(), ["doctor", "--json", "--config", json.dumps({"backend": backend})])
    rows = json.loads(shown.stdout)["ports"]
    before = listening()
    channel = WorkerChannel(lambda _: None, list)
    with AgentEngine(config):
        opened = [str(port) for port in listening() - before]
    channel.close()
    assert sorted(map(_kind, opened)) == sorted(_kind(row["port"]) for row in rows)
    assert all("secret" in row["who"] for row in rows if row["port"].startswith("unix:"))


def test_advice_about_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("proc/sys/kernel/yama/ptrace_scope", "2\n")
    put("proc/self/status", "CapEff:\t0000000000000000\n")
    put("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    put("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    put("sys/class/infiniband/mlx5_0/device/numa_node", "1\n")
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    put("sys/bus/pci/devices/0000:01:00.0/numa_node", "0\n")
    monkeypatch.setattr("kvxfer.cli.host._memlock", lambda: 65536)
    put("proc/self/status", "CapEff:\t0000000000004000\n")
    assert "limited to" not in str(host_facts(tmp_path)["advice"]), "IPC_LOCK lifts the limit"
    put("proc/self/status", "CapEff:\t0000000000000000\n")
    facts = host_facts(tmp_path)
    assert facts["nics"] == [
        {"name": "mlx5_0", "infiniband": True, "state": "DOWN", "gbit_per_s": 400.0, "numa_node": 1}
    ]
    for i, words in enumerate(["ptrace_scope is 2", "limited to 65536 bytes", "no InfiniBand device", "is DOWN"]):
        assert words in facts["advice"][i]
    put("proc/self/status", "CapEff:\t0000000000080000\n")
    assert "ptrace" not in host_facts(tmp_path)["advice"][0]


@pytest.mark.parametrize(
    ("lacks", "settings", "told"),
    [
        ("", {}, []),
        ("sys/class/infiniband/mlx5_0", {}, ["no RDMA device is visible"]),
        ("dev/infiniband/uverbs0", {}, ["/dev/infiniband has no uverbs"]),
        ("etc/libibverbs.d/mlx5.driver", {}, ["no drivers in /etc/libibverbs.d"]),
        ("libibverbs.so.1", {}, ["libibverbs.so.1 cannot be loaded"]),
        ("", {"UCX_TLS": "tcp"}, ["UCX_TLS in the environment is 'tcp', which leaves out mlx5_0"]),
        ("", {"TLS": "tcp,cuda_copy"}, ["option 'TLS' is 'tcp,cuda_copy', which leaves out mlx5_0"]),
        ("", {"TLS": "^ib"}, ["leaves out mlx5_0"]),
        ("", {"TLS": "rc_x,cuda"}, []),
        ("", {"TLS": "^tcp"}, []),
        ("", {"NET_DEVICES": "eth0"}, ["option 'NET_DEVICES' is 'eth0', which leaves out mlx5_0"]),
        ("", {"NET_DEVICES": "eth0,mlx5_0:1"}, []),
    ],
)
def test_what_keeps_ucx_from_rdma_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, settings: dict[str, str], told: list[str]
) -> None:
    for path in ("sys/class/infiniband/mlx5_0", "dev/infiniband/uverbs0", "etc/libibverbs.d/mlx5.driver"):
        if path != lacks:
            (tmp_path / path).mkdir(parents=True)
    (tmp_path / "sys/class/infiniband").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(ucx, "_loads", lambda library: library != lacks)
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
        if name in settings:
            monkeypatch.setenv(name, settings[name])
    found = ucx.fallbacks("10.0.0.7", settings, tmp_path)
    assert len(found) == len(told) and all(words in text for words, text in zip(told, found, strict=True))
    assert not ucx.fallbacks("127.0.0.1", settings, tmp_path), "nothing leaves this host"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "network of 127.0.0.1: nothing leaves this host"),
        ({"listen": "0.0.0.0", "advertise": "localhost"}, "not declared trusted, so auto leaves out nixl unless"),
        (
            {"listen": "0.0.0.0", "advertise": "localhost", "trust_network": True},
            "declared trusted ('trust_network'), so auto also uses nixl",
        ),
    ],
)
def test_it_says_whether_the_network_is_trusted(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    installed = registry.available()
    monkeypatch.setattr(registry, "available", lambda: {name: installed[name] for name in ("tcp", "nixl")})
    config = json.dumps({"backend": "auto", **settings})
    told = CliRunner().invoke(build(), ["doctor", "--config", config], env={"COLUMNS": "400"})
    assert words in told.stdout
    assert ("back end nixl: no RDMA device is visible" in told.stdout) is ("trust_network" in settings)


@pytest.mark.parametrize(
    ("name", "config", "encrypted", "advice"),
    [
        ("tcp", {"backend": "tcp"}, False, 'set "backend_options": {"encrypt": true} on all engines'),
        ("zmq", {"backend": "zmq", "backend_options": {"encrypt": True}}, True, "set 'key_file' as well"),
        ("tcp", {"backend": "auto"}, False, 'set "backend_options": {"tcp": {"encrypt": true}} on all engines'),
        ("tcp", {"backend": "auto", "backend_options": {"tcp": {"encrypt": True}}}, True, "set 'key_file' as well"),
        ("cma", {"backend": "cma"}, False, "or choose tcp or zmq"),
    ],
)
def test_whether_the_bulk_is_encrypted(name: str, config: dict[str, Any], encrypted: bool, advice: str) -> None:
    known = [registry.load(each) for each in ("tcp", "zmq", "cma")]
    said = encryption(Config.from_mapping(config), [registry.load(name)], known)[name]
    assert said["encrypted"] is encrypted and advice in said["advice"]
    assert encrypted or "key_file" not in said["advice"]


def test_it_says_what_becomes_of_elastic_caches(node: Any) -> None:
    """Which memory counts as elastic by these settings, and which back ends move it straight; and that the engine there has such."""
    p = node("tcp", seed=1, elastic=True)
    words = ["doctor", "--json", "--peer", f"{p.source.host}:{p.source.port}", "--config", '{"elastic": true}']
    found = json.loads(CliRunner().invoke(build(), words).stdout)
    ways = {name: row["elastic"] for name, row in found["backends"].items() if row["usable"]}
    assert {"tcp": "straight", "zmq": "straight"}.items() <= ways.items()
    assert all(ways[name] == "staged" for name in {"nixl", "ucx"} & ways.keys())
    which, *rest = found["elastic"].split("; ")
    assert which == "all memory, because 'elastic' is true"
    assert rest[0].startswith("moved straight by ") and "tcp" in rest[0] and "tcp" not in "".join(rest[1:])
    assert found["peers"][0]["peer_elastic"] is True
    assert "failure" not in found["peers"][0]
    assert call(node("tcp", seed=1).source)["peer_elastic"] is False


def test_a_visit_tells_what_became_of_prefixes() -> None:
    """What others have asked an engine for, what it has asked others for, and how soon it answers now, if it makes steps."""
    text = list(range(64))
    with ConversationEngine({"backend": "tcp"}, name="d") as d, ConversationEngine({"backend": "tcp"}, name="p") as p:
        for engine in (d, p):
            engine.step()
        d.finish_turn(d.begin("held", [*text, 99], [98]))
        for tail, sources in ((99, [d.scheduler.source]), (98, [])):
            turn = p.begin(f"turn-{tail}", [*text, tail], [1], sources)
            until(lambda turn=turn: (d.step(timeout=0.001), p.step(timeout=0.001)) and turn.done)

        def visited(engine: ConversationEngine) -> dict[str, Any]:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(call, engine.scheduler.source, backend="tcp")
                until(lambda: engine.step(timeout=0.001) and False or found.done(), 60.0)
            return found.result()

        asked = visited(d)["prefixes"]
        assert (asked["inquiries"], asked["held"], asked["offered"], asked["refused"], asked["asked"]) == (
            1,
            1,
            64,
            0,
            0,
        )
        assert 0 < asked["answer_s"] < 5 and 0 < asked["asked_now_s"] < 2
        found = visited(p)
        asking = found["prefixes"]
        kinds = ("asked", "unanswered", "found", "loaded", "dear", "recomputed", "inquiries")
        assert [asking[kind] for kind in kinds] == [1, 0, 64, 64, 0, 0, 0]
        with StringIO() as shown:
            show_visit(Console(file=shown, width=500), found)
            assert "asked others for: 1 requests, 0 unanswered; 64 tokens found, 64 loaded" in shown.getvalue()
            assert "one after " in shown.getvalue()
            assert "tcp, up, ping " in shown.getvalue() and "GB/s: not measured" in shown.getvalue()
        assert call(p.scheduler.source, backend="tcp")["prefixes"]["asked_now_s"] is None, "it makes no steps"


def test_an_engine_that_runs_here_is_no_problem_and_keeps_its_port(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.available()
    monkeypatch.setattr(registry, "available", lambda: {"zmq": installed["zmq"]})  # the others cost time
    p, d = node("zmq", seed=1), node("zmq")
    settings = json.dumps({"backend": "zmq", "port": p.source.port})
    words = ["doctor", "--json", "--config", settings, "--peer", f"{p.source.host}:{p.source.port}"]
    result = CliRunner().invoke(build(), words)
    report = json.loads(result.stdout)
    assert (result.exit_code, report["problems"]) == (0, []) and report["running"] is not None
    deliver(p, d, "after")


def test_two_engines_are_compared_by_what_they_say(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.available()
    monkeypatch.setattr(registry, "available", lambda: {"zmq": installed["zmq"]})  # the others cost time
    config = Config(backend="zmq")
    facts = ({"weights": "a3f1"}, {"weights": "a3f1"}, {"weights": "77c0"})
    with ExitStack() as stack:
        at = []
        for n, stated in enumerate(facts):
            at.append(stack.enter_context(AgentEngine(config, name=f"e{n}", facts=stated)).source)

        def problems(*words: str) -> list[str]:
            return json.loads(CliRunner().invoke(build(), ["doctor", "--json", *words]).stdout)["problems"]

        peers = [["--peer", str(source)] for source in at]
        assert problems("--config", '{"backend": "zmq"}', *peers[0], *peers[1]) == []
        [told] = problems("--config", '{"backend": "zmq"}', *peers[0], *peers[2])
        assert f"{at[0]} cannot load from the one at {at[2]}" in told and "a3f1 here, 77c0 at" in told
        here = json.dumps({"backend": "zmq", "port": at[0].port})
        assert problems("--config", here, *peers[1]) == []
        [told] = problems("--config", here, *peers[2])
        assert "weights: a3f1 here, 77c0 at" in told
